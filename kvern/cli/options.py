"""Options on the command line and in a YAML file, made from the configuration classes: one name everywhere.

`--max-num-seqs 8`, `--max_num_seqs=8` and `max_num_seqs: 8` in the file of `--config` are the same; the command line
wins over the file. A yes-or-no option is `--enable-prefix-caching` or `--no-enable-prefix-caching`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from kvern.config import EngineConfig, InvalidConfig, Option, ServerConfig, make_config, options


class Parser(argparse.ArgumentParser):
    """Says what is wrong on one line, without the usage of sixty options before it; exit code 2."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def normalize(arguments: Sequence[str]) -> list[str]:
    """--max_num_seqs=8 as --max-num-seqs=8; nothing after a bare "--" is an option."""
    result: list[str] = []
    for i, argument in enumerate(arguments):
        if argument == "--":
            return result + list(arguments[i:])
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        result.append(argument)
    return result


def add_options(parser: argparse.ArgumentParser, title: str, config: type[msgspec.Struct]) -> None:
    """Add the options of a configuration class to `parser`, and --config if it is not there yet. An option that is
    not given leaves nothing in the namespace."""
    if not any(action.dest == "config" for action in parser._actions):
        parser.add_argument("--config", metavar="FILE", help="a YAML file of these options; the command line wins")
    group = parser.add_argument_group(title)
    for option in options(config):
        flag = "--" + option.name.replace("_", "-")
        text = option.description.replace("%", "%%")
        if option.default not in (None, {}):
            text += f" (default: {str(option.default).lower() if option.type is bool else option.default})"
        if option.type is bool:
            group.add_argument(
                flag, dest=option.name, help=text, default=argparse.SUPPRESS, action=argparse.BooleanOptionalAction
            )
        else:
            metavar = "{" + ",".join(map(str, option.choices)) + "}" if option.choices else option.type.__name__.upper()
            group.add_argument(flag, dest=option.name, help=text, default=argparse.SUPPRESS, metavar=metavar)


def read_configs(args: argparse.Namespace, *configs: type[Any], known: Sequence[type[Any]] = ()) -> list[Any]:
    """The configurations, from the file of --config and the command line. A file may also hold options of the
    classes `known`, which this command does not use. Raises InvalidConfig."""
    from_file = _read_file(args.config) if args.config else {}
    mine = {option.name: option for config in configs for option in options(config)}
    named = [*mine, *(option.name for config in known for option in options(config))]
    for name in from_file:
        if name not in named:
            raise InvalidConfig(f"config: unknown option {name!r}{did_you_mean(name, named)}")
    values = {name: value for name, value in from_file.items() if name in mine}
    for name, option in mine.items():
        if hasattr(args, name):
            values[name] = _from_text(option, getattr(args, name))
    return [
        make_config(config, {o.name: values[o.name] for o in options(config) if o.name in values}) for config in configs
    ]


def read_engine_config(args: argparse.Namespace) -> EngineConfig:
    """For commands whose terminal is for what they print: unless told otherwise only warnings are logged. Raises
    InvalidConfig."""
    from kvern.log import setup_logging

    config: EngineConfig
    (config,) = read_configs(args, EngineConfig, known=[ServerConfig])
    setup_logging(config.log_level if hasattr(args, "log_level") else "warning")
    return config


def _read_file(path: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as exc:
        raise InvalidConfig(f"config: {path} cannot be read: {exc.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise InvalidConfig(f"config: {path} is not YAML: {' '.join(str(exc).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidConfig(f"config: {path} must hold option: value lines")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


def _from_text(option: Option, value: Any) -> Any:
    if option.type is dict:
        try:
            return json.loads(value)
        except ValueError:
            raise InvalidConfig(f'{option.name} must be JSON such as {{"name": 1}}, got {value!r}') from None
    if option.type in (int, float):
        try:
            return option.type(value)
        except ValueError:
            kind = "an integer" if option.type is int else "a number"
            raise InvalidConfig(f"{option.name} must be {kind}, got {value!r}") from None
    return value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def describe(*configs: msgspec.Struct) -> str:
    """The effective settings, "name=value ...", secrets hidden."""
    values = {name: value for config in configs for name, value in msgspec.structs.asdict(config).items()}
    if values.get("api_key"):
        values["api_key"] = "***"
    return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def fail(command: str, message: object, code: int) -> int:
    print(f"kvern {command}: error: {message}", file=sys.stderr)
    return code

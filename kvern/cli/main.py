"""The `kvern` command. Nothing heavy is imported until a command needs it.

Exit codes: 0 done, 1 the engine failed, 2 what was asked cannot be (the message names the option), 130 ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kvern import __version__
from kvern.cli import bench, chat, doctor, generate, models, serve
from kvern.cli.options import Parser, did_you_mean, fail, normalize
from kvern.config import InvalidConfig

_COMMANDS = {
    "serve": serve,
    "generate": generate,
    "chat": chat,
    "models": models,
    "bench": bench,
    "doctor": doctor,
}


def build_parser() -> Parser:
    parser = Parser(prog="kvern", description="An LLM inference and serving engine.")
    parser.add_argument("--version", action="version", version=f"kvern {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0].rstrip(".")
        module.add_arguments(commands.add_parser(name, help=summary, description=summary + "."))
    commands.add_parser("version", help="print the versions of kvern and of what it computes with")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. `arguments`: as in sys.argv[1:], the default."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(normalize(sys.argv[1:] if arguments is None else arguments))
    if unknown:
        return fail(args.command, _unknown(unknown[0], args), 2)
    if args.command == "version":
        return _print_versions()
    return _run(args)


def _unknown(argument: str, args: argparse.Namespace) -> str:
    known = Parser()
    if args.command in _COMMANDS:
        _COMMANDS[args.command].add_arguments(known)
    for action in known._actions:
        if isinstance(action, argparse._SubParsersAction):
            known = action.choices[args.part]
    return f"unknown argument {argument!r}{did_you_mean(argument.partition('=')[0], known._option_string_actions)}"


def _run(args: argparse.Namespace) -> int:
    from kvern.engine.messages import EngineDeadError
    from kvern.sampling_params import InvalidRequest

    try:
        code: int = _COMMANDS[args.command].run(args)
        return code
    except (InvalidConfig, InvalidRequest) as exc:
        return fail(args.command, exc, 2)
    except EngineDeadError as exc:
        return fail(args.command, exc, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; keep the interpreter from failing again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _print_versions() -> int:
    for name, version in doctor.versions().items():
        print(f"{name} {version or 'is not installed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""docs/configuration.md, made from the options themselves: `python -m kvern.cli.document > docs/configuration.md`."""

from __future__ import annotations

import json
from typing import Any

from kvern.config import EngineConfig, Option, ServerConfig, options

_HEAD = """# Configuration

Every option has one name: `LLM(max_num_seqs=8)` in Python, `--max-num-seqs 8` on the command line, `max_num_seqs: 8`
in the file of `--config`. The command line wins over the file. A yes-or-no option is `--name` or `--no-name`. What is
not set is derived from the model and the machine and printed at start.

This page is made from the code: `python -m kvern.cli.document > docs/configuration.md`.
"""

_SECTIONS: list[tuple[str, type[Any]]] = [
    ("Engine (`LLM`, `kvern serve`, `kvern generate`, `kvern chat`)", EngineConfig),
    ("Server (`kvern serve`)", ServerConfig),
]


def document() -> str:
    parts = [_HEAD]
    for title, config in _SECTIONS:
        parts.append(f"\n## {title}\n\n| option | type | default | meaning |\n|---|---|---|---|\n")
        parts += [_row(option) for option in options(config)]
    return "".join(parts)


def _row(option: Option) -> str:
    kind = ", ".join(f"`{choice}`" for choice in option.choices) if option.choices else option.type.__name__
    default = "" if option.default is None else f"`{json.dumps(option.default)}`"
    return f"| `{option.name}` | {kind} | {default} | {option.description} |\n"


if __name__ == "__main__":
    print(document(), end="")

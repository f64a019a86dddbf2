"""What `kvern generate` and `kvern chat` share: sampling options, and a quiet LLM."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvern.cli.options import read_engine_config
from kvern.config import InvalidConfig

if TYPE_CHECKING:
    from kvern.llm import LLM
    from kvern.sampling_params import SamplingParams

_TEMPERATURE = 0.7  # for a reader, not an API: small models ramble at 1


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    limit = "what is left of max_model_len" if max_tokens is None else max_tokens
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", metavar="INT", default=max_tokens, help=f"longest output (default: {limit})")
    group.add_argument(
        "--temperature",
        metavar="FLOAT",
        default=_TEMPERATURE,
        help=f"0: always the likeliest token (default: {_TEMPERATURE})",
    )
    group.add_argument("--top-p", metavar="FLOAT", default=1.0, help="least set of tokens with this probability in sum")
    group.add_argument("--top-k", metavar="INT", default=0, help="so many likeliest tokens; 0: all")
    group.add_argument("--min-p", metavar="FLOAT", default=0.0, help="tokens at least so likely beside the likeliest")
    group.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before this text; repeatable")


def read_sampling(args: argparse.Namespace) -> SamplingParams:
    """Raises InvalidConfig or InvalidRequest."""
    from kvern.sampling_params import SamplingParams

    def number(name: str, kind: type[int] | type[float]) -> float | None:
        value = getattr(args, name)
        try:
            return None if value is None else kind(value)
        except ValueError:
            raise InvalidConfig(
                f"{name} must be {'an integer' if kind is int else 'a number'}, got {value!r}"
            ) from None

    numbers = {name: number(name, int) for name in ("max_tokens", "top_k")}
    numbers |= {name: number(name, float) for name in ("temperature", "top_p", "min_p")}
    return SamplingParams(**numbers, stop=tuple(args.stop))  # type: ignore[arg-type]


def load_llm(args: argparse.Namespace) -> LLM:
    """The model the options ask for. Raises InvalidConfig."""
    import msgspec

    config = read_engine_config(args)
    from kvern.llm import LLM

    return LLM(**msgspec.structs.asdict(config))

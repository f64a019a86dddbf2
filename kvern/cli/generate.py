"""Complete one text, printing it as it comes."""

from __future__ import annotations

import argparse
import sys

from kvern.cli.options import add_options
from kvern.cli.sampling import add_sampling_options, load_llm, read_sampling
from kvern.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", default="-", help="the text to go on with; - or nothing: read stdin")
    add_sampling_options(parser, max_tokens=128)
    add_options(parser, "engine", EngineConfig)


def run(args: argparse.Namespace) -> int:
    sampling = read_sampling(args)
    llm = load_llm(args)
    with llm:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        error = None
        for delta in llm.stream(prompt, sampling):
            print(delta.text, end="", flush=True)
            error = delta.error or error
        print()
    if error is not None:
        print(f"kvern generate: {error}", file=sys.stderr)
    return 0 if error is None else 1

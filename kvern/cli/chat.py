"""Chat with a model in the terminal.

One line is one message. /reset forgets the conversation, /exit or the end of input ends; ctrl-C stops an answer.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from kvern.cli.options import add_options
from kvern.cli.sampling import add_sampling_options, load_llm, read_sampling
from kvern.config import EngineConfig
from kvern.sampling_params import InvalidRequest, SamplingParams

if TYPE_CHECKING:
    from kvern.llm import LLM

Conversation = list[dict[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    add_sampling_options(parser, max_tokens=None)
    add_options(parser, "engine", EngineConfig)


def run(args: argparse.Namespace) -> int:
    if args.model_argument is not None:
        args.model = args.model_argument
    sampling = read_sampling(args)
    opening: Conversation = [{"role": "system", "content": args.system}] if args.system else []
    with load_llm(args) as llm:
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401, line editing for input()

            print("/reset forgets the conversation, /exit ends")
        conversation = list(opening)
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except EOFError:
                return 0
            if line in ("/exit", "/quit"):
                return 0
            if line == "/reset":
                conversation = list(opening)
            elif line:
                _turn(llm, conversation, line, sampling)


def _turn(llm: LLM, conversation: Conversation, message: str, sampling: SamplingParams) -> None:
    """Answer `message` and add both to the conversation, unless it cannot be answered."""
    conversation.append({"role": "user", "content": message})
    answer = ""
    try:
        with closing(llm.stream(llm.chat_token_ids(conversation), sampling)) as deltas:
            for delta in deltas:
                print(delta.text, end="", flush=True)
                answer += delta.text
    except KeyboardInterrupt:
        pass
    except InvalidRequest as exc:
        conversation.pop()
        print(f"{exc} (/reset starts anew)", file=sys.stderr)
        return
    print()
    conversation.append({"role": "assistant", "content": answer})

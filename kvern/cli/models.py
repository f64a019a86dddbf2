"""List the built-in models and whether they are on this machine."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run(args: argparse.Namespace) -> int:
    from kvern.weights.hub import TOY_MODELS, cache_dir, list_models

    for model in list_models():
        state = f"at {model.path}" if model.cached else "fetched at first use"
        print(f"{model.name}  {model.size / 1e6:.0f} MB, {model.licence}, {state}\n  {model.description}")
    for name in TOY_MODELS:
        print(f"{name}  no weights, for tests: its text is a hash of what it has read")
    print(f"\nModels are kept in {cache_dir()}. Any folder, .gguf file or hub id can be named as well.")
    return 0

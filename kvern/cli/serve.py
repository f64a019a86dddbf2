"""Serve a model over HTTP, with an OpenAI-compatible API."""

from __future__ import annotations

import argparse
import logging

from kvern import __version__
from kvern.cli.options import add_options, describe, read_configs
from kvern.config import EngineConfig, ServerConfig

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Two ways to say one thing, `kvern serve NAME` and --model NAME; dest differs so that neither hides the other.
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="same as --model")
    add_options(parser, "server", ServerConfig)
    add_options(parser, "engine", EngineConfig)


def run(args: argparse.Namespace) -> int:
    if args.model_argument is not None:
        args.model = args.model_argument
    server_config, engine_config = read_configs(args, ServerConfig, EngineConfig)
    from kvern.log import setup_logging

    setup_logging(engine_config.log_level, "server")
    logger.info("kvern %s: %s", __version__, describe(engine_config, server_config))
    from kvern.server.app import serve

    return serve(engine_config, server_config)

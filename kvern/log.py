"""What kvern's own processes do with the log. As a library kvern only ever calls `logging.getLogger`."""

from __future__ import annotations

import logging
import sys


def setup_logging(level: str = "info", process: str = "kvern") -> None:
    """Send the log to stderr, one line a record. level: a name such as "info"; process: which of ours is speaking."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s %(levelname)-7s {process} %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )

"""What kvern's own processes do with the log. As a library kvern only ever calls `logging.getLogger`."""

from __future__ import annotations

import logging
import sys


def setup_logging(level: str = "info") -> None:
    """Send the log to stderr, one line a record; `level` is a name such as "info"."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)-7s %(processName)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )

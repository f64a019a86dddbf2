"""Keys and values that come from, or go to, another engine.

A connector has two halves. The scheduler's half, here, decides what is moved; it does no I/O. The executor's half, also
here, moves it. What the first tells the second travels in SchedulerOutput.connector_metadata; what the second reports
comes back in ModelRunnerOutput.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from kvern.request import Request


class Matched(NamedTuple):
    """What could be loaded for a request beyond what is cached here.

    num_tokens: how many tokens more. load_async: False: they are there when the step computes; True: the request waits,
    with its blocks, until the executor reports that they have arrived."""

    num_tokens: int
    load_async: bool


class SchedulerConnector(Protocol):
    """The scheduler's half."""

    def matched_tokens(self, request: Request, num_computed: int) -> Matched | None:
        """What can be loaded for tokens num_computed and later. None: not known yet, ask again at the next step."""
        ...

    def allocated(self, request: Request, tables: list[list[int]], start: int, end: int) -> None:
        """Blocks were found: tokens start .. end - 1 are to be loaded into `tables` (one per group)."""
        ...

    def finished(self, request: Request, tables: list[list[int]], num_computed: int) -> bool:
        """A request has ended. True: its blocks must stay until the executor reports it as sent."""
        ...

    def metadata(self) -> Any:
        """What the executor's half has to do in this step, or None. Called once at the end of each step's planning;
        what it returns is told once. Plain data."""
        ...


class Transferred(NamedTuple):
    """What an executor's half reports after a step."""

    arrived: list[str]  # requests whose asynchronous load has ended
    failed: dict[str, list[int]]  # request -> places in its table whose block could not be loaded
    sent: list[str]  # requests whose blocks are no longer needed for sending


class WorkerConnector(Protocol):
    """The executor's half. Called in this order in each step; layers are counted from 0."""

    def start_load(self, metadata: Any) -> None:
        """Begin what the scheduler's half asked for."""
        ...

    def wait_for_layer(self, layer: int) -> None:
        """Return when layer `layer` of synchronous loads is there."""
        ...

    def save_layer(self, layer: int) -> None:
        """Layer `layer` of this step has been computed."""
        ...

    def wait_for_save(self) -> None:
        """Return when nothing of this step's blocks is read any more."""
        ...

    def transferred(self) -> Transferred:
        """What has ended since the last call."""
        ...

    def close(self) -> None: ...

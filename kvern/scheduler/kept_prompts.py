"""Prompts whose owner has ended while siblings that have not started wait for them.

Without a prefix cache nobody else would know the prompt of siblings (n > 1) that never run at the same time. So the
blocks of the prompt are held for the sibling that comes next, the *heir*, until it starts; with a prefix cache that is
the cache's affair. What is held here is worth nobody's place: whoever is short of blocks takes it first, and then the
heir computes the prompt again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvern.request import Request, RequestStatus
from kvern.step import Int32

if TYPE_CHECKING:
    from kvern.scheduler.state import SchedulerState

_ENDED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH, RequestStatus.FINISHED_ABORTED)


class KeptPrompts:
    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self._of: dict[str, tuple[Request, Int32]] = {}  # heir's id -> the heir, and tables [groups, n]

    def __len__(self) -> int:
        return len(self._of)

    def of(self, request: Request) -> Int32 | None:
        """Tables with all that the request's last prompt token reads, if they were kept for it."""
        kept = self._of.get(request.id)
        return None if kept is None else kept[1]

    def tables(self) -> list[Int32]:
        return [tables for _, tables in self._of.values()]

    def pass_on(self, request: Request, status: RequestStatus, heir: Request | None) -> None:
        """A request ends, and still has its blocks; `heir`: the sibling that comes next."""
        kept = self._of.pop(request.id, None)
        if kept is not None and heir is not None:
            self._of[heir.id] = (heir, kept[1])
        elif kept is not None:
            self.state.cache.free(*kept)
        elif heir is not None and request.row >= 0 and status in _ENDED_WELL:
            self._keep(request, heir)

    def _keep(self, request: Request, heir: Request) -> None:
        state, last_token = self.state, request.num_prompt_tokens - 1
        if state.config.enable_prefix_caching or state.cache.recurrent or state.transfers.connector is not None:
            return
        num_blocks = -(-last_token // state.config.block_size)
        tables = state.batch.tables_of(request.row)[:, :num_blocks].copy()
        if state.batch.num_computed[request.row] < last_token or not state.cache.holds_all(tables, last_token):
            return
        state.cache.share(tables)
        self._of[heir.id] = (heir, tables)

    def release(self, request: Request) -> None:
        """The request has started, or will compute its prompt itself."""
        kept = self._of.pop(request.id, None)
        if kept is not None:
            self.state.cache.free(*kept)

    def drop_one(self, last: Request | None = None) -> bool:
        """Blocks are short. `last`: whose prompt goes only when there is no other. False if there is none."""
        for heir, _ in list(self._of.values()):
            if heir is not last or len(self._of) == 1:
                self.release(heir)
                return True
        return False

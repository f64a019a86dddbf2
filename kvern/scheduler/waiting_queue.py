"""Requests that wait, in the order in which they will be tried.

The order is (the policy's rank, resumed ones first, arrival, serial): a list kept sorted, so that the head costs
nothing however long the queue is. Requests that wait for something other than their turn (a grammar, a transfer) are
*parked*: they hold no row, are not walked over at each step, and come back to their own place when they are ready.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any

from kvern.request import Request, RequestStatus

_Entry = tuple[Any, Request]


def _key(entry: _Entry) -> Any:
    return entry[0]


class WaitingQueue:
    def __init__(self, rank: Callable[[Request], Any]) -> None:
        self._rank = rank
        self._entries: list[_Entry] = []  # sorted by key; keys are unique through the serial
        self._keys: dict[str, Any] = {}  # request id -> key, of those in _entries
        self._parked: dict[str, Request] = {}

    def __len__(self) -> int:
        """Parked ones included."""
        return len(self._entries) + len(self._parked)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._keys or request.id in self._parked

    def __iter__(self) -> Iterator[Request]:
        """In order, then the parked ones."""
        yield from (request for _, request in self._entries)
        yield from self._parked.values()

    @property
    def num_ready(self) -> int:
        return len(self._entries)

    def at(self, place: int) -> Request:
        """The ready request at `place`, 0 = the head."""
        return self._entries[place][1]

    def place_of(self, request: Request) -> int | None:
        """Its place among the ready ones; None if it is parked or not here."""
        key = self._keys.get(request.id)
        return None if key is None else bisect_left(self._entries, key, key=_key)

    def parked_by_status(self) -> dict[RequestStatus, int]:
        counts: dict[RequestStatus, int] = {}
        for request in self._parked.values():
            counts[request.status] = counts.get(request.status, 0) + 1
        return counts

    def earliest_arrival(self) -> float:
        """Of the ready requests, of which there must be one. O(waiting)."""
        return min(request.arrival_time for _, request in self._entries)

    def add(self, request: Request) -> None:
        key = self._key_of(request)
        self._keys[request.id] = key
        insort(self._entries, (key, request), key=_key)

    def _key_of(self, request: Request) -> Any:
        return (self._rank(request), not request.resumed, request.arrival_time, request.serial)

    def park(self, request: Request) -> None:
        """Set aside until unpark()."""
        if request.id in self._keys:
            self.remove(request)
        self._parked[request.id] = request

    def unpark(self, request: Request) -> None:
        self.add(self._parked.pop(request.id))

    def remove(self, request: Request) -> None:
        if self._parked.pop(request.id, None) is None:
            del self._entries[bisect_left(self._entries, self._keys.pop(request.id), key=_key)]

    def resort(self) -> None:
        """Ask for every rank again."""
        self._entries = [(self._key_of(request), request) for _, request in self._entries]
        self._entries.sort(key=_key)
        self._keys = {request.id: key for key, request in self._entries}

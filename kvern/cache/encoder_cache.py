"""Where image embeddings live between the step that computes them and the steps that read them.

Counted in embeddings, on two accounts: `budget`, how many may be computed in one step, and `capacity`, how many the
cache holds. Entries are known by content, so requests with the same image share one. A request refers to an entry from
the step that schedules its tokens until those tokens are in the KV cache. Entries that nobody refers to stay until room
is needed, and then go oldest first.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvern.request import ImageSpan


class EncoderCacheManager:
    def __init__(self, budget: int, capacity: int) -> None:
        self.budget = budget
        self.capacity = capacity
        self.remaining = budget  # of this step
        self._sizes: dict[str, int] = {}  # image id -> embeddings, of every entry
        self._readers: dict[str, dict[str, None]] = {}  # image id -> ids of requests that refer to it, in order
        self._unread: dict[str, None] = {}  # entries without readers, oldest first
        self._used = 0
        self._computed: dict[str, str] = {}  # image id -> request id, to be computed in this step
        self._evicted: list[str] = []  # not told yet

    def begin_step(self) -> None:
        self.remaining = self.budget

    def never_fits(self, images: Iterable[ImageSpan], at_once: bool = False) -> str | None:
        """Why the images, one by one or all of them at once, could never be computed, or None."""
        sizes = {image.id: image.length for image in images}
        most, who = max(sizes.values(), default=0), "an image has"
        if at_once:
            most, who = sum(sizes.values()), "chunked prefill is off, and the images have together"
        for limit, name in ((self.budget, "encoder_budget"), (self.capacity, "encoder_cache_size")):
            if most > limit:
                return f"{who} {most} embeddings, {name} is {limit}"
        return None

    def cut(self, images: Iterable[ImageSpan], start: int, num_tokens: int, most: int) -> int:
        """How many of the tokens start .. start + num_tokens - 1 can be computed in this step: up to the first image
        that does not lie in them whole, or that cannot be computed. An image at their very beginning, which would
        never lie in them whole if they are always so few, may make them more, up to `most`. 0 is a possible answer.
        Changes nothing."""
        first = next((image for image in images if image.offset <= start < image.offset + image.length), None)
        if first is not None and num_tokens and first.offset + first.length - start <= most:
            num_tokens = max(num_tokens, first.offset + first.length - start)
        end, budget = start + num_tokens, self.remaining
        room = self.capacity - self._used + sum(self._sizes[entry] for entry in self._unread)
        for image in images:
            if image.offset + image.length <= start:
                continue
            if image.offset >= end:
                break
            fits = image.offset + image.length <= end
            if image.id not in self._sizes:
                budget, room = budget - image.length, room - image.length
            elif image.id in self._unread:
                room -= image.length
            if not fits or budget < 0 or room < 0:
                return max(image.offset - start, 0)
        return num_tokens

    def take(self, request_id: str, images: Iterable[ImageSpan], start: int, num_tokens: int) -> None:
        """The request computes these tokens, which cut() has allowed: refer to their images, and have those computed
        that are not there."""
        read = [i for i in images if i.offset + i.length > start and i.offset < start + num_tokens]
        for image in read:  # first, so that none of them makes room for another
            self._unread.pop(image.id, None)
            self._readers.setdefault(image.id, {})[request_id] = None
        for image in read:
            if image.id not in self._sizes:
                self._make_room(image.length)
                self._sizes[image.id] = image.length
                self._used += image.length
                self.remaining -= image.length
                self._computed[image.id] = request_id

    def _make_room(self, size: int) -> None:
        while self._used + size > self.capacity:
            oldest = next(iter(self._unread))
            self._remove(oldest)
            self._evicted.append(oldest)

    def _remove(self, image_id: str) -> None:
        self._used -= self._sizes.pop(image_id)
        self._unread.pop(image_id, None)
        self._readers.pop(image_id, None)

    def release(self, request_id: str, images: Iterable[ImageSpan], num_computed: int) -> None:
        """Tokens before `num_computed` are in the KV cache: images that end there need not be read again."""
        for image in images:
            if image.offset + image.length <= num_computed:
                self._let_go(request_id, image.id)

    def give_back(self, request_id: str, images: Iterable[ImageSpan]) -> None:
        """The request leaves the batch. What would have been computed in this step for it alone is not, and its budget
        is free again."""
        for image in images:
            self._let_go(request_id, image.id)
            if image.id in self._computed and image.id in self._unread:
                self.remaining += self._sizes[image.id]
                del self._computed[image.id]
                self._remove(image.id)

    def _let_go(self, request_id: str, image_id: str) -> None:
        readers = self._readers.get(image_id)
        if readers is not None and request_id in readers:
            del readers[request_id]
            if not readers:
                del self._readers[image_id]
                self._unread[image_id] = None

    def computed(self) -> list[tuple[str, str]]:
        """(request id, image id) to be computed in this step. Told once: from then on they count as there."""
        told = [(request_id, image_id) for image_id, request_id in self._computed.items()]
        self._computed.clear()
        return told

    def evicted(self) -> list[str]:
        """Ids of entries that are gone since the last call."""
        told, self._evicted = self._evicted, []
        return told

    def check(self) -> None:
        """Raise AssertionError if the accounts do not add up."""
        assert self._used == sum(self._sizes.values()) <= self.capacity, "encoder cache: used is not what is there"
        for image_id in self._sizes:
            read = bool(self._readers.get(image_id))
            assert read != (image_id in self._unread), f"encoder cache: {image_id} is both read and unread, or neither"

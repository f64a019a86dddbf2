"""The encoder cache's accounts: what may be computed in a step, what is kept, who refers to it."""

from __future__ import annotations

from kvern.cache.encoder_cache import EncoderCacheManager
from kvern.request import ImageSpan

X, Y = ImageSpan(2, 6, "X"), ImageSpan(10, 4, "Y")


def test_cut_before_the_first_image_that_cannot_be_computed_whole() -> None:
    cache = EncoderCacheManager(budget=8, capacity=20)
    images = (X, Y)
    cuts = {n: cache.cut(images, 0, n, 100) for n in (1, 2, 3, 7, 8, 10, 12, 14)}
    assert cuts == {1: 1, 2: 2, 3: 2, 7: 2, 8: 8, 10: 10, 12: 10, 14: 10}  # X and Y together are above the budget


def test_image_at_the_beginning_widens_a_chunk_that_would_never_hold_it() -> None:
    cache = EncoderCacheManager(budget=8, capacity=20)
    assert cache.cut((X,), 2, 3, 100) == 6
    assert cache.cut((X,), 2, 3, 5) == 0  # as far as the step's tokens reach
    assert cache.cut((X,), 1, 3, 100) == 1


def test_what_is_given_back_can_be_had_by_others_in_the_same_step() -> None:
    """A request that is thrown out in the step that was to compute its image gives budget and room back."""
    cache = EncoderCacheManager(budget=8, capacity=8)
    cache.begin_step()
    cache.take("a", (X,), 0, 12)
    assert cache.cut((Y,), 10, 4, 100) == 0
    cache.give_back("a", (X,))
    assert cache.computed() == [] and cache.remaining == 8
    assert cache.cut((Y,), 10, 4, 100) == 4
    cache.take("b", (Y,), 10, 4)
    assert cache.computed() == [("b", "Y")]
    cache.check()


def test_image_that_somebody_else_reads_is_not_given_back() -> None:
    cache = EncoderCacheManager(budget=8, capacity=8)
    cache.begin_step()
    cache.take("a", (X,), 0, 12)
    cache.take("b", (X,), 0, 12)
    cache.give_back("a", (X,))
    assert cache.computed() == [("a", "X")] and cache.remaining == 2
    cache.check()


def test_unread_images_stay_until_room_is_needed_and_go_oldest_first() -> None:
    cache = EncoderCacheManager(budget=8, capacity=10)
    for image in (ImageSpan(0, 4, "A"), ImageSpan(0, 3, "B")):
        cache.begin_step()
        cache.take("r", (image,), 0, 4)
        cache.release("r", (image,), 4)
    assert cache.evicted() == []
    cache.begin_step()
    cache.take("s", (ImageSpan(0, 5, "C"),), 0, 5)
    assert cache.evicted() == ["A"]
    assert cache.cut((ImageSpan(0, 3, "B"), ImageSpan(3, 3, "D")), 0, 6, 100) == 3  # B is there; D finds no room
    cache.check()

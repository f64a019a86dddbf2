"""Image embeddings: a step's budget, the cache's room; shared by content, and evicted only when room is needed."""

from __future__ import annotations

import random

import pytest

from kvern.cache.encoder_cache import EncoderCacheManager
from kvern.request import ImageSpan, RequestStatus
from kvern.testing import SchedulerHarness, reference_tokens
from kvern.testing.harness import own_tokens

X, Y, Z = ImageSpan(2, 6, "X"), ImageSpan(10, 5, "Y"), ImageSpan(20, 4, "Z")
ALL = 1000


def step(cache: EncoderCacheManager, request: str, images: tuple[ImageSpan, ...], start: int, n: int) -> int:
    """One step with one request. Returns how many tokens it computes."""
    cache.begin_step()
    n = cache.cut(images, start, n, ALL)
    if n:
        cache.take(request, images, start, n)
    cache.check()
    return n


@pytest.mark.parametrize(
    ("start", "n", "expected"),
    [
        (0, 2, 2),  # ends before X
        (0, 3, 2),  # would end in X
        (0, 7, 2),
        (0, 8, 8),  # X lies in it whole
        (0, 12, 10),  # Y does not
        (0, 15, 15),
        (0, 30, 20),  # Z has no budget left
        (2, 1, 6),  # X at the very beginning makes it more
        (8, 2, 2),
        (10, 3, 5),
        (15, 30, 30),
    ],
)
def test_a_step_ends_before_an_image_that_does_not_lie_in_it_whole(start: int, n: int, expected: int) -> None:
    cache = EncoderCacheManager(budget=11, capacity=20)
    assert cache.cut((X, Y, Z), start, n, ALL) == expected


def test_an_image_at_the_beginning_makes_a_step_longer_only_up_to_its_budget() -> None:
    cache = EncoderCacheManager(budget=10, capacity=10)
    assert cache.cut((X,), 2, 3, most=6) == 6
    assert cache.cut((X,), 2, 3, most=5) == 0
    assert cache.cut((X,), 4, 1, most=6) == 4  # half of it lies in a cached prefix
    assert cache.cut((X,), 2, 0, most=6) == 0  # nothing was to be computed


def test_what_is_there_costs_no_budget() -> None:
    cache = EncoderCacheManager(budget=6, capacity=12)
    assert step(cache, "a", (X,), 0, 10) == 10
    assert cache.computed() == [("a", "X")] and cache.remaining == 0
    assert cache.cut((X,), 0, 10, ALL) == 10  # in the same step
    cache.take("b", (X,), 0, 10)
    assert cache.computed() == []
    cache.check()


def test_entries_stay_until_room_is_needed_and_the_oldest_goes() -> None:
    cache = EncoderCacheManager(budget=6, capacity=12)
    for name, image in (("a", X), ("b", Y)):
        step(cache, name, (image,), 0, 30)
        cache.release(name, (image,), 30)
    assert cache.evicted() == []
    assert step(cache, "c", (Z,), 0, 30) == 30 and cache.evicted() == ["X"]
    cache.computed()
    cache.release("c", (Z,), 30)
    assert step(cache, "d", (Y,), 0, 30) == 30 and cache.computed() == []  # Y is still there
    cache.release("d", (Y,), 30)
    assert step(cache, "e", (ImageSpan(0, 6, "V"),), 0, 30) == 30
    assert cache.evicted() == ["Z"]  # Y has been read after it


def test_what_is_read_is_not_evicted() -> None:
    cache = EncoderCacheManager(budget=6, capacity=8)
    assert step(cache, "a", (X,), 0, 30) == 30
    assert step(cache, "b", (Y,), 0, 30) == 10
    cache.release("a", (X,), 7)  # not all of X is in the KV cache
    assert step(cache, "b", (Y,), 10, 20) == 0
    cache.release("a", (X,), 8)
    assert step(cache, "b", (Y,), 10, 20) == 20 and cache.evicted() == ["X"]


def test_an_entry_with_two_readers_stays_for_the_second() -> None:
    cache = EncoderCacheManager(budget=6, capacity=6)
    cache.begin_step()
    for name in ("a", "b"):
        cache.take(name, (X,), 0, 8)
    cache.give_back("a", (X,))
    cache.check()
    assert step(cache, "c", (Y,), 10, 5) == 0
    cache.release("b", (X,), 8)
    assert step(cache, "c", (Y,), 10, 5) == 5


def test_who_leaves_within_the_step_gives_back_what_was_for_it_alone() -> None:
    cache = EncoderCacheManager(budget=11, capacity=11)
    cache.begin_step()
    cache.take("a", (X, Y), 0, 15)
    cache.take("b", (Y,), 0, 15)
    cache.give_back("a", (X, Y))
    assert cache.remaining == 6 and cache.computed() == [("a", "Y")]
    cache.check()


def test_who_leaves_after_the_step_was_planned_leaves_its_image() -> None:
    """It will be computed: others can read it, and the executor hears of it when it goes."""
    cache = EncoderCacheManager(budget=6, capacity=6)
    cache.begin_step()
    cache.take("a", (X,), 0, 8)
    assert cache.computed() == [("a", "X")]
    cache.give_back("a", (X,))
    assert step(cache, "b", (X,), 0, 8) == 8 and cache.computed() == []
    cache.release("b", (X,), 8)
    assert step(cache, "c", (Y,), 10, 5) == 5 and cache.evicted() == ["X"]


def test_one_image_of_a_prompt_does_not_make_room_for_another() -> None:
    """X and Y are there; with Z all three are more than fits, so it goes as far as the room reaches."""
    cache = EncoderCacheManager(budget=11, capacity=11)
    step(cache, "a", (X, Y), 0, 15)
    cache.release("a", (X, Y), 15)
    images = (ImageSpan(0, 4, "Z"), ImageSpan(5, 6, "X"), ImageSpan(12, 5, "Y"))
    assert step(cache, "b", images, 0, 20) == 12 and cache.evicted() == ["Y"]


def test_the_same_image_twice_in_a_prompt_is_computed_once() -> None:
    cache = EncoderCacheManager(budget=12, capacity=12)
    images = (ImageSpan(0, 6, "X"), ImageSpan(8, 6, "X"))
    assert step(cache, "a", images, 0, 20) == 20 and cache.computed() == [("a", "X")]
    cache.release("a", images, 6)
    cache.check()


@pytest.mark.parametrize("seed", range(20))
def test_the_accounts_add_up_in_any_order_of_events(seed: int) -> None:
    """Against a plain model: what the executor holds is what was computed and not told to be freed."""
    rng = random.Random(seed)
    cache = EncoderCacheManager(budget=rng.choice([6, 12]), capacity=rng.choice([8, 16]))
    pool = dict(zip("ABCDEF", [2, 3, 4, 5, 6, 1], strict=True))
    there: set[str] = set()
    live: dict[str, tuple[tuple[ImageSpan, ...], int]] = {}
    for number in range(150):
        cache.begin_step()
        if rng.random() < 0.5:
            at, images = 0, []
            for name in rng.sample(sorted(pool), rng.randint(1, 3)):
                at += rng.randint(0, 3)
                images.append(ImageSpan(at, pool[name], name))
                at += pool[name]
            live[f"r{number}"] = (tuple(images), 0)
        planned, budget = {}, cache.budget
        for name, (images_of, start) in live.items():
            n = cache.cut(images_of, start, rng.randint(1, 30), ALL)
            if n:
                cache.take(name, images_of, start, n)
                planned[name] = start + n
        if planned and rng.random() < 0.2:
            gone = rng.choice(sorted(planned))
            cache.give_back(gone, live.pop(gone)[0])
            del planned[gone]
        cache.check()
        new = [image for _, image in cache.computed()]
        assert len(new) == len(set(new)) and not there & set(new) - set(cache._evicted)
        there -= set(cache.evicted())
        there |= set(new)
        assert sum(pool[image] for image in new) <= budget
        assert sum(pool[image] for image in there) <= cache.capacity
        for name, end in planned.items():
            images_of, start = live[name]
            read = {i.id for i in images_of if i.offset < end and i.offset + i.length > start}
            assert read <= there, "a token reads an image that nobody has computed"
            cache.release(name, images_of, end)
            live[name] = (images_of, end)
            if end > 30:
                cache.give_back(name, live.pop(name)[0])
        cache.check()
        assert set(cache._sizes) == there


# ---- in the scheduler


def test_the_executor_is_told_what_to_encode_and_for_whom() -> None:
    h = SchedulerHarness(encoder_budget=12, encoder_cache_size=12)
    image = {"offset": 2, "length": 6, "id": "X"}
    first, second = h.add(12, images=[image]), h.add(12, images=[image])
    out = h.schedule()
    assert out.encoder_inputs == [(first, "X")] and out.num_scheduled_tokens == {first: 12, second: 12}
    h.update(out)
    assert h.schedule().encoder_inputs == []


def test_an_image_in_a_cached_prefix_is_not_encoded_again() -> None:
    h = SchedulerHarness(encoder_budget=6, encoder_cache_size=6)
    prompt, image = own_tokens("p", 40), {"offset": 2, "length": 6, "id": "X"}
    h.add(prompt, max_tokens=1, images=[image])
    h.step()
    h.add(own_tokens("q", 20), max_tokens=1, images=[image | {"id": "Y"}])
    h.step()  # Y has taken the room of X
    h.add([*prompt, 7], images=[image])
    out = h.schedule()
    assert out.encoder_inputs == [] and list(out.num_scheduled_tokens.values()) == [9]


def test_a_request_that_ends_with_its_first_token_leaves_its_image_to_others() -> None:
    h = SchedulerHarness(encoder_budget=6, encoder_cache_size=6, enable_prefix_caching=False)
    image = {"offset": 2, "length": 6, "id": "X"}
    h.add(12, max_tokens=1, images=[image])
    h.step()
    h.add(12, max_tokens=1, images=[image])
    out = h.schedule()
    assert out.encoder_inputs == [] and out.freed_encoder_ids == []


@pytest.mark.parametrize("seed", range(6))
def test_texts_do_not_depend_on_the_room_for_images(seed: int) -> None:
    rng = random.Random(seed)
    h = SchedulerHarness(
        num_blocks=30,
        block_size=4,
        max_num_seqs=5,
        max_num_batched_tokens=rng.choice([8, 40]),
        encoder_budget=8,
        encoder_cache_size=rng.choice([8, 12]),
        long_prefill_token_threshold=rng.choice([0, 5]),
        preempt_probability=0.2,
        seed=seed,
    )
    prompts = {}
    for i in range(8):
        prompt = own_tokens(f"p{i}", 30)
        images = [{"offset": at, "length": rng.randint(1, 8), "id": f"{seed}{i}{at}"} for at in (0, 9, 20)]
        prompts[h.add(prompt, max_tokens=5, images=images)] = prompt
    texts = h.run()
    assert texts == {rid: reference_tokens(prompt, 5) for rid, prompt in prompts.items()}
    assert h.scheduler.state.encoder._readers == {}


def test_an_image_that_can_never_be_computed_is_refused_with_the_limit() -> None:
    h = SchedulerHarness(encoder_budget=6, encoder_cache_size=9)
    rid = h.add(20, images=[{"offset": 0, "length": 7, "id": "X"}])
    h.step()
    assert h.request(rid).status is RequestStatus.FINISHED_IGNORED
    assert h.request(rid).error == "an image has 7 embeddings, encoder_budget is 6"

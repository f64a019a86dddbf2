"""prefill_first: a step is all prompts or all decodes. mixed: what the scenarios leave out."""

from __future__ import annotations

import pytest

from kvern.request import BlockedBy, RequestStatus
from kvern.testing import SchedulerHarness, reference_tokens
from kvern.testing.harness import own_tokens


def prefill_first(**config: object) -> SchedulerHarness:
    return SchedulerHarness(**{"num_blocks": 65, "block_size": 4, "batching": "prefill_first"} | config)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_no_step_has_prompts_and_decodes(seed: int) -> None:
    h = prefill_first(max_num_batched_tokens=16, max_num_seqs=4, preempt_probability=0.2, seed=seed)
    for i in range(10):
        h.add(own_tokens(f"{seed}/{i}", 5 + 7 * i % 30), max_tokens=6)
    while h.scheduler.has_work():
        known = {r.id: h.request(r.id).num_tokens for r in h.scheduler.requests.values()}
        out = h.schedule()
        ends = dict(zip(out.request_ids, (out.num_computed + out.num_new).tolist(), strict=True))
        entered = {new.request_id for new in out.new_requests}
        # A decode computes the one token that came in the last step; a prompt, or what is computed again, is more than
        # that or begins in this step.
        rows = {r.id: int(h.scheduler.state.batch.num_at_entry[r.row]) for r in h.scheduler.running()}
        prompts = [rid for rid, end in ends.items() if rid in entered or end <= rows[rid]]
        assert len(prompts) in (0, len(ends)), (known, ends)
        h.update(out)


def test_a_step_of_decodes_comes_when_no_prompt_can_begin() -> None:
    """The prompt lacks blocks: decodes are not kept waiting for it."""
    h = prefill_first(num_blocks=11)
    h.add(30, max_tokens=9)
    h.step()
    big = h.add(24, max_tokens=2)
    out = h.schedule()
    assert list(out.num_scheduled_tokens.values()) == [1]
    assert h.request(big).blocked_by is BlockedBy.NO_FREE_BLOCKS


def test_a_prompt_is_not_held_back_while_nothing_runs() -> None:
    h = prefill_first(delay_factor=100.0)
    first = h.add(4, max_tokens=1)
    h.step()
    h.clock.advance(1.0)
    second = h.add(4, max_tokens=1, at=1.0)
    assert h.schedule().request_ids == [second] and h.request(first).status.finished


@pytest.mark.parametrize(("waited", "starts"), [(0.9, False), (1.0, False), (1.1, True)])
def test_the_delay_is_a_multiple_of_the_last_prompt_step(waited: float, starts: bool) -> None:
    """A prompt step of 0.5 s, and a factor of 2: held back while it has waited no more than a second."""
    h = prefill_first(delay_factor=2.0)
    h.add(4, max_tokens=50)
    h.step()
    h.clock.advance(0.5)
    h.step()
    late = h.add(4, max_tokens=5, at=h.clock.now())
    h.clock.advance(waited)
    assert (h.schedule().request_ids == [late]) is starts


def test_two_that_waited_begin_together() -> None:
    """What the delay is for."""
    h = prefill_first(delay_factor=2.0)
    h.add(4, max_tokens=50)
    h.step()
    h.clock.advance(0.5)
    first = h.add(4, at=0.5)
    assert len(h.step().request_ids) == 1
    h.clock.advance(0.8)
    second = h.add(4, at=1.3)
    h.step()
    h.clock.advance(0.3)
    assert h.schedule().num_scheduled_tokens == {first: 4, second: 4}


def test_a_resumed_request_is_a_prompt_again() -> None:
    h = prefill_first(enable_prefix_caching=False)
    first, second = h.add(8, max_tokens=20), h.add(8, max_tokens=20)
    h.step()
    h.step()
    h.scheduler.preempt(second)
    assert h.schedule().num_scheduled_tokens == {second: 10}
    h.update(h._planned[0])
    assert h.schedule().num_scheduled_tokens == {first: 1, second: 1}


def test_prompts_and_decodes_have_the_budget_each_for_themselves() -> None:
    h = prefill_first(max_num_batched_tokens=10)
    rows = [h.add(1, max_tokens=20) for _ in range(8)]
    h.step()
    late = h.add(10, max_tokens=2)
    assert h.schedule().num_scheduled_tokens == {late: 10}
    h.update(h._planned[0])
    assert set(h.schedule().num_scheduled_tokens) == {*rows, late}


@pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
@pytest.mark.parametrize("chunked", [True, False])
def test_texts_do_not_depend_on_how_steps_are_put_together(batching: str, chunked: bool) -> None:
    h = SchedulerHarness(
        num_blocks=20,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        batching=batching,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=5,
    )
    prompts = [own_tokens(f"p{i}", 3 + 2 * i) for i in range(10)]
    ids = [h.add(prompt, max_tokens=7) for prompt in prompts]
    texts = h.run()
    assert [texts[rid] for rid in ids] == [reference_tokens(prompt, 7) for prompt in prompts]
    assert h.scheduler.stats.preemptions > 0


def test_without_chunks_no_prompt_is_ever_in_pieces() -> None:
    """Neither the threshold, nor a policy's cap, nor an image makes one of it."""
    h = SchedulerHarness(
        enable_chunked_prefill=False,
        long_prefill_token_threshold=4,
        max_num_batched_tokens=32,
        encoder_budget=8,
        encoder_cache_size=8,
        num_blocks=100,
    )
    ids = [h.add(20, max_tokens=3, images=[{"offset": 5, "length": 6, "id": f"I{i}"}]) for i in range(5)]
    begun = []
    while h.scheduler.has_work():
        out = h.schedule()
        begun += [n for n in out.num_scheduled_tokens.values() if n > 1]
        h.update(out)
    assert begun == [20] * len(ids)


def test_without_chunks_images_that_do_not_go_together_are_refused() -> None:
    h = SchedulerHarness(enable_chunked_prefill=False, encoder_budget=8, encoder_cache_size=20)
    images = [{"offset": 0, "length": 6, "id": "X"}, {"offset": 8, "length": 6, "id": "Y"}]
    rid = h.add(20, images=images)
    h.step()
    assert h.request(rid).status is RequestStatus.FINISHED_IGNORED
    assert h.request(rid).error == (
        "chunked prefill is off, and the images have together 12 embeddings, encoder_budget is 8"
    )

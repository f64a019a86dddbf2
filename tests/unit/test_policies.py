"""The policy interface: what the core does with opinions, with nonsense, and with exceptions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvern.config import InvalidConfig
from kvern.request import BlockedBy, RequestStatus
from kvern.scheduler.policies import Policy, RequestInfo, make_policy
from kvern.scheduler.policies.guard import GuardedPolicy
from kvern.testing import SchedulerHarness, reference_tokens
from kvern.testing.harness import own_tokens

HERE = __name__


class Newest(Policy):
    """Last come, first served."""

    name = "newest-first"

    def __init__(self, sign: int = -1) -> None:
        self.sign = sign

    def rank(self, request: RequestInfo, now: float) -> Any:
        return self.sign * request.arrival_time


class Moody(Newest):
    """Raises in the hooks named in `broken`."""

    name = "moody"
    broken: set[str] = set()

    def _try(self, hook: str) -> None:
        if hook in self.broken:
            raise RuntimeError(f"no {hook}")

    def rank(self, request: RequestInfo, now: float) -> Any:
        self._try("rank")
        return super().rank(request, now)

    def pick_victim(self, running: Any, now: float) -> RequestInfo:
        self._try("pick_victim")
        chosen: RequestInfo = running[0]
        return chosen

    def may_preempt(self, waiting: RequestInfo, running: RequestInfo, now: float) -> bool:
        self._try("may_preempt")
        return waiting.priority < running.priority

    def cap_tokens(self, request: RequestInfo, num_tokens: int, now: float) -> int:
        self._try("cap_tokens")
        return 3

    def shed(self, request: RequestInfo, now: float) -> str | None:
        self._try("shed")
        return None

    def on_arrival(self, request: RequestInfo, now: float) -> None:
        self._try("on_arrival")

    def on_served(self, served: Any, now: float) -> None:
        self._try("on_served")

    def on_finish(self, request: RequestInfo, now: float) -> None:
        self._try("on_finish")


class NotAPolicy:
    pass


class OfTomorrow(Policy):
    name = "tomorrow"
    version = 2


def three(policy: str, **config: Any) -> tuple[SchedulerHarness, list[str]]:
    h = SchedulerHarness(num_blocks=100, max_num_seqs=1, policy=policy, **config)
    h.clock.advance(10.0)
    return h, [h.add(10, max_tokens=1, at=float(i)) for i in range(3)]


def order_of_service(h: SchedulerHarness) -> list[str]:
    served = []
    while h.scheduler.requests:
        out = h.schedule()
        served += out.request_ids
        h.update(out)
    return served


# ---- names and options


def test_a_class_can_be_named() -> None:
    h, ids = three(f"{HERE}:Newest")
    assert order_of_service(h) == ids[::-1]


def test_options_arrive_as_arguments() -> None:
    h, ids = three(f"{HERE}:Newest", policy_options={"sign": 1})
    assert order_of_service(h) == ids


def test_an_entry_point_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    entry = SimpleNamespace(name="theirs", load=lambda: Newest)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == "kvern.policies" else [])
    assert isinstance(make_policy("theirs"), Newest)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("best", {}, "must be one of fcfs, priority, fair, deadline, shortest, prefix, or module:Class, got 'best'"),
        (f"{HERE}:Absent", {}, "cannot load"),
        ("no_such_module:X", {}, "cannot load no_such_module:X"),
        (f"{HERE}:NotAPolicy", {}, "is not a subclass"),
        (f"{HERE}:OfTomorrow", {}, "interface version 2, this is 1"),
        ("fcfs", {"speed": 1}, "policy_options of fcfs"),
        ("fair", {"weights": {"a": 0}}, "weights must be above 0"),
        ("fair", {"prompt_cost": -1}, "must not be negative"),
        ("deadline", {"ttft": -1}, "ttft must not be negative"),
        ("shortest", {"ageing": 0}, "ageing must be above 0"),
        ("prefix", {"ageing": -5}, "ageing must be above 0"),
    ],
)
def test_what_cannot_be_is_said(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match="policy") as raised:
        make_policy(name, options)
    assert message in str(raised.value)


# ---- what a policy sees


def test_a_policy_can_change_nothing() -> None:
    h, ids = three("fcfs")
    info = h.requests[ids[0]].info
    for name in ("priority", "arrival_time", "tenant", "num_tokens", "running"):
        with pytest.raises(AttributeError):
            setattr(info, name, 7)


def test_the_numbers_a_policy_sees() -> None:
    h = SchedulerHarness(num_blocks=100, max_num_batched_tokens=24)
    rid = h.add(own_tokens("x", 40), max_tokens=5, priority=3, tenant="t", ttft_target=0.5, tpot_target=0.1, at=2.0)
    info = h.requests[rid].info
    assert (info.id, info.priority, info.tenant, info.arrival_time) == (rid, 3, "t", 2.0)
    assert (info.ttft_target, info.tpot_target, info.num_preemptions) == (0.5, 0.1, 0)
    assert (info.running, info.num_computed_tokens, info.num_uncomputed_tokens) == (False, 0, 40)
    h.step()
    assert (info.running, info.num_computed_tokens, info.num_uncomputed_tokens, info.num_blocks) == (True, 24, 16, 2)
    h.step()
    assert (info.num_tokens, info.num_prompt_tokens, info.num_output_tokens, info.max_output_tokens) == (41, 40, 1, 5)
    again = h.add([*own_tokens("x", 40), 7], max_tokens=1)
    assert h.requests[again].info.cached_prefix() == 32 and info.cached_prefix() == 0  # who runs asks for nothing


# ---- exceptions and nonsense


@pytest.mark.parametrize("hook", ["rank", "pick_victim", "may_preempt", "cap_tokens", "shed", "on_served", "on_finish"])
def test_a_hook_that_raises_costs_a_step_its_policy_and_nothing_else(hook: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(Moody, "broken", {hook})
    h = SchedulerHarness(num_blocks=12, block_size=4, policy=f"{HERE}:Moody", max_num_seqs=4)
    prompts = {h.add(own_tokens(f"p{i}", 9), max_tokens=9, priority=i % 2): own_tokens(f"p{i}", 9) for i in range(7)}
    texts = h.run()
    assert texts == {rid: reference_tokens(prompt, 9) for rid, prompt in prompts.items()}
    assert h.scheduler.stats.policy_errors > 0
    guard = h.scheduler.state.policy
    assert guard.last_error is not None and guard.last_error.endswith(f"no {hook}")


def test_without_its_policy_a_step_is_first_come_first_served_and_the_next_one_is_not(monkeypatch: Any) -> None:
    h, ids = three(f"{HERE}:Moody")
    monkeypatch.setattr(Moody, "broken", {"shed"})
    assert h.schedule().request_ids == [ids[2]]  # the order was known before shed() raised
    monkeypatch.setattr(Moody, "broken", {"rank"})
    h.scheduler.state.reorder()
    h.update(h._planned[0])
    assert h.schedule().request_ids == [ids[0]]
    monkeypatch.setattr(Moody, "broken", set())
    h.update(h._planned[0])
    assert order_of_service(h)[-1] == ids[1]


def test_the_order_is_restored_after_a_step_without_the_policy(monkeypatch: Any) -> None:
    """They came while it could not rank. Ranks of a policy that is not dynamic are asked for once, but for this."""
    monkeypatch.setattr(Moody, "broken", {"rank"})
    h, ids = three(f"{HERE}:Moody")
    assert [request.id for request in h.scheduler.waiting()] == ids
    monkeypatch.setattr(Moody, "broken", set())
    assert order_of_service(h)[0] == ids[2]


@pytest.mark.parametrize("rank", [float("nan"), "soon", None, (1, "x"), [1]])
def test_a_rank_that_is_no_number_is_reported(rank: Any) -> None:
    guard = GuardedPolicy(Newest())
    guard.policy.rank = lambda request, now: rank  # type: ignore[method-assign]
    assert guard.rank(None) == () and guard.failed and guard.num_errors == 1  # type: ignore[arg-type]
    assert "rank must be a number" in str(guard.last_error)


@pytest.mark.parametrize("rank", [3, -1.5, True, (1, 2.0), float("inf")])
def test_numbers_and_tuples_of_numbers_are_ranks(rank: Any) -> None:
    guard = GuardedPolicy(Newest())
    guard.policy.rank = lambda request, now: rank  # type: ignore[method-assign]
    assert guard.rank(None) == (rank if isinstance(rank, tuple) else (rank,)) and not guard.failed  # type: ignore[arg-type]


def test_a_victim_that_does_not_run_is_reported_and_the_last_one_taken() -> None:
    guard, running = GuardedPolicy(Newest()), [object(), object()]
    guard.policy.pick_victim = lambda running, now: "somebody"  # type: ignore[method-assign]
    assert guard.pick_victim(running) is running[-1] and guard.num_errors == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(("cap", "given"), [(-5, 1), (0, 1), (4, 4), (10, 10), (99, 10)])
def test_a_cap_gives_at_least_one_token_and_never_more_than_asked_for(cap: int, given: int) -> None:
    guard = GuardedPolicy(Newest())
    guard.policy.cap_tokens = lambda request, num_tokens, now: cap  # type: ignore[method-assign]
    assert guard.cap_tokens(None, 10) == given  # type: ignore[arg-type]


def test_a_cap_holds_for_prompts_that_begin_and_that_go_on() -> None:
    h = SchedulerHarness(num_blocks=100, policy=f"{HERE}:Moody")
    rid = h.add(8, max_tokens=2)
    assert [h.step() and h.request(rid).num_computed_tokens for _ in range(4)] == [3, 6, 8, 9]


def test_the_victim_of_the_policy_goes() -> None:
    h = SchedulerHarness(num_blocks=6, policy=f"{HERE}:Moody", enable_prefix_caching=False)
    first, second = h.add(30, max_tokens=30), h.add(32, max_tokens=30)
    while not (out := h.schedule()).preempted_req_ids:
        h.update(out)
    assert out.preempted_req_ids == [first] and second in out.num_scheduled_tokens


# ---- another policy while requests live


def test_another_policy_takes_over_and_nobody_is_dropped() -> None:
    h = SchedulerHarness(num_blocks=40, block_size=4, max_num_seqs=2)
    prompts = {h.add(own_tokens(f"p{i}", 10), max_tokens=6, tenant="ab"[i % 2], priority=i): i for i in range(8)}
    names = ["priority", "fair", "shortest", "prefix", "deadline", f"{HERE}:Newest", "fcfs"]
    for name in names:
        h.step()
        running = [request.id for request in h.scheduler.running()]
        h.scheduler.set_policy(name)
        assert sorted(request.id for request in h.scheduler.running()) == sorted(running)
        h.check_invariants()
    texts = h.run()
    assert all(texts[rid] == reference_tokens(own_tokens(f"p{i}", 10), 6) for rid, i in prompts.items())


def test_the_new_order_holds_from_the_next_step_on() -> None:
    h, ids = three("fcfs")
    h.step()
    h.scheduler.set_policy(f"{HERE}:Newest")
    assert order_of_service(h) == [ids[2], ids[1]]


def test_a_policy_that_cannot_be_leaves_the_old_one() -> None:
    h, ids = three(f"{HERE}:Newest")
    for name in ("best", f"{HERE}:NotAPolicy"):
        with pytest.raises(InvalidConfig):
            h.scheduler.set_policy(name)
    assert order_of_service(h) == ids[::-1]


def test_fair_takes_over_while_somebody_runs() -> None:
    """It has seen nobody arrive; from then on tenants take turns."""
    h = SchedulerHarness(num_blocks=100, max_num_seqs=1)
    first = [h.add(10, max_tokens=1, tenant="a") for _ in range(3)]
    second = [h.add(10, max_tokens=1, tenant="b") for _ in range(2)]
    h.step()
    h.scheduler.set_policy("fair")
    served = order_of_service(h)
    assert served == [first[1], second[0], first[2], second[1]], served


# ---- shedding


def test_deadline_says_how_late_it_would_be() -> None:
    h = SchedulerHarness(policy="deadline", policy_options={"shed": True, "ttft": 1.0, "token_time": 0.01})
    late = h.add(50, max_tokens=4)
    h.clock.advance(1.25)
    h.step()
    assert h.request(late).status is RequestStatus.FINISHED_IGNORED
    assert h.request(late).error == "shed by policy deadline: its first token would be 0.750 s late"


def test_deadline_does_not_shed_who_has_been_served() -> None:
    h = SchedulerHarness(policy="deadline", policy_options={"shed": True, "tpot": 0.1})
    rid = h.add(50, max_tokens=4)
    h.step()
    h.scheduler.preempt(rid)
    h.clock.advance(100.0)
    assert h.schedule().request_ids == [rid]


def test_who_waits_for_policy_reasons_is_said_to() -> None:
    h = SchedulerHarness(batching="prefill_first", delay_factor=1.0, num_blocks=100)
    h.add(10, max_tokens=9)
    h.step()
    h.clock.advance(1.0)
    h.step()
    rid = h.add(10, at=h.clock.now())
    h.step()
    assert h.request(rid).blocked_by is BlockedBy.POLICY

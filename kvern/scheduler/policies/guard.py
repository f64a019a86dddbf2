"""The core's side of the policy interface: calls the hooks, and carries on when one raises.

After an exception the step at hand goes first come, first served (every rank equal, the last of the order gives way,
nobody preempts); at the next step the policy is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvern.scheduler.policies.base import Policy, RequestInfo, Served

T = TypeVar("T")


class GuardedPolicy:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.now = 0.0
        self.failed = False  # in this step
        self.num_errors = 0
        self.last_error: str | None = None
        self.failures: dict[str, int] = {}  # "hook: exception class" -> how often
        hooks = type(policy)
        # Hooks that are left at their default need not be called for every request.
        self.picks_victims = hooks.pick_victim is not Policy.pick_victim
        self.preempts = hooks.may_preempt is not Policy.may_preempt
        self.caps = hooks.cap_tokens is not Policy.cap_tokens
        self.sheds = hooks.shed is not Policy.shed
        self.accounts = hooks.on_served is not Policy.on_served

    @property
    def dynamic(self) -> bool:
        """Whether ranks must be asked for anew in each step that depends on them."""
        return self.policy.dynamic

    def begin_step(self, now: float) -> bool:
        """Returns whether the last step was planned without the policy, so that the order must be restored."""
        self.now = now
        failed, self.failed = self.failed, False
        return failed

    def rank(self, request: RequestInfo) -> tuple[float, ...]:
        """The rank as a tuple of numbers, so that any two compare. () while the policy is out of order."""
        rank = self._call((), self.policy.rank, request, self.now)
        parts = rank if isinstance(rank, tuple) else (rank,)
        if all(isinstance(part, (int, float)) and part == part for part in parts):
            return parts
        self.report("rank", TypeError(f"rank must be a number or a tuple of numbers, got {rank!r}"))
        return ()

    def pick_victim(self, running: Sequence[RequestInfo]) -> RequestInfo:
        victim: RequestInfo = self._call(running[-1], self.policy.pick_victim, running, self.now)
        if not any(victim is request for request in running):
            self.report("pick_victim", ValueError(f"pick_victim returned {victim!r}, which does not run"))
            return running[-1]
        return victim

    def may_preempt(self, waiting: RequestInfo, running: RequestInfo) -> bool:
        return bool(self._call(False, self.policy.may_preempt, waiting, running, self.now))

    def cap_tokens(self, request: RequestInfo, num_tokens: int) -> int:
        return max(
            1, min(num_tokens, int(self._call(num_tokens, self.policy.cap_tokens, request, num_tokens, self.now)))
        )

    def shed(self, request: RequestInfo) -> str | None:
        reason: str | None = self._call(None, self.policy.shed, request, self.now)
        return None if reason is None else str(reason)

    def on_arrival(self, request: RequestInfo) -> None:
        self._call(None, self.policy.on_arrival, request, self.now, always=True)

    def on_served(self, served: Sequence[Served]) -> None:
        self._call(None, self.policy.on_served, served, self.now, always=True)

    def on_finish(self, request: RequestInfo) -> None:
        self._call(None, self.policy.on_finish, request, self.now, always=True)

    def explain(self, request: RequestInfo) -> dict[str, float]:
        """What the policy says of a request. Asked between steps: a failure here decides nothing."""
        try:
            return {name: float(value) for name, value in self.policy.explain(request, self.now).items()}
        except Exception:
            return {}

    def report(self, hook: str, error: Exception) -> None:
        """Note a failure; the rest of this step does without the policy."""
        self.failed = True
        self.num_errors += 1
        kind = f"{hook}: {type(error).__name__}"
        self.failures[kind] = self.failures.get(kind, 0) + 1
        self.last_error = f"{kind}: {error}"

    def _call(self, default: Any, hook: Callable[..., Any], *arguments: Any, always: bool = False) -> Any:
        if self.failed and not always:
            return default
        try:
            return hook(*arguments)
        except Exception as error:
            self.report(hook.__name__, error)
            return default

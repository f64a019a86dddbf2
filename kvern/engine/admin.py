"""What people ask of a running engine and tell it, and what it says of itself in the log.

Nothing here takes part in a step: `after_step` only looks. At log level debug it says, whenever the reason changes, why
a request waits; a policy's failures it says once for each kind.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvern.cache.pins import PinView
from kvern.clock import Clock
from kvern.config import InvalidConfig
from kvern.request import BlockedBy, Request
from kvern.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Admin:
    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._options: dict[str, Any] = dict(scheduler.config.policy_options)  # of the policy in use
        self._name = scheduler.config.policy  # as it was asked for
        self.policy_changes = 0
        self._errors_seen = 0
        self._pins_given_up = 0
        self._told: set[tuple[str, str]] = set()  # (policy, kind of failure) that are in the log
        self._reasons: dict[str, BlockedBy] = {}  # why requests waited after the last step; only at level debug

    # ---- the policy

    def set_policy(self, name: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Another policy from the next step on; no request is touched. Returns what `policy` does. Raises
        InvalidConfig, and the policy stays as it was."""
        try:
            self._scheduler.set_policy(name, options)
        except InvalidConfig:
            raise
        except Exception as exc:  # module:Class is somebody's code
            raise InvalidConfig(f"policy: {name} cannot be made: {type(exc).__name__}: {exc}") from exc
        logger.info("policy: %s %s, was %s %s", name, dict(options or {}), self._name, self._options)
        self._name, self._options = name, dict(options or {})
        self.policy_changes += 1
        return self.policy()

    def policy(self) -> dict[str, Any]:
        """The policy in use. errors: since the start; failures: of this policy, by kind."""
        guard = self._scheduler.policy
        return {
            "policy": self._name,
            "options": self._options,
            "changes": self.policy_changes,
            "errors": guard.num_errors,
            "failures": dict(guard.failures),
            "last_error": guard.last_error,
        }

    # ---- pinned prefixes

    def pin(
        self, prompt_token_ids: Sequence[int], ttl: float, cache_salt: str | None = None, lora: str | None = None
    ) -> dict[str, Any]:
        """Keep a prefix from eviction for `ttl` seconds. Returns the pin as `pins` shows it. Raises InvalidRequest."""
        now = self._clock.now()
        pin_id = self._scheduler.pin(prompt_token_ids, ttl, now, cache_salt, lora)
        (view,) = (view for view in self._scheduler.pins(now) if view.id == pin_id)
        logger.info("pinned %s: %d tokens for %g s", pin_id, view.num_tokens, ttl)
        return self._describe_pin(view, now)

    def unpin(self, pin_id: str) -> bool:
        """False if there is no such pin."""
        found = self._scheduler.unpin(pin_id)
        if found:
            logger.info("unpinned %s", pin_id)
        return found

    def pins(self) -> dict[str, Any]:
        """What is pinned, the oldest first, and how much may be."""
        now = self._clock.now()
        return {
            "pins": [self._describe_pin(view, now) for view in self._scheduler.pins(now)],
            "num_pinned_blocks": self._scheduler.num_pinned_blocks,
            "max_pinned_blocks": self._scheduler.state.cache.pins.most,
            "given_up": self._scheduler.stats.pins_given_up,
        }

    def _describe_pin(self, view: PinView, now: float) -> dict[str, Any]:
        return {
            "id": view.id,
            "num_tokens": view.num_tokens,
            "num_blocks": view.num_blocks,
            "num_cached_blocks": view.num_cached,
            "expires_in": round(view.expires - now, 3),
        }

    # ---- requests

    def requests(self) -> list[dict[str, Any]]:
        """One plain dict per live request, oldest first."""
        return [self.describe(request) for request in self._scheduler.requests.values()]

    def describe(self, request: Request) -> dict[str, Any]:
        view = self._scheduler.view(request)
        why = view.explanation
        return {
            "request_id": view.id,
            "status": view.status.value,
            "blocked_by": None if view.blocked_by is None else view.blocked_by.value,
            "explanation": None
            if why is None
            else {
                "text": str(why),
                "rank": why.rank,
                "blocks_short": why.blocks_short,
                "blocks_pinned": why.blocks_pinned,
                "overtaken_by": why.overtaken_by,
                "waits_for": why.waits_for,
                "policy": dict(why.policy or {}),
            },
            "age_seconds": round(self._clock.now() - view.arrival_time, 3),
            "num_prompt_tokens": view.num_prompt_tokens,
            "num_tokens": view.num_tokens,
            "num_computed_tokens": view.num_computed_tokens,
            "num_cached_tokens": view.num_cached_tokens,
            "num_blocks": len(view.block_ids),
            "num_preemptions": view.num_preemptions,
            "priority": view.priority,
            "tenant": view.tenant,
        }

    # ---- the log

    def after_step(self) -> None:
        guard = self._scheduler.policy
        if guard.num_errors != self._errors_seen:
            self._errors_seen = guard.num_errors
            self._tell_failures()
        if self._scheduler.stats.pins_given_up != self._pins_given_up:
            self._pins_given_up = self._scheduler.stats.pins_given_up
            logger.warning("a pinned prefix was given up, since a request could not run beside it")
        if logger.isEnabledFor(logging.DEBUG):
            self._tell_reasons()

    def _tell_failures(self) -> None:
        guard = self._scheduler.policy
        for kind in guard.failures:
            if (self._name, kind) not in self._told:
                self._told.add((self._name, kind))
                logger.error(
                    "policy %s failed in %s; such a step goes first come, first served (further failures of this kind "
                    "are only counted)", self._name, guard.last_error if kind in str(guard.last_error) else kind
                )  # fmt: skip

    def _tell_reasons(self) -> None:
        before, self._reasons = self._reasons, {}
        for request in self._scheduler.waiting():
            reason = self._scheduler.admission.blocked_by(request)
            if reason is None:
                continue
            self._reasons[request.id] = reason
            if before.get(request.id) is not reason:
                logger.debug("request %s waits: %s", request.id, self._scheduler.view(request).explanation)

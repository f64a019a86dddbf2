"""What a scheduling policy may decide: who goes first and who has to give way.

A policy sees requests and returns opinions; blocks, budgets, states and correctness stay in the core.
"""

from __future__ import annotations

from typing import Any

from kvern.request import Request


class Policy:
    """Base of all policies: every hook has a default, and the defaults together are first come, first served.

    Interface version 1. A rank must not change while a request lives, except through the events that are handed to
    the policy; equal ranks are ordered by the core (resumed requests first, then arrival, then order of adding).
    """

    name = "policy"
    version = 1

    def rank(self, request: Request) -> Any:
        """Order among waiting and among running requests, smallest first. Any comparable value."""
        return ()

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Whether `waiting` may take memory or a row from `running` right now."""
        return False

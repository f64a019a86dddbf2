"""The scheduler scenarios, one test each; what the harness does not know yet is skipped with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from run_scenarios import Run, Skip, harness_class, load

# Areas whose scenarios must run: a skip there would hide that something got lost.
MUST_RUN = {"budget", "order", "preemption", "priority", "prefix-cache", "block-pool", "stop-conditions", "abort"}
MUST_RUN |= {"limits", "spec", "async"}


@pytest.mark.parametrize("scenario", load(), ids=lambda s: s["id"])
def test_scenario(scenario: dict[str, Any]) -> None:
    try:
        Run(scenario, harness_class())
    except Skip as reason:
        assert scenario["area"] not in MUST_RUN, f"skipped: {reason}"
        pytest.skip(str(reason))

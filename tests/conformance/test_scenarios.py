"""The scheduler scenarios, one test each. Public ones that the harness cannot take are skipped with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from run_scenarios import Run, Skip, harness_class, load

PUBLIC, OWN = load(), load(["scenarios_own.yaml"])

# Areas whose scenarios must run: a skip there would hide that something got lost.
MUST_RUN = {"budget", "order", "preemption", "priority", "prefix-cache", "block-pool", "stop-conditions", "abort"}
MUST_RUN |= {"limits", "spec", "async"}


@pytest.mark.parametrize("scenario", PUBLIC, ids=lambda s: s["id"])
def test_scenario(scenario: dict[str, Any]) -> None:
    try:
        Run(scenario, harness_class())
    except Skip as reason:
        assert scenario["area"] not in MUST_RUN, f"skipped: {reason}"
        pytest.skip(str(reason))


@pytest.mark.parametrize("scenario", OWN, ids=lambda s: s["id"])
def test_own_scenario(scenario: dict[str, Any]) -> None:
    Run(scenario, harness_class())


def test_scenarios_have_names_of_their_own() -> None:
    names = [scenario["id"] for scenario in PUBLIC + OWN]
    assert len(names) == len(set(names)) >= 2 * 71

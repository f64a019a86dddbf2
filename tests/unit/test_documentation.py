"""The documentation says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvern.cli.document import document

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_configuration_page_is_made_from_the_options() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == document()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_policy_on_the_policies_page_is_the_example() -> None:
    """The page builds it from an empty file in under 40 lines; what stands there runs, and is what is shipped."""
    code = re.search(r"```python\n(from kvern.scheduler.policies.*?)```", (ROOT / "docs/policies.md").read_text(), re.S)
    assert code is not None and code[1].count("\n") < 40
    names: dict[str, object] = {}
    exec(code[1], names)
    shipped: dict[str, object] = {}
    exec((ROOT / "examples/two_level_feedback.py").read_text(), shipped)
    for scope in (names, shipped):
        policy = scope["TwoLevelFeedback"]
        assert isinstance(policy, type) and policy.name == "two-level-feedback"  # type: ignore[attr-defined]


def test_the_policy_of_the_page_does_what_it_says() -> None:
    from kvern.testing import SchedulerHarness

    h = SchedulerHarness(
        max_num_seqs=1, policy="examples.two_level_feedback:TwoLevelFeedback", policy_options={"quantum": 4}
    )
    long = h.add(prompt=10, max_tokens=20)
    for _ in range(6):
        h.step()
    short = h.add(prompt=10, max_tokens=2)
    out = h.schedule()
    assert out.preempted_req_ids == [long] and list(out.num_scheduled_tokens) == [short]
    h.update(out)
    assert len(h.run()[long]) == 20

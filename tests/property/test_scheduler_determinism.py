"""The same events give the same outputs, to the byte, in any process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from workloads import Play, random_workload

from kvern.step import StepOutputs, to_jsonable

SEEDS = range(1000, 1010)


class RecordedPlay(Play):
    """Keeps every plan and everything delivered, as the lines of a trace."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lines: list[str] = []
        take_in = self.h.update

        def update(*args: object, **kwargs: object) -> StepOutputs:
            outputs = take_in(*args, **kwargs)  # type: ignore[arg-type]
            ended = [(f.request.id, f.status.name, f.stop_reason, f.error) for f in outputs.finished]
            self.lines.append(json.dumps([outputs.tokens(), ended]))
            return outputs

        self.h.update = update  # type: ignore[method-assign]

    def schedule(self) -> None:
        super().schedule()
        reasons = {reason.name: n for reason, n in self.h.scheduler.waiting_by_reason().items()}
        self.lines.append(json.dumps([to_jsonable(self.flight[-1][0]), reasons]))


def record(seed: int) -> list[str]:
    rng = random.Random(seed)
    play = RecordedPlay(random_workload(rng), rng)
    play.run()
    return play.lines


def digest() -> str:
    return sha256("\n".join(line for seed in SEEDS for line in record(seed)).encode()).hexdigest()


def test_two_runs_are_equal_to_the_byte() -> None:
    for seed in SEEDS:
        assert record(seed) == record(seed)


def test_record_is_whole() -> None:
    """What is compared says everything needed to replay a step: SchedulerOutput has no part that JSON cannot hold."""
    lines = record(SEEDS[0])
    plans = [plan for line in lines if "step_id" in (plan := json.loads(line)[0])]
    assert [plan["step_id"] for plan in plans] == list(range(len(plans))) and len(plans) > 3
    assert {"rows", "epochs", "num_computed", "new_requests", "new_blocks", "blocks_to_copy"} <= set(plans[0])
    assert sum(plan["total_num_scheduled_tokens"] for plan in plans) > 0


@pytest.mark.parametrize("hash_seed", ["0", "4242"])
def test_equal_in_processes_with_another_order_of_hashes(hash_seed: str) -> None:
    here = Path(__file__).parent
    env = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    code = "from test_scheduler_determinism import digest; print(digest())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest()

"""Bits that flip at random places and times, and many verified micro-batches without any: ``make soak``, outside CI.

The variables FLIPS (how many), FLIPS_SEED (the first one's number), FLIPS_LOG (a file for the results) and QUIET_STEPS
(of each training without a flip) change what is run.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from changes import Changes, undisturbed_hash
from harness import SLOWNESS, Job

from elastic_launch.batch import slice_of
from elastic_launch.faults import FLIPS, FaultPlan
from elastic_launch.training.verification import assigned, due, share_of

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

STEPS, MICROS, SEED = 80, 4, 1
"""As ``changes.py`` trains: its seed, and the micro-batches of its global batch."""

FIRST = int(os.environ.get("FLIPS_SEED", "0"))
NUMBERS = range(FIRST, FIRST + int(os.environ.get("FLIPS", "200")))


@dataclass
class Drawn:
    """A flip of a rank in the step after ``step``, in a run of so many ranks that verifies a share of its steps."""

    number: int

    def __post_init__(self) -> None:
        chance, number = random.Random(self.number), self.number
        self.world, number = 2 + number % 3, number // 3
        self.of, number = sorted(FLIPS)[number % len(FLIPS)], number // len(FLIPS)
        self.every = number % 2 == 1 and self.of in ("gradient", "sums")  # a second flip would undo that of a state
        self.rank, self.step = chance.randrange(self.world), chance.randrange(2, STEPS - 10)
        self.share, self.live = chance.choice(["10%", "30%", "100%"]), chance.random() < 0.7

    @property
    def found_in(self) -> int | None:
        """The first step, from 0, that verifies what the flip has changed; None: there is none."""
        steps = range(self.step + (self.of == "sums"), STEPS)  # which are what it updates with
        verified = [step for step in steps if due(SEED, step, share_of(self.share, ""))]
        if self.of == "gradient" and not self.every:  # that of its first micro-batch in that step alone
            slices = [range(*slice_of(MICROS, self.world, rank)) for rank in range(self.world)]
            plan = assigned(SEED, self.step, slices, [0] * self.world, machines=False)
            verified = verified if plan.micros[self.rank] == slices[self.rank][0] else []
            return self.step if self.step in verified else None
        return verified[0] if verified else None

    @property
    def named(self) -> list[int]:
        """The ranks that are named: of two ranks, the one that does not repeat its own result, if there is one."""
        return [self.rank] if self.world > 2 or (self.of == "gradient" and not self.every) else []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed_hash(tmp_path_factory.mktemp("undisturbed"), STEPS)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_flip_is_found_and_undone(
    job: Job, undisturbed: str, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flip that changes no verified micro-batch may be found by the comparison of replicas, or not at all."""
    drawn = Drawn(number)
    changes = Changes(job, "--verify", drawn.share, "--steps", str(STEPS), live=drawn.live, step_time=0)
    plan = FaultPlan.fail_at(drawn.rank, drawn.step, do="flip", of=drawn.of, every=drawn.every)
    agent = changes.alone("--nproc", str(drawn.world), plan=plan)
    result = changes.finish(agent)
    found, expected = job.events("corruption_found"), drawn.found_in
    compared = "ReplicasDifferError" in agent.output
    right = result["hash"] == undisturbed
    how = "verified" if found else "compared" if compared else "missed"
    line = {**vars(drawn), "expected": expected, "how": how, "right": right, "again": len(changes.steps()) - STEPS}
    with capsys.disabled():
        print(json.dumps(line), flush=True)
    if log := os.environ.get("FLIPS_LOG"):
        with Path(log).open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    if how == "verified":
        (event,) = found
        assert expected is not None, agent.output
        assert (event["step"], event["ranks"]) == (expected + 1, drawn.named), agent.output
    elif how == "compared":
        assert drawn.of != "gradient", agent.output
    else:
        assert expected is None, agent.output
    assert right or how == "missed", agent.output


@pytest.mark.parametrize("form", [[], ["--autocast"], ["--compile", "--backend", "inductor"]])
@pytest.mark.parametrize("world", [2, 4])
def test_many_verified_micro_batches_raise_no_alarm(job: Job, form: list[str], world: int) -> None:
    """With dropout and batch norm. In each step another rank computes one micro-batch of each again."""
    steps = int(os.environ.get("QUIET_STEPS", "10000"))
    changes = Changes(job, "--verify", "100%", "--steps", str(steps), *form, live=True, step_time=0)
    agent = changes.alone("--nproc", str(world))
    changes.hurry()
    assert agent.wait(steps / SLOWNESS) == 0, agent.output[-3000:]
    result = json.loads((job.work / "result.json").read_text())
    assert (result["agreed"], result["worlds"]) == (steps, [world])
    assert not job.events("corruption_found")
    assert not job.events("restart_charged")

"""An average that starts late, and is swapped in for evaluations: through faults it is the undisturbed run's."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Job, run_script

from elastic_launch.faults import FaultPlan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "averages" / "train.py")
LATE = str(SCRIPTS / "late.py")
START = 40
SAME = ("steps", "accuracy", "weights_sha256", "average_sha256")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = tmp_path_factory.mktemp("undisturbed") / "result.json"
    run_script(EXAMPLE, "--result", str(result))
    return dict(json.loads(result.read_text()))


def command(job: Job, *options: str, step_time: float = 0.0) -> list[str]:
    return [EXAMPLE, "--result", str(job.work / "result.json"), "--step-time", str(step_time), *options]


def check(job: Job, undisturbed: dict[str, Any]) -> dict[str, Any]:
    result = dict(json.loads((job.work / "result.json").read_text()))
    assert {key: result[key] for key in SAME} == {key: undisturbed[key] for key in SAME}
    return result


@pytest.mark.parametrize("flags", [(), ("--no-live",)], ids=["live", "restarted"])
def test_workers_are_killed_before_and_after_its_start(
    job: Job, undisturbed: dict[str, Any], flags: tuple[str, ...]
) -> None:
    plan = FaultPlan.fail_at(1, 20)
    for number, (rank, step) in enumerate([(0, START - 1), (1, START), (0, START + 1), (1, 75)], 2):
        plan += FaultPlan.fail_at(rank, step, round=number)
    budget = ("--max-restarts", "9")
    agent = job.launch("--standalone", "--nproc", "2", *budget, *flags, command=command(job), env=plan.environment())
    assert agent.wait(200) == 0, agent.output
    assert agent.output.count("kills itself after step") == 5
    check(job, undisturbed)
    assert bool(job.events("worker_kept")) is not bool(flags)


def test_a_node_joins_after_its_start(job: Job, undisturbed: dict[str, Any]) -> None:
    run = command(job, step_time=0.2)
    a = job.node("a", "--rdzv-conf", "is_host=true", command=run)
    a.says(f"step {START + 5} loss", 100)
    b = job.node("b", "--rdzv-conf", "is_host=false", command=run)
    assert (a.wait(200), b.wait(100)) == (0, 0), a.output + b.output
    result = check(job, undisturbed)
    assert result["worlds"] == [1, 2]
    assert job.events("worker_kept")


@pytest.mark.parametrize("step", [START - 5, START + 5])
def test_it_is_stopped_and_resumed_at_another_world_size(job: Job, undisturbed: dict[str, Any], step: int) -> None:
    run = command(job, "--checkpoint", str(job.directory / "checkpoints"), "--every", "1000", step_time=0.1)
    first = job.launch("--standalone", "--nproc", "2", command=run, name="first")
    first.says(f"step {step} loss", 100)
    first.signal(signal.SIGTERM)
    assert first.wait(100) == 143, first.output
    second = job.launch("--standalone", "--nproc", "3", command=run, name="second")
    assert second.wait(200) == 0, second.output
    result = check(job, undisturbed)
    assert result["resumed_step"] >= step
    assert result["worlds"] == [2, 3]


@pytest.mark.parametrize("mode", ["die", "sharded"])
def test_a_kill_while_the_average_is_swapped_in_and_shards(job: Job, mode: str) -> None:
    """The sharded one is made by another number of ranks, which start at a snapshot with the average."""
    alone = job.directory / "alone"
    alone.mkdir()
    run_script(LATE, str(alone), "die")
    plan = FaultPlan.fail_at(0, 8) if mode == "sharded" else FaultPlan()
    flags = ("--nproc", "3" if mode == "sharded" else "2")
    agent = job.launch("--standalone", *flags, command=[LATE, str(job.work), mode], env=plan.environment())
    assert agent.wait(150) == 0, agent.output
    assert "signal 9 (SIGKILL)" in agent.output
    model, average, swapped = json.loads((job.work / "result.json").read_text())
    assert [model, average, swapped] == json.loads((alone / "result.json").read_text())
    assert swapped == average


@pytest.mark.parametrize(
    ("mode", "says"), [("one-rank", "but not on all ranks"), ("equal", "has not registered 'average'")]
)
def test_what_not_all_ranks_register_is_one_clear_error(job: Job, mode: str, says: str) -> None:
    agent = job.launch("--standalone", "--nproc", "2", command=[LATE, str(job.work), mode])
    assert agent.wait(150) != 0, agent.output
    assert says in agent.output
    assert "Call run.register() on all ranks in the same step" in agent.output

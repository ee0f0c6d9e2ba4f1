"""A step of two passes and two optimizers, of which a fault takes a part: it is completed, or done again as a whole."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Agent, Job, run_script, wait_for

SCRIPT = str(SCRIPTS / "passes.py")
EXAMPLES = Path(__file__).parents[2] / "examples"


def undisturbed(directory: Path, *options: str) -> dict[str, Any]:
    directory.mkdir(exist_ok=True)
    run_script(SCRIPT, str(directory), *options)
    return dict(json.loads((directory / "result.json").read_text()))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return undisturbed(tmp_path_factory.mktemp("alone"))


def finished(job: Job, *agents: Agent) -> dict[str, Any]:
    for agent in agents:
        assert agent.wait(150) == 0, agent.output
    return dict(json.loads((job.directory / "result.json").read_text()))


def kept(job: Job) -> list[tuple[int, int]]:
    """The (round, rank) of each process that went on in another round."""
    return sorted((event["round"], event["rank"]) for event in job.events("worker_kept"))


def test_the_others_go_on_with_the_second_pass(job: Job, alone: dict[str, Any]) -> None:
    """A process that is new leaves the first pass out, and the state that it gets includes what followed that pass."""
    ends = ["--end", "1:1:5:between:kill", "--end", "2:0:10:second:kill"]
    agent = job.launch("--standalone", "--nproc", "2", command=[SCRIPT, str(job.directory), *ends])
    result = finished(job, agent)
    assert result["hashes"] == alone["hashes"]
    assert (result["updates"], result["losses"]) == (alone["updates"], alone["losses"])
    assert (result["worlds"], result["restarts"]) == ([2, 2, 2], 2)
    assert len(kept(job)) == 2
    assert result["resumed"] == 9, "no step was lost"


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["second", *(pytest.param(x, marks=pytest.mark.soak) for x in ("first", "between", "after"))]
)
@pytest.mark.parametrize("how", [pytest.param("kill", marks=pytest.mark.soak), "raise"])
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_worker_may_end_at_any_place_of_a_step(
    job: Job, alone: dict[str, Any], place: str, how: str, workers: int
) -> None:
    ends = ["--end", f"1:0:5:{place}:{how}", "--end", f"2:1:10:{place}:{how}", "--end", f"3:0:15:{place}:{how}"]
    agent = job.launch("--standalone", "--nproc", str(workers), command=[SCRIPT, str(job.directory), *ends])
    result = finished(job, agent)
    assert result["hashes"] == alone["hashes"]
    assert (result["updates"], result["losses"]) == (alone["updates"], alone["losses"])
    assert result["restarts"] == 3
    assert len(kept(job)) == 3 * (workers - 1)
    assert result["resumed"] == (15 if place == "after" else 14)


@pytest.mark.slow
def test_a_new_process_leaves_out_all_passes_that_are_done(job: Job) -> None:
    alone = undisturbed(job.directory / "alone", "--thrice")
    ends = ["--end", "1:1:5:third:kill", "--end", "2:0:10:second:kill", "--end", "3:0:15:third:kill"]
    command = [SCRIPT, str(job.directory), "--thrice", *ends]
    result = finished(job, job.launch("--standalone", "--nproc", "2", command=command))
    assert (result["hashes"], result["updates"]) == (alone["hashes"], alone["updates"])
    assert (len(kept(job)), result["resumed"]) == (3, 14)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--freeze", "--toggle"])
def test_networks_may_be_frozen_and_unfrozen_in_steps_and_passes(job: Job, how: str) -> None:
    """The new process has not come to the code that does it."""
    alone = undisturbed(job.directory / "alone", how)
    ends = ["--end", "1:1:5:second:kill", "--end", "2:0:10:second:kill"]
    command = [SCRIPT, str(job.directory), how, *ends]
    result = finished(job, job.launch("--standalone", "--nproc", "2", command=command))
    assert result["hashes"] == alone["hashes"]
    assert (result["restarts"], len(kept(job)), result["resumed"]) == (2, 2, 9)


@pytest.mark.slow
def test_a_rank_whose_first_pass_failed_goes_on_with_the_others_second_one(job: Job, alone: dict[str, Any]) -> None:
    command = [SCRIPT, str(job.directory), "--behind", "1:1:5"]
    result = finished(job, job.launch("--standalone", "--nproc", "3", command=command))
    assert result["hashes"] == alone["hashes"]
    assert (result["updates"], result["losses"]) == (alone["updates"], alone["losses"])
    assert kept(job) == [(2, 0), (2, 1), (2, 2)]
    assert result["resumed"] == 4


@pytest.mark.slow
def test_the_world_may_shrink_between_two_passes(job: Job, alone: dict[str, Any]) -> None:
    """The second pass of a step is then divided among other ranks than the first."""
    command = [SCRIPT, str(job.directory), "--end", "1:1:5:between:lose"]
    a = job.node("a", "--nnodes", "1:2", "--rdzv-conf", "is_host=true", "--node-rank", "0", command=command)
    b = job.node("b", "--nnodes", "1:2", "--rdzv-conf", "is_host=false", "--node-rank", "1", command=command)
    result = finished(job, a)
    b.wait(30)
    assert result["hashes"] == alone["hashes"]
    assert result["worlds"] == [2, 1]
    assert (kept(job), result["resumed"]) == ([(2, 0)], 4)


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [[], ["--freeze"]])
def test_in_default_mode_too_the_step_is_completed(job: Job, freeze: list[str]) -> None:
    """With other trained parameters the losses of a pass go with the gradients of those before."""
    alone = undisturbed(job.directory / "alone", "--default", *freeze)
    ends = ["--end", "1:1:5:between:kill", "--end", "2:0:10:second:kill"]
    command = [SCRIPT, str(job.directory), "--default", *freeze, *ends]
    result = finished(job, job.launch("--standalone", "--nproc", "2", command=command))
    assert result["size"] == pytest.approx(alone["size"], rel=1e-4)
    assert result["losses"] == pytest.approx(alone["losses"], rel=1e-3)
    assert (result["updates"], len(kept(job)), result["resumed"]) == (20, 2, 9)


@pytest.mark.slow
def test_a_step_that_breaks_twice_is_done_again_as_a_whole(job: Job, alone: dict[str, Any]) -> None:
    """All processes end, and the state is that of the last snapshot: none of the step's updates is in it."""
    ends = ["--end", "1:1:5:between:kill", "--end", "2:1:5:second:kill"]
    agent = job.launch("--standalone", "--nproc", "2", command=[SCRIPT, str(job.directory), *ends])
    result = finished(job, agent)
    assert (result["hashes"], result["updates"]) == (alone["hashes"], alone["updates"])
    assert (result["restarts"], kept(job)) == (2, [(2, 0)])


@pytest.mark.slow
def test_a_script_that_carries_something_from_pass_to_pass_does_the_step_again(job: Job) -> None:
    """The process that is new lacks it, and fails; then all do the whole step."""
    alone = undisturbed(job.directory / "alone", "--carry")
    command = [SCRIPT, str(job.directory), "--carry", "--end", "1:1:5:second:kill"]
    result = finished(job, job.launch("--standalone", "--nproc", "2", command=command))
    assert result["hashes"] == alone["hashes"]
    assert result["restarts"] == 2


@pytest.mark.slow
def test_a_script_that_exchanges_between_passes_ends_with_its_round(job: Job, alone: dict[str, Any]) -> None:
    command = [SCRIPT, str(job.directory), "--exchange", "--end", "1:1:5:second:kill"]
    result = finished(job, job.launch("--standalone", "--nproc", "2", command=command))
    assert (result["hashes"], kept(job)) == (alone["hashes"], [])
    assert result["restarts"] == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("example", "steps"), [pytest.param("gan", 40, marks=pytest.mark.soak), ("actor_critic", 30)])
def test_the_examples_have_the_undisturbed_weights_after_three_kills(
    job: Job, tmp_path: Path, example: str, steps: int
) -> None:
    script = str(EXAMPLES / example / "train.py")

    def result(name: str) -> dict[str, Any]:
        return dict(json.loads((tmp_path / name).read_text()))

    run_script(script, "--steps", str(steps), "--result", str(tmp_path / "alone"))
    third = steps // 4
    faults = [{"rank": n % 2, "round": n, "step": n * third} for n in (1, 2, 3)]
    command = [script, "--steps", str(steps), "--result", str(tmp_path / "killed")]
    flags = ["--standalone", "--nproc", "2"]
    agent = job.launch(*flags, command=command, env={"ELASTIC_LAUNCH_FAULTS": json.dumps(faults)})
    assert agent.wait(150) == 0, agent.output
    one, other = result("alone"), result("killed")
    assert (other.pop("restarts"), other.pop("worlds")) == (3, [2, 2, 2, 2])
    assert other.pop("resumed_step") > 0
    assert other == {name: value for name, value in one.items() if name in other}


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_examples_learn(tmp_path: Path) -> None:
    told = {}
    for example in ("gan", "actor_critic"):
        command = [sys.executable, str(EXAMPLES / example / "train.py"), "--result", str(tmp_path / example)]
        subprocess.run(command, check=True, capture_output=True, timeout=250)
        told[example] = json.loads((tmp_path / example).read_text())
    assert 0.8 < told["gan"]["radius"] < 1.2
    assert told["gan"]["spread"] < 0.3
    assert told["actor_critic"]["worth"] > -1.5


@pytest.mark.slow
def test_a_process_that_must_end_between_two_passes_saves_no_half_of_a_step(job: Job, alone: dict[str, Any]) -> None:
    """The other node is lost, too few are left, and this one leaves: the next run begins at a whole step."""
    options = [str(job.directory), "--checkpoint", str(job.directory / "checkpoints")]
    command = [SCRIPT, *options, "--end", "1:1:5:between:lose"]
    a = job.node("a", "--nnodes", "2", "--rdzv-conf", "is_host=true", "--node-rank", "0", command=command)
    b = job.node("b", "--nnodes", "2", "--rdzv-conf", "is_host=false", "--node-rank", "1", command=command)
    b.wait(60)
    wait_for("a suspended worker", lambda: job.events("round_broken"), 30)
    a.says("parked")
    a.signal(signal.SIGTERM)
    assert a.wait(60) != 0, a.output
    assert not (job.directory / "result.json").exists()
    result = finished(job, job.launch("--standalone", name="later", command=[SCRIPT, *options]))
    assert (result["hashes"], result["updates"]) == (alone["hashes"], alone["updates"])

"""The trainer, the agreement to stop, and the examples on several ranks: real launches."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Job, wait_for

JOB = str(SCRIPTS / "trainer_job.py")
EXAMPLES = Path(__file__).parents[2] / "examples"


def _train(job: Job, nproc: int, *options: str, name: str = "run") -> dict[str, Any]:
    result = job.directory / f"{name}.json"
    agent = job.launch("--standalone", "--nproc", str(nproc), command=[JOB, str(result), *options], name=name)
    assert agent.wait(100) == 0, agent.output
    return dict(json.loads(result.read_text()))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    job = Job(tmp_path_factory.mktemp("alone"))
    try:
        return _train(job, 1)
    finally:
        job.close()


@pytest.mark.slow
def test_everything_that_is_reported_is_the_same_at_three_ranks(job: Job, alone: dict[str, Any]) -> None:
    three = _train(job, 3)
    assert three["hash"] == alone["hash"]
    assert three["losses"] == alone["losses"]
    assert three["evaluations"] == alone["evaluations"]
    assert [step for step, _ in three["evaluations"]] == [3, 6, 9]


@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["--default-mode"], marks=pytest.mark.slow),
        pytest.param(["--default-mode", "--micro", "auto"], marks=pytest.mark.soak),
    ],
)
def test_ranks_that_build_other_models_train_the_first_ones(job: Job, options: list[str]) -> None:
    """As DDP does: a script that sets no seed must not train a different model on each rank."""
    _train(job, 2, "--unseeded", *options)
    hashes = {(job.directory / f"run.{rank}").read_text() for rank in range(2)}
    assert len(hashes) == 1


@pytest.mark.slow
def test_the_default_mode_agrees_within_float_tolerance(job: Job, alone: dict[str, Any]) -> None:
    two = _train(job, 2, "--default-mode")
    for ours, theirs in zip(two["losses"], alone["losses"], strict=True):
        assert ours[1] == pytest.approx(theirs[1], rel=1e-4)
        assert ours[2] == pytest.approx(theirs[2])
    assert [x for row in two["weights"] for x in row] == pytest.approx(
        [x for row in alone["weights"] for x in row], abs=2e-4
    )


@pytest.mark.slow
def test_half_precision_is_exact_too(job: Job) -> None:
    assert _train(job, 2, "--precision", "fp16")["hash"] == _train(job, 3, "--precision", "fp16", name="b")["hash"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], pytest.param(["--default-mode"], marks=pytest.mark.soak)])
def test_one_rank_without_memory_makes_all_halve_their_micro_batches(job: Job, mode: list[str]) -> None:
    poor = _train(job, 2, "--micro", "auto", "--poor-rank", "1", *mode)
    assert poor["rounds"] == [[2, 12, 0, "first"]]
    assert poor["micro"] == 6
    assert [incident[:2] for incident in poor["incidents"]] == [["out of memory", 0]]
    undisturbed = _train(job, 2, "--micro", "6", *mode, name="undisturbed")
    if mode:
        for ours, theirs in zip(poor["losses"], undisturbed["losses"], strict=True):
            assert ours[1] == pytest.approx(theirs[1], rel=1e-4)
    else:
        assert poor["losses"] == undisturbed["losses"]
        assert poor["hash"] == undisturbed["hash"]


@pytest.mark.slow
def test_one_rank_asks_and_all_stop_after_the_same_step_with_their_state_saved(job: Job, alone: dict[str, Any]) -> None:
    checkpoint = str(job.directory / "checkpoint")
    stopped = _train(job, 3, "--stop-after", "4", "--every", "50", "--checkpoint", checkpoint, name="first")
    assert stopped["stopped"] is True
    # Asked for after step 4, posted at its boundary, read at the next one.
    assert stopped["step"] == 5
    assert stopped["checkpoints"] == [5]
    resumed = _train(job, 2, "--checkpoint", checkpoint, "--every", "50", name="second")
    assert resumed["rounds"] == [[2, 4, 5, "first"]]
    assert resumed["history"] == [3, 6, 9]
    assert resumed["worlds"] == [3, 2]
    assert resumed["hash"] == alone["hash"]


@pytest.mark.slow
def test_checkpoints_by_the_clock_are_taken_at_the_same_step_everywhere(job: Job, alone: dict[str, Any]) -> None:
    """Every 10 ms is every step: the first rank's clock decides, one boundary later."""
    checkpoint = job.directory / "checkpoint"
    seen = _train(job, 2, "--every", "0.01s", "--step-time", "0.5", "--checkpoint", str(checkpoint))
    assert seen["hash"] == alone["hash"]
    assert seen["checkpoints"][-1] == 9
    assert len(seen["checkpoints"]) >= 2


@pytest.mark.slow
def test_a_hand_written_loop_resumes_after_a_kill_and_at_another_size(job: Job) -> None:
    checkpoints, result = job.directory / "checkpoints", job.directory / "result.json"
    command = [str(EXAMPLES / "own_loop" / "train.py"), "--checkpoint", str(checkpoints), "--every", "5"]
    first = job.launch("--standalone", "--nproc", "2", command=[*command, "--epochs", "600"], name="first")
    wait_for("a checkpoint", lambda: list(checkpoints.glob("step-*")), 60)
    os.kill(job.events("worker_started")[1]["pid"], signal.SIGKILL)
    wait_for("a checkpoint of the second round", lambda: list(checkpoints.glob("step-*.r2.*")), 60)
    first.signal(signal.SIGTERM)
    assert first.wait() == 143
    options = ["--epochs", "600", "--stop-at", "0.1", "--result", str(result)]
    second = job.launch("--standalone", "--nproc", "3", command=[*command, *options], name="second")
    assert second.wait(100) == 0, second.output
    seen = json.loads(result.read_text())
    assert seen["worlds"] == [2, 2, 3]
    assert seen["resumed_step"] > 0
    assert seen["stopped"] is True
    assert seen["accuracy"] > 0.9


@pytest.mark.slow
def test_the_language_model_reaches_the_same_hash_after_a_kill(job: Job) -> None:
    script = [str(EXAMPLES / "gpt" / "train.py"), "--exact", "--until", "12ba", "--global-batch", "8"]
    script += ["--micro-batch", "2", "--sample", "8"]
    plain, disturbed = job.directory / "plain.json", job.directory / "disturbed.json"
    one = job.launch("--standalone", "--nproc", "1", command=[*script, "--result", str(plain)], name="one")
    assert one.wait(100) == 0, one.output
    checkpoints = job.directory / "checkpoints"
    options = ["--checkpoint", str(checkpoints), "--every", "1", "--result", str(disturbed)]
    gated = [str(SCRIPTS / "gated.py"), str(job.work)]
    job.tell("hold", "6")
    job.tell("go-2")
    two = job.launch("--standalone", "--nproc", "2", command=[*gated, *script, *options], name="two")
    wait_for("a checkpoint", lambda: list(checkpoints.glob("step-*")), 60)
    os.kill(job.events("worker_started")[-1]["pid"], signal.SIGKILL)
    assert two.wait(100) == 0, two.output
    seen = json.loads(disturbed.read_text())
    assert seen["weights_sha256"] == json.loads(plain.read_text())["weights_sha256"]
    assert seen["restarts"] == 1
    assert seen["resumed_step"] > 0

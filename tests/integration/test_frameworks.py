"""Scripts on other frameworks: a killed worker, and planned changes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SCRIPTS, Job, run_script, wait_for

import elastic_launch as el
from elastic_launch.faults import FaultPlan

FRAMEWORKS = Path(__file__).parents[2] / "examples" / "frameworks"
STEPS = 12
HOLD = 3
"""Steps after which the workers of each round wait until they are released."""

PRELOADED = {"transformers": "transformers.trainer", "lightning": "lightning.pytorch"}
"""What an agent imports for all workers of ``gated.py``, in which it cannot see the imports of the script."""

EXTENSIONS = FRAMEWORKS.parents[1] / "build" / "torch_extensions"
"""Where DeepSpeed keeps what it compiles on its first run, which takes a minute."""


def installed(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed: pip install '.[frameworks]'")


def each(*names: str, soak: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    often = [pytest.param(name, marks=installed(name)) for name in names]
    rarely = [pytest.param(name, marks=[installed(name), pytest.mark.soak]) for name in soak]
    return pytest.mark.parametrize("name", [*often, *rarely])


def command(job: Job, name: str, script: str, *, every: int) -> list[str]:
    """A script of a framework, whose optimizer steps are noted and can be held back."""
    (job.work / "hold").write_text(str(HOLD))
    options = ["--dir", str(job.directory / "checkpoints"), "--steps", str(STEPS), "--every", str(every)]
    return [str(SCRIPTS / "gated.py"), str(job.work), str(FRAMEWORKS / name / script), *options]


def noted(job: Job, number: int, rank: int = 0) -> list[dict[str, Any]]:
    """The optimizer steps of a rank in a round."""
    return [step for step in job.noted("optimizer.jsonl", number=number) if step["rank"] == rank]


def held(job: Job, number: int, world_size: int) -> None:
    """Wait until all workers of a round are held."""

    def probe() -> bool:
        return all(len(noted(job, number, rank)) == HOLD for rank in range(world_size))

    try:
        wait_for(f"round {number} of world size {world_size}, held", probe, 400)
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *(agent.output for agent in job.agents)])) from None


UNOPTIMIZED = """#!/bin/sh
for option; do
    shift
    case $option in
        -O*) ;;
        *) set -- "$@" "$option" ;;
    esac
done
exec c++ -O0 "$@"
"""


@pytest.fixture
def extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give DeepSpeed a separate directory, where no lock is left from a killed run, and a compiler that is quick.

    With the options that DeepSpeed gives, its extension takes minutes to compile.
    """
    for lock in EXTENSIONS.glob("**/lock"):
        lock.unlink()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(EXTENSIONS))
    EXTENSIONS.mkdir(parents=True, exist_ok=True)
    compiler = EXTENSIONS / "c++"
    compiler.write_text(UNOPTIMIZED)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("extensions")
@each("transformers", soak=("accelerate", "deepspeed", "lightning"))
@pytest.mark.executed
def test_a_script_on_a_framework_resumes_from_its_own_checkpoint_when_a_worker_is_killed(job: Job, name: str) -> None:
    script = FRAMEWORKS / name / "train.py"
    assert not re.search(r"^\s*(import|from)\s+elastic", script.read_text(), re.MULTILINE)
    flags = ("--standalone", "--nproc", "2", "--shutdown-timeout", "10", "--preload", PRELOADED.get(name, name))
    agent = job.launch(*flags, command=command(job, name, "train.py", every=2))
    held(job, 1, 2)
    job.tell("go-2")
    os.kill(noted(job, 1, rank=1)[-1]["pid"], signal.SIGKILL)
    job.tell("go-1")
    assert agent.wait(200) == 0, agent.output
    assert "signal 9 (SIGKILL)" in agent.output
    assert re.search(r"^resumed (at step 2|from .*checkpoint-2)$", agent.output, re.MULTILINE), agent.output
    assert f"done: steps {STEPS}" in agent.output
    assert len(noted(job, 2)) == STEPS - 2, "what was done since the checkpoint is done again, and no more"


@pytest.mark.slow
@pytest.mark.timeout(900)
@each("lightning", soak=("accelerate", "transformers"))
def test_with_one_more_line_a_node_that_joins_and_one_that_leaves_cost_no_step(job: Job, name: str) -> None:
    line = command(job, name, "drain.py", every=1000)  # by itself it saves nothing
    flags = ["--shutdown-timeout", "90"]
    host = job.node("a", *flags, command=line)
    held(job, 1, 1)
    guest = job.node("b", *flags, command=line)
    host.says("round 1 drains", 60)
    job.tell("go-1")
    held(job, 2, 2)
    guest.signal(signal.SIGTERM)
    guest.says("SIGTERM")
    job.tell("slow")  # the worker hears of it a moment later
    job.tell("go-2")
    job.tell("go-3")
    assert guest.wait(100) == 143, guest.output
    assert host.wait(100) == 0, host.output

    assert job.events("round_broken") == []
    drained = [(event["round"], event["kind"], event["step"]) for event in job.events("round_drained")]
    assert [event[:2] for event in drained] == [(1, "membership"), (2, "preemption")]
    assert [len(noted(job, number)) for number in (1, 2, 3)] == [
        drained[0][2],
        drained[1][2] - drained[0][2],
        STEPS - drained[1][2],
    ]
    assert f"done: steps {STEPS}" in host.output


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("extensions")
@each("lightning", soak=("deepspeed",))
def test_sigterm_at_a_worker_alone_drains_the_round(job: Job, name: str) -> None:
    """Lightning's own handler would join a collective out of turn; DeepSpeed's loop has no callbacks."""
    agent = job.launch("--standalone", "--nproc", "2", command=command(job, name, "drain.py", every=1000))
    held(job, 1, 2)
    os.kill(noted(job, 1, rank=1)[-1]["pid"], signal.SIGTERM)
    job.tell("go-1")
    job.tell("go-2")
    assert agent.wait(200) == 0, agent.output
    (drained,) = job.events("round_drained")
    assert len(noted(job, 1)) == drained["step"]
    assert len(noted(job, 2)) == STEPS - drained["step"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@each("accelerate")
@pytest.mark.executed
def test_elasticctl_makes_a_framework_save(job: Job, name: str) -> None:
    job.tell("slow")
    job.tell("go-1")
    options = ["--steps", "400", "--every", "1000"]
    agent = job.launch("--standalone", command=[*command(job, name, "drain.py", every=1000), *options])
    wait_for("steps", lambda: len(noted(job, 1)) > 1, 100)
    asking = [sys.executable, "-m", "elastic_launch.cli.elasticctl", "checkpoint", "--log-dir", str(job.logs)]
    done = subprocess.run(asking, capture_output=True, text=True, timeout=180)
    (job.work / "slow").unlink()
    assert agent.wait(100) == 0, agent.output
    (saved,) = (job.directory / "checkpoints").glob("step-*")
    assert done.stdout.strip() == f"checkpoint of step {saved.name.removeprefix('step-')} written"
    assert job.events("round_drained") == []


DEEPSPEED = str(FRAMEWORKS.parent / "deepspeed" / "train.py")


def deepspeed(job: Job, *, stage: int, epochs: int, precision: str = "fp32") -> list[str]:
    """The example with ``Trainer(deepspeed_config=...)``."""
    options = ["--stage", str(stage), "--epochs", str(epochs), "--precision", precision]
    return [str(SCRIPTS / "plain_deepspeed.py"), DEEPSPEED, *options, "--dir", str(job.work / "saved")]


def result(output: str) -> dict[str, Any]:
    (line,) = re.findall(r"^{.*}$", output, re.MULTILINE)
    return dict(json.loads(line))


def trained(job: Job, *flags: str, env: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
    """The result of a run of the example."""
    name = f"to-{options['epochs']}"
    agent = job.launch("--standalone", *flags, name=name, command=deepspeed(job, **options), env=env)
    assert agent.wait(200) == 0, agent.output
    return result(agent.output)


@pytest.mark.slow
@pytest.mark.timeout(900)
@installed("deepspeed")
def test_a_trainer_with_zero_is_killed_and_resumed_in_another_world_and_stage(job: Job) -> None:
    """Gradients are added in another order in each world, so the losses are equal but for rounding."""
    kill = FaultPlan.fail_at(1, 12).environment()
    first = trained(job, "--nproc", "2", stage=1, epochs=1, env=kill)
    assert first["worlds"] == [2, 2]
    assert 0 < first["resumed_step"] <= 12, "it resumed from a snapshot in memory, in which no rank had all"
    second = trained(job, "--nproc", "3", stage=2, epochs=2)
    assert (second["worlds"], second["resumed_step"]) == ([2, 2, 3], first["steps"])
    (job.work / "saved").rename(job.work / "resumed")
    undisturbed = result(run_script(*deepspeed(job, stage=0, epochs=2), timeout=200, env={"OMP_NUM_THREADS": "1"}))
    assert undisturbed["worlds"] == [1]
    assert second["steps"] == undisturbed["steps"]
    assert second["loss"] == pytest.approx(undisturbed["loss"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(900)
@installed("deepspeed")
def test_a_killed_training_in_bf16_goes_on_with_the_float32_values_of_its_weights(job: Job) -> None:
    found = trained(
        job, "--nproc", "2", stage=2, epochs=1, precision="bf16", env=FaultPlan.fail_at(1, 12).environment()
    )
    assert (found["precision"], found["worlds"]) == ("bf16", [2, 2])
    assert 0 < found["resumed_step"] <= 12
    state = el.load_checkpoint(job.work / "saved")
    for name, weight in state["model"].items():
        own = state["optimizer"]["state"][name]["parameter"]
        assert (weight.dtype, own.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(own.to(torch.bfloat16), weight), "what the optimizer has is what was trained"
        assert not torch.equal(own, weight.float())


NOTHING_LAST = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import elastic_launch as el

callbacks = [el.integrations.lightning.DrainCallback()]
Trainer(max_steps=1, accelerator="cpu", logger=False, callbacks=callbacks).fit(BoringModel())
"""


@pytest.mark.slow
@installed("lightning")
def test_lightning_fails_before_the_first_step_if_nothing_would_be_resumed(tmp_path: Path) -> None:
    script = tmp_path / "nothing_last.py"
    script.write_text(NOTHING_LAST)
    printed = run_script(str(script), code=1)
    assert "UsageError: DrainCallback() finds no ModelCheckpoint that saves a last checkpoint" in printed


@pytest.mark.slow
@installed("transformers")
def test_a_drained_trainer_saves_although_its_state_is_not_the_best(tmp_path: Path) -> None:
    run_script(str(SCRIPTS / "keeping_best.py"), str(tmp_path), "3", code=128 + signal.SIGTERM)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-3"}


@pytest.mark.slow
@installed("transformers")
def test_a_trainer_that_may_keep_one_checkpoint_keeps_that_of_its_planned_stop_besides_the_best(tmp_path: Path) -> None:
    printed = run_script(str(SCRIPTS / "keeping_best.py"), str(tmp_path), "3", "1", code=128 + signal.SIGTERM)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-3"}
    assert "Loading best model" not in printed


@pytest.mark.slow
@installed("lightning")
@pytest.mark.parametrize(("every", "accumulate", "steps"), [(4, 1, (3, 4, 8, 12, 16, 24)), (3, 3, (1, 3, 5))])
def test_lightning_stops_after_what_is_due_at_a_step_and_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, every: int, accumulate: int, steps: tuple[int, ...]
) -> None:
    """With the batches, validations, ends of epochs, and a ReduceLROnPlateau; the last step is not stopped at."""
    printed = run_script(
        str(SCRIPTS / "validating.py"), str(tmp_path), *map(str, (every, accumulate, 0, *steps)), timeout=200
    )
    undisturbed, *others = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    total = undisturbed["ends"][0]["steps"]
    for step, other in zip(steps, others, strict=True):
        assert other["done"] == undisturbed["done"], step
        assert other["ends"] == ([143] if step < total else []) + undisturbed["ends"], step

"""What a process holds lives through rounds: compiled graphs, the loader's processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from changes import Changes
from harness import Job, run_script


def survived(job: Job, *options: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Kill rank 1 of two; return the steps that rank 0 noted in its first round and in the next, and the hash."""
    changes = Changes(job, *options, live=True)
    agent = changes.alone("--nproc", "2")
    changes.trains(2, steps=4)
    (killed,) = [e["pid"] for e in job.events("worker_started") if e["rank"] == 1]
    os.kill(killed, signal.SIGKILL)
    changes.trains(2, after=1, steps=4)
    result = changes.finish(agent)
    assert changes.done_again() == 0
    assert [event["rank"] for event in job.events("worker_kept")] == [0]
    return changes.steps(1), changes.steps(2), result["hash"]


@pytest.mark.slow  # tests/training/live/test_rehearsal.py has a compiled model that enters a round with its graphs
def test_a_compiled_model_keeps_its_graphs(job: Job, undisturbed: str) -> None:
    before, after, digest = survived(job, "--compile")
    assert before[-1]["graphs"]["unique_graphs"] >= 1
    assert {str(step["graphs"]) for step in after} == {str(before[-1]["graphs"])}
    assert digest == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True], ids=["started for each epoch", "persistent"])
def test_the_loaders_processes_are_kept_if_they_are_persistent_and_none_is_left(
    job: Job, undisturbed: str, persistent: bool
) -> None:
    options = ["--loader-workers", "2", *(["--persistent"] if persistent else [])]
    before, after, digest = survived(job, *options)
    counts = {len(step["loaders"]) for step in [*before, *after]}
    assert max(counts) == 2
    if persistent:
        assert {str(step["loaders"]) for step in after} == {str(before[0]["loaders"])}
    else:
        assert not {*before[-1]["loaders"]} & {*after[0]["loaders"]}
    assert digest == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", ["scheduler", pytest.param("average", marks=pytest.mark.soak)])
def test_what_is_not_saved_ends_processes_with_their_round(job: Job, forgotten: str) -> None:
    """A process that joins would begin with another one than those that are kept."""
    changes = Changes(job, "--forget", forgotten, live=True)
    a = changes.node("a")
    changes.trains(1, steps=3)
    b = changes.node("b")
    number = changes.trains(2, steps=10)
    b.signal(signal.SIGTERM)
    changes.trains(1, after=number, steps=3)
    assert b.wait() == 143
    result = changes.finish(a)
    assert changes.kinds()[:2] == [("drained", 1, "membership"), ("drained", number, "preemption")]
    assert not job.events("worker_kept")
    assert result["restarts"] == 0
    assert changes.done_again() == 0


SCALED = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import elastic_launch as el

there, enabled, size = Path(sys.argv[1]), sys.argv[2] == "enabled", int(sys.argv[3])
with el.session() as run:
    torch.manual_seed(0)
    model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=64.0, enabled=enabled)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    loader = el.ElasticLoader(data, el.GlobalBatch(size, 4))
    for step in run.steps(loader, model, optimizer, until="3ba", scaler=scaler, exact=True):
        if run.rank == 0 and size == 4:  # it has no micro-batch
            there.touch()
        for x in step:
            step.backward(model(x).square().mean())
            if run.rank == 0:
                there.touch()
            elif run.world.round == 1:
                while not there.exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
        step.update(clip_norm=1.0)
    print("done", el.weights_sha256(model), flush=True)
"""


@pytest.mark.parametrize(("enabled", "size"), [("disabled", 16), ("enabled", 16), ("enabled", 4)])
def test_a_scaler_is_part_of_a_process_that_is_kept_in_its_first_step(
    job: Job, tmp_path: Path, enabled: str, size: int
) -> None:
    script = tmp_path / "scaled.py"
    script.write_text(SCALED)
    alone = run_script(str(script), str(tmp_path / "alone"), enabled, str(size)).splitlines()[-1]
    command = [str(script), str(tmp_path / "there"), enabled, str(size)]
    agent = job.launch("--standalone", "--nproc", "2", command=command)
    assert agent.wait(100) == 0, agent.output
    assert agent.output.count(alone) == 2
    assert [event["rank"] for event in job.events("worker_kept")] == [0]
    assert len(job.events("restart_charged")) == 1

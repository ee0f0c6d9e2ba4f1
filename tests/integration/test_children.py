"""What a worker's script starts: it handles signals as under torchrun, and may outlive the worker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, SLOWNESS, Agent, Job, wait_for

from elastic_agents.workers.sessions import command_of

pytestmark = [pytest.mark.executed, pytest.mark.timeout(300)]

SCRIPT = str(SCRIPTS / "children.py")

IGNORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
"""What a shell without job control has its background jobs ignore, and nohup."""

IGNORING = "import os, signal, sys\nfor x in %s: signal.signal(x, signal.SIG_IGN)\nos.execvp(sys.argv[1], sys.argv[1:])"
PREFIX = [sys.executable, "-c", IGNORING % (tuple(map(int, IGNORED)),)]


@pytest.fixture(scope="module", params=[pytest.param("", marks=pytest.mark.soak), "library"])
def under_torchrun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The script's flags, and what its processes have under torchrun, itself started by such a shell."""
    flags, file = [request.param] if request.param else [], tmp_path_factory.mktemp("torchrun") / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    with subprocess.Popen(
        [*PREFIX, *command, SCRIPT, str(file), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as torchrun:
        try:
            assert torchrun.wait(60 * SLOWNESS) == 0
        finally:
            torchrun.kill()
    return flags, json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "no-warm"])
def test_what_a_worker_starts_handles_signals_as_under_torchrun(
    job: Job, warm: bool, under_torchrun: tuple[list[str], dict[str, Any]]
) -> None:
    flags, wanted = under_torchrun
    file = job.work / "found.json"
    start = ["--standalone", "--nproc", "1", "--max-restarts", "0", *([] if warm else ["--no-warm"])]
    agent = job.launch(*start, command=[SCRIPT, str(file), *flags], prefix=PREFIX)
    assert agent.wait(60) == 0, agent.output
    assert json.loads(file.read_text()) == wanted


POOL = """
import multiprocessing
import torch
from torch.utils.data import TensorDataset
import elastic_launch as el

with el.session() as run:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = el.ElasticLoader(TensorDataset(torch.ones(8, 2)), el.GlobalBatch(4, micro=2), seed=0)
    for step in run.steps(data, model, optimizer, until="3ba"):
        for (inputs,) in step:
            step.backward(model(inputs).sum())
        step.update()
        with multiprocessing.get_context("fork").Pool(4) as pool:
            pool.map(abs, range(4))
"""


def test_a_pool_in_the_loop_ends(job: Job) -> None:
    script: Path = job.work / "pool.py"
    script.write_text(POOL)
    agent = job.launch("--standalone", "--nproc", "1", "--max-restarts", "0", command=[str(script)])
    assert agent.wait(60) == 0, agent.output


UPLOAD = """
import pathlib, subprocess, sys
command = "while [ ! -e go ]; do sleep 0.05; done; touch copied"
child = subprocess.Popen(["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
pathlib.Path("upload.pid").write_text(str(child.pid))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def upload(job: Job) -> Iterator[Callable[..., Agent]]:
    """Starts a job whose worker leaves a process behind, which makes the file ``copied`` once there is ``go``."""
    script: Path = job.work / "upload.py"
    script.write_text(UPLOAD)

    def start(*flags: str, ends: int = 0) -> Agent:
        command = [str(script), str(ends)]
        return job.launch("--standalone", "--nproc", "1", "--max-restarts", "0", *flags, command=command, cwd=job.work)

    yield start
    (job.work / "go").touch()
    if (pid := job.work / "upload.pid").exists():
        wait_for("the end of the child", lambda: not command_of(int(pid.read_text())))


def test_a_run_waits_for_what_its_workers_have_left_behind(job: Job, upload: Callable[..., Agent]) -> None:
    agent = upload()
    agent.says("waiting for up to 30 s (--wait-for-children): sh -c while")
    (job.work / "go").touch()
    assert agent.wait(60) == 0, agent.output
    assert (job.work / "copied").exists()
    assert "they go on" not in agent.output


@pytest.mark.parametrize("how", ["no time", "a signal"])
def test_what_workers_have_left_behind_goes_on_after_the_run(job: Job, upload: Callable[..., Agent], how: str) -> None:
    agent = upload(*(["--wait-for-children", "0"] if how == "no time" else []))
    if how == "a signal":
        agent.says("waiting for up to 30 s (--wait-for-children): sh -c while")
        agent.signal(signal.SIGTERM)
    assert agent.wait(60) == 0, agent.output
    pid = (job.work / "upload.pid").read_text()
    assert f"(pid {pid})" in agent.output.partition("still run, they go on: sh -c while")[2]
    (job.work / "go").touch()
    wait_for("the copy", (job.work / "copied").exists)


def test_what_a_failed_worker_has_left_behind_is_killed(job: Job, upload: Callable[..., Agent]) -> None:
    agent = upload(ends=3)
    assert agent.wait(60) == 3, agent.output
    assert not command_of(int((job.work / "upload.pid").read_text()))
    assert "left behind" not in agent.output


SHARED = """
import os, pathlib, signal, sys
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=1000)
pathlib.Path("block").write_text(block.name)
if len(sys.argv) > 1:
    os.kill(os.getpid(), signal.SIGKILL)
block.close()
"""


@pytest.mark.parametrize("killed", [False, True], ids=["ends", "killed"])
def test_shared_memory_that_a_worker_has_left_is_removed(job: Job, killed: bool) -> None:
    """By Python's resource tracker, a process that ends once the worker has."""
    script: Path = job.work / "shared.py"
    script.write_text(SHARED)
    command = [str(script), *(["killed"] if killed else [])]
    agent = job.launch("--standalone", "--nproc", "1", "--max-restarts", "0", command=command, cwd=job.work)
    assert agent.wait(60) == (137 if killed else 0), agent.output
    block = Path("/dev/shm", (job.work / "block").read_text().lstrip("/"))
    wait_for("its removal", lambda: not block.exists())
    assert "left behind" not in agent.output

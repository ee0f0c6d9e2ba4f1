"""What a worker's script starts handles signals as under torchrun, and a pool in the loop ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, SLOWNESS, Job

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

"""A leaving node gives its snapshot to the next round: no checkpoint exists, and no step is lost."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import Member, cluster, endpoints
from harness import SCRIPTS, Agent, Job, run_script, wait_for

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits" / "train.py")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Member]]:
    directory = tmp_path / "etcd"
    directory.mkdir()
    with cluster(directory) as members:
        yield members


class Run:
    """Nodes of one run on etcd, slow until :meth:`hurry`, that save nothing to disk."""

    def __init__(self, job: Job, servers: list[Member], nnodes: str) -> None:
        self.job = job
        where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", endpoints(servers)]
        self.flags = ["--nnodes", nnodes, *where, "--shutdown-timeout", "120"]  # a leaving node waits for successors

    def node(self, name: str, *flags: str, nproc: int = 1) -> Agent:
        paced = [str(SCRIPTS / "paced.py"), str(self.job.directory / "hurry"), DIGITS, "--exact", "--epochs", "3"]
        command = [*paced, "--step-time", "0.5", "--result", str(self.job.directory / "result.json")]
        own = ["--node-id", name, "--rdzv-id", "run", "--nproc", str(nproc)]
        return self.job.launch(*self.flags, *own, *flags, name=name, command=command)

    def hurry(self) -> None:
        (self.job.directory / "hurry").touch()

    def result(self) -> dict[str, Any]:
        return dict(json.loads((self.job.directory / "result.json").read_text()))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights after three epochs in one process."""
    result = tmp_path_factory.mktemp("undisturbed") / "result.json"
    run_script(DIGITS, "--exact", "--epochs", "3", "--result", str(result))
    return str(json.loads(result.read_text())["weights_sha256"])


def steps(job: Job, number: int) -> list[int]:
    """Steps that rank 0 has printed in a round."""
    found = job.logged(f"round_{number}/0/stdout.log")
    return [int(step) for path in found for step in re.findall(r"^step (\d+)", path.read_text(), re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize("token", [pytest.param(False, marks=pytest.mark.soak), True], ids=["no token", "token"])
def test_a_spare_resumes_from_the_memory_of_the_node_whose_place_it_takes(
    job: Job, servers: list[Member], undisturbed: str, token: bool
) -> None:
    (job.directory / "token").write_text("0123456789abcdef0123456789abcdef\n")
    (job.directory / "token").chmod(0o600)
    flags = ["--token-file", str(job.directory / "token")] if token else []
    run = Run(job, servers, "1")
    first = run.node("a", *flags, nproc=2)
    wait_for("a step", lambda: steps(job, 1), 60)
    spare = run.node("b", *flags)
    first.says("node b joined")
    first.signal(signal.SIGTERM)
    assert first.wait(60) == 143
    run.hurry()
    assert spare.wait(100) == 0, spare.output

    (drained,) = job.events("round_drained")
    assert job.events("round_broken") == []
    result = run.result()
    assert result["resumed_step"] == drained["step"]
    assert result["worlds"] == [2, 1]
    assert result["weights_sha256"] == undisturbed
    assert f"the snapshot of step {drained['step']} was fetched from 127.0.0.1" in spare.output
    assert f"the snapshot of step {drained['step']} went to 127.0.0.1" in first.output


@pytest.mark.slow
def test_all_members_leave_at_once_to_spares(job: Job, servers: list[Member], undisturbed: str) -> None:
    run = Run(job, servers, "2")
    old = [run.node(name) for name in "ab"]
    wait_for("a step", lambda: steps(job, 1), 60)
    new = [run.node(name) for name in "cd"]
    wait_for("the spares", lambda: len(job.events("node_joined")) == 4)
    for agent in old:
        agent.signal(signal.SIGTERM)
    assert [agent.wait(60) for agent in old] == [143, 143]
    run.hurry()
    assert [agent.wait(100) for agent in new] == [0, 0], new[0].output + new[1].output

    (drained,) = job.events("round_drained")
    result = run.result()
    assert result["resumed_step"] == drained["step"]
    assert result["weights_sha256"] == undisturbed


@pytest.mark.slow
def test_a_node_that_leaves_while_no_other_waits_does_not_stay(job: Job, servers: list[Member]) -> None:
    """The limit is an hour: reaching it would be noticed."""
    agent = Run(job, servers, "1").node("a", "--shutdown-timeout", "3600")
    wait_for("a step", lambda: steps(job, 1), 60)
    agent.signal(signal.SIGTERM)
    assert agent.wait(60) == 143
    (drained,) = job.events("round_drained")
    assert drained["step"] >= 1

"""The examples based on PyTorch's own tutorials, run as documented."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import SCRIPTS, Job, wait_for

import elastic_launch.launch

EXAMPLES = Path(__file__).parents[2] / "examples"
TUTORIAL = str(EXAMPLES / "tutorial" / "example.py")
SERIES = EXAMPLES / "ddp_series"


@pytest.fixture(autouse=True)
def logs_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


TORCHS_ABORT = "terminate called without an active exception"
"""What torch 2.13 prints if it aborts as an interpreter that has trained with gloo ends.

Under torchrun, 4 of 40 runs of the tutorial on a busy machine ended so. Workers that are forked do not.
"""


def run(*command: str, cwd: Path | None = None) -> str:
    """The output of a command, which must succeed, unless torch itself aborts as a worker ends."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200, cwd=cwd)
    assert done.returncode == 0 or TORCHS_ABORT in done.stdout + done.stderr, done.stdout + done.stderr
    return done.stdout


def assert_tutorial(output: str, world_size: int, devices: int) -> None:
    """All processes have printed their three lines."""
    n = devices // world_size
    for rank in range(world_size):
        start = (
            rf"\[(\d+)\] Initializing process group with: \{{'MASTER_ADDR': '[^']+', 'MASTER_PORT': '\d+', "
            rf"'RANK': '{rank}', 'WORLD_SIZE': '{world_size}'\}}"
        )
        found = re.search(start, output)  # anywhere: lines of several processes may come to stand in one
        assert found, output
        pid = found[1]
        assert f"[{pid}]: world_size = {world_size}, rank = {rank}, backend=gloo" in output
        mine = list(range(rank * n, (rank + 1) * n))
        assert f"[{pid}] rank = {rank}, world_size = {world_size}, n = {n}, device_ids = {mine}" in output


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [2, *(pytest.param(x, marks=pytest.mark.soak) for x in (1, 8))])
def test_eight_devices_are_divided_among_the_processes(processes: int) -> None:
    flags = ["-m", "elastic_launch", "--standalone", "--nproc", str(processes)]
    output = run(*flags, TUTORIAL, f"--local_world_size={processes}", "--devices=8")
    assert_tutorial(output, processes, devices=8)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "elastic_launch", "--standalone", "--nproc_per_node=2"],
        ["-m", "elastic_launch.launch", "--nproc_per_node=2", "--nnodes=1", "--node_rank=0"],
        [elastic_launch.launch.__file__, "--nproc_per_node=2", "--nnodes=1", "--node_rank=0"],
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    ],
    ids=["elastic-launch", "launch", "launch by its path", "torchrun"],
)
def test_without_devices_the_tutorial_trains_on_the_cpu_under_each_launcher(launcher: list[str]) -> None:
    assert_tutorial(run(*launcher, TUTORIAL, "--local_world_size=2"), 2, devices=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_composers_launcher_starts_the_tutorial_too(tmp_path: Path) -> None:
    """Rank 0 prints to the console; the other rank's output is in a file."""
    seen = run("-m", "elastic_launch.cli.composer", "--nproc", "2", "--stdout", f"{tmp_path}/{{rank}}.txt", TUTORIAL)
    assert_tutorial(seen + (tmp_path / "1.txt").read_text(), 2, devices=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_series_begins_on_one_node(job: Job) -> None:
    weights = job.directory / "weights.pt"
    options = ["2", "1", "--batch_size", "256", "--checkpoint", str(weights)]
    agent = job.launch("--standalone", "--nproc", "2", command=[str(SERIES / "single_node.py"), *options])
    assert agent.wait(150) == 0, agent.output
    assert "[rank 1] epoch 1 | steps 4 |" in agent.output
    assert weights.exists()


def gated(job: Job, hold: int, script: str, *options: str) -> list[str]:
    """A script whose workers are held after a step."""
    (job.work / "hold").write_text(str(hold))
    return [str(SCRIPTS / "gated.py"), str(job.work), str(SERIES / script), *options]


def held(job: Job, number: int, hold: int) -> list[int]:
    """Wait until both workers of a round are held; return their pids."""

    def probe() -> list[int]:
        steps = [step for step in job.noted("optimizer.jsonl", number=number) if step["count"] == hold]
        return [step["pid"] for step in sorted(steps, key=lambda step: step["rank"])] if len(steps) == 2 else []

    return wait_for(f"round {number}, held", probe, 100)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.executed
def test_a_killed_worker_costs_the_series_the_steps_since_its_snapshot(job: Job) -> None:
    snapshot = str(job.directory / "snapshot.pt")
    command = gated(job, 9, "fault_tolerant.py", "4", "1", "--batch_size", "256", "--snapshot", snapshot)
    agent = job.launch("--standalone", "--nproc", "2", "--shutdown-timeout", "10", command=command)
    pids = held(job, 1, 9)
    job.tell("go-2")
    os.kill(pids[1], signal.SIGKILL)
    job.tell("go-1")
    assert agent.wait(150) == 0, agent.output
    assert agent.output.count("resumes at epoch 2") == 2
    assert agent.output.count(" epoch 2 |") == 2
    assert "[rank 1] epoch 3 |" in agent.output
    again = [step for step in job.noted("optimizer.jsonl", number=2) if step["rank"] == 0]
    assert len(again) == 2 * 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nodes_of_the_series_need_no_common_directory(job: Job) -> None:
    command = gated(job, 9, "several_nodes.py", "4", "1", "--batch_size", "256")
    places = {name: job.directory / f"disk-{name}" for name in "abc"}
    for place in places.values():
        place.mkdir()
    host = job.node("a", "--node-rank", "0", command=command, nnodes="2", cwd=places["a"])
    host.says("hosts the run")
    lost = job.node("b", command=command, nnodes="2", cwd=places["b"])
    held(job, 1, 9)
    job.tell("go-2")
    lost.kill()
    job.tell("go-1")
    host.says("node b lost")
    fresh = job.node("c", command=command, nnodes="2", cwd=places["c"])
    assert host.wait(150) == 0, host.output
    assert fresh.wait(30) == 0, fresh.output
    assert "resumes at epoch 2, world size 2" in host.output
    assert re.findall(r"epoch (\d)", fresh.output) == ["2", "3"], "it goes on where the others were"
    assert not (places["c"] / "snapshot.pt").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_launcher_the_series_sets_the_processes_address_by_hand(tmp_path: Path) -> None:
    output = run(str(SERIES / "by_hand.py"), "2", "1", "--processes", "2", "--batch_size", "256", cwd=tmp_path)
    assert "[rank 0] epoch 1 | steps 4 |" in output
    assert "[rank 1] epoch 1 | steps 4 |" in output
    assert (tmp_path / "checkpoint.pt").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_series_keeps_its_global_batch_at_any_world_size_and_stops_at_a_step(job: Job) -> None:
    script, snapshot = str(SERIES / "any_world.py"), job.directory / "snapshot.pt"
    alone = job.launch("--standalone", name="alone", command=[script, "2", "5"], cwd=job.directory)
    assert alone.wait(100) == 0, alone.output
    loss = float(re.findall(r"world size 1 \| loss ([\d.]+)", alone.output)[0])
    snapshot.unlink(missing_ok=True)
    options = ["2", "5", "--snapshot", str(snapshot)]
    command = gated(job, 9, "any_world.py", *options)
    agent = job.launch("--standalone", "--nproc", "2", command=command)
    held(job, 1, 9)
    agent.signal(signal.SIGTERM)
    job.tell("go-1")
    assert agent.wait(100) == 143, agent.output
    (saved,) = re.findall(r"step (\d+) \| snapshot saved", agent.output)
    assert 9 <= int(saved) < 128, agent.output  # how soon it hears of the signal is a matter of time
    rest = job.launch("--standalone", "--nproc", "4", name="rest", command=[script, *options])
    assert rest.wait(100) == 0, rest.output
    assert rest.output.count(f"resumes at step {saved}") == 4
    parts = re.findall(r"step 128 \| world size 4 \| loss ([\d.]+)", rest.output)
    assert len(parts) == 4
    assert sum(map(float, parts)) == pytest.approx(loss, rel=1e-3)

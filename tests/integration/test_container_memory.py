"""Snapshots in a container's memory: a full /dev/shm takes nothing from them, and too low a limit leaves them out.

A training that needs their memory later gets it.

Real agents, in a mount namespace and in a memory control group.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memory_group
import netns
import pytest
from harness import SCRIPTS, Agent, Job, alive, freeze, run_script, tree, wait_for

from elastic_launch.faults import FaultPlan
from elastic_launch.snapshot.memory.slot import Slot

NO_MOUNTS, NO_GROUPS = netns.missing(), memory_group.missing()

MIB = 96
"""The size of the state; three snapshots of it need more than a container's usual 64 MiB of shared memory."""

LARGER = 160
"""The size of the state of a training whose need grows, in MiB."""

MORE = 260
"""MiB that it takes later, in all processes of a node together."""

FREE = 100
"""MiB that are free then, beside two snapshots."""

FIRST_CHECKPOINT = 12
"""The step of the first checkpoint of that training."""

FULL = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && head -c 64M /dev/zero >/dev/shm/others && exec "$@"'


def train(job: Job, *prefix: str, checkpoints: Path | None = None, flags: tuple[str, ...] = ()) -> Agent:
    """Train 8 steps with one worker, which is killed behind the sixth."""
    command = [str(SCRIPTS / "large_state.py"), str(job.work), str(MIB), "8", *map(str, filter(None, [checkpoints]))]
    env = FaultPlan.fail_at(0, 6).environment()
    agent = job.launch("--standalone", "--no-live", "--nproc", "1", *flags, command=command, env=env, prefix=prefix)
    wait_for("the first step", (job.work / "waiting").exists, 60)
    return agent


@pytest.mark.system
@pytest.mark.skipif(bool(NO_MOUNTS), reason=NO_MOUNTS or "nothing is missing")
def test_others_that_have_filled_dev_shm_take_nothing_from_snapshots(job: Job) -> None:
    agent = train(job, "unshare", "--mount", "sh", "-c", FULL, "sh")
    job.tell("go")
    assert agent.wait(60) == 0, agent.output
    found = re.search(r"went on from step (\d+)", agent.output)
    assert found is not None, agent.output
    assert 1 <= int(found[1]) <= 6, "there is no checkpoint, so this was in memory"
    assert not job.events("snapshots_left_out")


@pytest.mark.system
@pytest.mark.skipif(bool(NO_GROUPS), reason=NO_GROUPS or "nothing is missing")
def test_a_limit_with_room_for_one_snapshot_of_three_leaves_them_out_and_kills_nothing(
    job: Job, tmp_path: Path
) -> None:
    with memory_group.group() as group:
        agent = train(job, *group.prefix, checkpoints=tmp_path / "saved")
        # The optimizer takes half of a state, a checkpoint's copy one; slow storage holds back what is written of it.
        group.limit(5 * MIB // 2 * 2**20)
        job.tell("go")
        assert agent.wait(60) == 0, agent.output
        assert group.kills == 0
    figures = r"3 of 0\.09 GiB each need 0\.28 GiB more, and 0\.\d\d GiB are free within the container's limit of"
    assert re.search(rf"no snapshots in memory from now on: {figures}.*docker run --memory", agent.output)
    assert re.match(figures, job.event("snapshots_left_out")["cause"])
    assert re.search(r"went on from step [246]\b", agent.output), f"not from a checkpoint: {agent.output}"
    steps = {path.name.split(".")[0] for path in (tmp_path / "saved").glob("step-*")}
    assert {"step-2", "step-4", "step-8"} <= steps


def growing(directory: Path, checkpoints: Path, more: int = MORE, *whose: str) -> list[str]:
    return [str(SCRIPTS / "growing_need.py"), str(directory), str(LARGER), str(more), str(checkpoints), *whose]


def wait_for_the_step_before(job: Job, ranks: int) -> None:
    for rank in range(ranks):
        wait_for("the step before", (job.work / f"waiting-{rank}").exists, 60)


def grow(job: Job, group: memory_group.Group, ranks: int, workers: int = 1) -> None:
    """Let the need grow once the node has snapshots, and too little memory is free besides.

    Each of the workers in the group takes half of the state for its gradients in a step, and again to exchange them.
    """
    wait_for_the_step_before(job, ranks)
    group.limit((FREE + (workers - 1) * LARGER) * 2**20)
    job.tell("go")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights after the training whose need grows, in one process with enough memory."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "go").touch()
    return weights(run_script(*growing(directory, directory / "saved"), timeout=250))


def weights(output: str) -> str:
    (found,) = set(re.findall(r"weights (\w+)", output))
    return str(found)


def check_left_out(
    job: Job, agent: Agent, killed: str = "a worker", freed: str = "(they|all but the newest) are freed"
) -> None:
    cause = rf"the kernel killed {killed} \(pid \d+\) for lack of memory while snapshots used 0\.\d\d GiB; {freed}"
    text = rf"no snapshots in memory from now on: {cause}.*docker run --memory.*--no-snapshots"
    assert len(list(re.finditer(text, agent.output))) == 1, agent.output
    assert len([event for event in job.events("snapshots_left_out") if re.match(cause, event["cause"])]) == 1


@pytest.mark.system
@pytest.mark.skipif(bool(NO_GROUPS), reason=NO_GROUPS or "nothing is missing")
@pytest.mark.parametrize(
    ("nproc", "flags"),
    [pytest.param(1, ("--no-live",), id="1 worker", marks=pytest.mark.soak), pytest.param(2, (), id="2 live workers")],
)
def test_a_training_that_needs_the_memory_of_snapshots_later_gets_it(
    job: Job, tmp_path: Path, undisturbed: str, nproc: int, flags: tuple[str, ...]
) -> None:
    with memory_group.group() as group:
        command = growing(job.work, tmp_path / "saved", MORE // nproc)
        agent = job.launch("--standalone", "--nproc", str(nproc), *flags, command=command, prefix=group.prefix)
        grow(job, group, nproc, nproc)
        assert agent.wait(120) == 0, agent.output
        # A worker that keeps its process needs memory to send its state to the new one, and may be the second.
        assert 1 <= group.kills <= nproc, agent.output
    assert weights(agent.output) == undisturbed
    begun = {event["round"]: event["step"] for event in job.events("training_begun")}
    assert 1 <= begun[2] < FIRST_CHECKPOINT, f"a restart cost steps: {begun}, {agent.output}"
    check_left_out(job, agent)
    steps = {path.name.split(".")[0] for path in (tmp_path / "saved").glob("step-*")}
    assert {"step-12", "step-14"} <= steps, "durable checkpoints go on"


@contextlib.contextmanager
def decoy(group: memory_group.Group) -> Iterator[subprocess.Popen[bytes]]:
    """A process that the kernel kills before the agent, if those that it has killed have not ended after a second."""
    command = [*group.prefix, "sh", "-c", "echo 1000 >/proc/self/oom_score_adj && exec sleep 600"]
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.system
@pytest.mark.skipif(bool(NO_GROUPS), reason=NO_GROUPS or "nothing is missing")
def test_two_workers_killed_at_the_same_moment_have_both_lacked_memory(
    job: Job, tmp_path: Path, undisturbed: str
) -> None:
    with memory_group.group() as group, decoy(group) as other:
        # Each needs more than there is even without the other.
        command = growing(job.work, tmp_path / "saved", 2000, "once")
        flags = ("--standalone", "--nproc", "2", "--max-restarts", "1")
        agent = job.launch(*flags, command=command, prefix=group.prefix)
        wait_for_the_step_before(job, 2)
        started = [event["pid"] for event in job.events("worker_started")]
        freeze(agent.process.pid)  # it learns of both ends at the same moment
        grow(job, group, 2, 2)
        wait_for("both ends", lambda: not any(map(alive, started)), 60)
        os.kill(agent.process.pid, signal.SIGCONT)
        assert agent.wait(120) == 0, agent.output
        assert group.kills == 2 + (other.poll() is not None), agent.output
    assert weights(agent.output) == undisturbed
    check_left_out(job, agent)
    broken = job.event("round_broken")
    named = re.findall(r"rank (\d) .*: signal 9 \(SIGKILL\); the kernel killed it for lack of memory", agent.output)
    assert set(named) == {"0", "1"}, agent.output
    assert broken["kind"] == "out of memory"


@pytest.mark.system
@pytest.mark.skipif(bool(NO_GROUPS), reason=NO_GROUPS or "nothing is missing")
def test_the_kill_of_a_suspended_worker_frees_all_but_the_newest_snapshot_at_once(
    job: Job, tmp_path: Path, undisturbed: str
) -> None:
    """Its round is over, and the next one waits for another node."""
    with memory_group.group() as group, decoy(group) as other:
        command = growing(job.work, tmp_path / "saved", MORE + LARGER, "thread")
        first = job.node("a", nnodes="2", command=command, prefix=group.prefix)
        first.says("parked with 1 node", 60)  # it hosts the run
        lost = job.node("b", nnodes="2", command=command)
        wait_for_the_step_before(job, 2)
        for pid in tree(lost.process.pid):  # its worker would go on for a moment
            os.kill(pid, signal.SIGKILL)
        job.tell("go")
        wait_for("the end of the round", lambda: first.output.count("parked with 1 node") == 2, 20)
        slots = [Path(f"/proc/{first.process.pid}/fd/{fd}") for fd in tensors_of(first.process.pid)]
        wait_for("the snapshots of two steps", lambda: held(slots) == 2)
        group.limit(FREE * 2**20)
        job.tell("grow")
        first.says("which was suspended, ended with signal 9 (SIGKILL); the kernel killed it for lack of memory", 20)
        job.event("snapshots_left_out")
        check_left_out(job, first, freed="all but the newest are freed")
        wait_for("the memory", lambda: held(slots) == 1, 10)
        again = job.node("c", nnodes="2", command=command)
        assert (first.wait(120), again.wait(120)) == (0, 0), first.output + again.output
        assert group.kills == 1 + (other.poll() is not None), first.output
    assert weights(first.output) == undisturbed
    begun = {event["round"]: event["step"] for event in job.events("training_begun")}
    assert begun[2] >= 7, f"a restart cost steps: {begun}, {first.output}"


def tensors_of(pid: int) -> list[str]:
    """The descriptors of a node's snapshots, whether they are in use or not."""
    links = {link.name: os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    return [fd for fd, name in links.items() if re.search(r"elastic-launch-slot-\d+-tensors", name)]


def complete(pid: int) -> int:
    """How many complete snapshots a node has."""
    with contextlib.ExitStack() as closing:
        links = {os.readlink(link): link for link in Path(f"/proc/{pid}/fd").iterdir()}
        heads = {name.replace("-head", "-tensors"): links[name] for name in links if "slot" in name and "-head" in name}
        slots = [Slot(*(os.open(path, os.O_RDONLY) for path in (links[name], head))) for name, head in heads.items()]
        for slot in slots:
            closing.callback(slot.close)
        return sum(slot.header() is not None for slot in slots)


def held(slots: list[Path]) -> int:
    """How many of them use memory."""
    return sum(slot.stat().st_blocks > 0 for slot in slots)


@pytest.mark.system
@pytest.mark.soak  # the number of kills depends on the memory that storage takes, and so on the machine's other load
@pytest.mark.skipif(bool(NO_GROUPS), reason=NO_GROUPS or "nothing is missing")
def test_training_goes_on_when_a_slow_copy_has_freed_its_snapshot(job: Job, tmp_path: Path, undisturbed: str) -> None:
    with memory_group.group() as group:
        # The need fits without snapshots, but not beside one, also if the copier was stopped as it had just started.
        command = growing(job.work, tmp_path / "saved", MORE + LARGER + 30, "often")
        agent = job.launch("--standalone", "--no-live", command=command, prefix=group.prefix)
        copier = wait_for("a copy", lambda: copying(agent), 60)
        os.kill(copier, signal.SIGSTOP)
        grow(job, group, 1)
        agent.says("round 2 formed", 60)
        time.sleep(5)  # longer than the worker needs to start
        assert group.kills == 1, agent.output
        os.kill(copier, signal.SIGCONT)
        assert agent.wait(120) == 0, agent.output
        assert group.kills == 1, agent.output
    assert weights(agent.output) == undisturbed
    begun = {event["round"]: event["step"] for event in job.events("training_begun")}
    assert begun[2] in [event["step"] for event in job.events("checkpoint_saved")], begun


def copying(agent: Agent) -> int | None:
    """The process that copies a snapshot to the checkpoints, if there is one."""
    for pid in tree(agent.process.pid):
        with contextlib.suppress(OSError):
            if b"snapshots.copying" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


@pytest.mark.system
@pytest.mark.skipif(bool(NO_GROUPS), reason=NO_GROUPS or "nothing is missing")
def test_a_loaders_process_gets_it_too(job: Job, tmp_path: Path, undisturbed: str) -> None:
    with memory_group.group() as group:
        # The loader's process also keeps copies of what the worker changes after it has forked it.
        command = growing(job.work, tmp_path / "saved", 2 * FREE, "loader")
        agent = job.launch("--standalone", command=command, prefix=group.prefix)
        grow(job, group, 1)
        assert agent.wait(120) == 0, agent.output
        assert group.kills in (1, 2), agent.output  # storage may hold memory for longer
    assert weights(agent.output) == undisturbed
    check_left_out(job, agent, "a child of a worker")
    broken = job.event("round_broken")
    assert broken["kind"] == "out of memory"
    assert re.search(r"the kernel killed a child of it for lack of memory: RuntimeError: DataLoader", broken["cause"])


@pytest.mark.system
@pytest.mark.skipif(bool(NO_GROUPS), reason=NO_GROUPS or "nothing is missing")
def test_a_survivor_saves_its_last_step_though_snapshots_are_left_out(job: Job, tmp_path: Path) -> None:
    """No round follows the kill, and the node's snapshots are older than the state of the worker that is left."""
    with memory_group.group() as group:
        # More than is free, so that the kernel kills rank 1 before it exchanges anything of step 9.
        command = growing(job.work, tmp_path / "saved", MORE + LARGER, "1")
        flags = ("--standalone", "--nproc", "2", "--max-restarts", "0")
        agent = job.launch(*flags, command=command, prefix=group.prefix)
        grow(job, group, 2, 2)
        assert agent.wait(120) == 137, agent.output
        assert group.kills == 1, agent.output
    check_left_out(job, agent)
    assert list((tmp_path / "saved").glob("step-8.*")), agent.output


@pytest.mark.system
@pytest.mark.skipif(bool(NO_GROUPS), reason=NO_GROUPS or "nothing is missing")
def test_another_node_keeps_its_snapshots_and_decides_when_they_are_taken(
    job: Job, tmp_path: Path, undisturbed: str
) -> None:
    """The node of rank 0 leaves them out. A later fault finds a newer state than before, although no checkpoint is."""
    env = FaultPlan.fail_at(1, 11, round=2).environment()
    with memory_group.group() as group:
        command = growing(job.work, tmp_path / "saved")
        flags = ("--no-live", "--node-rank")
        first = job.node("a", *flags, "0", nnodes="2", command=command, prefix=group.prefix)
        other = job.node("b", *flags, "1", nnodes="2", command=command, env=env)
        grow(job, group, 2)
        assert (first.wait(120), other.wait(120)) == (0, 0), first.output + other.output
        assert group.kills == 1, first.output
    assert weights(first.output) == undisturbed
    check_left_out(job, first)
    begun = {event["round"]: event["step"] for event in job.events("training_begun")}
    assert begun[3] > begun[2] > 0, begun


SHARDED = [str(SCRIPTS / "sharded_room.py")]
"""A state of 256 MiB, of which a node of four keeps 128 MiB in a snapshot that is split."""

ROOM = 540
"""MiB with room for two of these and the training, and not for two of the whole state, beside a snapshot of it."""


@pytest.mark.system
@pytest.mark.skipif(bool(NO_GROUPS), reason=NO_GROUPS or "nothing is missing")
def test_a_limit_without_room_for_the_whole_of_a_sharded_state_has_snapshots_split(job: Job, tmp_path: Path) -> None:
    """One of four nodes has the limit, and all split them from the second one on. A worker of another is killed."""
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "go").touch()
    expected = weights(run_script(*SHARDED, str(alone), "10", str(alone / "saved"), timeout=250))
    command = [*SHARDED, str(job.work), "10", str(tmp_path / "saved")]
    env = FaultPlan.fail_at(2, 7).environment()
    how: dict[str, Any] = {"nnodes": "4", "command": command, "env": env}
    with memory_group.group() as group:
        nodes = [job.node("a", "--no-live", **how, prefix=group.prefix)]
        nodes[0].says("hosts the run")
        nodes += [job.node(name, "--no-live", **how) for name in "bcd"]
        wait_for_the_step_before(job, 4)
        # What the first one, before the first step, needs while it is taken must not become part of the limit.
        wait_for("the first snapshot", lambda: complete(nodes[0].process.pid) == 1, 60)
        group.limit(ROOM * 2**20)
        job.tell("go")
        assert [node.wait(250) for node in nodes] == [0, 0, 0, 0], nodes[0].output
        assert group.kills == 0
    output = "".join(node.output for node in nodes)
    figures = r"3 of 0\.25 GiB each need 0\.\d\d GiB more, and 0\.\d\d GiB are free within the container's limit of"
    assert re.search(rf"from now on snapshots in memory are split among the nodes: {figures}", output), output
    assert not job.events("snapshots_left_out"), output
    went_on = re.findall(r"went on from step (\d+)", output)
    assert len(went_on) == 4, output
    # On a slow machine, the newest one may not have been complete when the worker was killed.
    assert {*went_on} <= set("1234567"), f"there is no checkpoint, so this was in memory: {output}"
    assert weights(output) == expected


def test_the_flag_leaves_snapshots_out_from_the_start(job: Job) -> None:
    agent = train(job, flags=("--no-snapshots",))
    job.tell("go")
    assert agent.wait(60) == 0, agent.output
    assert "went on from step 0" in agent.output
    assert not job.events("snapshots_left_out")


def test_without_snapshots_and_before_the_first_checkpoint_the_last_line_says_that_none_was_complete(
    job: Job, tmp_path: Path
) -> None:
    command = [str(SCRIPTS / "growing_need.py"), str(job.work), "8", "0", str(tmp_path / "saved")]
    env = FaultPlan.fail_at(0, 5).environment()
    flags = ("--standalone", "--nproc", "1", "--max-restarts", "0", "--no-snapshots")
    agent = job.launch(*flags, command=command, env=env)
    assert agent.wait(60) == 137, agent.output
    assert "nothing is saved, 5 steps lost: no checkpoint was complete" in agent.output

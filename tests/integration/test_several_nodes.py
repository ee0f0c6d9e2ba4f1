"""Several nodes, as several agents on loopback."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from pathlib import Path

import pytest
from harness import LOOP, Job, alive, freeze, round_of, tree, wait_for


def test_two_nodes_form_one_world(job: Job) -> None:
    a = job.node("a", "--role", "trainer", nnodes="2", nproc=2)
    a.says("node a joined")
    b = job.node("b", "--role", "reader", nnodes="2", nproc=1)
    workers = job.world(3)
    env = [worker["env"] for worker in workers]
    roles = [[e[f"ROLE_{name}"] for name in ("NAME", "RANK", "WORLD_SIZE")] for e in env]
    assert roles == [["trainer", "0", "2"], ["trainer", "1", "2"], ["reader", "0", "1"]]
    assert [e["RANK"] for e in env] == ["0", "1", "2"]
    assert sorted(e["LOCAL_RANK"] for e in env) == ["0", "0", "1"]
    assert len({(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in env}) == 1
    assert {e["GROUP_WORLD_SIZE"] for e in env} == {"2"}
    job.finish()
    assert (a.wait(), b.wait()) == (0, 0)


@pytest.mark.executed
def test_a_dead_worker_ends_its_round_on_every_node(job: Job) -> None:
    a, b = job.node("a", nnodes="2"), job.node("b", nnodes="2")
    first = job.world(2)
    os.kill(first[1]["pid"], signal.SIGKILL)
    job.world(2, after=1)
    assert not any(alive(worker["pid"]) for worker in first)
    job.finish()
    assert (a.wait(), b.wait()) == (0, 0)
    assert len(job.events("restart_charged")) == 1


def test_a_lost_node_shrinks_the_world_and_its_return_grows_it(job: Job) -> None:
    a = job.node("a", nnodes="1:2")
    b = job.node("b", nnodes="1:2")
    job.world(2)
    host, other = (a, b) if "hosts the run" in a.output else (b, a)
    other.kill()
    shrunk = job.world(1, after=1)
    assert shrunk[0]["env"]["TORCHELASTIC_RESTART_COUNT"] == "0"
    again = job.node(other.name, nnodes="1:2")
    grown = job.world(2, after=round_of(shrunk[0]))
    assert {worker["env"]["TORCHELASTIC_RESTART_COUNT"] for worker in grown} == {"0"}
    job.finish()
    assert (host.wait(), again.wait()) == (0, 0)
    assert [e["node"] for e in job.events("node_lost")] == [other.name]


def test_a_node_that_joins_while_the_host_is_frozen_waits_for_it(job: Job) -> None:
    timing = ["--rdzv-conf", "dead_after=2,beat=0.5"]
    host = job.node("a", *timing, nnodes="2")
    host.says("node a joined")
    freeze(host.process.pid)
    other = job.node("b", *timing, nnodes="2")
    other.says("its agent may be frozen, or the port may be in use by another service")
    time.sleep(3)  # its next attempt is silent, too
    host.signal(signal.SIGCONT)
    job.world(2)
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)
    assert other.output.count("may be frozen") == 1
    assert not job.events("node_lost")


def test_a_frozen_node_is_dead_after_its_silence(job: Job) -> None:
    timing = ["--dead-after", "4"]
    host = job.node("a", *timing, nnodes="1:2")
    host.says("node a joined")
    other = job.node("b", *timing, nnodes="1:2")
    frozen = job.world(2)[1]
    os.kill(other.process.pid, signal.SIGSTOP)
    shrunk = job.world(1, after=round_of(frozen))
    assert "silent for " in host.output
    os.kill(other.process.pid, signal.SIGCONT)
    grown = job.world(2, after=round_of(shrunk[0]))
    assert not alive(frozen["pid"])
    assert round_of(grown[0]) > round_of(shrunk[0])
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)


def test_members_park_while_the_host_is_gone_and_continue_with_it(job: Job) -> None:
    flags = ["--join-settle", "60"]
    host = job.node("a", *flags, nnodes="1:2")
    host.says("node a joined")
    other = job.node("b", *flags, nnodes="1:2")
    first = job.world(2)
    host.kill()
    other.says("goes on when an agent is back at the endpoint")
    wait_for("b's worker to be stopped", lambda: not any(alive(worker["pid"]) for worker in first))
    again = job.node("a", *flags, nnodes="1:2")
    second = job.world(2, after=round_of(first[0]))
    assert round_of(second[0]) == round_of(first[0]) + 1
    numbers = {worker["env"]["ELASTIC_LAUNCH_RUN_NUMBER"] for worker in (*first, *second)}
    assert len(numbers) == 1, "the new host goes on with the run"
    job.finish()
    assert (again.wait(), other.wait()) == (0, 0)
    assert job.events("round_formed")[-1]["term"] == 2


def test_a_leaving_node_is_not_waited_for(job: Job) -> None:
    host = job.node("a", nnodes="1:2")
    host.says("node a joined")
    other = job.node("b", nnodes="1:2")
    job.world(2)
    other.signal(signal.SIGTERM)
    job.world(1, after=1)
    assert other.wait() == 143
    job.finish()
    assert host.wait() == 0
    assert "node b leaves (SIGTERM)" in host.output
    assert not job.events("restart_charged")


@pytest.mark.slow
def test_below_min_the_run_parks_and_ends_with_94(job: Job) -> None:
    flags = ["--min-wait", "12"]
    host = job.node("a", *flags, nnodes="2")
    host.says("node a joined")
    other = job.node("b", *flags, nnodes="2")
    first = job.world(2)
    other.kill()
    host.says("parked with 1 node, 2 needed")
    wait_for("the workers to be stopped", lambda: not any(alive(worker["pid"]) for worker in first))
    assert host.wait() == 94
    assert len(job.events("round_formed")) == 1


def test_a_spare_waits_and_takes_over(job: Job) -> None:
    host = job.node("a", nnodes="1:2")
    host.says("node a joined")
    second = job.node("b", nnodes="1:2")
    job.world(2)
    spare = job.node("c", nnodes="1:2")
    host.says("node c joined")
    other = job.node("d", nnodes="1:2")
    host.says("round is full, 2 spare")
    second.kill()
    job.world(2, after=1)
    job.finish()
    assert (host.wait(), spare.wait(), other.wait()) == (0, 0, 0)
    assert job.events("round_formed")[-1]["nodes"] == ["a", "c"]


def test_a_node_with_other_arguments_and_limits_takes_part_by_those_of_the_first(job: Job) -> None:
    run = ["--rdzv-id", "run"]  # without an id, such a node would be refused: it may be of another job
    host = job.node("a", *run)
    job.world(1)
    spelled = f"{Path(LOOP).parent}/../scripts/{Path(LOOP).name}"
    own = [*run, "--node-id", "b", "--rdzv-endpoint", f"127.0.0.1:{job.port}", "--max-restarts", "7"]
    other = job.launch(*own, name="b", command=[spelled, str(job.work), "--node-rank", "1"])
    workers = job.world(2, after=1)
    assert [worker["argv"][1:] for worker in workers] == [[], ["--node-rank", "1"]]
    assert [worker["env"]["TORCHELASTIC_MAX_RESTARTS"] for worker in workers] == ["3", "3"]
    for agent in (host, other):
        agent.says(
            "--node-rank 1` in addition; and with other limits: --nnodes 1:1 --max-restarts 7; those of the run hold"
        )
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)


@pytest.mark.slow
def test_a_newer_agent_takes_the_place_of_the_older_with_its_node_id(job: Job) -> None:
    host = job.node("a", nnodes="1:2")
    host.says("node a joined")
    older = job.node("b", nnodes="1:2")
    first = job.world(2)
    newer = job.node("b", nnodes="1:2")
    assert older.wait() == 95
    assert "took its place" in older.output
    job.world(2, after=round_of(first[0]))
    job.finish()
    assert (host.wait(), newer.wait()) == (0, 0)


def test_node_ranks_are_honoured(job: Job) -> None:
    host = job.node("a", "--node-rank", "1", nnodes="2")
    host.says("node a joined")
    other = job.node("b", "--node-rank", "0", nnodes="2")
    job.world(2)
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)
    assert job.event("round_formed")["nodes"] == ["b", "a"]


def test_all_processes_of_a_dead_programs_session_are_ended(job: Job) -> None:
    command = ["bash", "-c", f"echo $$ > {job.work}/pid-$GROUP_RANK-$WORLD_SIZE; sleep 600; true"]
    host = job.node("a", "--no-python", nnodes="1:2", command=command)
    host.says("node a joined")
    other = job.node("b", "--no-python", nnodes="1:2", command=command)
    wait_for("both workers", lambda: (job.work / "pid-0-2").exists() and (job.work / "pid-1-2").exists())
    pids = [int(wait_for("a pid", (job.work / f"pid-{i}-2").read_text)) for i in (0, 1)]
    other.kill()
    wait_for("the other's worker to restart alone", (job.work / "pid-0-1").exists)
    # The dead agent's guard and the survivor's new round are not ordered.
    wait_for("the end of both old workers", lambda: not any(map(alive, pids)))
    host.signal(signal.SIGTERM)
    assert host.wait() == 143


def test_a_signal_while_waiting_for_nodes_ends_cleanly(job: Job) -> None:
    agent = job.node("a", nnodes="2")
    agent.says("waiting for nodes: 1 of at least 2")
    agent.signal(signal.SIGINT)
    assert agent.wait() == 130
    assert "Traceback" not in agent.output
    assert not job.started()


def test_without_an_endpoint_the_others_join_by_the_printed_command(job: Job) -> None:
    first = job.launch("--nnodes", "2", "--nproc", "1", "--log-dir", str(job.logs), name="first")
    first.says("the others join with:")
    line = next(line for line in first.output.splitlines() if line.strip().startswith("elastic-launch --nnodes"))
    _, *arguments = shlex.split(line)
    second = job.launch(command=arguments, name="second")
    job.world(2)
    job.finish()
    assert (first.wait(), second.wait()) == (0, 0)


@pytest.mark.executed
@pytest.mark.parametrize("trains", [False, True])
def test_no_temporary_files_are_left_by_an_agent_that_is_killed(job: Job, tmp_path: Path, trains: bool) -> None:
    """Of one that waits for other nodes not even by a kill of all its processes; else its guard removes them."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    agent = job.node("a", nnodes="1:1" if trains else "2:2", env={"TMPDIR": str(temporary)})
    if trains:
        job.world(1)
        assert [path.name for path in temporary.iterdir() if path.name.startswith("elastic-launch-")]
        agent.kill()
    else:
        agent.says("parked with 1 node")
        for pid in tree(agent.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    wait_for("an empty directory", lambda: not list(temporary.iterdir()))


def test_the_next_agent_removes_the_temporary_files_of_one_that_was_killed_with_all_its_processes(
    job: Job, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    killed = job.launch("--standalone", env={"TMPDIR": str(temporary)})
    (first,) = job.world(1)
    for pid in killed.freeze():
        os.kill(pid, signal.SIGKILL)
    (left,) = temporary.iterdir()
    agent = job.launch("--standalone", name="next", env={"TMPDIR": str(temporary)})
    wait_for("the next one's worker", lambda: [x for x in job.started() if x["pid"] != first["pid"]])
    wait_for("the removal", lambda: not left.exists())
    assert len([*temporary.iterdir()]) == 1
    job.finish()
    assert agent.wait() == 0
    assert not [*temporary.iterdir()]

"""Real trainings whose workers keep their processes through changes of the world, in exact mode: one hash."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from changes import STEPS, Changes, pids
from etcd_servers import cluster, endpoints
from harness import SCRIPTS, Job, now, read_lines, wait_for


@pytest.mark.executed
def test_a_killed_worker_costs_no_step_and_no_other_process(job: Job, undisturbed: str) -> None:
    changes = Changes(job, live=True)
    agent = changes.alone("--nproc", "2")
    changes.trains(2, steps=10)
    os.kill(pids(job, 1)[1], signal.SIGKILL)
    changes.trains(2, after=1)
    result = changes.finish(agent)
    assert changes.kinds() == [("broken", 1, "crash")]
    assert changes.done_again() == 0
    assert (result["worlds"], result["restarts"]) == ([2, 2], 1)
    assert result["resumed"] == job.events("training_begun")[-1]["step"] >= 9
    assert pids(job, 2)[0] == pids(job, 1)[0]
    assert pids(job, 2)[1] != pids(job, 1)[1]
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_the_new_first_rank_gets_the_state_of_the_one_that_is_left(job: Job, undisturbed: str) -> None:
    changes = Changes(job, live=True)
    agent = changes.alone("--nproc", "3")
    number = changes.trains(3, steps=5)
    for _ in range(3):
        os.kill(pids(job, number)[0], signal.SIGKILL)
        number = changes.trains(3, after=number, steps=2)
    result = changes.finish(agent)
    done = [step["step"] for step in changes.steps()]
    assert len(done) == len(set(done)) >= STEPS - 3, "a killed one may not have noted its last step"
    assert (result["worlds"], result["restarts"]) == ([3] * 4, 3)
    assert pids(job, 4)[2] == pids(job, 1)[2]
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_two_kills_50_ms_apart_and_one_of_a_worker_that_has_just_come(job: Job, undisturbed: str) -> None:
    changes = Changes(job, live=True)
    agent = changes.alone("--nproc", "4", "--max-restarts", "9")
    changes.trains(4, steps=5)
    first = pids(job, 1)
    os.kill(first[3], signal.SIGKILL)
    time.sleep(0.05)
    os.kill(first[1], signal.SIGKILL)
    new = wait_for("a new worker", lambda: set(_started(job)) - set(first.values()), 60)
    number = next(event["round"] for event in job.events("worker_started") if event["pid"] == min(new))
    os.kill(min(new), signal.SIGKILL)
    changes.trains(4, after=number)
    result = changes.finish(agent)
    assert changes.done_again() == 0
    last = len(job.events("round_formed"))
    assert {pids(job, last)[rank] for rank in (0, 2)} == {first[0], first[2]}
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_a_survivor_is_killed_while_the_next_round_forms(job: Job, undisturbed: str) -> None:
    changes = Changes(job, live=True)
    agent = changes.alone("--nproc", "3", "--max-restarts", "9")
    changes.trains(3, steps=5)
    first = pids(job, 1)
    os.kill(first[2], signal.SIGKILL)
    wait_for("its place in the next round", lambda: first[1] in pids(job, 2).values(), 60)
    os.kill(first[1], signal.SIGKILL)
    last = changes.trains(3, after=2)
    result = changes.finish(agent)
    assert changes.done_again() == 0
    assert pids(job, last)[0] == first[0]
    assert not {first[1], first[2]} & {*pids(job, last).values()}
    assert result["hash"] == undisturbed


def _started(job: Job) -> list[int]:
    return [event["pid"] for event in job.events("worker_started")]


@pytest.mark.slow
def test_a_node_joins_and_leaves_and_another_is_lost(job: Job, undisturbed: str) -> None:
    changes = Changes(job, live=True, step_time=0.2)  # it lasts until all have come
    result, _ = changes.joined_left_and_lost()
    assert changes.done_again() == 0
    assert (result["worlds"], result["restarts"]) == ([1, 2, 1, 3, 1], 0)
    (events,) = job.logged("events-a.jsonl")
    kept = [e["pid"] for e in read_lines(events) if e["event"] == "worker_kept"]
    assert kept == [pids(job, 1)[0]] * 4, "the first node's worker has one process"
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_a_worker_that_is_frozen_in_a_round_that_breaks_is_killed(job: Job, undisturbed: str) -> None:
    changes = Changes(job, live=True)
    agent = changes.alone("--nproc", "3")
    changes.trains(3, steps=5)
    first = pids(job, 1)
    os.kill(first[1], signal.SIGSTOP)
    os.kill(first[2], signal.SIGKILL)
    changes.trains(3, after=1)
    result = changes.finish(agent)
    assert "the workers of local rank 1 have not left the round in time; they are killed" in agent.output
    assert changes.done_again() == 0
    assert pids(job, 2)[0] == first[0]
    assert pids(job, 2)[1] != first[1]
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_a_node_that_is_told_to_leave_while_its_worker_is_suspended_saves_the_worker_s_state(
    job: Job, undisturbed: str
) -> None:
    saving = ["--checkpoint", str(job.directory / "checkpoints"), "--every", "10000"]
    changes = Changes(job, *saving, "--due-until", "5", live=True)
    options = ["--rdzv-conf", "dead_after=15"]
    a = changes.node("a", *options, nnodes="2")
    a.says("hosts the run")
    b = changes.node("b", *options, rank=1, nnodes="2")
    number = changes.trains(2, steps=12)
    killed = now()
    b.kill()
    wait_for("the end of its round", lambda: any(x["clock"] > killed for x in job.events("parked")), 60)
    last = changes.last(number)
    assert changes.whole(number) < 6 < last
    a.signal(signal.SIGTERM)
    assert a.wait(100) == 143, a.output
    assert changes.durable()[-1] in (last, last + 1), "the last step may not have been noted"
    result = changes.finish(changes.alone())
    assert changes.done_again() == 0
    assert result["hash"] == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("behind", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_rank_that_is_a_step_behind_gets_the_state_of_one_that_is_ahead(job: Job, behind: int) -> None:
    command = [str(SCRIPTS / "torn.py"), str(job.work), str(behind)]
    agent = job.launch("--standalone", "--nproc", "3", command=command)
    assert agent.wait(100) == 0, agent.output
    torn = read_lines(job.work / "results.jsonl")
    kept = {event["pid"] for event in job.events("worker_kept")}
    assert len(kept) == 2
    for result in torn:
        numbers = [number for number, _ in result["done"]]
        assert numbers == list(range(31 - len(numbers), 31)), "each step once"
        assert (result["pid"] in kept) == (len(numbers) == 30)
    assert len({str(result["done"][-19:]) for result in torn}) == 1, "the losses, too"
    assert len({(result["hash"], result["rate"]) for result in torn}) == 1
    undisturbed = _alone(job)
    assert {result["hash"] for result in torn} == {undisturbed["hash"]}
    assert undisturbed["done"][-19:] == torn[0]["done"][-19:]


@pytest.mark.slow
def test_a_rank_that_has_got_a_state_has_it_if_that_round_breaks_too(job: Job) -> None:
    command = [str(SCRIPTS / "torn.py"), str(job.work), "0", "lost"]
    agent = job.launch("--standalone", "--nproc", "3", command=command)
    assert agent.wait(100) == 0, agent.output
    results = read_lines(job.work / "results.jsonl")
    assert pids(job, 3)[0] == pids(job, 1)[0]
    (first,) = [result for result in results if result["pid"] == pids(job, 1)[0]]
    assert [number for number, _ in first["done"]] == list(range(1, 31)), "each step once"
    assert {result["hash"] for result in results} == {_alone(job)["hash"]}


@pytest.mark.slow
def test_ranks_that_were_suspended_before_they_had_what_is_not_saved_get_it_from_the_first_of_them(job: Job) -> None:
    """All of them have the state of the same step then, which spares others that they are sent the model."""
    command = [str(SCRIPTS / "unsaved.py"), str(job.work)]
    timing = ["--rdzv-conf", "start_wait=0,resize_delay=0.1,join_settle=0.2"]
    a = job.node("a", *timing, command=command)
    wait_for("its first steps", lambda: len(read_lines(job.work / "steps.jsonl")) > 3, 60)
    b = job.node("b", *timing, "--node-rank", "1", nproc=2, command=command)
    assert (a.wait(100), b.wait(100)) == (0, 0), a.output + b.output
    steps = read_lines(job.work / "steps.jsonl")
    alone = [line for line in steps if line["world"] == 2]
    assert alone, "the two that were left have trained without another one"
    pids_left = {line["pid"] for line in alone}
    assert len(pids_left) == 2
    assert {line["pid"] for line in steps if line["world"] == 3} > pids_left, "they have kept their processes"
    for number in range(alone[0]["step"], 201):
        assert len({line["shift"] for line in steps if line["step"] == number}) == 1, number


def _alone(job: Job) -> dict[str, Any]:
    work = Path(job.work) / "alone"
    work.mkdir()
    command = [str(SCRIPTS / "torn.py"), str(work), "-1"]
    agent = job.launch("--standalone", "--nproc", "1", command=command, name="alone")
    assert agent.wait(100) == 0, agent.output
    (result,) = read_lines(work / "results.jsonl")
    return result


@pytest.mark.slow
def test_a_spot_notice_costs_no_step_and_a_replacement_from_another_address_joins(job: Job, undisturbed: str) -> None:
    """The replacements are like a pod that comes back: they have the same node id."""
    notice = job.directory / "leave"
    changes = Changes(job, live=True, step_time=0.3)  # it lasts until all have come
    a = changes.node("a")
    changes.trains(1, steps=3)
    b = changes.node("b", "--local-addr", "127.0.0.2", "--notice", f"file:{notice}")
    joined = changes.trains(2, steps=3)
    notice.with_suffix(".new").write_text("20")
    notice.with_suffix(".new").rename(notice)
    left = changes.trains(1, after=joined, steps=3)
    assert b.wait() == 143
    assert "stopped by file notice" in b.output
    again = changes.node("b", "--local-addr", "127.0.0.3")
    back = changes.trains(2, after=left, steps=3)
    again.kill()
    other = changes.node("b", "--local-addr", "127.0.0.4")
    changes.trains(2, after=back, steps=3)
    result = changes.finish(a, other)
    assert changes.kinds()[:2] == [("drained", 1, "membership"), ("drained", joined, "preemption")]
    assert changes.done_again() == 0
    assert (result["worlds"][:4], result["worlds"][-1], result["restarts"]) == ([1, 2, 1, 2], 2, 0)
    for address in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
        assert f"node b joined from {address} with 1 worker" in a.output
    (events,) = job.logged("events-a.jsonl")
    kept = [e["pid"] for e in read_lines(events) if e["event"] == "worker_kept"]
    assert len(kept) >= 4
    assert set(kept) == {pids(job, 1)[0]}
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_the_workers_of_other_nodes_outlive_a_leader_on_etcd(job: Job, undisturbed: str, tmp_path: Path) -> None:
    directory = tmp_path / "etcd"
    directory.mkdir()
    changes = Changes(job, live=True)
    with cluster(directory) as servers:
        where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", endpoints(servers), "--rdzv-id", "run"]
        flags = ["--nnodes", "2:3", "--join-settle", "100", "--dead-after", "15", *where]
        agents = [job.launch(*flags, "--node-id", x, name=x, command=changes.command, env={"NODE": x}) for x in "abc"]
        number = changes.trains(3, steps=5)
        first = pids(job, number)
        leader = str(job.events("leader_elected")[-1]["node"])
        agents["abc".index(leader)].kill()
        last = changes.trains(2, after=number, steps=5)
        assert {*pids(job, last).values()} < {*first.values()}
        result = changes.finish(*(agent for agent in agents if agent.name != leader))
    done = [step["step"] for step in changes.steps()]
    assert len(done) == len(set(done)) >= STEPS - 1, "a killed one may not have noted its last step"
    assert (result["worlds"], result["restarts"]) == ([3, 2], 0)
    assert result["hash"] == undisturbed

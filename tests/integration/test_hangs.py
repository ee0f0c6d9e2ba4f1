"""Workers that hang are found, named and killed; those that only take long are left alone."""

from __future__ import annotations

import re

import pytest
from hanging_runs import Hanging
from harness import Job, read_lines, wait_for

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "kind", ["stop", "deadlock", *(pytest.param(x, marks=pytest.mark.soak) for x in ("sleep", "write", "loader"))]
)
def test_a_rank_that_hangs_is_named_and_the_others_keep_their_processes(job: Job, kind: str) -> None:
    run = Hanging(job, "--loader-workers", str(int(kind == "loader")))
    agent = run.alone()
    run.trains(3)
    first = run.pids(1)
    run.hangs(kind, 1)
    event = run.found()
    assert event["ranks"] == [1], agent.output
    where = event["places"][0]
    assert (
        where.startswith("stopped (SIGSTOP)") if kind == "stop" else re.search(rf"at hanging.py:\d+ in {kind}", where)
    )
    second = {*run.pids(run.trains(3, after=1)).values()}
    assert second & {*first.values()} == {first[0], first[2]}, agent.output
    (stacks,) = job.logged("round_1/stacks-*.txt")
    assert all(f"rank {rank} (pid {first[rank]})" in stacks.read_text() for rank in range(3))
    assert job.event("restart_charged")["kind"] == "hang"
    assert f"round 1 broken after {job.events('round_broken')[0]['lasted_s']:.1f} s: rank 1 on node " in agent.output


def test_without_live_rounds_all_are_started_again(job: Job) -> None:
    run = Hanging(job)
    agent = run.alone("--no-live", "--no-warm", nproc=2)
    run.trains(2)
    first = run.pids(1)
    run.hangs("sleep", 0)
    event = run.found()
    assert (event["ranks"], len(event["places"])) == ([0], 1), agent.output
    assert re.fullmatch(r"at hanging.py:\d+ in sleep", event["places"][0])
    assert not {*first.values()} & {*run.pids(run.trains(2, after=1)).values()}


def test_a_rank_that_leaves_an_exchange_out_is_named(job: Job) -> None:
    run = Hanging(job, "--meet")
    agent = run.alone()
    run.trains(3)
    run.hangs("skip", 2)
    event = run.found()
    assert event["ranks"] == [2], agent.output
    assert re.search(r", ranks 0, 1 waiting for other ranks at hanging.py:\d+ in meet; ", event["cause"])
    run.trains(3, after=1)


def test_a_rank_on_another_node_is_named_with_its_node(job: Job) -> None:
    run = Hanging(job)
    job.node("a", "--rdzv-conf", "is_host=true", nnodes="2", nproc=2, command=run.command)
    job.node("b", "--rdzv-conf", "is_host=false", "--node-rank", "1", nnodes="2", nproc=2, command=run.command)
    run.trains(4)
    first = run.pids(1)
    run.hangs("deadlock", 3)
    event = run.found()
    assert (event["ranks"], event["nodes"]) == ([3], ["b"])
    second = {*run.pids(run.trains(4, after=1)).values()}
    assert second & {*first.values()} == {first[0], first[1], first[2]}


def test_what_only_takes_long_is_no_hang(job: Job) -> None:
    """Announced pauses of one rank, hooks before a save, a rank that computes, and steps of different length."""
    run = Hanging(job, "--slow", "--steps", "80")
    agent = run.alone(nproc=2)
    assert agent.wait(200) == 0, agent.output
    assert job.events("hang_found") == []
    assert len(run.steps(1)) == 80


def test_an_evaluation_may_take_long(job: Job) -> None:
    run = Hanging(job, "--evaluate", "--steps", "40")
    agent = run.alone(nproc=2)
    assert agent.wait(200) == 0, agent.output
    assert job.events("hang_found") == []
    assert job.events("restart_charged") == []
    assert {each["what"] for each in read_lines(job.work / "slow.jsonl")} == {"evaluation"}


def test_a_node_that_was_frozen_with_its_workers_goes_on(job: Job) -> None:
    """Its agent has not seen the time pass either."""
    run = Hanging(job, "--steps", "200")
    agent = run.alone(nproc=2)
    run.trains(2)
    frozen = agent.freeze()
    try:
        wait_for("time to pass", lambda: False, 14 / 3)
    except AssertionError:
        agent.thaw(frozen)
    assert agent.wait(100) == 0, agent.output
    assert job.events("hang_found") == []
    assert {event["round"] for event in job.events("round_formed")} == {1}


PLAIN = """
import os, time, torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(3600)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_plain_script_is_watched_by_what_it_does_if_asked(job: Job) -> None:
    script = job.work / "plain.py"
    script.write_text(PLAIN)
    agent = job.launch("--standalone", "--nproc", "2", "--hang-timeout", "6", command=[str(script)])
    assert agent.wait(100) == 0, agent.output
    (event,) = job.events("hang_found")
    assert (event["ranks"], event["places"]) == ([1], ["at plain.py:5 in <module>"])


def test_nothing_is_watched_if_it_is_turned_off(job: Job) -> None:
    run = Hanging(job)
    agent = run.alone("--hang-timeout", "off", nproc=2)
    run.trains(2)
    run.hangs("stop", 1)
    wait_for("the hang", lambda: (job.work / "hang.taken").exists(), 20)
    with pytest.raises(AssertionError, match="a verdict"):
        wait_for("a verdict", lambda: job.events("hang_found"), 16 / 3)
    assert "hangs" not in agent.output

"""Workers that start ahead of a place in a round: real agents, workers without torch."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
from harness import SCRIPTS, Agent, Job, alive, read_lines, wait_for

LIVE = str(SCRIPTS / "live.py")
AHEAD = ("--rdzv-conf", "start_wait=0,resize_delay=0.1,beat=0.5,dead_after=3")


def noted(job: Job, what: str, number: int | None = None) -> list[dict[str, Any]]:
    """What workers noted, of one round; a worker that has no place yet is in round 0."""
    found = read_lines(job.work / "live.jsonl")
    return [note for note in found if note["what"] == what and number in (None, note["round"])]


def begun(job: Job, number: int, workers: int = 2) -> dict[int, int]:
    """Wait until a round's workers have begun; return their pids by rank."""
    try:
        wait_for(f"round {number}", lambda: len(noted(job, "begins", number)) == workers, 40)
    except AssertionError as error:
        raise AssertionError(f"{error}\n" + "\n".join(agent.output for agent in job.agents)) from None
    return {note["rank"]: note["pid"] for note in noted(job, "begins", number)}


def starting(job: Job, *former: int) -> int:
    """Wait for another worker that starts ahead; return its pid."""

    def probe() -> list[int]:
        return [note["pid"] for note in noted(job, "connects", 0) if note["pid"] not in former]

    return int(wait_for("a worker that starts ahead", probe, 40)[-1])


def launch(job: Job, *flags: str, nproc: int = 2, script: tuple[str, ...] = ()) -> Agent:
    command = [LIVE, str(job.work), *script]
    return job.launch("--standalone", "--nproc", str(nproc), *AHEAD, *flags, command=command)


def node(job: Job, name: str, *flags: str, nnodes: str = "1:2", nproc: int = 1, rank: int = 0) -> Agent:
    where = [] if name == "a" else ["--node-rank", str(rank or 1)]
    command = [LIVE, str(job.work)]
    return job.node(name, *AHEAD, "--nproc", str(nproc), *where, *flags, nnodes=nnodes, command=command)


def exits(job: Job) -> list[tuple[int, int, int]]:
    return [(event["round"], event["local_rank"], event["exit_code"]) for event in job.events("worker_exited")]


def test_the_others_go_on_without_a_killed_worker_until_another_one_has_started(job: Job) -> None:
    agent = launch(job)
    first = begun(job, 1)
    os.kill(first[0], signal.SIGKILL)
    assert begun(job, 2, workers=1) == {0: first[1]}
    new = starting(job)
    job.tell("come")
    assert begun(job, 3) == {0: new, 1: first[1]}
    job.finish()
    assert agent.wait() == 0
    assert re.search(r"ahead of a round: (earlier starts took about [\d.]+ s; )?the others do not wait", agent.output)
    assert "round 2: 1 worker kept, 0 started; 1 more worker of this node will join" in agent.output
    assert "round 3: 1 worker kept, 0 started, 1 started ahead" in agent.output
    formed = [(event["round"], event["world_size"]) for event in job.events("round_formed")]
    assert formed == [(1, 2), (2, 1), (3, 2)]
    (came,) = job.events("worker_ahead")
    assert (came["local_rank"], came["pid"]) == (0, new)
    placed = [
        (event["round"], event["rank"], event["local_rank"], event["pid"]) for event in job.events("worker_placed")
    ]
    assert placed == [(3, 0, 0, new)]
    where = ("round", "rank", "local_rank", "ahead")
    starts = [tuple(event[name] for name in where) for event in job.events("worker_started")]
    assert starts == [(1, 0, 0, 0), (1, 1, 1, 0), (0, None, 0, 1)]
    ahead = job.events("worker_started")[-1]["clock"]
    formed_at = job.events("round_formed")[1]["clock"]
    trains = min(event["clock"] for event in job.events("training_begun") if event["round"] == 2)
    assert ahead > min(trains, formed_at + 0.4), "it took processor time from the others as they entered their round"
    assert sorted(exits(job)) == [(1, 0, -9), (3, 0, 0), (3, 1, 0)]
    assert [event["restarts"] for event in job.events("restart_charged")] == [1]
    assert job.event("round_drained")["cause"].endswith("has workers back")


def test_the_others_wait_for_a_start_that_is_expected_to_be_short(job: Job) -> None:
    agent = launch(job, "--rdzv-conf", "start_wait=100")
    first = begun(job, 1)
    os.kill(first[0], signal.SIGKILL)
    assert begun(job, 2)[1] == first[1]
    job.finish()
    assert agent.wait() == 0
    assert not noted(job, "connects", 0)


def test_a_worker_ahead_that_is_killed_is_followed_by_others_and_at_last_by_one_that_starts_with_its_round(
    job: Job,
) -> None:
    agent = launch(job)
    first = begun(job, 1)
    os.kill(first[1], signal.SIGKILL)
    assert begun(job, 2, workers=1) == {0: first[0]}
    killed: list[int] = []
    for _ in range(3):
        killed.append(starting(job, *killed))
        os.kill(killed[-1], signal.SIGKILL)
    last = begun(job, 3)
    assert last[0] == first[0]
    assert last[1] not in killed
    job.finish()
    assert agent.wait() == 0
    assert agent.output.count("ended with signal 9 (SIGKILL); another one starts\n") == 2
    assert agent.output.count("ended with signal 9 (SIGKILL); another one starts with its next round\n") == 1
    assert sorted(exits(job)) == [(0, 1, -9)] * 3 + [(1, 1, -9), (3, 0, 0), (3, 1, 0)]
    assert [event["restarts"] for event in job.events("restart_charged")] == [1]


def test_a_worker_ahead_that_is_killed_while_it_joins_breaks_the_round(job: Job) -> None:
    agent = launch(job)
    first = begun(job, 1)
    os.kill(first[0], signal.SIGKILL)
    begun(job, 2, workers=1)
    job.tell(f"come-{starting(job)}")
    os.kill(begun(job, 3)[0], signal.SIGKILL)
    assert begun(job, 4, workers=1) == {0: first[1]}
    job.tell("come")
    assert begun(job, 5)[1] == first[1]
    job.finish()
    assert agent.wait() == 0
    assert [event["restarts"] for event in job.events("restart_charged")] == [1, 2]


def test_a_worker_ahead_that_is_killed_as_it_waits_is_replaced(job: Job) -> None:
    """The two of them join together."""
    agent = launch(job, nproc=3)
    first = begun(job, 1, workers=3)
    os.kill(first[0], signal.SIGKILL)
    assert begun(job, 2) == {0: first[1], 1: first[2]}
    os.kill(first[1], signal.SIGKILL)
    assert begun(job, 3, workers=1) == {0: first[2]}
    wait_for("two that start ahead", lambda: len(noted(job, "connects", 0)) == 2, 40)
    one, other = (note["pid"] for note in noted(job, "connects", 0))
    job.tell(f"come-{one}")
    agent.says(f"(pid {one}), started ahead, is ready for a round")
    os.kill(one, signal.SIGKILL)
    another = starting(job, one, other)
    job.tell("come")
    assert {*begun(job, 4, workers=3).values()} == {first[2], other, another}
    job.finish()
    assert agent.wait() == 0


def test_a_script_that_reads_its_rank_itself_is_started_with_its_rounds(job: Job) -> None:
    agent = launch(job, script=("--reads-rank",))
    first = begun(job, 1)
    for number, following in ((1, 3), (3, 5), (5, 6)):
        os.kill(begun(job, number)[0], signal.SIGKILL)
        begun(job, following)
    assert begun(job, 6)[1] == first[1]
    job.finish()
    assert agent.wait() == 0
    failed = "ended with exit code 1: ValueError: invalid literal for int() with base 10: 'unplaced'"
    assert agent.output.count(f"{failed}; another one starts with its next round") == 1
    assert agent.output.count(f"{failed}; workers of this node no longer start ahead") == 1
    formed = [(event["round"], event["world_size"]) for event in job.events("round_formed")]
    assert formed == [(1, 2), (2, 1), (3, 2), (4, 1), (5, 2), (6, 2)]


@pytest.mark.slow
def test_a_worker_that_can_never_be_replaced_ends_the_run_when_the_budget_is_spent(job: Job) -> None:
    """What fails ahead costs nothing, and is tried again in a round, where it does."""
    agent = launch(job, script=("--fails-again",))
    first = begun(job, 1)
    os.kill(first[0], signal.SIGKILL)
    assert begun(job, 4, workers=1) == {0: first[1]}, "the other one trains on"
    assert agent.wait(60) == 91
    assert [event["restarts"] for event in job.events("restart_charged")] == [1, 2, 3]
    formed = [(event["round"], event["world_size"]) for event in job.events("round_formed")]
    assert formed == [(1, 2), (2, 1), (3, 2), (4, 1), (5, 2), (6, 2)]
    assert [end for end in exits(job) if end[0] == 0] == [(0, 0, 1)] * 2
    failed = "started ahead of a round, ended with exit code 1"
    assert agent.output.count(failed) == 2
    assert "2 workers lost before a round; restarts 3 of 3" in agent.output


def test_a_worker_ahead_that_never_comes_is_killed(job: Job) -> None:
    agent = launch(job, "--rdzv-conf", "join_timeout=4")  # of which a round needs a part for its start
    first = begun(job, 1)
    os.kill(first[0], signal.SIGKILL)
    begun(job, 2, workers=1)
    new = starting(job)
    third = begun(job, 3)
    assert third[1] == first[1]
    assert third[0] != new
    job.finish()
    assert agent.wait() == 0
    assert "has not come to its first use of the world in time; it is killed" in agent.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["told to leave", "killed"])
def test_no_worker_ahead_outlives_its_agent(job: Job, number: int) -> None:
    agent = launch(job)
    os.kill(begun(job, 1)[0], signal.SIGKILL)
    begun(job, 2, workers=1)
    new = starting(job)
    agent.signal(number)
    agent.wait()
    wait_for("its end", lambda: not alive(new), 20)


def test_a_run_that_ends_does_not_wait_for_workers_ahead(job: Job) -> None:
    agent = launch(job)
    os.kill(begun(job, 1)[0], signal.SIGKILL)
    begun(job, 2, workers=1)
    new = starting(job)
    job.finish()
    assert agent.wait() == 0
    assert not alive(new)


def test_a_node_that_joins_starts_its_workers_ahead(job: Job) -> None:
    a = node(job, "a", "--join-settle", "0.2")
    first = begun(job, 1, workers=1)
    b = node(job, "b", nproc=2)
    wait_for("two that start ahead", lambda: len(noted(job, "connects", 0)) == 2, 40)
    new = {note["pid"] for note in noted(job, "connects", 0)}
    assert len(job.events("round_formed")) == 1
    job.tell("come")
    second = begun(job, 2, workers=3)
    assert second == {0: first[0]} | {rank: second[rank] for rank in (1, 2)}
    assert {second[1], second[2]} == new
    b.signal(signal.SIGTERM)
    assert begun(job, 3, workers=1) == first
    assert b.wait() == 143
    job.finish()
    assert a.wait() == 0
    assert not job.events("restart_charged")
    assert "round 2: 0 workers kept, 0 started, 2 started ahead" in b.output


def test_a_node_that_leaves_before_its_workers_have_come_disturbs_none(job: Job) -> None:
    a = node(job, "a", "--join-settle", "0.2")
    begun(job, 1, workers=1)
    b = node(job, "b")
    new = starting(job)
    b.signal(signal.SIGTERM)
    assert b.wait() == 143
    assert not alive(new)
    job.finish()
    assert a.wait() == 0
    assert len(job.events("round_formed")) == 1


def test_a_node_that_has_lost_all_its_workers_joins_again_once_others_have_started(job: Job) -> None:
    a = node(job, "a", "--join-settle", "60")
    a.says("hosts the run")
    b = node(job, "b")
    first = begun(job, 1)
    os.kill(first[1], signal.SIGKILL)
    assert begun(job, 2, workers=1) == {0: first[0]}
    new = starting(job)
    job.tell("come")
    assert begun(job, 3) == {0: first[0], 1: new}
    job.finish()
    assert (a.wait(), b.wait()) == (0, 0)


def test_a_round_that_lacks_nodes_is_formed_with_those_whose_workers_have_not_come(job: Job) -> None:
    a = node(job, "a", nnodes="2")
    a.says("hosts the run")
    b = node(job, "b", nnodes="2")
    first = begun(job, 1)
    os.kill(first[1], signal.SIGKILL)
    b.says("round 2 formed")
    new = starting(job)
    job.tell("come")
    assert begun(job, 2) == {0: first[0], 1: new}
    job.finish()
    assert (a.wait(), b.wait()) == (0, 0)


def test_workers_ahead_outlive_the_loss_of_the_leader(job: Job) -> None:
    a = node(job, "a", "--join-settle", "0.2")
    begun(job, 1, workers=1)
    b = node(job, "b")
    new = starting(job)
    a.kill()
    b.says("parked")
    node(job, "a", "--join-settle", "60")
    assert alive(new)
    job.tell("come")
    assert begun(job, 1, workers=3)[1] == new, "the next leader begins with round 1"
    job.finish()
    assert [agent.wait() for agent in job.agents[1:]] == [0, 0]

"""Workers that hang are found, named and killed; those that only take long are left alone.

Most of these runs wait most of the time, so they run side by side.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hanging_runs import Hanging
from harness import Agent, Job, job_in, read_lines, wait_for

pytestmark = pytest.mark.slow

PLAIN = """
import os, time, torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(3600)
dist.barrier()
dist.destroy_process_group()
"""

STOPPED = """
import os, signal, torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGSTOP)
dist.barrier()
dist.destroy_process_group()
"""

LEFT = """
import os, threading, time, torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    threading.Thread(target=time.sleep, args=(3600,)).start()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def new_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Job]]:
    """Makes jobs that end with this file."""
    with ExitStack() as jobs:
        yield lambda: jobs.enter_context(contextmanager(job_in)(tmp_path_factory.mktemp("job")))


@pytest.fixture(scope="module")
def hung(new_job: Callable[[], Job]) -> dict[str, Hanging]:
    """Runs of which a rank hangs in its tenth step, and three of plain scripts."""
    flags = {"sleep": [], "skip": ["--meet"], "deadlock": [], "again": [], "again, exchange": ["--meet"]}
    runs = {name: Hanging(new_job(), "--steps", "60", *own) for name, own in flags.items()}
    runs["sleep"].hangs("sleep", 0)
    runs["sleep"].alone("--no-live", "--no-warm", nproc=2)
    runs["skip"].hangs("skip", 2)
    runs["skip"].alone()
    runs["deadlock"].hangs("deadlock", 3)
    for name, kind, rank in (("again", "sleep", 1), ("again, exchange", "skip", 2)):
        runs[name].hangs(kind, rank, "twice")
        runs[name].alone("--no-live")
    job, command = runs["deadlock"].job, runs["deadlock"].command
    job.node("a", "--rdzv-conf", "is_host=true", nnodes="2", nproc=2, command=command)
    job.node("b", "--rdzv-conf", "is_host=false", "--node-rank", "1", nnodes="2", nproc=2, command=command)
    job = new_job()
    script = job.work / "stopped.py"
    script.write_text(STOPPED)
    for node, host in (("a", "true"), ("b", "false")):
        rank = str(int(node == "b"))
        job.node(
            node, "--rdzv-conf", f"is_host={host}", "--node-rank", rank, nnodes="2", nproc=1, command=[str(script)]
        )
    runs["stopped"] = Hanging(job)
    for name, text in (("plain", PLAIN), ("left", LEFT)):
        job = new_job()
        script = job.work / f"{name}.py"
        script.write_text(text)
        job.launch("--standalone", "--nproc", "2", "--hang-timeout", "6", command=[str(script)])
        runs[name] = Hanging(job)
    return runs


@pytest.fixture(scope="module")
def unread(new_job: Callable[[], Job]) -> dict[int, Hanging]:
    """Runs whose rank 1 gets no first batch, by the processes of its loader."""
    runs = {processes: Hanging(new_job(), "--loader-workers", str(processes)) for processes in (0, 1)}
    for processes, run in runs.items():
        # What ranks compare is read first, by another process if there are any, which ends when it takes long.
        run.job.tell("hang", f"loader 1 0 {'twice' if processes else ''}")
        run.alone(nproc=2)
    return runs


@pytest.fixture(scope="module")
def quiet(new_job: Callable[[], Job]) -> dict[str, Hanging]:
    """Runs of two ranks in which no hang is to be found."""
    flags = {"frozen": [], "off": [], "slow": ["--slow", "--steps", "80"], "evaluate": ["--evaluate", "--steps", "40"]}
    runs = {name: Hanging(new_job(), *own) for name, own in flags.items()}
    runs["off"].hangs("stop", 1)
    for name, run in runs.items():
        run.alone(*(["--hang-timeout", "off"] if name == "off" else []), nproc=2)
    return runs


def agent_of(run: Hanging) -> Agent:
    return run.job.agents[0]


@pytest.mark.usefixtures("hung", "unread")
@pytest.mark.parametrize(
    "kind", ["stop", *(pytest.param(x, marks=pytest.mark.soak) for x in ("deadlock", "sleep", "write", "loader"))]
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
    stopped = where["state"] == "stopped"
    assert stopped if kind == "stop" else re.search(rf"hanging.py:\d+ in {kind}", where["frame"])
    second = {*run.pids(run.trains(3, after=1)).values()}
    assert second & {*first.values()} == {first[0], first[2]}, agent.output
    (stacks,) = job.logged("round_1/stacks-*.txt")
    assert all(f"rank {rank} (pid {first[rank]})" in stacks.read_text() for rank in range(3))
    assert job.event("restart_charged")["kind"] == "hang"
    assert f"round 1 broken after {job.events('round_broken')[0]['lasted_s']:.1f} s: rank 1 on node " in agent.output


@pytest.mark.usefixtures("hung", "unread")
@pytest.mark.parametrize("kind", ["stop", "sleep"])
def test_a_rank_that_hangs_right_before_a_node_joins_is_found(job: Job, kind: str) -> None:
    """The drain for it has no limit, and would last for ever. The node waits, so that it joins at once when it may."""
    run = Hanging(job)
    options = {"nnodes": "1:2", "command": run.command}
    for node, host in (("a", "true"), ("b", "false")):
        job.node(node, "--join-settle", "100", "--rdzv-conf", f"is_host={host}", **options)
    run.trains(2)
    job.node("c", "--rdzv-conf", "is_host=false", **options)
    wait_for("the spare", lambda: len(job.events("node_joined")) == 3, 60)
    run.hangs(kind, 1)
    wait_for("the hang", (job.work / "hang.taken").exists)
    resize = [sys.executable, "-m", "elastic_launch.cli.elasticctl", "resize", "--log-dir", str(job.logs), "1:3"]
    resized = subprocess.run(resize, capture_output=True, text=True, timeout=180)
    assert resized.returncode == 0, resized.stdout + resized.stderr
    event = run.found()
    assert (event["round"], event["ranks"]) == (1, [1]), agent_of(run).output
    assert event["places"][0]["state"] == ("stopped" if kind == "stop" else "code")
    assert [(drain["round"], drain["seconds"]) for drain in job.events("round_draining")] == [(1, None)]
    run.trains(3, after=1)
    assert job.event("restart_charged")["kind"] == "hang"


@pytest.mark.parametrize("name", ["again", "again, exchange"])
def test_a_second_hang_at_the_same_place_is_found_in_a_first_step(hung: dict[str, Hanging], name: str) -> None:
    """All that is known of the time of a new process' first step is that it does nothing meanwhile."""
    run = hung[name]
    wait_for("two verdicts", lambda: len(run.job.events("hang_found")) == 2, 90)
    first, second = run.job.events("hang_found")
    assert (second["ranks"], second["places"]) == (first["ranks"], first["places"]), agent_of(run).output
    assert second["round"] == first["round"] + 1
    assert [x["step"] for x in read_lines(run.job.work / "steps.jsonl") if x["round"] == second["round"]] == []
    run.trains(3, after=second["round"])
    broken = {event["round"]: event["lasted_s"] for event in run.job.events("round_broken")}
    assert broken[second["round"]] < broken[first["round"]] + 40


def test_a_stopped_worker_of_a_plain_script_is_found_by_default(hung: dict[str, Hanging]) -> None:
    """The other node's worker waits for it, and is not watched."""
    run = hung["stopped"]
    event = run.found()
    assert (event["ranks"], event["nodes"]) == ([1], ["b"]), agent_of(run).output
    assert event["places"][0]["state"] == "stopped"
    for agent in run.job.agents:
        assert agent.wait(100) == 0, agent.output


def test_without_live_rounds_all_are_started_again(hung: dict[str, Hanging]) -> None:
    run = hung["sleep"]
    event = run.found()
    assert (event["ranks"], len(event["places"])) == ([0], 1), agent_of(run).output
    assert re.fullmatch(r"hanging.py:\d+ in sleep", event["places"][0]["frame"])
    assert not {*run.pids(1).values()} & {*run.pids(run.trains(2, after=1)).values()}


def test_a_rank_that_leaves_an_exchange_out_is_named(hung: dict[str, Hanging]) -> None:
    run = hung["skip"]
    event = run.found()
    assert event["ranks"] == [2], agent_of(run).output
    waits = r"ranks 0, 1 waiting for other ranks in all_reduce of Float\[1\] at hanging.py:\d+ in meet; "
    assert re.search(waits, event["cause"])
    met = {"what": "all_reduce of Float[1]", "number": 10, "group": "1", "there": [0, 1], "behind": [2], "instead": []}
    assert met in event["collectives"]
    run.trains(3, after=1)


def test_a_rank_on_another_node_is_named_with_its_node(hung: dict[str, Hanging]) -> None:
    run = hung["deadlock"]
    event = run.found()
    assert (event["ranks"], event["nodes"]) == ([3], ["b"])
    first, second = run.pids(1), {*run.pids(run.trains(4, after=1)).values()}
    assert second & {*first.values()} == {first[0], first[1], first[2]}


def test_a_plain_script_is_watched_by_what_it_does_if_asked(hung: dict[str, Hanging]) -> None:
    agent = agent_of(hung["plain"])
    assert agent.wait(100) == 0, agent.output
    (event,) = hung["plain"].job.events("hang_found")
    place = {"state": "code", "frame": "plain.py:5 in <module>", "collective": ""}
    assert (event["ranks"], event["places"]) == ([1], [place])


def test_a_thread_that_outlives_the_script_on_one_rank_is_found_if_asked(hung: dict[str, Hanging]) -> None:
    agent = agent_of(hung["left"])
    assert agent.wait(100) == 0, agent.output
    (event,) = hung["left"].job.events("hang_found")
    assert event["ranks"] == [1]
    assert "hangs in the end of its script" in agent.output
    (stacks,) = hung["left"].job.logs.rglob("stacks-*.txt")
    assert ", in _shutdown" in stacks.read_text()


def test_a_node_that_was_frozen_with_its_workers_goes_on(quiet: dict[str, Hanging]) -> None:
    """Its agent has not seen the time pass either."""
    run, agent = quiet["frozen"], agent_of(quiet["frozen"])
    run.trains(2)
    frozen = agent.freeze()
    try:
        wait_for("time to pass", lambda: False, 14 / 3)
    except AssertionError:
        agent.thaw(frozen)
    thawed = len(run.steps(1))
    wait_for("further steps", lambda: len(run.steps(1)) > thawed + 50)
    agent.signal(signal.SIGTERM)
    assert agent.wait(100) == 143, agent.output
    assert run.job.events("hang_found") == []
    assert {event["round"] for event in run.job.events("round_formed")} == {1}


@pytest.mark.parametrize("processes", [0, 1])
def test_a_first_batch_that_does_not_come_is_said_after_a_minute(unread: dict[int, Hanging], processes: int) -> None:
    run, agent = unread[processes], agent_of(unread[processes])
    wait_for("a line", lambda: "waits for data" in agent.output, 90)
    line = next(line for line in agent.output.splitlines() if "waits for data" in line)
    where = r"rank 1 has done no step \d+ s after round 1 began, .*; it stands at hanging.py:\d+ in loader"
    assert re.search(where + ("; processes of its loader: 1$" if processes else "$"), line), agent.output
    assert run.job.events("hang_found") == []
    agent.signal(signal.SIGTERM)


def test_nothing_is_watched_if_it_is_turned_off(quiet: dict[str, Hanging]) -> None:
    run = quiet["off"]
    wait_for("the hang", lambda: (run.job.work / "hang.taken").exists(), 60)
    with pytest.raises(AssertionError, match="a verdict"):
        wait_for("a verdict", lambda: run.job.events("hang_found"), 16 / 3)
    assert "hangs" not in agent_of(run).output


def test_an_evaluation_may_take_long(quiet: dict[str, Hanging]) -> None:
    run, agent = quiet["evaluate"], agent_of(quiet["evaluate"])
    assert agent.wait(200) == 0, agent.output
    assert run.job.events("hang_found") == []
    assert run.job.events("restart_charged") == []
    assert {each["what"] for each in read_lines(run.job.work / "slow.jsonl")} == {"evaluation"}


def test_what_only_takes_long_is_no_hang(quiet: dict[str, Hanging]) -> None:
    """Announced pauses of one rank, hooks before a save, a rank that computes, and steps of different length."""
    run, agent = quiet["slow"], agent_of(quiet["slow"])
    assert agent.wait(200) == 0, agent.output
    assert run.job.events("hang_found") == []
    assert len(run.steps(1)) == 80

"""elasticctl against real agents, links and workers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import cluster, endpoints
from harness import SCRIPTS, SLOWNESS, Agent, Job, free_port, wait_for

from elastic_launch.config.endpoints import parse_endpoint
from elastic_launch.rendezvous.admin.messages import Caller
from elastic_launch.rendezvous.run_file import RunAddress, RunFile
from elastic_launch.rendezvous.wire import messages as m

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits" / "train.py")
TOKEN = "correct-horse-battery-staple"


def ctl(*arguments: str, timeout: float = 180.0, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastic_launch.cli.elasticctl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})})


def told(job: Job, *arguments: str) -> str:
    """The output of a command that must succeed."""
    command, *rest = arguments
    done = ctl(command, "--log-dir", str(job.logs), *rest)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def status(job: Job) -> dict[str, Any]:
    return dict(json.loads(told(job, "status", "--json")))


def digits(job: Job, *options: str) -> list[str]:
    """A training that saves only at the end by default, and is slow until :func:`hurry`."""
    saving = ["--checkpoint", str(job.directory / "checkpoints"), "--every", "100000"]
    paced = [str(SCRIPTS / "paced.py"), str(job.directory / "hurry"), DIGITS]
    return [*paced, "--exact", "--step-time", "0.4", *saving, "--result", str(job.directory / "result.json"), *options]


def hurry(job: Job) -> None:
    (job.directory / "hurry").touch()


def result_of(job: Job) -> dict[str, Any]:
    return dict(json.loads((job.directory / "result.json").read_text()))


def trains(job: Job, world_size: int) -> None:
    """Wait until the newest round, of that world size, has done steps."""

    def probe() -> bool:
        formed = job.events("round_formed")
        if not formed or formed[-1]["world_size"] != world_size:
            return False
        return formed[-1]["round"] in {event["round"] for event in job.events("first_step")}

    wait_for(f"steps of a round of world size {world_size}", probe, 60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkpoint_a_resize_and_a_drain_of_a_node_cost_no_step(job: Job) -> None:
    # Long enough for a resize to pay.
    command = digits(job, "--epochs", "12", "--step-time", "0.8")
    nodes = [job.node(name, "--join-settle", "100", nnodes="1:2", command=command) for name in "abc"]
    trains(job, 2)
    wait_for("the spare", lambda: len(job.events("node_joined")) == 3)

    text = told(job, "checkpoint")
    (written,) = (job.directory / "checkpoints").glob("step-*")
    assert text == f"checkpoint of step {written.name.split('-')[1].split('.')[0]} written"
    seen = status(job)
    assert sorted(node["state"] for node in seen["nodes"]) == ["spare", "training", "training"]
    assert (seen["world_size"], seen["max_nodes"], seen["restarts"]) == (2, 2, 0)
    assert f"checkpoint of step {seen['checkpoint']['step']} written" == text
    assert seen["step"] >= seen["checkpoint"]["step"]
    wait_for("a snapshot", lambda: status(job)["snapshot"])

    assert "world size 3 on 3 nodes" in told(job, "resize", "1:3")
    trains(job, 3)
    assert "world size 2 on 2 nodes" in told(job, "resize", "1:2")
    last = job.events("round_formed")[-1]["nodes"]
    (spare,) = {"a", "b", "c"} - set(last)
    trains(job, 2)
    goes = next(node for node in last if node != seen["leader"])
    text = told(job, "drain", goes)
    assert re.match(rf"node {goes} left: it was drained after step \d+; ", text)
    assert nodes["abc".index(goes)].wait(30) == 143
    wait_for("the spare's round", lambda: spare in job.events("round_formed")[-1]["nodes"])

    hurry(job)
    others = [node for node in nodes if node.name != goes]
    assert [node.wait(60) for node in others] == [0, 0]
    assert job.events("round_broken") == []
    drained = job.events("round_drained")
    assert len(drained) == 3
    assert result_of(job)["resumed_step"] == drained[-1]["step"]
    assert result_of(job)["worlds"] == [2, 3, 2, 2]


@pytest.mark.slow
def test_a_run_that_is_drained_exits_with_143_everywhere_and_resumes_at_its_step(job: Job) -> None:
    nodes = [job.node(name, command=digits(job)) for name in "ab"]
    trains(job, 2)
    text = told(job, "drain")
    found = re.fullmatch(
        r"the run has ended with 143: stopped by elasticctl drain after step (\d+), its state saved", text
    )
    assert found, text
    assert [node.wait(30) for node in nodes] == [143, 143]
    assert all("its state saved" in node.output for node in nodes)
    over = ctl("status", "--log-dir", str(job.logs))
    assert over.returncode == 1
    assert "has ended with exit code 143: stopped by elasticctl drain" in over.stderr

    hurry(job)
    resumed = job.launch("--standalone", command=digits(job), name="resumed")
    assert resumed.wait(100) == 0, resumed.output
    assert result_of(job)["resumed_step"] == int(found[1])


@pytest.mark.slow
def test_plain_scripts_have_a_status_and_neither_checkpoint_nor_drain(job: Job) -> None:
    first = job.node("a", "--rdzv-id", "plain")
    job.world(1)
    shown = told(job, "status")
    assert "run plain at c10d" in shown
    assert re.search(r"^a +127\.0\.0\.1 +1  training ", shown, re.MULTILINE)
    assert "no step reported" in shown

    where = ["--log-dir", str(job.logs)]
    saved = ctl("checkpoint", *where)
    assert (saved.returncode, "cannot be asked" in saved.stdout) == (1, True)
    other = ctl("status", "--rdzv-endpoint", f"127.0.0.1:{job.port}", "--rdzv-id", "other")
    assert (other.returncode, "this leader leads another run, not 'other'" in other.stderr) == (95, True)
    hosts = ctl("drain", "a", *where)
    assert (hosts.returncode, "hosts the run" in hosts.stderr) == (2, True)
    stopped = ctl("drain", *where)
    assert (stopped.returncode, "the round was broken" in stopped.stdout) == (1, True)
    assert first.wait(30) == 143


def test_a_run_with_a_token_answers_only_callers_that_have_it(job: Job) -> None:
    agent = job.launch("--standalone", "--rdzv-id", "kept", env={"ELASTIC_LAUNCH_TOKEN": TOKEN})
    job.world(1)
    where = ["--log-dir", str(job.logs)]
    assert "run kept at" in ctl("status", *where, env={"ELASTIC_LAUNCH_TOKEN": TOKEN}).stdout
    for env, message in [({}, "the token is missing"), ({"ELASTIC_LAUNCH_TOKEN": TOKEN[::-1]}, "The token differs")]:
        refused = ctl("drain", *where, env=env)
        assert refused.returncode == 95
        assert message in refused.stderr
    assert TOKEN not in "".join(path.read_text() for path in job.logs.rglob("run.json"))
    job.finish()
    assert agent.wait(60) == 0


def test_a_run_of_one_node_obeys_its_user_alone(job: Job) -> None:
    """Its port is open to all users of the host: if no token is given, it makes one that none of them can read."""
    agent = job.launch("--standalone")
    job.world(1)
    (path,) = job.logged("run.json")
    found = wait_for("the leader's address", lambda: (read := json.loads(path.read_text()))["leader"] and read)
    assert path.with_name("token").stat().st_mode & 0o777 == 0o600
    where = parse_endpoint(found["leader"])
    for run_id in ("?", found["run_id"]):
        with socket.create_connection((where.host, where.port), timeout=20) as stranger:
            stranger.sendall(m.pack(Caller(m.PROTOCOL_VERSION, run_id)))
            answer = stranger.makefile("rb").readline()
        assert b"the token is missing" in answer
        assert found["run_id"].encode() not in answer
    assert f"run {found['run_id']} at" in told(job, "status")
    assert ctl("drain", "--log-dir", str(job.logs)).returncode == 1  # broken, since this script saves nothing
    assert agent.wait(60) == 143
    assert not path.with_name("token").exists()


@pytest.mark.parametrize("told", [True, False], ids=["told by the leader", "found in the file"])
def test_watching_ends_with_the_run(job: Job, told: bool) -> None:
    """The leader's answer may be lost with its link."""
    agent = job.launch("--standalone", "--rdzv-id", "seen")
    job.world(1)
    command = [
        sys.executable,
        "-m",
        "elastic_launch.cli.elasticctl",
        "status",
        "--watch",
        "--json",
        "--log-dir",
        str(job.logs),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        try:
            assert watcher.stdout is not None
            seen = [json.loads(watcher.stdout.readline()) for _ in range(2)]
            assert {status["run_id"] for status in seen} == {"seen"}
            if told:
                job.finish()
                assert agent.wait(60) == 0
            else:
                (path,) = job.logged("run.json")
                file = RunFile(path.parent)
                file.write(RunAddress(**json.loads(path.read_text())))
                file.end(0, "finished")
                agent.kill()
            *_, last = watcher.communicate(timeout=30 * SLOWNESS)[0].splitlines()
        finally:
            watcher.kill()
    assert json.loads(last)["ended"] == 0
    assert watcher.returncode == 0


@pytest.mark.slow
def test_the_only_live_run_in_the_state_directory_is_the_one_that_is_meant(job: Job) -> None:
    env = {"XDG_STATE_HOME": str(job.directory / "state")}

    def launch(name: str) -> Agent:
        command = [str(SCRIPTS / "loop.py"), str(job.work)]
        agent = Agent(["--standalone", "--rdzv-id", name, *command], job.directory, name, env)
        job.agents.append(agent)
        wait_for(f"the run file of {name}", lambda: list((job.directory / "state").glob(f"*/*/{name}/run.json")))
        return agent

    nothing = ctl("status", env=env)
    assert (nothing.returncode, "There is no run in" in nothing.stderr) == (95, True)
    gone = launch("one")
    gone.signal(signal.SIGTERM)
    assert gone.wait(30) == 143
    ended = ctl("status", env=env)
    assert ended.returncode == 95
    assert "the last one, one, ended with exit code 143: stopped by SIGTERM" in ended.stderr
    assert "add --rdzv-id one;" in ended.stderr
    assert "143: stopped by SIGTERM" in ctl("report", "--rdzv-id", "one", env=env).stdout
    launch("two")
    assert "run two at" in ctl("status", env=env).stdout
    third = launch("three")
    several = ctl("status", env=env)
    assert several.returncode == 2
    assert "There are 2 runs" in several.stderr
    assert "run three at" in ctl("status", "--rdzv-id", "three", env=env).stdout
    third.kill()
    assert "run two at" in ctl("status", env=env).stdout


def test_several_runs_that_have_ended_are_not_shown_as_live_ones(tmp_path: Path) -> None:
    for name in ("one", "two"):
        file = RunFile(tmp_path / name)
        file.write(RunAddress(name, "c10d", "127.0.0.1:29400", "a"))
        file.end(0, "finished")
    asked = ctl("status", "--log-dir", str(tmp_path))
    assert asked.returncode == 2
    assert f"There are 2 runs in {tmp_path}, none with an agent alive on this host: " in asked.stderr


def test_where_nothing_listens_the_endpoint_is_named() -> None:
    port = free_port()
    done = ctl("status", "--rdzv-endpoint", f"127.0.0.1:{port}")
    assert done.returncode == 95
    assert f"Nothing answers at the rendezvous endpoint 127.0.0.1:{port}" in done.stderr


@pytest.mark.slow
def test_the_leader_on_etcd_can_be_drained_and_an_ended_run_tells_its_end(job: Job, tmp_path: Path) -> None:
    directory = tmp_path / "etcd"
    directory.mkdir()
    with cluster(directory) as members:
        where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", endpoints(members), "--rdzv-id", "run"]
        command = digits(job)

        def node(name: str, rank: str) -> Agent:
            flags = ["--nnodes", "1:2", "--join-settle", "100", "--node-id", name, "--node-rank", rank, *where]
            return job.launch(*flags, name=name, command=command)

        nodes = {"a": node("a", "0")}
        nodes["a"].says("leads the run")  # it has the state to save: of the leaving nodes, the first one saves
        nodes["b"] = node("b", "1")
        trains(job, 2)
        leader = json.loads(ctl("status", "--json", *where).stdout)["leader"]
        done = ctl("drain", leader, *where)
        assert done.returncode == 0, done
        found = re.search(r"it was drained after step (\d+); ", done.stdout)
        assert found, done
        assert nodes.pop(leader).wait(30) == 143
        assert list((job.directory / "checkpoints").glob(f"step-{found[1]}.*"))
        trains(job, 1)
        (left,) = nodes
        assert json.loads(ctl("status", "--json", *where).stdout)["leader"] == left
        assert "may have 2:3 nodes" in ctl("resize", "2:3", *where).stdout
        assert ctl("drain", *where).returncode == 0
        assert nodes[left].wait(30) == 143
        over = ctl("status", *where)
        assert (over.returncode, "exit code 143: stopped by elasticctl drain" in over.stderr) == (1, True)
        missing = ctl("status", *where[:-1], "another")
        assert (missing.returncode, "There is no run 'another'" in missing.stderr) == (95, True)


@pytest.mark.slow
def test_stacks_logs_and_the_pace_of_a_run(job: Job) -> None:
    nodes = [job.node(name, nnodes="2", command=digits(job)) for name in "ab"]
    trains(job, 2)
    # The time left is known after a few steps.
    seen = wait_for("the time left", lambda: (found := status(job))["remaining"] is not None and found, 60)
    assert seen["remaining"] > 0
    assert seen["step_s"] > 0.2
    assert seen["loss"] is not None
    assert " steps/s, about " in told(job, "status")
    stacks = told(job, "stacks")
    assert re.findall(r"^rank (\d) \(pid \d+\): \w+$", stacks, re.MULTILINE) in (["0", "1"], ["1", "0"])
    assert stacks.count("paced.py") >= 2
    assert stacks.endswith("these are all workers of round 1")
    wait_for("the log of rank 0", lambda: "step 1 loss" in told(job, "logs", "0"))
    hurry(job)
    done = ctl("logs", "0", "--log-dir", str(job.logs), "--follow")
    assert "weights_sha256" in done.stdout
    assert [node.wait(60) for node in nodes] == [0, 0]


def test_an_endpoint_at_which_nothing_answers_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        done = ctl("status", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "r")
    assert done.returncode == 95
    assert re.search(rf"leader at 127\.0\.0\.1:{port} was silent for [34]\.\d s", done.stderr)


@pytest.mark.slow
def test_output_and_events_are_followed_through_the_kill_of_a_worker(job: Job) -> None:
    nodes = [job.node(name, nnodes="2", command=digits(job)) for name in "ab"]
    trains(job, 2)
    program = ["-m", "elastic_launch.cli.elasticctl"]
    where = ["--log-dir", str(job.logs), "--follow"]
    logs = job.program([*program, "logs", "0", *where], "logs")
    events = job.program([*program, "events", *where], "events")
    logs.says("step 1 loss")
    events.says("first_step: ")
    (victim,) = (event for event in job.events("worker_started") if event["rank"] == 0 and event["round"] == 1)
    os.kill(victim["pid"], signal.SIGKILL)
    logs.says("elasticctl: rank 0 is another worker in round 2", timeout=60)
    logs.says(f"rank 0 of round 1 (pid {victim['pid']}) ended by signal 9; its output is in ")
    events.says("round_formed: round 2", timeout=60)
    hurry(job)
    assert [node.wait(60) for node in nodes] == [0, 0]
    assert (logs.wait(30), events.wait(30)) == (0, 0)
    shown = logs.output
    assert "step 1 loss" in shown.split("is another worker in round 2")[0]
    assert "loss" in shown.split("is another worker in round 2")[1]
    text = events.output
    assert text.index("worker_exited") < text.index("round_formed: round 2") < text.index("run_ended")
    said = ctl("logs", "0", *where[:2]).stderr
    (place,) = re.findall(r"its output is in (\S+)", said)
    assert (Path(place) / "stdout.log").is_file()


LAST_WORK = """
import os, time
from pathlib import Path
import torch
import elastic_launch as el

with el.session() as run:
    model = torch.nn.Linear(4, 1)
    loader = el.ElasticLoader(torch.ones(64, 4), el.GlobalBatch(8, micro=2))
    for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), lr=0.01), until="2ba"):
        for x in step:
            step.backward(model(x).mean())
        step.update()
        with open("steps", "a") as file:
            file.write(f"{os.environ['NAME']} {step.number}\\n")
if os.environ["NAME"] == "a":
    while not Path("end").exists():
        time.sleep(0.05)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["is lost", "leaves"])
def test_no_node_trains_again_when_one_that_has_finished_goes(job: Job, how: signal.Signals) -> None:
    (job.work / "last.py").write_text(LAST_WORK)
    command = [str(job.work / "last.py")]
    nodes = (job.node(name, nnodes="3", command=command, cwd=job.work, env={"NAME": name}) for name in "abc")
    a = next(nodes)
    a.says("node a joined", 60)
    b, c = nodes
    wait_for("b and c", lambda: [node["doing"] == "done" for node in status(job)["nodes"]] == [False, True, True], 10)
    b.signal(how)
    b.wait(60)
    a.says("node b l", 60)
    (job.work / "end").touch()
    assert (a.wait(60), c.wait(60)) == (0, 0), a.output
    steps = (job.work / "steps").read_text().split("\n")[:-1]
    assert sorted(steps) == sorted(f"{name} {number}" for name in "abc" for number in (1, 2))
    assert len(job.events("round_formed")) == 1

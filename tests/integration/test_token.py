"""Runs with a token: real agents, on c10d and on a real etcd; clients without it are rejected and do no harm."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import cluster, endpoints
from harness import SCRIPTS, Agent, Job, free_port, tree, wait_for

from elastic_launch.config.endpoints import Endpoint
from elastic_launch.rendezvous.stores.static_store import NotAStoreError, connect_store
from elastic_launch.secret import ENV_TOKEN

TOKEN = "correct-horse-battery-staple"
OTHER = "another-token-of-some-length"

Node = Callable[..., Agent]


@pytest.fixture(params=["c10d", pytest.param("etcd", marks=pytest.mark.soak)])
def node(request: pytest.FixtureRequest, job: Job, tmp_path: Path) -> Iterator[Node]:
    """Starts a node of the run; ``token`` goes into its environment."""

    def start(where: list[str], name: str, *flags: str, token: str | None = TOKEN, **options: Any) -> Agent:
        env = {} if token is None else {ENV_TOKEN: token}
        several = ["--nnodes", "1:4", "--rdzv-id", "run", "--node-id", name, *where, *flags]
        return job.launch(*several, name=name, env=env, **options)

    if request.param == "c10d":
        endpoint = f"127.0.0.1:{free_port()}"
        yield lambda *arguments, **options: start(["--rdzv-endpoint", endpoint], *arguments, **options)
        return
    directory = tmp_path / "etcd"
    directory.mkdir()
    with cluster(directory) as members:
        where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", endpoints(members)]
        yield lambda *arguments, **options: start(where, *arguments, **options)


@pytest.mark.slow
def test_two_nodes_with_the_token_train_on_while_others_are_sent_away(job: Job, node: Node, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    first = node("a")
    job.world(1)
    second = node("b", "--token-file", str(file), token=None)
    workers = job.world(2)
    strangers = [(node("c", token=OTHER), "The token differs"), (node("d", token=None), "he token is missing")]
    for stranger, message in strangers:
        assert stranger.wait(60) == 95
        assert message in stranger.output
        assert "ELASTIC_LAUNCH_TOKEN or --token-file" in stranger.output
        assert "Traceback" not in stranger.output
    last = int(workers[0]["env"]["ELASTIC_LAUNCH_ROUND"])
    job.finish()
    assert [first.wait(60), second.wait(60)] == [0, 0]
    assert max(event["round"] for event in job.events("round_formed")) == last
    assert {event["node"] for event in job.events("node_joined")} == {"a", "b"}
    assert not any(ENV_TOKEN in worker["env"] for worker in workers)
    left = [path for path in job.logs.rglob("*") if path.is_file()]
    assert not [path for path in left if TOKEN in path.read_text(errors="replace")]
    assert TOKEN not in first.output + second.output


@pytest.mark.slow
def test_a_node_with_a_token_is_sent_away_from_a_run_without(job: Job, node: Node) -> None:
    first = node("a", token=None)
    job.world(1)
    second = node("b")
    assert second.wait(60) == 95
    assert "This node has a token, " in second.output
    assert "run has none" in second.output.replace("run 'run'", "the run")
    job.finish()
    assert first.wait(60) == 0
    assert len(job.events("round_formed")) == 1


@pytest.mark.slow
def test_a_run_with_a_token_outlives_the_loss_of_a_worker_and_of_a_node(job: Job, node: Node) -> None:
    agents = [node(name) for name in "ab"]
    workers = job.world(2)
    os.kill(workers[1]["pid"], signal.SIGKILL)
    after = int(workers[0]["env"]["ELASTIC_LAUNCH_ROUND"])
    again = job.world(2, after=after)
    third = node("c")
    job.world(3, after=int(again[0]["env"]["ELASTIC_LAUNCH_ROUND"]))
    os.kill(third.process.pid, signal.SIGKILL)
    third.process.wait()
    job.world(2, after=int(again[0]["env"]["ELASTIC_LAUNCH_ROUND"]) + 1)
    job.finish()
    assert [agent.wait(60) for agent in agents] == [0, 0]


@pytest.mark.parametrize("node", ["etcd"], indirect=True)
def test_a_lost_leader_is_succeeded_under_the_token(job: Job, node: Node) -> None:
    agents = {name: node(name) for name in "ab"}
    before = int(job.world(2)[0]["env"]["ELASTIC_LAUNCH_ROUND"])
    leader = str(job.events("leader_elected")[-1]["node"])
    agents[leader].kill()
    job.world(1, after=before)
    first_term, term = (event["term"] for event in job.events("leader_elected"))
    assert term > first_term
    (survivor,) = (agent for name, agent in agents.items() if name != leader)
    job.finish()
    assert survivor.wait(60) == 0


def test_with_a_token_the_endpoint_is_not_an_open_store(job: Job) -> None:
    """Clients that reach its port can store nothing there, and the run has no second port for links."""
    flags = ["--rdzv-id", "run"]
    unused = {"ELASTIC_LAUNCH_ETCD_USER": "user", "ELASTIC_LAUNCH_ETCD_PASSWORD": "password"}
    first = job.node("a", *flags, env={ENV_TOKEN: TOKEN, **unused})
    (worker,) = job.world(1)
    assert not {ENV_TOKEN, *unused} & worker["env"].keys()
    with pytest.raises(NotAStoreError):
        connect_store(Endpoint("127.0.0.1", job.port), 2.0)
    with socket.create_connection(("127.0.0.1", job.port), timeout=30) as stranger:
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 1 << 24:
                sent += stranger.send(b"x" * 65536)
        assert sent < 1 << 24
    os.kill(worker["pid"], signal.SIGKILL)
    job.world(1, after=1)
    job.finish()
    assert first.wait(60) == 0


PLAIN = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"] if os.geteuid() == 0 else []
"""Starts a program without root's capabilities."""


def seen(pid: int, file: str) -> str:
    """What another process of the same user can read about a process."""
    command = [*PLAIN, "cat", f"/proc/{pid}/{file}"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    return done.stdout if done.returncode == 0 else done.stderr


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="needs setpriv")
@pytest.mark.parametrize("script", ["loop.py", "meeting.py"])
def test_other_processes_of_its_user_cannot_look_into_an_agent(job: Job, script: str) -> None:
    """Whether or not it begins as one process with the warm server; workers are as readable as any other program."""
    agent = job.launch(command=[str(SCRIPTS / script), str(job.work)], env={ENV_TOKEN: TOKEN}, prefix=PLAIN)
    wait_for("a worker", lambda: len(tree(agent.process.pid)) > 2)
    wait_for("the agent's start", lambda: "Permission denied" in seen(agent.process.pid, "environ"))
    for file in ("environ", "maps", "fd/0"):
        assert "Permission denied" in seen(agent.process.pid, file)
    job.world(1) if script == "loop.py" else wait_for("a worker", lambda: list(job.work.glob("met-*")))
    texts = [seen(pid, "environ") for pid in tree(agent.process.pid)[1:]]
    assert any("TORCHELASTIC_RUN_ID=" in text or "PATH=" in text for text in texts)
    assert not any("Permission denied" in text or TOKEN in text for text in texts)
    agent.signal(signal.SIGTERM)
    assert agent.wait(60) == 143


@pytest.mark.parametrize(
    ("flags", "env", "found"),
    [
        ([], {ENV_TOKEN: "short"}, "ELASTIC_LAUNCH_TOKEN holds a token of 5 characters"),
        (["--token-file", "/no/such/file"], {}, "--token-file /no/such/file cannot be read: No such file"),
        (["--token", TOKEN], {}, "--token is not a flag"),
    ],
)
def test_an_invalid_token_is_a_usage_error(job: Job, flags: list[str], env: dict[str, str], found: str) -> None:
    agent = job.launch(*flags, env=env)
    assert agent.wait() == 2
    assert found in agent.output
    assert not job.logs.exists()

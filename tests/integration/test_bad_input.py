"""Invalid input ends with one clear message, its exit code, and nothing left behind."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from harness import LOOP, STEPS, Job


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--no-such-flag", LOOP], "--no-such-flag"),
        (["--nnodes", "4:1", LOOP], "--nnodes 4:1"),
        (["--nproc", "0", LOOP], "--nproc 0"),
        (["there/is/none.py"], "there/is/none.py"),
    ],
)
def test_usage_errors_end_with_2_and_leave_nothing(job: Job, arguments: list[str], found: str) -> None:
    agent = job.launch(command=arguments)
    assert agent.wait() == 2
    assert found in agent.output
    assert "Traceback" not in agent.output
    assert not job.logs.exists()


def test_an_endpoint_that_does_not_resolve(job: Job) -> None:
    endpoint = ["--nnodes", "2", "--rdzv-endpoint", "no-such-host.invalid:29400", "--rdzv-conf", "join_timeout=1"]
    agent = job.launch(*endpoint)
    assert agent.wait() == 95
    assert "no-such-host.invalid:29400 does not resolve" in agent.output
    assert "Traceback" not in agent.output


def test_a_host_whose_own_address_is_not_its_own(job: Job) -> None:
    agent = job.launch("--standalone", "--local-addr", "192.0.2.1")
    assert agent.wait() == 95
    assert "--local-addr 192.0.2.1 is not one" in agent.output
    assert "Traceback" not in agent.output


@pytest.mark.parametrize("most", [12, 34, 50])
def test_a_limit_of_open_files_that_is_too_low(job: Job, most: int) -> None:
    agent = job.launch("--standalone", prefix=["sh", "-c", f'ulimit -n {most} && exec "$@"', "sh"])
    assert agent.wait() == 1
    assert f"This agent may open {most} files (ulimit -Hn)" in agent.output
    assert "Raise the limit of open files (ulimit -Hn)" in agent.output
    assert "Traceback" not in agent.output


@pytest.mark.parametrize("text", ["import json\n", "import torch\n"])
def test_a_limit_of_memory_that_is_too_low(job: Job, text: str) -> None:
    """The second script's torch is imported as the agent executes itself again."""
    script = job.work / "train.py"
    script.write_text(text)
    prefix = ["sh", "-c", 'ulimit -v 300000 && exec "$@"', "sh"]
    agent = job.launch("--standalone", command=[str(script)], prefix=prefix)
    assert agent.wait() == 1
    assert "failed to map segment from shared object" in agent.output
    assert "Raise the limit on memory (ulimit -v, which is 300000)" in agent.output
    assert "Traceback" not in agent.output


def test_an_endpoint_where_nothing_answers(job: Job) -> None:
    agent = job.node("a", "--rdzv-conf", "is_host=false,join_timeout=1")
    assert agent.wait() == 95
    assert f"Nothing answers at the rendezvous endpoint 127.0.0.1:{job.port}" in agent.output


def test_a_port_in_use_by_something_else(job: Job) -> None:
    with socket.create_server(("127.0.0.1", job.port)):
        agent = job.node("a", "--rdzv-conf", "join_timeout=8")
        agent.says("the port may be in use by another service, and this node tries for up to 8 s")
        assert agent.wait() == 95
    assert "If the port is in use by another service, choose another --rdzv-endpoint" in agent.output


@pytest.mark.parametrize(
    ("flags", "options", "found"),
    [
        ([], {"command": [STEPS]}, "with the command"),
        pytest.param(["--rdzv-id", "another"], {}, "belongs to run 'another'", marks=pytest.mark.slow),
    ],
)
def test_a_node_that_does_not_fit_is_refused_and_does_no_harm(
    job: Job, flags: list[str], options: dict[str, object], found: str
) -> None:
    host = job.node("a", "--rdzv-id", "run")
    job.world(1)
    stranger = job.node("b", "--rdzv-id", "run", *flags, **options)
    assert stranger.wait() == 95
    assert found in stranger.output
    assert json.loads((job.logs / "run" / "run.json").read_text())["node_id"] == "a"
    assert "Traceback" not in stranger.output
    job.finish()
    assert host.wait() == 0
    assert len(job.events("round_formed")) == 1


def test_another_protocol_version_is_refused(job: Job) -> None:
    host = job.node("a", "--rdzv-id", "run")
    job.world(1)
    hello = {"type": "nodehello", "version": 99, "run_id": "run", "digest": "x", "command": "c", "limits": "l"}
    hello |= {"node_id": "n", "incarnation": "i", "workers": 1, "address": "127.0.0.1", "store_port": 1}
    with socket.create_connection(("127.0.0.1", job.port), timeout=10) as link:
        link.sendall(json.dumps(hello).encode() + b"\n")
        answer = json.loads(link.makefile().readline())
    assert answer["type"] == "refused"
    assert "version 99" in answer["reason"]
    job.finish()
    assert host.wait() == 0


def test_garbage_on_the_links_port_does_no_harm(job: Job) -> None:
    host = job.node("a", "--rdzv-id", "run")
    job.world(1)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95" * 100 + b"\n", b'{"type":"nodehello"}\n', b"[1]\n"):
        with socket.create_connection(("127.0.0.1", job.port), timeout=10) as link:
            link.sendall(garbage)
            link.settimeout(20)
            assert link.recv(100) == b""
    job.finish()
    assert host.wait() == 0


def test_an_event_log_that_cannot_be_written_does_not_stop_the_run(job: Job, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, not a directory")
    agent = job.launch("--standalone", "--log-dir", str(blocked))
    assert agent.wait() == 2
    assert "--log-dir" in agent.output


def test_an_agent_that_may_open_too_few_files_ends_with_the_remedy(job: Job) -> None:
    agent = job.launch("--standalone", prefix=("sh", "-c", 'ulimit -n 16; exec "$@"', "sh"))
    assert agent.wait() == 1
    assert "Raise the limit of open files" in agent.output
    assert "Traceback" not in agent.output

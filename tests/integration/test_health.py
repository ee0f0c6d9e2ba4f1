"""Probes of real agents: one that waits is alive, one that trains is ready."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest
from harness import Job, free_port, wait_for

from elastic_launch.config.launch_config import Command, LaunchConfig
from elastic_launch.errors import UsageError


def asked(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def test_a_node_that_waits_is_alive_and_one_that_trains_is_ready(job: Job) -> None:
    port = free_port()
    waits = job.node("a", "--health-port", str(port), nnodes="2", env={"ELASTIC_LAUNCH_TERMINATION_LOG": "/dev/null"})
    waits.says("hosts the run")
    assert (asked(port, "/livez"), asked(port, "/readyz")) == (200, 503)
    comes = job.node("b", nnodes="2")
    job.world(2)
    wait_for("readiness", lambda: asked(port, "/readyz") == 200)
    job.finish()
    assert (waits.wait(), comes.wait()) == (0, 0)
    assert asked(port, "/livez") == 0


def test_a_port_for_probes_that_is_taken_ends_the_agent_before_it_begins(job: Job) -> None:
    with socket.create_server(("127.0.0.1", job.port)):
        agent = job.launch("--standalone", "--health-port", f"127.0.0.1:{job.port}")
        assert agent.wait() == 95
    assert f"--health-port 127.0.0.1:{job.port}: this node cannot listen there: Address already in use" in agent.output


def test_an_invalid_port_for_probes_is_refused() -> None:
    with pytest.raises(UsageError, match="--health-port 70000 is not a port"):
        LaunchConfig(Command((), ()), health_port=70000)

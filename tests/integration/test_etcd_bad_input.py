"""Unusable etcd setups: each ends with 95 and a message that says what to do, or recovers once it is repaired."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import Member, cluster
from harness import Agent, Job, wait_for

SMALL = ("--quota-backend-bytes", "400000")


def launch(job: Job, address: str, *flags: str, name: str = "a", **options: Any) -> Agent:
    where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", address, "--rdzv-id", "run", "--node-id", name]
    return job.launch(*where, "--nnodes", "1:2", *flags, name=name, **options)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Member]:
    (tmp_path / "etcd").mkdir()
    with cluster(tmp_path / "etcd", 1, SMALL) as members:
        yield members[0]


class _Version2(http.server.BaseHTTPRequestHandler):
    """Answers like an etcd that is older than its v3 API."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"etcdserver":"2.3.8","etcdcluster":"2.3.0"}')

    def log_message(self, *_: Any) -> None:
        return


def test_another_server_or_an_old_etcd_is_reported(job: Job) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Version2) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            agent = launch(job, f"127.0.0.1:{server.server_port}", "--rdzv-conf", "join_timeout=1")
            assert agent.wait() == 95
        finally:
            server.shutdown()
            thread.join()
    assert "does not speak etcd's v3 API" in agent.output
    assert "etcd 3.4 or later" in agent.output
    assert "Traceback" not in agent.output


@pytest.mark.slow
def test_a_user_that_etcd_refuses_is_reported_at_once(job: Job, etcd: Member) -> None:
    etcd.control("user", "add", "root", "--new-user-password", "secret")
    etcd.control("user", "grant-role", "root", "root")
    etcd.control("auth", "enable")
    nobody = launch(job, etcd.address)
    wrong = launch(job, etcd.address, env={"ELASTIC_LAUNCH_ETCD_USER": "root", "ELASTIC_LAUNCH_ETCD_PASSWORD": "guess"})
    assert nobody.wait() == 95
    assert "asks for a user and a password" in nobody.output
    assert "Set ELASTIC_LAUNCH_ETCD_USER and ELASTIC_LAUNCH_ETCD_PASSWORD" in nobody.output
    assert wrong.wait() == 95
    assert "refuses the user or the password" in wrong.output
    assert "guess" not in wrong.output
    right = launch(
        job, etcd.address, env={"ELASTIC_LAUNCH_ETCD_USER": "root", "ELASTIC_LAUNCH_ETCD_PASSWORD": "secret"}
    )
    job.world(1)
    job.finish()
    assert right.wait() == 0


@pytest.mark.slow
def test_an_etcd_that_is_full_at_the_start_is_reported(job: Job, etcd: Member) -> None:
    etcd.fill()
    agent = launch(job, etcd.address, "--rdzv-conf", "join_timeout=1")
    assert agent.wait() == 95
    assert "out of space" in agent.output
    assert "etcdctl alarm disarm" in agent.output


@pytest.mark.slow
def test_a_run_trains_through_an_etcd_that_is_full_and_waits_only_to_form_a_round(job: Job, etcd: Member) -> None:
    agents = {name: launch(job, etcd.address, name=name) for name in "ab"}
    job.world(2)
    etcd.fill()
    third = launch(job, etcd.address, name="c")  # a spare: nothing is written
    wait_for("the spare", lambda: [event for event in job.events("node_joined") if event["node"] == "c"])
    assert len(job.events("round_formed")) == 1
    job.tell("exit-0", "1")
    leader = agents[job.event("leader_elected")["node"]]
    leader.says("out of space")
    leader.says("goes on when a leader can be elected")
    assert [agent.process.poll() for agent in (*agents.values(), third)] == [None] * 3
    etcd.make_room()
    job.world(2, after=1)
    job.finish()
    assert [agent.wait() for agent in (*agents.values(), third)] == [0] * 3
    # A node that gave up the lead does not count as dead: its workers might still be ending.
    assert "its process is gone" not in [event["cause"] for event in job.events("leader_elected")][-1]


@pytest.mark.slow
def test_a_run_that_cannot_be_recorded_for_min_wait_ends(job: Job, etcd: Member) -> None:
    agent = launch(job, etcd.address, "--min-wait", "2")
    job.world(1)
    etcd.fill()
    job.tell("exit-0", "1")
    assert agent.wait() == 95
    assert "out of space" in agent.output
    assert "alarm disarm" in agent.output.splitlines()[-1]

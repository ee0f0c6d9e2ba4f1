"""Endpoints by name and by IPv6 address; which node hosts, and what the log says about it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from harness import Job

OWN_HOSTS = 'mount --bind "$0" /etc/hosts && exec "$@"'
"""Gives a process its own file of host names."""


@pytest.mark.system
def test_a_name_that_becomes_known_late_is_waited_for(job: Job, tmp_path: Path) -> None:
    names = tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost\n")
    prefix = ["unshare", "--mount", "sh", "-c", OWN_HOSTS, str(names)]
    endpoint = f"pod-0.train.invalid:{job.port}"
    agent = job.node("a", nnodes="1:2", endpoint=endpoint, prefix=prefix)
    agent.says(f"The rendezvous endpoint {endpoint} does not resolve")
    agent.says("retrying for up to 600 s (said once)")
    with names.open("a") as file:  # in place: the mount is of this inode
        file.write("127.0.0.1 pod-0.train.invalid\n")
    assert job.world(1)[0]["env"]["MASTER_ADDR"] != "127.0.0.1", "no other host could come there"
    job.finish()
    assert agent.wait() == 0
    assert agent.output.count("does not resolve") == 1


def test_a_node_can_leave_while_it_waits_for_a_name(job: Job) -> None:
    agent = job.launch("--nnodes", "2", "--rdzv-endpoint", "no-such-host.invalid:29400")
    agent.says("retrying for up to")
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143
    assert "Traceback" not in agent.output


def test_two_nodes_meet_at_an_ipv6_address(job: Job) -> None:
    endpoint = f"[::1]:{job.port}"
    host = job.node("a", nnodes="2", endpoint=endpoint, env={"SLURM_NODEID": "1"})
    host.says(f"this node hosts the run at {endpoint}: the port was free, and only this host reaches ::1")
    host.says("But SLURM_NODEID=1 says that it is not the first, and ::1 means each host itself")
    other = job.node("b", nnodes="2", endpoint=endpoint, env={"SLURM_NODEID": "0"})
    other.says(f"this node does not host the run at {endpoint}: the port is in use on this host")
    env = [worker["env"] for worker in job.world(2)]
    assert {e["MASTER_ADDR"] for e in env} == {"::1"}
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)

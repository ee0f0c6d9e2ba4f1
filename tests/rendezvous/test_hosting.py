"""The reasons that a node logs for hosting the run or not."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from elastic_launch.config.endpoints import Endpoint
from elastic_launch.rendezvous.backends.hosting import explain, said_rank

HERE = Endpoint("127.0.0.1", 29400)
THERE = Endpoint("192.0.2.7", 29400)


def line(wanted: Endpoint, said: tuple[int, str] | None = None, **how: Any) -> tuple[int, str]:
    return explain(wanted, said, **{"hosts": False, "taken": False, "is_host": None, "nodes": 4, **how})


@pytest.mark.parametrize(
    ("node_rank", "environ", "said"),
    [
        (None, {}, None),
        (2, {"SLURM_NODEID": "0"}, (2, "--node-rank 2")),
        (None, {"SLURM_NODEID": "3", "JOB_COMPLETION_INDEX": "1"}, (3, "SLURM_NODEID=3")),
        (None, {"SLURM_NODEID": "", "JOB_COMPLETION_INDEX": "1"}, (1, "JOB_COMPLETION_INDEX=1")),
        (None, {"SLURM_NODEID": "first"}, None),
    ],
)
def test_sources_of_the_node_rank(node_rank: int | None, environ: dict[str, str], said: tuple[int, str] | None) -> None:
    assert said_rank(node_rank, environ) == said


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (
            {"hosts": True},
            "hosts the run at 127.0.0.1:29400: the port was free, and only this host reaches 127.0.0.1",
        ),
        ({"hosts": True, "is_host": True}, "hosts the run at 127.0.0.1:29400: is_host is true"),
        ({"taken": True}, "does not host the run at 127.0.0.1:29400: the port is in use on this host"),
        ({"is_host": False}, "does not host the run at 127.0.0.1:29400: is_host is false"),
        ({}, "does not host the run at 127.0.0.1:29400: 127.0.0.1 is not an address of this host"),
    ],
)
def test_each_reason_is_logged(how: dict[str, Any], why: str) -> None:
    level, text = line(HERE, **how)
    assert level == logging.INFO
    assert why in text
    assert "although" not in text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_run_of_several_nodes_at_loopback_tells_that_other_hosts_cannot_reach_it(host: str) -> None:
    said = f", and only this host reaches {host}"
    assert line(Endpoint(host, 29400), hosts=True)[1].endswith(said)
    assert line(Endpoint(host, 29400), hosts=True, is_host=True)[1].endswith(f"is_host is true{said}")
    assert said not in line(Endpoint(host, 29400), hosts=True, nodes=1)[1]
    assert said not in line(THERE, hosts=True)[1]


def test_a_contradiction_by_the_scheduler_is_logged_too() -> None:
    first, third = (0, "SLURM_NODEID=0"), (3, "SLURM_NODEID=3")
    assert line(THERE, first)[1].endswith("(although SLURM_NODEID=0 says that it is the first)")
    assert line(THERE, third, hosts=True)[1].endswith("(although SLURM_NODEID=3 says that it is not the first)")
    for said, hosts in ((first, True), (third, False), (None, True), (None, False)):
        assert "although" not in line(THERE, said, hosts=hosts)[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_later_node_that_hosts_at_loopback_is_warned(host: str) -> None:
    """Otherwise every node of the job would host its own run, and wait for the others."""
    said = (3, "JOB_COMPLETION_INDEX=3")
    level, text = line(Endpoint(host, 29400), said, hosts=True)
    assert level == logging.WARNING
    assert "JOB_COMPLETION_INDEX=3 says that it is not the first" in text
    assert "--rdzv-endpoint" in text
    assert line(Endpoint(host, 29400), said, hosts=True, is_host=True)[0] == logging.INFO
    assert line(Endpoint(host, 29400), (0, "SLURM_NODEID=0"), hosts=True)[0] == logging.INFO

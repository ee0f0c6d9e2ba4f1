"""Hosts whose only IPv4 address is that of loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from harness import STEPS, Job
from netns import ip, missing

MISSING = missing()

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "nothing is missing"),
]

ADDRESS = "fd00:e1a5::1"


@pytest.fixture
def host() -> Iterator[str]:
    """A network namespace with one address, an IPv6 one."""
    name = f"el-six-{os.getpid()}"
    ip("netns", "add", name)
    try:
        for command in (
            "link set lo up",
            "link add cable0 type veth peer name cable1",
            "link set cable1 up",
            "link set cable0 up",
            f"-6 address add {ADDRESS}/64 dev cable0 nodad",
            "-6 route add default dev cable0",
        ):
            ip("-n", name, *command.split())
        yield name
    finally:
        pids = ip("netns", "pids", name).split()
        subprocess.run(["kill", "-9", *pids], check=False, capture_output=True)
        ip("netns", "delete", name)


@pytest.mark.executed
def test_a_run_on_ipv6_only_hosts_is_joined_by_the_command_that_it_prints(job: Job, host: str) -> None:
    prefix = ("ip", "netns", "exec", host)
    script = [STEPS, str(job.work)]
    flags = ("--nnodes", "1:2", "--health-port", "29480", "--node-id", "a")
    first = job.launch(*flags, name="a", prefix=prefix, env={"NODE": "a"}, command=script)
    first.says(f"--rdzv-endpoint [{ADDRESS}]:29400 --rdzv-id ")
    run_id = first.output.split("--rdzv-id ")[1].split()[0]
    job.trained(1)
    joined = ("--nnodes", "1:2", "--rdzv-endpoint", f"[{ADDRESS}]:29400", "--rdzv-id", run_id, "--node-id", "b")
    second = job.launch(*joined, name="b", prefix=prefix, env={"NODE": "b"}, command=script)
    job.trained(2)
    health = f"import urllib.request as u; print(u.urlopen('http://[{ADDRESS}]:29480/livez', timeout=10).status)"
    asked = subprocess.run([*prefix, sys.executable, "-c", health], capture_output=True, text=True, timeout=30)
    assert asked.stdout == "200\n", asked.stderr
    job.finish()
    assert (first.wait(60), second.wait(60)) == (0, 0)

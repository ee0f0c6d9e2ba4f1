"""Hosts for tests: network namespaces on one bridge, whose cables can be pulled. Needs root and iproute2.

Names are unique per net, and nothing outlives it: processes left in a namespace at the end are killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

__all__ = ["Host", "Net", "apart", "kill_all", "missing", "net"]

CABLE = "cable0"
"""The name of the interface on every host."""

BRIDGE, SECOND = "bridge0", "bridge1"
"""The bridges of the switch: one for all hosts, and one for those that are :func:`apart`."""

_nets = itertools.count()


def missing() -> str:
    """Return what this machine lacks to make network namespaces, or nothing."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    if shutil.which("ip") is None:
        return "needs ip (Debian: iproute2) for network namespaces"
    probe = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True, timeout=20)
    return f"may not make network namespaces: {probe.stderr.strip()}" if probe.returncode else ""


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def kill_all(name: str) -> None:
    """Kill the processes in a network namespace, and those that they start meanwhile."""
    deadline = time.monotonic() + 10
    while (pids := ip("netns", "pids", name).split()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


class Host:
    """A network namespace with one address."""

    def __init__(self, name: str, address: str, switch: str, port: str) -> None:
        self.name = name
        self.address = address
        self.prefix = ("ip", "netns", "exec", name)
        """The prefix of a command that is to run on this host."""
        self.env = {"GLOO_SOCKET_IFNAME": CABLE}
        self._ends = {"switch": (switch, port), "host": (name, CABLE)}

    def cut(self, end: str = "switch") -> None:
        """Pull the cable, or shut down the interface on the host itself: nothing is closed, nothing arrives."""
        self._set(end, "down")

    def mend(self, end: str = "switch") -> None:
        self._set(end, "up")

    def plug(self, bridge: str) -> None:
        """Connect the cable to one of the switch's bridges."""
        switch, port = self._ends["switch"]
        ip("-n", switch, "link", "set", port, "master", bridge)

    def _set(self, end: str, state: str) -> None:
        where, interface = self._ends[end]
        ip("-n", where, "link", "set", interface, state)


class Net:
    """A switch, which is its own namespace, and hosts on it."""

    def __init__(self) -> None:
        self._tag = f"el{os.getpid()}n{next(_nets)}"
        self._switch = f"{self._tag}-switch"
        self._names: list[str] = []
        self._hosts = 0

    def open(self, hosts: int) -> list[Host]:
        self._add(self._switch)
        for bridge in (BRIDGE, SECOND):
            self._in_switch("link", "add", bridge, "type", "bridge")
            self._in_switch("link", "set", bridge, "up")
        return [self.add() for _ in range(hosts)]

    @property
    def switch(self) -> str:
        """The namespace of the switch, for services that all hosts must reach."""
        return self._switch

    def add(self) -> Host:
        """Add a host with an address that was never used."""
        self._hosts += 1
        return self._host(self._hosts)

    def remove(self, host: Host) -> None:
        """Remove a host, and kill its processes."""
        self._names.remove(host.name)
        self._remove(host.name)

    def close(self) -> None:
        for name in self._names:
            self._remove(name)

    def _remove(self, name: str) -> None:
        kill_all(name)
        ip("netns", "del", name)  # and with it its interfaces

    def _host(self, number: int) -> Host:
        name = f"{self._tag}-{number}"
        self._add(name)
        port = f"port{number}"
        self._in_switch("link", "add", port, "type", "veth", "peer", "name", CABLE, "netns", name)
        self._in_switch("link", "set", port, "master", BRIDGE, "up")
        host = Host(name, f"10.77.0.{number}", self._switch, port)
        ip("-n", name, "addr", "add", f"{host.address}/24", "dev", CABLE)
        ip("-n", name, "link", "set", CABLE, "up")
        return host

    def _in_switch(self, *arguments: str) -> None:
        ip("-n", self._switch, *arguments)

    def _add(self, name: str) -> None:
        ip("netns", "add", name)
        self._names.append(name)
        ip("-n", name, "link", "set", "lo", "up")


@contextlib.contextmanager
def net(hosts: int) -> Iterator[list[Host]]:
    """Make hosts that reach each other; remove them at the end."""
    made = Net()
    try:
        yield made.open(hosts)
    finally:
        made.close()


@contextlib.contextmanager
def apart(hosts: Sequence[Host]) -> Iterator[None]:
    """Have hosts reach each other, and no others."""
    for host in hosts:
        host.plug(SECOND)
    try:
        yield
    finally:
        for host in hosts:
            host.plug(BRIDGE)

"""HTTP probes, as the kubelet makes them: https://kubernetes.io/docs/concepts/workloads/pods/probes/."""

from __future__ import annotations

import ctypes
import http.client
import os
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from netns import Host

from kubelet.manifests import Manifest

__all__ = ["Probe", "inside"]

CLONE_NEWNET = 0x40000000

T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)


def inside(namespace: str, act: Callable[[], T]) -> T:
    """Call act in a network namespace: a socket that it creates stays there. For the calling thread only."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            assert _libc.setns(there, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        finally:
            os.close(there)
        try:
            return act()
        finally:
            assert _libc.setns(here, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(here)


class Probe:
    """One of a container's probes; without a spec, it always succeeds."""

    def __init__(self, spec: Manifest | None, container: Manifest, host: Host) -> None:
        self._spec, self._host = spec, host
        self.good = spec is None
        """Whether the last attempts succeeded, as many as the spec requires."""
        self.failed = False
        """Whether as many consecutive attempts have failed as the spec requires."""
        self.found = ""
        self._next = 0.0
        self._misses = 0
        if spec is not None:
            port = spec["httpGet"]["port"]
            named = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
            self._port = int(named.get(port, port))
            self._next = time.monotonic() + spec.get("initialDelaySeconds", 0)

    def turn(self) -> None:
        """Probe if it is due."""
        if self._spec is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._spec.get("periodSeconds", 10)
        if self._try():
            self.good, self._misses = True, 0
            return
        self._misses += 1
        if self._misses >= self._spec.get("failureThreshold", 3):
            self.good, self.failed = False, True

    def _try(self) -> bool:
        assert self._spec is not None
        timeout = self._spec.get("timeoutSeconds", 1)
        connection = http.client.HTTPConnection(self._host.address, self._port, timeout=timeout)
        try:
            connection.sock = inside(self._host.name, socket.socket)
            connection.sock.settimeout(timeout)
            connection.sock.connect((self._host.address, self._port))
            connection.request("GET", self._spec["httpGet"]["path"])
            answer = connection.getresponse()
            self.found = f"{answer.status} {answer.read().decode().strip()}"
            return 200 <= answer.status < 400
        except OSError as error:
            self.found = str(error)
            return False
        finally:
            connection.close()

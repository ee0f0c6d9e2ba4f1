"""Ranks as real processes that a test orders about one by one, without a launcher: ``scripts/round_groups.py``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from harness import SCRIPTS

LIMIT = 120.0  # seconds

# torch's stores look up the names of all addresses that they connect; a name server may take seconds.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "RES_OPTIONS": "attempts:0"}


@dataclass(frozen=True)
class Answer:
    """What an order came to.

    Attributes:
        result: what it returned.
        error: the class and the text of what it raised; empty if nothing.
        at: when it ended, by the clock that all processes of this machine share.
    """

    result: Any
    error: str
    at: float


class RankProcess:
    """A process that carries out orders."""

    def __init__(self, pid: int, orders: socket.socket) -> None:
        self.pid, self._orders, self._number = pid, orders, 0
        self._lines = orders.makefile("r")
        self._answers: dict[int, Answer] = {}

    def begin(self, name: str, *arguments: Any) -> int:
        """Order something, and return the order's number."""
        self._number += 1
        order = {"number": self._number, "name": name, "arguments": arguments}
        self._orders.sendall(json.dumps(order).encode() + b"\n")
        return self._number

    def end(self, number: int) -> Answer:
        """Return what an order came to."""
        while number not in self._answers:
            line = self._lines.readline()
            assert line, f"process {self.pid} has died"
            found = json.loads(line)
            self._answers[found["number"]] = Answer(found.get("result"), found.get("error", ""), found["at"])
        return self._answers[number]

    def do(self, name: str, *arguments: Any) -> Any:
        """Order something, and return its result."""
        answer = self.end(self.begin(name, *arguments))
        assert not answer.error, answer.error
        return answer.result

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        self._lines.close()
        self._orders.close()


class RankProcesses:
    """Forks processes, and ends them."""

    def __init__(self, **environment: str) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, str(SCRIPTS / "round_groups.py"), str(theirs.fileno())],
                env={**os.environ, **_ENVIRONMENT, **environment},
                pass_fds=[theirs.fileno()],
            )
        self._requests.settimeout(LIMIT)
        self._started: list[RankProcess] = []

    def start(self, count: int) -> list[RankProcess]:
        """Start processes."""
        for _ in range(count):
            ours, theirs = socket.socketpair()
            ours.settimeout(LIMIT)
            with theirs:
                socket.send_fds(self._requests, [b"fork"], [theirs.fileno()])
                self._started.append(RankProcess(int(self._requests.recv(20)), ours))
        return self._started[-count:]

    def wait(self, rank: RankProcess) -> int:
        """Have a process end, and return its exit code."""
        self._started.remove(rank)
        rank.close()
        self._requests.sendall(b"%d" % rank.pid)
        return int(self._requests.recv(20))

    def end(self) -> None:
        """Kill the processes that still run."""
        for rank in [*self._started]:
            with contextlib.suppress(ProcessLookupError):
                rank.signal(signal.SIGKILL)
            self.wait(rank)

    def close(self) -> None:
        self.end()
        self._requests.close()
        self._server.wait(LIMIT)

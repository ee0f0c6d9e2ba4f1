"""A collective that outlasts its timeout ends the process also where torch's watchdog does not."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from enum import Enum
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_launch.training import rounds
from elastic_launch.training.link import AgentLink
from elastic_launch.training.live.groups import RoundGroups
from elastic_launch.training.live.timeout_watch import TimeoutWatch
from elastic_launch.training.ranks.world import World

WAIT = 30.0


class ErrorType(Enum):
    """As torch's."""

    SUCCESS = 0
    TIMEOUT = 1


class Backend:
    error = ErrorType.SUCCESS

    def get_error(self) -> ErrorType:
        return self.error


class Ignorant:
    """A backend that does not know."""

    def get_error(self) -> Any:
        raise RuntimeError("Backend ignorant does not support getError")


def test_a_timeout_is_seen_once_and_other_backends_do_not_matter() -> None:
    backend, looks, ended = Backend(), threading.Semaphore(0), threading.Semaphore(0)

    def backends() -> list[Any]:
        looks.release()
        return [Ignorant(), object(), backend]

    watch = TimeoutWatch(backends, ended.release, every=0.001)
    for _ in range(3):
        assert looks.acquire(timeout=WAIT)
    assert not ended.acquire(blocking=False)
    backend.error = ErrorType.TIMEOUT
    assert ended.acquire(timeout=WAIT)
    watch.close()
    assert not ended.acquire(blocking=False)


def test_the_process_ends_by_a_signal_as_torchs_watchdog_ends_it() -> None:
    script = (
        "import logging, threading; logging.basicConfig()\n"
        "from test_timeout_watch import Backend, ErrorType, TimeoutWatch\n"
        "backend = Backend(); backend.error = ErrorType.TIMEOUT\n"
        "TimeoutWatch(lambda: [backend], every=0.001); threading.Event().wait()\n"
    )
    path = __file__.rsplit("/", 1)[0]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=path)
    assert done.returncode == -signal.SIGABRT
    assert "a collective has outlasted the timeout of its process group: this process is ended" in done.stderr


@pytest.mark.parametrize(("value", "watches"), [("1", 1), ("0", 1), ("2", 0), ("3", 0)])
def test_who_has_torch_leave_timeouts_alone_gets_no_watch(
    monkeypatch: pytest.MonkeyPatch, value: str, watches: int
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", value)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    made: list[Any] = []
    monkeypatch.setattr(rounds, "TimeoutWatch", made.append)
    link = AgentLink()
    link.patience = 1.0
    rounds.WorkerRounds(World(), torch.device("cuda"), link, RoundGroups(), timeout=1.0, live=None)
    assert len(made) == watches

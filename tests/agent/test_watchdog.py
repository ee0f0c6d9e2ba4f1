"""Tests of the timers that workers set with torch.distributed.elastic.timer."""

from __future__ import annotations

import json
import os
import queue
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import SLOWNESS
from torch.distributed.elastic.timer import FileTimerClient

from elastic_agents.summary import hint_on
from elastic_agents.workers.watchdog import ENV_ENABLE, ENV_FILE, TimerExpired, TimerRequest, Timers, watchdog
from elastic_launch.codec import decode, loads
from elastic_launch.errors import ProtocolError, UsageError
from elastic_launch.failure import Failure


def line(pid: int, scope: str, expires: float, number: int = 9) -> bytes:
    return json.dumps({"pid": pid, "scope_id": scope, "expiration_time": expires, "signal": number}).encode()


def change(timers: Timers, *asked: Any) -> None:
    timers.change(decode(TimerRequest, loads(line(*asked))), 0.0)


def test_a_timer_expires_once_unless_it_is_released() -> None:
    timers = Timers()
    assert timers.wait(0.0) is None
    change(timers, 7, "a", 10.0)
    change(timers, 7, "b", 20.0)
    assert (timers.wait(4.0), timers.expired(9.9)) == (6.0, [])
    change(timers, 7, "a", -1, 0)
    assert timers.expired(15.0) == []
    assert timers.expired(20.0) == [TimerExpired(7, "b", 9)]
    assert timers.expired(30.0) == []


def test_of_a_processs_timers_the_first_with_a_signal_counts() -> None:
    timers = Timers()
    for scope, expires, number in (("c", 3.0, 15), ("a", 1.0, 0), ("b", 2.0, 9)):
        change(timers, 7, scope, expires, number)
    change(timers, 8, "x", 1.0, -1)
    assert timers.expired(5.0) == [TimerExpired(7, "b", 9), TimerExpired(8, "x", 0)]


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[]", b"7", b'{"pid": 1}', b"\xff", b"[" * 100_000),
        *(
            line(0, "a", 1.0),
            line(-1, "a", 1.0),
            line(7, "a", 1.0, 99),
            line(7, "a", float("nan")),
            line(10**30, "a", 1.0),
            line(7, "a" * 5000, 1.0),
        ),
        b'{"pid": "x", "scope_id": 1, "expiration_time": 1, "signal": 1}',
    ],
)
def test_an_invalid_timer_request_sets_no_timer(text: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(TimerRequest, loads(text))


def test_torchs_client_reaches_the_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENV_ENABLE, "1")
    monkeypatch.delenv(ENV_FILE, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found: queue.Queue[TimerExpired] = queue.Queue()
    with watchdog(found.put):
        path = os.environ[ENV_FILE]
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        client = FileTimerClient(path, signal=signal.SIGTERM)
        client.acquire("released", time.time() + 0.2)
        client.release("released")
        with open(path, "w") as pipe:
            pipe.write("garbage\n")
        client.acquire("step", time.time() + 0.2)
        assert found.get(timeout=10 * SLOWNESS) == TimerExpired(os.getpid(), "step", signal.SIGTERM)
    assert (os.path.exists(path), ENV_FILE in os.environ, found.qsize()) == (False, False, 0)
    assert "garbage" in caplog.text


def test_the_pipe_exists_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_ENABLE, "0")
    monkeypatch.setenv(ENV_FILE, str(tmp_path / "pipe"))
    with watchdog(pytest.fail):
        assert not (tmp_path / "pipe").exists()


def test_an_old_pipe_is_replaced_and_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pipe"
    monkeypatch.setenv(ENV_ENABLE, "1")
    monkeypatch.setenv(ENV_FILE, str(path))
    os.mkfifo(path)
    with watchdog(pytest.fail):
        assert stat.S_ISFIFO(path.stat().st_mode)
    path.write_text("mine")
    with pytest.raises(UsageError, match="no named pipe can be made there: File exists"), watchdog(pytest.fail):
        pytest.fail("entered")
    assert path.read_text() == "mine"


def test_there_is_no_hint_to_look_for_the_sender_of_the_signal() -> None:
    failure = Failure("a", "hang", 0, 0, 7, -signal.SIGKILL, "its timer 'step' expired: signal 9 (SIGKILL)")
    assert hint_on(failure) == ""
    assert hint_on(replace(failure, kind="crash"))

"""Threads that a process depends on."""

from __future__ import annotations

import threading

import pytest

from elastic_launch.system.threads import ThreadDied, VitalThread, deaths_reported_to


def _end(error: BaseException | None) -> None:
    if error is not None:
        raise error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_that_ends_a_thread_is_reported_with_its_name() -> None:
    reported: list[ThreadDied] = []
    with deaths_reported_to(reported.append):
        for error in (OverflowError("too large"), None, SystemExit()):
            thread = VitalThread(_end, "control", (error,))
            thread.start()
            thread.join(30)
    assert reported == [ThreadDied("control", "OverflowError: too large")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_removed_listener_receives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[ThreadDied] = []
    printed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda *_: printed.set())
    with deaths_reported_to(reported.append):
        pass
    VitalThread(_end, "control", (ValueError("x"),)).start()
    assert printed.wait(30), "the traceback is printed as for any thread"
    assert reported == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_with_an_owner_reports_to_it_alone() -> None:
    reported: list[ThreadDied] = []
    owner: list[ThreadDied] = []
    with deaths_reported_to(reported.append):
        thread = VitalThread(_end, "leader", (KeyError(7),), owner=owner.append)
        thread.start()
        thread.join(30)
    assert (owner, reported) == ([ThreadDied("leader", "KeyError: 7")], [])

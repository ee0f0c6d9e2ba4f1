"""The run's nodes, asked of a leader that does not answer; tests/integration/test_http_pages.py asks real ones."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pytest
from harness import free_port, wait_for

from elastic_agents.probes import roster
from elastic_agents.probes.roster import LastStatus, Roster
from elastic_launch.config.launch_config import LaunchConfig


def asking(leader: Callable[[], str]) -> contextlib.closing[Roster]:
    return contextlib.closing(Roster(LaunchConfig(), leader))


def said(asked: Roster) -> LastStatus | None:
    """What the leader said, once it has answered."""
    answer = asked.look(0.01)
    return answer if answer.at or answer.problem else None


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "roster"]


def test_nothing_runs_until_somebody_looks() -> None:
    with asking(lambda: "127.0.0.1:1"):
        assert threads() == []


def test_a_node_that_has_not_reached_the_leader_says_so() -> None:
    with asking(lambda: "") as asked:
        answer = wait_for("an answer", lambda: said(asked))
        assert (answer.status, answer.problem) == (None, "this node has not reached the run's leader yet")
    assert threads() == []


def test_a_leader_that_is_gone_is_named() -> None:
    port = free_port()
    with asking(lambda: f"127.0.0.1:{port}") as asked:
        answer = wait_for("an answer", lambda: said(asked))
        assert f"127.0.0.1:{port}" in answer.problem
    assert threads() == []


def test_a_leader_that_is_silent_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_launch.rendezvous.admin.client.TIMEOUT", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with asking(lambda: f"127.0.0.1:{silent.getsockname()[1]}") as asked:
            took = []
            began = time.monotonic()
            assert asked.look() == LastStatus()
            while not (answer := asked.look()).problem:
                before = time.monotonic()
                asked.look()
                took.append(time.monotonic() - before)
                assert time.monotonic() - began < 30
                time.sleep(0.01)
            assert max(took) < 1.0
            assert "was silent for" in answer.problem
            closing = time.monotonic()
        assert time.monotonic() - closing < 2 * roster.CLOSE


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_is_logged_and_the_next_look_starts_another(caplog: pytest.LogCaptureFixture) -> None:
    def leader() -> str:
        if not caplog.text:
            raise KeyError("nodes")
        return ""

    with asking(leader) as asked:
        wait_for("the failure", lambda: asked.look(0.01) and caplog.text)
        assert "the leader is not asked for its nodes: KeyError: 'nodes'" in caplog.text
        told = "this node has not reached the run's leader yet"
        wait_for("an answer", lambda: asked.look().problem == told)


def test_it_is_asked_only_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown to the next reader is asked anew."""
    monkeypatch.setattr(roster, "OLD", 0.2)
    monkeypatch.setattr(roster, "ASK_EVERY", 0.05)
    asks: list[float] = []

    def leader() -> str:
        asks.append(time.monotonic())
        return ""

    with asking(leader) as asked:
        wait_for("an answer", lambda: said(asked))
        wait_for("the end of asking", lambda: time.monotonic() - asks[-1] > 0.5)
        assert threads() == []
        before = len(asks)
        assert asked.look(20.0).problem
        assert len(asks) == before + 1

"""Which workers of a node's round are watched for hangs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_agents.hangs.hang_watch import HangWatch, WatchedRound
from elastic_agents.hangs.hanging import Hanging
from elastic_agents.node_state import NodeState
from elastic_agents.policy_types import Phase, View
from elastic_launch.config.launch_config import Command, LaunchConfig
from elastic_launch.rendezvous.wire import messages as m

ALL = frozenset({0, 1, 2})

TRAINS = View(Phase.RUNNING, 3, slots=ALL, alive=ALL, ready=ALL, live=ALL)
DRAINS = replace(TRAINS, phase=Phase.DRAINING)


class Watched:
    """What a node with three workers has watched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(HangWatch, "follow", lambda _, watched: setattr(self, "last", watched))
        config = LaunchConfig(Command(("python",), ("train.py",)))
        self.last: WatchedRound | None = None
        self.workers = SimpleNamespace(held=False, running=self._running)
        self.state = NodeState(config)
        outside: Any = None  # what is not used
        self.hanging = Hanging(
            config, self.state, cast(Any, self.workers), lambda _: None, outside, outside, cast(Any, None)
        )

    def _running(self, number: int) -> list[tuple[Any, int, Any]]:
        logs = SimpleNamespace(error_file=Path("dumps/error.json"), directory=Path("logs"))
        return [(SimpleNamespace(rank=3 + x, local_rank=x), 100 + x, logs) for x in sorted(self.state.view.alive)]

    def ranks(self, view: View) -> list[int]:
        """The local ranks that are watched in a view."""
        self.state.view = view
        self.hanging.follow()
        return [worker.local_rank for worker in self.last.workers] if self.last is not None else []

    def drain(self, seconds: float | None, number: int = 3) -> None:
        """The leader orders to drain the round."""
        self.state.ordered(m.DrainRound(1, number, "membership", "resize", seconds))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(monkeypatch)
    with closing(watched.hanging):
        yield watched


def test_all_workers_of_a_round_that_trains_are_watched(watched: Watched) -> None:
    assert watched.ranks(TRAINS) == [0, 1, 2]
    assert watched.last is not None
    assert not watched.last.finishing
    assert watched.ranks(replace(TRAINS, alive=ALL - {1}, finished=frozenset({1}))) == [0, 2]
    assert watched.last.finishing
    watched.workers.held = True
    assert watched.ranks(TRAINS) == []


def test_a_drain_is_watched_only_if_nothing_else_ends_it(watched: Watched) -> None:
    assert watched.ranks(DRAINS) == [], "this node leaves, and the leader has not said what it makes of it"
    watched.drain(None)
    assert watched.ranks(DRAINS) == [0, 1, 2]
    watched.workers.held = True
    assert watched.ranks(DRAINS) == []
    watched.workers.held = False
    watched.drain(30.0)
    assert watched.ranks(DRAINS) == []
    watched.drain(None, number=2)
    assert watched.ranks(DRAINS) == []


@pytest.mark.parametrize("has_stopped", ["drained", "stopping", "suspended"])
def test_workers_that_have_stopped_in_a_drain_are_not_late(watched: Watched, has_stopped: str) -> None:
    watched.drain(None)
    for count in (1, 2, 3):
        those = frozenset(range(count))
        alive = ALL - those if has_stopped == "suspended" else ALL
        assert watched.ranks(replace(DRAINS, alive=alive, **{has_stopped: those})) == [*range(count, 3)]  # type: ignore[arg-type]
        assert watched.last is None or not watched.last.finishing, "the others have not ended for good"


def test_no_worker_is_watched_of_a_round_that_is_over(watched: Watched) -> None:
    watched.drain(None)
    for phase in set(Phase) - {Phase.RUNNING, Phase.DRAINING}:
        assert watched.ranks(replace(TRAINS, phase=phase)) == []

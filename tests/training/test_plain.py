"""``report_step`` and ``should_stop`` in one process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.training import plain
from elastic_launch.training.link import AgentLink
from elastic_launch.training.plain import PlainLoop
from elastic_launch.training.ranks.world import World


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    plain._loop.cache_clear()
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    plain._loop.cache_clear()


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", None])
def test_a_step_is_a_whole_number(step: Any) -> None:
    with pytest.raises(UsageError, match="is not a number of steps"):
        el.report_step(step)


def test_steps_are_reported_before_it_may_stop() -> None:
    with pytest.raises(UsageError, match=r"before report_step\(\)"):
        el.should_stop()


def test_several_ranks_need_a_process_group() -> None:
    loop = PlainLoop(World(rank=0, world_size=2), AgentLink())
    loop.report(0)
    with pytest.raises(UsageError, match="init_process_group"):
        loop.should_stop()


def test_without_a_launcher_it_stops_after_sigterm() -> None:
    el.report_step(0)
    assert not el.should_stop()
    signal.raise_signal(signal.SIGTERM)  # by kill() another thread may get it, a moment later
    assert el.should_stop()
    assert el.should_stop(), "from then on always"

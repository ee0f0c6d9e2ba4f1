"""Which ranks count as slow."""

from __future__ import annotations

import math
from itertools import takewhile
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_launch.events import types as ev
from elastic_launch.events.sentences import sentence
from elastic_launch.training.ranks.pace import (
    FIRST_WINDOW,
    WINDOWS,
    Pace,
    Persistence,
    Straggler,
    _pressure,
    comparable,
    slow_ranks,
)


@pytest.mark.parametrize(
    ("times", "found"),
    [
        ([(0.0, 0.010), (0.0, 0.011), (0.0, 0.014)], []),
        ([(0.0, 0.010), (0.0, 0.011), (0.0, 0.022)], [Straggler(2, "compute", 2.1)]),
        ([(0.002, 0.010), (0.020, 0.010)], [Straggler(1, "data", 2.5)]),
        ([(0.0, 0.0001), (0.0, 0.0009)], []),
        ([(math.nan, math.nan), (0.0, 0.010), (0.0, 0.030)], [Straggler(2, "compute", 3.0)]),
        ([(0.0, 0.010), (math.nan, math.nan)], []),
        ([(0.0, 0.010)], []),
    ],
    ids=["alike", "computes longer", "waits for data", "too short to matter", "an idle rank", "only one", "alone"],
)
def test_slow_ranks(times: list[tuple[float, float]], found: list[Straggler]) -> None:
    assert slow_ranks(times) == found


@pytest.mark.parametrize(
    ("pressed", "found"),
    [
        ([False, False, False, False], [0, 2]),
        ([False, False, True, False], [0, 2]),
        ([False, False, True, True], [0, 2]),
        ([False, True, True, True], [0]),
        ([True, True, True, True], []),
    ],
    ids=["none", "the slow one", "one host of two", "all but one", "the only host"],
)
def test_ranks_on_overloaded_hosts_are_compared_only_with_those_on_others(
    pressed: list[bool], found: list[int]
) -> None:
    slow = [Straggler(rank, "compute", 2.0) for rank in (0, 2)]
    assert [each.rank for each in comparable(slow, pressed)] == found


@given(st.lists(st.sets(st.integers(0, 3)), max_size=30))
def test_a_rank_is_found_when_it_has_been_slow_in_enough_windows_on_end(windows: list[set[int]]) -> None:
    persistence = Persistence()
    for last, slow in enumerate(windows, 1):
        found = persistence.add([Straggler(rank, "compute", 2.0) for rank in sorted(slow)])
        expected = [
            rank
            for rank in range(4)
            if sum(1 for _ in takewhile(lambda window: rank in window, reversed(windows[:last]))) == WINDOWS  # noqa: B023
        ]
        assert [one.rank for one in found] == expected


def test_a_pause_that_is_in_two_windows_is_not_persistent() -> None:
    persistence = Persistence()
    slow = [Straggler(1, "compute", 9.0)]
    assert [persistence.add(window) for window in (slow, slow, [], slow, slow, [])] == [[]] * 6


@pytest.mark.parametrize(
    ("waited", "pressure", "first", "told"),
    [
        (-1.0, None, (0.5, -1.0), True),
        (0.504, 0.5, (9.0, 0.1), True),
        (0.504, 0.5, (0.5, 0.504), False),
        (-1.0, None, (2.5, -1.0), False),
    ],
    ids=["not counted", "counted", "all overloaded", "all overloaded, not counted"],
)
def test_a_rank_is_reported_once_after_three_windows(
    waited: float, pressure: float | None, first: tuple[float, float], told: bool
) -> None:
    found: list[Straggler] = []
    pace = Pace(0, 2, 100, on_host=True, report=found.append)
    other = 0.1

    def reduce(table: torch.Tensor, async_op: bool) -> None:
        table[0, 3:] = torch.tensor(first)
        table[1] = torch.tensor([0.0, other, 2.0, 2.5, waited])

    step = 100
    with mock.patch("torch.distributed.all_reduce", reduce):
        for window in range(1, 7):
            other = 0.01 if window == WINDOWS + 1 else 0.1
            before = len(found)
            while True:
                step += 1
                pace.add(0.05, 0.0, 0.04, 1)
                pace.compare(step)
                if pace._count == 0:
                    break
            assert len(found) - before == (told and window == WINDOWS), window
    assert found == [Straggler(1, "compute", 10.0, load=2.5, pressure=pressure)] * told
    assert step >= 100 + 6 * FIRST_WINDOW


@pytest.mark.parametrize(("load", "told"), [(0.9, False), (1.25, False), (2.34, True)])
def test_a_finding_says_that_the_host_is_overloaded(load: float, told: bool) -> None:
    found = ev.StragglerFound(1, 2, "b", "compute", 2.0, load)
    assert sentence(found).endswith("which wait for it; its host is overloaded, with a load of 2.3 per CPU") == told
    assert found.host == ("overloaded" if told else "normal")


@pytest.mark.parametrize(("pressure", "told"), [(0.0, False), (0.25, False), (0.634, True)])
def test_where_the_kernel_counts_who_waits_for_a_cpu_the_load_average_does_not_matter(
    pressure: float, told: bool
) -> None:
    found = ev.StragglerFound(1, 2, "b", "compute", 2.0, 0.5 if told else 9.0, pressure)
    assert sentence(found).endswith("its host is overloaded, tasks waited for a CPU in 63% of the last 10 s") == told
    assert found.host == ("overloaded" if told else "normal")


@pytest.mark.parametrize(
    ("text", "pressure"),
    [
        ("some avg10=62.63 avg60=16.23 avg300=7.62 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", 0.6263),
        ("some\n", -1.0),
        (None, -1.0),
    ],
    ids=["counted", "of another kind", "not counted"],
)
def test_the_pressure_is_what_the_kernel_says(tmp_path: Path, text: str | None, pressure: float) -> None:
    if text is not None:
        (tmp_path / "cpu").write_text(text)
    assert _pressure(tmp_path / "cpu") == pytest.approx(pressure)

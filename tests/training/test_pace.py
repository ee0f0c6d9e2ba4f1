"""Which ranks count as slow."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

from elastic_launch.training.ranks.pace import FIRST_WINDOW, WINDOWS, Pace, Straggler, slow_ranks


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


def test_a_rank_is_reported_once_after_two_windows() -> None:
    found: list[Straggler] = []
    pace = Pace(0, 2, 100, on_host=True, report=found.append)
    other = 0.1

    def reduce(table: torch.Tensor) -> None:
        table[1] = torch.tensor([0.0, other, 2.0])

    step = 100
    with mock.patch("torch.distributed.all_reduce", reduce):
        for window in range(1, 6):
            other = 0.01 if window == 4 else 0.1
            before = len(found)
            while True:
                step += 1
                pace.add(0.05, 0.0, 0.04, 1)
                pace.compare(step)
                if pace._count == 0:
                    break
            assert len(found) - before == (window == WINDOWS), window
    assert found == [Straggler(1, "compute", 10.0)]
    assert step >= 100 + 5 * FIRST_WINDOW

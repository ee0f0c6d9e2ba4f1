"""Means over the micro-batches of all ranks: values that are reduced along with gradients arrive bitwise."""

from __future__ import annotations

import math

import pytest
import torch

from elastic_launch.training.gradients.means import MOST_CARGO, MeanTable, cargo_size

VALUES = [0.1, -0.0, math.inf, math.nan, -5e-324]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("changed", [0, 2, 300])
def test_a_table_arrives_to_the_bit_as_a_part_of_other_sums(dtype: torch.dtype, changed: int) -> None:
    """With more ranks than a byte can count, each with one row, of which some have a request."""
    ranks = 300
    tables = [MeanTable(ranks, 1, [1.0, 0.0, float(rank == 7)]) for rank in range(ranks)]
    sums = torch.zeros(cargo_size(ranks, 1, 3) + 5, dtype=dtype)
    for rank, table in enumerate(tables):
        table.fill(rank, [VALUES[rank % len(VALUES)]], 0.3)
        cargo = table.cargo(changed=rank < changed)
        sums[: len(cargo)] += cargo
    tables[0].unload(sums)
    assert (tables[0].any_changed, tables[0].all_changed) == (changed > 0, changed == ranks)
    assert [value > 0 for value in tables[0].carried] == [True, False, True]
    expected = torch.tensor(VALUES, dtype=torch.float64).repeat(ranks // len(VALUES))
    found = torch.tensor(tables[0].column(0), dtype=torch.float64)
    assert torch.equal(found.view(torch.int64), expected.view(torch.int64))
    assert tables[0].not_finite() == (2, math.inf)


def test_a_long_table_goes_by_itself() -> None:
    assert 0 < cargo_size(2000, 1, 6) <= MOST_CARGO
    assert cargo_size(3000, 1, 6) == 0

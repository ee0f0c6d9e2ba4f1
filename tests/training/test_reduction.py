"""The exact reduction in one process; tests/training/test_exact_matrix.py tests it on several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic_launch.errors import UsageError
from elastic_launch.training.gradients.reduction import ExactReduction
from elastic_launch.training.gradients.tree import fold


def _tree_sum(values: list[Tensor]) -> Tensor:
    return fold(len(values), [((index, 0), value) for index, value in enumerate(values)], torch.add)


def _add(reduction: ExactReduction, index: int, values: Sequence[Tensor | None]) -> None:
    """Add all values of one micro-batch."""
    reduction.begin(index)
    for which, value in enumerate(values):
        if value is not None:
            reduction.put(which, value)
    reduction.end()


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 1000))
def test_one_process_adds_by_the_tree_in_every_step(totals: list[int], seed: int) -> None:
    """The number of micro-batches may change from step to step; the next step reuses memory of the previous one."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [((3,), torch.float32), ((2, 2), torch.float64), ((1,), torch.float32)]
    reduction = ExactReduction([torch.empty(shape, dtype=dtype) for shape, dtype in shapes], 1, 0)
    for total in totals:
        values = [[torch.randn(s, dtype=d, generator=generator) for s, d in shapes] for _ in range(total)]
        for index, value in enumerate(values):
            # What is added becomes the reduction's.
            _add(reduction, index, [value[0].clone(), value[1].clone(), None])
        sums = reduction.finish(total)
        assert sums[2] is None
        for which in (0, 1):
            result = sums[which]
            assert result is not None
            assert torch.equal(result, _tree_sum([value[which] for value in values]))
        reduction.reset()


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=20))
def test_a_missing_value_counts_as_zero_and_only_one_missing_everywhere_stays_missing(there: list[list[bool]]) -> None:
    """To the bit: a zero that is added makes a negative zero positive, as it does where zeros cross the network."""
    reduction = ExactReduction([torch.empty(2)] * 3, 1, 0)
    value = torch.tensor([-0.0, 1.1])
    for index, row in enumerate(there):
        _add(reduction, index, [value.clone() if present else None for present in row])
    for which, result in enumerate(reduction.finish(len(there))):
        column = [row[which] for row in there]
        if not any(column):
            assert result is None
            continue
        assert result is not None
        expected = _tree_sum([value if present else torch.zeros(2) for present in column])
        assert result.view(torch.int32).tolist() == expected.view(torch.int32).tolist()


def test_the_result_lies_in_memory_as_the_parameter_does() -> None:
    """A norm over all elements depends on their order in memory to the bit."""
    like = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    reduction = ExactReduction([like], 1, 0)
    value = torch.randn(2, 3, 4, 5)
    _add(reduction, 0, [value.clone()])
    (result,) = reduction.finish(1)
    assert result is not None
    assert result.stride() == like.stride()
    assert torch.equal(result, value)


def test_values_in_parts_are_added_up_before_they_meet_others() -> None:
    parts = [torch.randn(3, generator=torch.Generator().manual_seed(n)) for n in range(6)]
    reduction = ExactReduction([torch.empty(3)], 1, 0)
    for index in range(3):
        reduction.begin(index)
        for part in parts[2 * index : 2 * index + 2]:
            reduction.put(0, part.clone())
        reduction.end()
    (result,) = reduction.finish(3)
    assert result is not None
    assert torch.equal(result, _tree_sum([parts[0] + parts[1], parts[2] + parts[3], parts[4] + parts[5]]))


def test_values_that_come_in_parts_late_are_refused() -> None:
    reduction = ExactReduction([torch.empty(3)], 1, 0)
    _add(reduction, 0, [torch.ones(3)])
    reduction.begin(1)
    reduction.put(0, torch.ones(3))
    with pytest.raises(UsageError, match="tensor 0 came in several parts"):
        reduction.put(0, torch.ones(3))


def test_a_slice_with_a_gap_is_refused() -> None:
    reduction = ExactReduction([torch.empty(3)], 1, 0)
    _add(reduction, 0, [torch.ones(3)])
    with pytest.raises(ValueError, match="the micro-batches 0 to 1 of 2"):
        reduction.finish(2)

"""Orders that are computed position by position are permutations, and random as far as these tests can tell.

Keys are fixed, so that a test gives the same result each time. The limits are five standard deviations of chi-square.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic_launch.errors import UsageError
from elastic_launch.training.data.permutation import LONGEST, Permutation, uniform

ORDER = [159, 379, 858, 538, 419, 499]
NUMBERS = [0.3094389534224846, 0.8632127395040796, 0.3772045407666397]


def _excess(counts: Tensor, freedom: int | None = None) -> float:
    """How many standard deviations chi-square of counts, which should all be equal, is above its mean."""
    counts = counts.double()
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1 if freedom is None else freedom
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@cache
def _orders(length: int, count: int) -> Tensor:
    positions = torch.arange(length)
    return torch.stack([Permutation(length, "test", key)[positions] for key in range(count)])


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3000), st.integers(0, 2**63))
def test_each_number_occurs_once(length: int, key: int) -> None:
    assert Permutation(length, key)[torch.arange(length)].sort().values.tolist() == list(range(length))


@pytest.mark.parametrize("length", [10**9, 10**12, 2**48 + 1, 2**62])
def test_any_length_costs_the_same(length: int) -> None:
    permutation = Permutation(length, 3)
    positions = torch.arange(5000) * (length // 5000)
    numbers = permutation[positions]
    assert len(set(numbers.tolist())) == 5000
    assert 0 <= int(numbers.min()) <= length // 100
    assert length - length // 100 <= int(numbers.max()) < length
    assert torch.equal(permutation[positions[4000:].view(10, 100)].flatten(), numbers[4000:])


@pytest.mark.parametrize("length", [0, LONGEST + 1])
def test_a_length_that_cannot_be_is_refused(length: int) -> None:
    with pytest.raises(UsageError, match=rf"Permutation\(length={length}\)"):
        Permutation(length)


@pytest.mark.parametrize(
    "length", [2, 3, 4, pytest.param(5, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.soak)]
)
def test_all_orders_of_few_numbers_are_equally_frequent(length: int) -> None:
    found = Counter(tuple(order) for order in _orders(length, 10 * math.factorial(length)).tolist())
    assert _excess(torch.tensor([found[order] for order in permutations(range(length))])) < 5


@pytest.mark.parametrize("length", [17, 60])
def test_each_number_is_equally_frequent_at_each_position(length: int) -> None:
    orders = _orders(length, 600)
    table = torch.stack([orders[:, place].bincount(minlength=length) for place in range(length)])
    assert abs(_excess(table, (length - 1) ** 2)) < 5


@pytest.mark.parametrize("length", [17, 60])
def test_neighbours_are_independent(length: int) -> None:
    """Numbers at neighbouring positions, and at the same position of two epochs."""
    orders = _orders(length, 600)
    steps = (orders[:, 1:] - orders[:, :-1]) % length
    assert abs(_excess(steps.flatten().bincount(minlength=length)[1:])) < 5
    epochs = (orders[1:] - orders[:-1]) % length
    assert abs(_excess(epochs.flatten().bincount(minlength=length))) < 5


@pytest.mark.parametrize("length", [10**6 + 3, 10**9])
def test_pairs_of_neighbours_in_a_long_order_fill_the_square(length: int) -> None:
    """Numbers at positions one, two and a thousand apart, in 32 classes each."""
    positions = torch.arange(30_000)
    numbers = Permutation(length, 11)[positions] * 32 // length
    for apart in (1, 2, 1000):
        pairs = numbers[:-apart] * 32 + numbers[apart:]
        assert abs(_excess(pairs.bincount(minlength=1024))) < 5
    assert abs(_excess(numbers.bincount(minlength=32))) < 5


def test_the_order_is_what_it_was() -> None:
    """Checkpoints depend on it: another order needs another version, and the present one must stay supported."""
    assert Permutation(1000, 0, 0)[torch.arange(6)].tolist() == ORDER
    assert uniform(torch.arange(3), 0, 0).tolist() == NUMBERS


def test_uniform_numbers_are_uniform_and_independent() -> None:
    numbers = torch.stack([uniform(torch.arange(20_000) + start, 5) for start in (0, 2**33)])
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    classes = (numbers * 32).long()
    pairs = classes[:, :-1] * 32 + classes[:, 1:]
    assert abs(_excess(pairs.flatten().bincount(minlength=1024))) < 5
    assert abs(_excess((classes[0] * 32 + classes[1]).bincount(minlength=1024))) < 5
    low_bits = (numbers * 2**53).long() % 64
    assert abs(_excess(low_bits.flatten().bincount(minlength=64))) < 5
    assert abs(_excess((uniform(torch.arange(20_000), 6) - numbers[0]).remainder(1).mul(64).long().bincount())) < 5

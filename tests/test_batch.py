"""Properties of the global batch's arithmetic."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_launch.batch import GlobalBatch, slice_of

WORLDS = st.integers(1, 9)
BATCHES = st.tuples(st.integers(1, 64), st.integers(1, 16)).filter(lambda pair: pair[1] <= pair[0])


@st.composite
def batches_with_samples(draw: st.DrawFn) -> tuple[GlobalBatch, int]:
    size, micro = draw(BATCHES)
    return GlobalBatch(size, micro), draw(st.integers(1, size))


@given(batches_with_samples(), WORLDS)
def test_all_ranks_together_do_all_micro_batches_once_and_in_order(given_: tuple[GlobalBatch, int], world: int) -> None:
    batch, samples = given_
    plans = [batch.plan(world, rank, samples) for rank in range(world)]
    together = tuple(micro for plan in plans for micro in plan.micro_batches)
    assert together == batch.micro_batches(samples) == batch.plan(1, 0, samples).micro_batches
    assert [position for micro in together for position in range(micro.start, micro.stop)] == list(range(samples))
    assert [micro.index for micro in together] == list(range(math.ceil(samples / batch.micro)))
    assert {plan.total for plan in plans} == {len(together)}


@given(batches_with_samples(), WORLDS)
def test_weights_make_the_mean_over_the_global_batch(given_: tuple[GlobalBatch, int], world: int) -> None:
    batch, samples = given_
    plans = [batch.plan(world, rank, samples) for rank in range(world)]
    assert math.isclose(sum(sum(plan.weights) for plan in plans), 1.0)
    losses = [float(i * i) for i in range(samples)]
    mean = sum(
        weight * sum(losses[micro.start : micro.stop]) / len(micro)
        for plan in plans
        for micro, weight in zip(plan.micro_batches, plan.weights, strict=True)
    )
    assert math.isclose(mean, sum(losses) / samples, abs_tol=1e-9)


@given(batches_with_samples(), WORLDS)
def test_no_rank_does_more_than_it_must(given_: tuple[GlobalBatch, int], world: int) -> None:
    batch, samples = given_
    loads = [batch.plan(world, rank, samples).grad_accum for rank in range(world)]
    assert max(loads) == math.ceil(sum(loads) / world)
    assert max(loads) - min(loads) <= 1


@given(st.integers(1, 64), WORLDS)
def test_the_advised_micro_batch_is_the_largest_that_uses_all_ranks(size: int, world: int) -> None:
    advised = GlobalBatch(size, size).micro_for(world)
    fitting = [micro for micro in range(1, size + 1) if GlobalBatch(size, micro).idle_ranks(world) == 0]
    assert advised == (max(fitting) if fitting else None)


def test_equal_powers_of_two_are_aligned() -> None:
    assert [slice_of(16, 4, rank) for rank in range(4)] == [(0, 4), (4, 8), (8, 12), (12, 16)]


@pytest.mark.parametrize(
    ("size", "micro", "field"), [(0, 1, "size=0"), (-4, 1, "size=-4"), (8, 0, "micro=0"), (8, 9, "micro=9")]
)
def test_what_cannot_be_a_batch_is_refused(size: int, micro: int, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        GlobalBatch(size, micro)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="ranks 0 to 3"):
        GlobalBatch(8, 2).plan(4, rank)


@pytest.mark.parametrize("samples", [0, 9])
def test_a_short_batch_has_at_least_one_sample_and_no_more_than_a_full_one(samples: int) -> None:
    with pytest.raises(ValueError, match="1 to 8 samples"):
        GlobalBatch(8, 2).plan(1, 0, samples)

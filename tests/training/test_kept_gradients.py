"""Gradients that something still holds when the next step begins: theirs is other memory then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from elastic_launch.training.gradients.buckets import BucketedReduction
from elastic_launch.training.gradients.flat import Reduction
from elastic_launch.training.gradients.reduction import ExactReduction

LIKE = {"weight": torch.empty(2, 3), "phase": torch.empty(2, dtype=torch.complex64), "bias": torch.empty(3)}

HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda gradient: gradient,
    "a part": lambda gradient: gradient[:1],
    "flat": lambda gradient: gradient.view(-1),
    "detached": lambda gradient: gradient.detach(),
    "an array": lambda gradient: gradient.numpy(),
    "its memory": lambda gradient: gradient.untyped_storage(),
    "in a graph": lambda gradient: (torch.ones(1, requires_grad=True) * gradient).grad_fn,
}


@pytest.fixture(params=["buckets", "exact"])
def reduction(request: pytest.FixtureRequest) -> Iterator[Reduction]:
    if request.param == "exact":
        yield ExactReduction([*LIKE.values()], 1, 0)
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield BucketedReduction(LIKE, frozenset(), overlap=True, room=8)
    finally:
        dist.destroy_process_group()


def _step(reduction: Reduction, value: float) -> list[Tensor]:
    reduction.reset()
    for index in range(2):
        reduction.begin(index)
        reduction.begin_pass(last=index == 1)
        for which, like in enumerate(LIKE.values()):
            reduction.put(which, torch.full_like(like, value))
        reduction.end_pass()
        reduction.end()
    found = reduction.finish(2)
    sums = [gradient for gradient in found if gradient is not None]
    assert [float(each.real.sum()) for each in sums] == [2 * value * like.numel() for like in LIKE.values()]
    return sums


@pytest.mark.parametrize("which", [0, 1, 2], ids=[*LIKE])
@pytest.mark.parametrize("how", HOLDS)
def test_what_is_held_stays_as_it_was(reduction: Reduction, how: str, which: int) -> None:
    _step(reduction, 1.0)
    for value in (2.0, 3.0):
        gradient = _step(reduction, value)[which]
        address, then = gradient.data_ptr(), gradient.untyped_storage().tolist()
        held = HOLDS[how](gradient)
        del gradient
        now = _step(reduction, 4.0)[which]
        assert now.data_ptr() != address
        if how == "its memory":
            assert held.tolist() == then
        elif how == "in a graph":
            assert torch.equal(held._saved_other, torch.full_like(now, 2 * value))
        else:
            assert torch.equal(torch.as_tensor(held).reshape(-1)[:1].real, torch.full((1,), 2 * value))


def test_memory_that_nothing_holds_is_used_again(reduction: Reduction) -> None:
    _step(reduction, 1.0)  # the buckets are made anew after it
    addresses = [[gradient.data_ptr() for gradient in _step(reduction, value)] for value in (2.0, 3.0, 4.0)]
    assert addresses == addresses[:1] * 3

"""Ranks that lack a state get their parts of it from those that have it; threads take the ranks' places."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_threads import Messages
from torch import Tensor

from elastic_launch.shared_progress import Activity
from elastic_launch.training.ranks import exchange, spreading
from elastic_launch.training.ranks.spreading import Box, narrowed, sources, spread_state
from elastic_launch.training.ranks.world import World

MISSING = -1.0

_in_chunks = spreading.in_chunks


class Link:
    """What a rank says to its agent that it does."""

    def __init__(self) -> None:
        self.now = Activity.STEP

    @contextlib.contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        before, self.now = self.now, activity
        yield
        self.now = before

    def advanced(self) -> None:
        pass


class Shards:
    """Keeps what equal shards in one dimension give to a rank, and nothing of tensors that others have."""

    def __init__(self, rank: int, ranks: int, dimension: int) -> None:
        self._rank, self._ranks, self._dimension = rank, ranks, dimension

    def __call__(self, path: tuple[Any, ...], tensor: Tensor, /) -> Tensor:
        box = self.box(path, tensor.shape)
        return tensor.to("meta") if box is None else self.kept(path, tensor.shape, narrowed(tensor, box))

    def box(self, path: tuple[Any, ...], shape: Sequence[int]) -> Box | None:
        if path[0] == "owned" and path[1] % self._ranks != self._rank:
            return None
        found = [(0, length) for length in shape]
        if path[0] == "sharded" and self._dimension < len(shape):
            length = shape[self._dimension]
            each = -(-length // self._ranks)
            begin = min(length, each * self._rank)
            found[self._dimension] = (begin, min(length, begin + each) - begin)
        return found

    def kept(self, path: tuple[Any, ...], shape: Sequence[int], part: Tensor) -> Tensor:
        whole = torch.full(tuple(shape), MISSING, dtype=part.dtype)
        box = self.box(path, shape)
        assert box is not None
        narrowed(whole, box).copy_(part)
        return whole


def _state(shapes: list[list[int]]) -> dict[str, Any]:
    filled = [torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) for shape in shapes]
    return {
        "sharded": {str(number): tensor for number, tensor in enumerate(filled)},
        "owned": {number: tensor + 1 for number, tensor in enumerate(filled)},
        "same": [torch.tensor(3.0), {"tied": filled[0]}],
        "array": np.arange(5, dtype=np.int16),
        "plain": ["a", None, 7],
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=4),
    has=st.lists(st.booleans(), min_size=1, max_size=5).filter(any),
    dimension=st.integers(0, 1),
)
def test_each_byte_that_is_kept_is_sent_once_and_no_other(
    monkeypatch: pytest.MonkeyPatch, shapes: list[list[int]], has: list[bool], dimension: int
) -> None:
    ranks, holders = len(has), [rank for rank, there in enumerate(has) if there]
    messages, sent = Messages(), []
    for module in (exchange, spreading):
        monkeypatch.setattr(module, "dist", messages)

    def counted(dense: Tensor, transfer: Any) -> None:
        sent.append(dense.nbytes * (transfer.func is spreading._send))
        _in_chunks(dense, transfer)

    monkeypatch.setattr(spreading, "in_chunks", counted)

    def spread(rank: int) -> Any:
        state = _state(shapes) if rank in holders else None
        return spread_state(state, holders, World(rank, ranks), Shards(rank, ranks, dimension))

    least = 0
    for rank, found in enumerate(messages.run(ranks, spread)):
        expected = spread_state(_state(shapes), [0], World(), Shards(rank, ranks, dimension))
        assert found["plain"] == expected["plain"]
        assert np.array_equal(found["array"], expected["array"])
        tensors = {}
        for name, state in (("found", found), ("expected", expected)):
            owned = {key: value for key, value in state["owned"].items() if not value.is_meta}
            tensors[name] = [*state["sharded"].values(), *owned.values(), state["same"][0], state["same"][1]["tied"]]
        assert list(map(Tensor.tolist, tensors["found"])) == list(map(Tensor.tolist, tensors["expected"]))
        if rank not in holders:
            kept = {id(x): int((x != MISSING).sum()) * 4 for x in tensors["found"]}  # the tied one is one tensor
            least += sum(kept.values()) + found["array"].nbytes
    assert sum(sent) == least


def test_what_a_rank_keeps_is_received_as_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large array, of which a rank first learns the shape alone, and sets, which are encoded in another order."""
    state = {
        "same": np.arange(2**20),
        "owned": {0: np.arange(2**20), 1: np.arange(2**20)},
        "set": {(name, torch.tensor(number)) for number, name in enumerate("hgfedcba")},
    }
    messages = Messages()
    for module in (exchange, spreading):
        monkeypatch.setattr(module, "dist", messages)

    def spread(rank: int) -> Any:
        return spread_state(state if rank == 0 else None, [0], World(rank, 2), Shards(rank, 2, 0))

    for rank, found in enumerate(messages.run(2, spread)):
        assert {(name, int(number)) for name, number in found["set"]} == set(zip("hgfedcba", range(8), strict=True))
        assert np.array_equal(found["same"], state["same"])
        assert np.array_equal(found["owned"][rank], state["same"])


def test_views_are_sent_as_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a process that goes on; what was read from a snapshot has no such tensors."""
    sent: list[Tensor] = []
    dist = SimpleNamespace(broadcast=lambda tensor, **_: sent.append(tensor.clone()))
    monkeypatch.setattr(exchange, "dist", dist)
    lazily = torch.tensor([1 + 2j, 3j]).conj()
    state = {"conjugate": lazily, "negative": lazily.imag, "one of a column": torch.arange(6.0).view(3, 2)[1:2, 1]}
    exchange.broadcast_state(state, 0, 0)
    exchange.broadcast_tensors([state["one of a column"]])
    dtypes = torch.complex64, torch.float32, torch.float32, torch.float32
    small, last = sent[2:]  # those of a state are together
    parts = [*small.split([16, 8, 4]), last]
    read = [data.clone().view(dtype).tolist() for data, dtype in zip(parts, dtypes, strict=True)]
    assert read == [[1 - 2j, -3j], [-2.0, -3.0], [3.0], [3.0]]


@pytest.mark.parametrize("number", range(4))  # the size and bytes of what it is, the small tensors, and a large one
def test_a_process_that_loses_a_receiver_can_tell_that_the_exchange_failed(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """So that it goes on in another round, whichever part of the state was on its way."""
    sent: list[Tensor] = []

    def broadcast(tensor: Tensor, src: int, group: object = None, async_op: bool = False) -> None:
        if len(sent) == number:
            raise RuntimeError("Connection reset by peer")
        sent.append(tensor)

    own = FunctionType(broadcast.__code__, {"__name__": "torch.distributed.lost"}, closure=broadcast.__closure__)
    monkeypatch.setattr(exchange, "dist", SimpleNamespace(broadcast=own))
    large = torch.ones(exchange.SMALL)
    state = {"weights": [large], "groups": OrderedDict(a={"b": torch.ones(1)}), "set": {(1, torch.ones(3))}}
    with pytest.raises(RuntimeError, match="reset by peer") as caught:
        exchange.broadcast_state(state, 0, 0)
    within = caught.value.__traceback__
    assert within is not None
    assert exchange.is_of_exchange(caught.value.with_traceback(within.tb_next))


@given(st.integers(1, 40), st.data())
def test_those_who_have_the_state_serve_equally_many(ranks: int, data: st.DataObject) -> None:
    holders = sorted(data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)))
    found = sources(holders, ranks)
    assert set(found) == set(range(ranks)) - set(holders)
    served = [sum(source == holder for source in found.values()) for holder in holders]
    assert sum(served) == len(found)
    assert max(served) - min(served) <= 1


def test_a_rank_that_serves_no_other_says_that_it_waits_for_those_that_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = Messages()
    for module in (exchange, spreading):
        monkeypatch.setattr(module, "dist", messages)
    links = [Link() for _ in range(3)]
    seen: list[list[Activity]] = []

    class Slow(Shards):
        def kept(self, path: tuple[Any, ...], shape: Sequence[int], part: Tensor) -> Tensor:
            if path[0] == "array":  # the last one: until then, rank 2's holder sends to it
                wait_for("the holders", lambda: messages.waiting == 2)
                seen.append([link.now for link in links])
            return super().kept(path, shape, part)

    def spread(rank: int) -> Any:
        with exchange.telling(links[rank]):  # type: ignore[arg-type]
            state = None if rank == 2 else _state([[4]])
            return spread_state(state, [0, 1], World(rank, 3), (Slow if rank == 2 else Shards)(rank, 3, 0))

    messages.run(3, spread)
    assert seen == [[Activity.FORMING, Activity.FORMING, Activity.RESTORE]]

"""Shards that processes keep at a planned change; threads take the ranks' places."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_threads import Messages
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import elastic_launch as el
from elastic_launch.training.checkpoints import split_restore
from elastic_launch.training.checkpoints.kept_shards import KEPT, KeptShards, boxes_of, cut_for, keep_shards, portions
from elastic_launch.training.checkpoints.memory import MemorySnapshots, Newest, newest
from elastic_launch.training.checkpoints.saving import Trained
from elastic_launch.training.checkpoints.sharded import StateGatherer
from elastic_launch.training.checkpoints.split import SnapshotPart
from elastic_launch.training.checkpoints.split_restore import restored
from elastic_launch.training.engine import Engine
from elastic_launch.training.link import AgentLink
from elastic_launch.training.live.resharding import let_go
from elastic_launch.training.ranks import exchange
from elastic_launch.training.ranks.spreading import Box, narrowed, overlap
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
STAYS = st.lists(st.booleans(), min_size=1, max_size=6).filter(any)


def elements(box: Box) -> set[tuple[int, ...]]:
    found: set[tuple[int, ...]] = {()}
    for begin, length in box:
        found = {(*each, place) for each in found for place in range(begin, begin + length)}
    return found


@given(SHAPES, st.data())
def test_a_tensor_is_cut_as_torch_cuts_it(shape: tuple[int, ...], data: st.DataObject) -> None:
    dimension = data.draw(st.integers(0, len(shape) - 1))
    count = data.draw(st.integers(1, 12))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    chunks = torch.chunk(whole, count, dimension)
    for place in range(count):
        part = narrowed(whole, cut_for(shape, dimension, count, place))
        assert torch.equal(part, chunks[place]) if place < len(chunks) else not part.numel()


@given(SHAPES, STAYS, st.booleans(), st.data())
def test_each_element_is_in_one_portion_and_what_stays_is_not_given(
    shape: tuple[int, ...], stays: list[bool], cut: bool, data: st.DataObject
) -> None:
    """Also of a tensor of which all ranks have the whole."""
    dimension = data.draw(st.integers(0, len(shape) - 1)) if cut else None
    world = len(stays)
    boxes = [cut_for(shape, dimension, world if cut else 1, rank if cut else 0) for rank in range(world)]
    plan = portions(stays)
    assert all(stays[portion.keeper] for portion in plan)
    found = boxes_of(plan, boxes, shape, dimension)
    held = [element for box in found.values() for element in elements(box)]
    assert sorted(held) == sorted(elements([(0, length) for length in shape]))
    given = {e for number, box in found.items() if plan[number].of != plan[number].keeper for e in elements(box)}
    assert not given & {e for rank, box in enumerate(boxes) if stays[rank] for e in elements(box)}


class Sharded:
    """This rank's shard of a tensor, in place of a DTensor, which needs processes."""

    device = torch.device("cpu")

    def __init__(self, whole: Tensor, box: Box, dimension: int) -> None:
        self.shape, self.dtype = whole.shape, whole.dtype
        self.placements = (SimpleNamespace(dim=dimension),)
        self._local = narrowed(whole, box)

    def to_local(self) -> Tensor:
        return self._local


class Cut:
    """What a rank keeps of the model's tensors: its shards, within zeros."""

    def __init__(self, dimensions: Sequence[int], world: World) -> None:
        self._dimensions, self._world = dimensions, world

    def __call__(self, path: tuple[Any, ...], tensor: Tensor, /) -> Tensor:
        return tensor.clone()

    def box(self, path: tuple[Any, ...], shape: Sequence[int]) -> Box:
        if path[0] != "model":
            return [(0, length) for length in shape]
        return cut_for(shape, self._dimensions[path[1]], self._world.world_size, self._world.rank)

    def kept(self, path: tuple[Any, ...], shape: Sequence[int], part: Tensor) -> Tensor:
        whole = torch.zeros(tuple(shape), dtype=part.dtype)
        narrowed(whole, self.box(path, shape)).copy_(part)
        return whole


@st.composite
def wholes(draw: st.DrawFn) -> list[tuple[Tensor, int]]:
    """Tensors, some with fewer rows than ranks, and the dimension in which each is cut."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        shape, dtype = draw(SHAPES), draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
        tensor = torch.arange(1, torch.Size(shape).numel() + 1).to(dtype).view(shape)
        found.append((tensor, draw(st.integers(0, len(shape) - 1))))
    return found


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wholes=wholes(), stays=STAYS, newcomers=st.integers(0, 3), at_once=st.sampled_from([1, 64, 2**26]))
def test_what_is_sent_at_a_change_is_what_changes_its_owner(
    monkeypatch: pytest.MonkeyPatch, wholes: list[tuple[Tensor, int]], stays: list[bool], newcomers: int, at_once: int
) -> None:
    """If some leave while others come, what the former had may go on once more: their number is not known before."""
    monkeypatch.setattr(split_restore, "CHUNK", at_once)
    messages, before = Messages(), len(stays)
    for module in (exchange, split_restore):
        monkeypatch.setattr(module, "dist", messages)
    boxes = [[cut_for(tensor.shape, dim, before, rank) for tensor, dim in wholes] for rank in range(before)]

    def keep(rank: int) -> tuple[dict[str, Any], SnapshotPart]:
        gatherer = StateGatherer(keep=True, split=True)
        tensors = {}
        for index, (whole, dimension) in enumerate(wholes):
            tensors[index] = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
            gatherer.left.append((tensors[index], Sharded(whole, boxes[rank][index], dimension)))
        state = {"model": tensors, "optimizer": {"step": torch.tensor(7.0), "rates": [0.1, None]}}
        return keep_shards(state, gatherer, boxes, stays, rank)

    found = messages.run(before, keep)
    assert messages.unread == 0
    staying = [rank for rank, each in enumerate(stays) if each]
    after = len(staying) + newcomers
    meta = {"of": "all"}
    mine = [KeptShards(1, 7, 0, part, state, meta) for state, part in (found[rank] for rank in staying)]
    parts = {rank: each.part for rank, each in enumerate(mine)}

    def restore(rank: int) -> Any:
        world = World(rank, after)
        cut = Cut([dimension for _, dimension in wholes], world)
        return restored(mine[rank] if rank < len(mine) else None, parts, world, lambda _: cut)

    for rank, (state, told) in enumerate(messages.run(after, restore)):
        assert told == meta
        assert (state["optimizer"]["step"].item(), state["optimizer"]["rates"]) == (7, [0.1, None])
        for index, (whole, dimension) in enumerate(wholes):
            box = cut_for(whole.shape, dimension, after, rank)
            assert torch.equal(narrowed(state["model"][index], box), narrowed(whole, box))
    least, given = 0, 0
    for index, (whole, dimension) in enumerate(wholes):
        kept = [
            overlap(boxes[old][index], cut_for(whole.shape, dimension, after, new)) for new, old in enumerate(staying)
        ]
        least += whole.nbytes - sum(narrowed(whole, box).nbytes for box in kept if box is not None)
        given += sum(narrowed(whole, boxes[rank][index]).nbytes for rank in range(before) if not stays[rank])
    assert messages.unread == 0
    if newcomers == 0 or all(stays):
        assert messages.sent == least
    assert least <= messages.sent <= least + given


class Kept:
    """Ranks of a new round, some of which have kept shards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._messages = Messages()
        for module in (exchange, split_restore):
            monkeypatch.setattr(module, "dist", self._messages)

    def newest(self, kept: Sequence[KeptShards | None]) -> list[Newest | None]:
        def found(rank: int) -> Newest | None:
            world = World(rank, len(kept), node_rank=rank, round=3)
            memory = MemorySnapshots(AgentLink(), world)
            memory.shards = kept[rank]
            return newest(memory, world, 0)

        return self._messages.run(len(kept), found)


def of(*ranks: int, step: int = 7, training: int = 0) -> KeptShards:
    return KeptShards(2, step, training, SnapshotPart(ranks, 3), {}, {})


def test_what_processes_have_kept_is_the_newest_state_while_all_of_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Kept(monkeypatch)
    for each in ranks.newest([of(0), None, of(1, 2)]):
        assert each is not None
        assert (each.position, each.phase, [*each.holders], each.snapshot) == ((2, 7), KEPT, [0, 2], -1)
    assert ranks.newest([of(0), None, of(2)]) == [None] * 3
    assert ranks.newest([of(0, 1, 2, training=1)]) == [None]


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_checkpoint_is_written_at_a_planned_change_only_if_a_process_leaves(tmp_path: Path, goes_on: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = Run(Engine(World(round=1), torch.device("cpu"), AgentLink()))
    model = nn.Linear(3, 5)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    try:
        run.register("model", model)
        run.resume(el.Checkpoint(tmp_path / "checkpoints", every=1000))
        engine, expected = run._engine, model.weight.full_tensor().clone()  # type: ignore[operator]
        after = Trained(7, engine.checkpoint, {}, engine.state, [1])
        engine.saver.save(after, last=True, draining=True, stays=None, goes_on=goes_on)
        engine.saver.finish(wait=True)
        kept = engine.saver._memory.shards
        assert len([*tmp_path.glob("checkpoints/step-7.*")]) == int(not goes_on)
        assert (kept is not None) is goes_on
        if kept is not None:
            assert (kept.position, kept.part) == ((1, 7, KEPT), SnapshotPart((0,), 1))
            assert any(torch.equal(each, expected) for each in kept.state["pieces"]["0"].values())
            engine.saver.poll(8, engine.checkpoint)
            assert engine.saver._memory.shards is None
    finally:
        run._engine.release()
        let_go(model)
        dist.destroy_process_group()

"""Snapshots that are split among the nodes; threads take the ranks' places, with real slots for the nodes' memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from rank_threads import Messages
from torch import Tensor

from elastic_launch.snapshot import room
from elastic_launch.snapshot.format import tree
from elastic_launch.snapshot.memory.slot import EVALUATED, PART, STEPPED, Header, Slot
from elastic_launch.snapshot.memory.slot_state import SlotDraft, SlotWriter
from elastic_launch.snapshot.storage.shares import OwnShare
from elastic_launch.training.checkpoints import split, split_restore
from elastic_launch.training.checkpoints.memory import MemorySnapshots, Newest, newest
from elastic_launch.training.checkpoints.sharded import StateGatherer
from elastic_launch.training.checkpoints.split import InSlot, Layouts, SnapshotPart, Votes, complete, owners, taken
from elastic_launch.training.checkpoints.split_restore import restored
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks import exchange
from elastic_launch.training.ranks.spreading import Box, narrowed, overlap, within
from elastic_launch.training.ranks.world import World

BOXES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=2, max_size=2)


def _elements(box: Box) -> set[tuple[int, ...]]:
    found: set[tuple[int, ...]] = {()}
    for begin, length in box:
        found = {(*each, place) for each in found for place in range(begin, begin + length)}
    return found


@given(BOXES, BOXES)
def test_two_boxes_have_the_elements_in_common_that_are_in_both(box: Box, other: Box) -> None:
    common = overlap(box, other)
    assert _elements(box) & _elements(other) == (set() if common is None else _elements(common))
    if common is not None:
        whole = torch.arange(100).view(10, 10)
        assert torch.equal(narrowed(narrowed(whole, other), within(common, other)), narrowed(whole, common))


NODES = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), min_size=1, max_size=9)


@given(NODES)
def test_shards_are_kept_by_the_node_that_has_them_and_by_the_one_before_of_those_that_write(
    ranks: list[tuple[int, bool, bool]],
) -> None:
    nodes = [node for node, *_ in ranks]
    first = [node not in nodes[:rank] for rank, node in enumerate(nodes)]
    writes = [writes and first[rank] for rank, (_, writes, _) in enumerate(ranks)]
    asks = [asks and writes[rank] for rank, (*_, asks) in enumerate(ranks)]
    votes = Votes.of(list(zip(nodes, first, writes, asks, strict=True)))
    circle = sorted(node for rank, node in enumerate(nodes) if writes[rank])
    assert votes.split is (len(circle) >= 3 and any(asks))
    assert votes.kept is any(writes)
    assert [nodes[rank] for rank in votes.firsts] == sorted({*nodes})
    assert all(first[rank] for rank in votes.firsts)
    assert len(votes.keepers) == (len(ranks) if votes.split else 0)
    for node, kept_by in zip(nodes, votes.keepers, strict=False):
        place = max((place for place, other in enumerate(circle) if other <= node), default=len(circle) - 1)
        assert all(writes[rank] for rank in kept_by)
        assert [nodes[rank] for rank in kept_by] == [circle[place], circle[place - 1]]


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([], False),
        ([SnapshotPart()], True),
        ([SnapshotPart((0, 1), 3)], False),
        ([SnapshotPart((0, 1), 3), SnapshotPart((1, 2), 3)], True),
        ([SnapshotPart((0, 1), 4), SnapshotPart((2, 1), 4)], False),
        ([SnapshotPart((0, 1), 4), SnapshotPart()], True),
    ],
)
def test_parts_are_complete_with_the_shards_of_all_ranks_or_the_whole(parts: list[SnapshotPart], whole: bool) -> None:
    assert complete(parts) is whole


@dataclass(frozen=True)
class Like:
    """A tensor of a state, and how it is sharded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dimension: int | None  # None: it is not sharded

    def whole(self) -> Tensor:
        """Numbers that differ from each other, where the dtype has enough."""
        numbers = torch.arange(1, torch.Size(self.shape).numel() + 1)
        return (numbers % 2 == 1 if self.dtype is torch.bool else numbers.to(self.dtype)).view(self.shape)


@dataclass(frozen=True)
class Mesh:
    """A world in which some ranks have the same shards."""

    shards: int
    replicas: int = 1
    inner: bool = False  # whether neighbouring ranks have the same shard

    @property
    def ranks(self) -> int:
        return self.shards * self.replicas

    def box(self, like: Like, rank: int) -> Box:
        """Return a rank's shard as ``torch.chunk`` makes it: the last ones may be short or empty."""
        found = [(0, length) for length in like.shape]
        if like.dimension is not None:
            place = rank // self.replicas if self.inner else rank % self.shards
            length = like.shape[like.dimension]
            each = -(-length // self.shards)
            begin = min(length, each * place)
            here = min(length, begin + each) - begin
            found[like.dimension] = (begin if here else 0, here)
        return found


class Sharded:
    """This rank's shard of a tensor, in place of a DTensor, which needs processes."""

    device = torch.device("cpu")
    placements = ()

    def __init__(self, whole: Tensor, box: Box) -> None:
        self.shape, self.dtype = whole.shape, whole.dtype
        self._box = box
        self._local = narrowed(whole, box)

    def to_local(self) -> Tensor:
        return self._local


class Shards:
    """Keeps a rank's shards of a mesh, within zeros; of every third tensor nothing on odd ranks."""

    def __init__(self, likes: Sequence[Like], mesh: Mesh, rank: int) -> None:
        self._likes, self._mesh, self._rank = likes, mesh, rank

    def __call__(self, path: tuple[Any, ...], tensor: Tensor, /) -> Tensor:
        box = self.box(path, tensor.shape)
        return tensor.to("meta") if box is None else self.kept(path, tensor.shape, narrowed(tensor, box))

    def box(self, path: tuple[Any, ...], shape: Sequence[int]) -> Box | None:
        if path[0] != "model":
            return [(0, length) for length in shape]
        if path[1] % 3 == 2 and self._rank % 2:
            return None
        return self._mesh.box(self._likes[path[1]], self._rank)

    def kept(self, path: tuple[Any, ...], shape: Sequence[int], part: Tensor) -> Tensor:
        whole = torch.zeros(tuple(shape), dtype=part.dtype)
        box = self.box(path, shape)
        assert box is not None
        narrowed(whole, box).copy_(part)
        return whole


MESHES = st.builds(Mesh, st.integers(1, 6), st.integers(1, 2), st.booleans())


@st.composite
def _likes(draw: st.DrawFn) -> list[Like]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        dimension = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
        found.append(Like(shape, dtype, dimension))
    return found


def _on_nodes(ranks: int, each: int) -> list[int]:
    """Return the node of each rank."""
    return [rank // each for rank in range(ranks)]


def _state(tensors: Sequence[Any]) -> dict[str, Any]:
    return {"model": dict(enumerate(tensors)), "optimizer": {"step": torch.tensor(7.0), "rates": [0.1, None]}}


@contextmanager
def _slots(states: Sequence[dict[str, Any]], metas: Sequence[dict[str, Any]]) -> Iterator[list[tuple[Slot, Header]]]:
    """Write states into slots, one for each."""
    with ExitStack() as stack:
        found = []
        for state, meta in zip(states, metas, strict=True):
            slot = Slot.make("test")
            stack.callback(slot.close)
            writer = SlotWriter(slot)
            stack.callback(writer.close)
            writer.write(SlotDraft(state, meta, lambda tensor: True), Header(1, 1, 7, EVALUATED, 0))
            header = slot.header()
            assert header is not None
            found.append((slot, header))
        yield found


def _gathered(wholes: Sequence[Tensor], boxes: dict[int, Box], *, keep: bool) -> tuple[dict[str, Any], StateGatherer]:
    """Return a rank's state with stand-ins for the tensors that are sharded.

    Args:
        boxes: the part that the rank has of these, by index.
    """
    gatherer, tensors = StateGatherer(keep=keep, split=True), list(wholes)
    for index, box in boxes.items():
        tensors[index] = torch.empty(wholes[index].shape, dtype=wholes[index].dtype, device="meta")
        gatherer.left.append((tensors[index], Sharded(wholes[index], box)))
    return _state(tensors), gatherer


def _replace_distributed(monkeypatch: pytest.MonkeyPatch) -> Messages:
    messages = Messages()
    for module in (exchange, split_restore):
        monkeypatch.setattr(module, "dist", messages)
    return messages


def _nbytes(box: Box, dtype: torch.dtype) -> int:
    return torch.Size([length for _, length in box]).numel() * dtype.itemsize


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(likes=_likes(), before=MESHES, after=MESHES, data=st.data())
def test_what_is_taken_is_restored_to_the_bit_and_each_byte_that_a_node_lacks_is_sent_once(
    monkeypatch: pytest.MonkeyPatch, likes: list[Like], before: Mesh, after: Mesh, data: st.DataObject
) -> None:
    """Nodes are lost and come between the two, and the state may be sharded in another way, or not at all."""
    messages = _replace_distributed(monkeypatch)
    nodes = _on_nodes(before.ranks, data.draw(st.integers(1, 3), "ranks of a node before"))
    first = [rank for rank, node in enumerate(nodes) if node not in nodes[:rank]]
    writers = data.draw(st.sets(st.sampled_from(first), min_size=1), "ranks that write")
    if len(writers) < 3:
        kept_by = [sorted(writers)] * before.ranks
    else:
        kept_by = Votes.of([(node, rank in first, rank in writers, True) for rank, node in enumerate(nodes)]).keepers
    wholes = [like.whole() for like in likes]
    sharded = [index for index, like in enumerate(likes) if like.dimension is not None]
    boxes = [[before.box(likes[index], rank) for index in sharded] for rank in range(before.ranks)]

    def take(rank: int) -> dict[str, Any]:
        state, gatherer = _gathered(wholes, dict(zip(sharded, boxes[rank], strict=True)), keep=rank in writers)
        return taken(state, gatherer, boxes, kept_by, rank)

    states = messages.run(before.ranks, take)
    assert [rank for rank, state in enumerate(states) if state] == sorted(writers)
    sent = 0
    for place, (index, ranks) in enumerate(zip(sharded, owners(boxes), strict=True)):
        covered = [element for rank in ranks for element in _elements(boxes[rank][place])]
        assert sorted(covered) == sorted(_elements([(0, length) for length in likes[index].shape])), "not each once"
        for rank in ranks:
            away = [writer for writer in kept_by[rank] if writer != rank]
            sent += len(away) * _nbytes(boxes[rank][place], likes[index].dtype)
    assert (messages.sent, messages.unread) == (sent, 0)

    metas = [
        {
            "of": "all",
            PART: {"ranks": [r for r, kept in enumerate(kept_by) if writer in kept], "world_size": before.ranks},
        }
        for writer in sorted(writers)
    ]
    with _slots([states[writer] for writer in sorted(writers)], metas) as slots:
        left = data.draw(st.lists(st.sampled_from(range(len(slots))), unique=True), "slots left")
        has = [{*metas[number][PART]["ranks"]} for number in left]
        there = complete([SnapshotPart.of(*slots[number]) for number in left])
        assert there is ({*range(before.ranks)} <= set().union(*has))
        assume(there)
        now = _on_nodes(after.ranks, data.draw(st.integers(1, 3), "ranks of a node after"))
        assume(max(now) + 1 >= len(left))
        places = data.draw(st.permutations([*left, *[None] * (max(now) + 1 - len(left))]), "slot of each node")
        slot_of = [places[node] for node in now]
        parts = {rank: SnapshotPart.of(*slots[number]) for rank, number in enumerate(slot_of) if number is not None}
        whole_on = data.draw(st.sets(st.sampled_from(range(after.ranks))), "ranks that do not shard any more")
        messages.sent = 0

        def restore(rank: int) -> tuple[Any, dict[str, Any]]:
            number = slot_of[rank]
            cut = None if rank in whole_on else Shards(likes, after, rank)
            mine = None if number is None else InSlot(*slots[number])
            return restored(mine, parts, World(rank, after.ranks), lambda meta: cut)

        lacks = 0
        for rank, (state, meta) in enumerate(messages.run(after.ranks, restore)):
            cut = Shards(likes, after, rank)
            assert meta["of"] == "all"
            assert state["optimizer"]["rates"] == [0.1, None]
            assert state["optimizer"]["step"].item() == 7
            for index, whole in enumerate(wholes):
                found, path = state["model"][index], ("model", index)
                expected = whole if rank in whole_on else cut(path, whole)
                assert (found.shape, found.dtype, found.is_meta) == (whole.shape, whole.dtype, expected.is_meta)
                assert expected.is_meta or torch.equal(found, expected)
            for place, (index, ranks) in enumerate(zip(sharded, owners(boxes), strict=True)):
                full = [(0, length) for length in likes[index].shape]
                box = full if rank in whole_on else cut.box(("model", index), likes[index].shape)
                for shard in ranks if box is not None else ():
                    common = overlap(box, boxes[shard][place])
                    if common is not None and (rank not in parts or shard not in parts[rank].ranks):
                        lacks += _nbytes(common, likes[index].dtype)
        assert (messages.sent, messages.unread) == (lacks, 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(likes=_likes(), mesh=MESHES, each=st.integers(1, 3))
def test_the_shares_of_all_nodes_are_the_state_and_no_tensor_is_in_two(
    monkeypatch: pytest.MonkeyPatch, likes: list[Like], mesh: Mesh, each: int
) -> None:
    messages = _replace_distributed(monkeypatch)
    nodes = _on_nodes(mesh.ranks, each)
    firsts = [rank for rank, node in enumerate(nodes) if node not in nodes[:rank]]
    wholes = [like.whole() for like in likes]
    sharded = [index for index, like in enumerate(likes) if like.dimension is not None]
    boxes = [[mesh.box(likes[index], rank) for index in sharded] for rank in range(mesh.ranks)]

    def share(rank: int) -> OwnShare | None:
        state, gatherer = _gathered(wholes, dict(zip(sharded, boxes[rank], strict=True)), keep=rank in firsts)
        return split.own_tensors(state, gatherer, boxes, firsts, rank)

    found = messages.run(mesh.ranks, share)
    assert messages.unread == 0
    if found[0] is None:  # with one share, the whole state is saved as it is elsewhere
        assert {*found} == {None}
        assert len(firsts) == 1 or sum(wholes[index].nbytes > 0 for index in sharded) <= 1
        return
    shares = [own for own in found if own.index is not None]
    assert [own.index for own in shares] == list(range(found[0].count))
    assert {own.count for own in found} == {len(shares)}
    names = [name for own in shares for name in own.tensors]
    assert len(names) == len({*names})
    tensors = {name: tensor for own in shares for name, tensor in own.tensors.items()}
    state = tree.decode(found[0].rest, tensors)
    assert state["optimizer"]["rates"] == [0.1, None]
    for index, whole in enumerate(wholes):
        assert state["model"][index].dtype == whole.dtype
        assert torch.equal(state["model"][index], whole)
    addresses = {tensor.data_ptr() for tensor in tensors.values() if tensor.numel()}
    assert not addresses & {whole.data_ptr() for whole in wholes}, "training changes what is being written"


def test_layouts_are_exchanged_again_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = _replace_distributed(monkeypatch)
    monkeypatch.setattr(split, "box_of", lambda sharded: sharded._box)
    told = []

    def counted(world: World, mine: bytes) -> list[bytes]:
        told.append(world.rank)
        return exchange.bytes_of_all(world, mine)

    monkeypatch.setattr(split, "bytes_of_all", counted)
    layouts = [Layouts() for _ in range(2)]
    for length, times in ((4, 2), (4, 2), (6, 4), (6, 4)):
        like, mesh = Like((length,), torch.float32, 0), Mesh(2)

        def exchanged(rank: int, like: Like = like, mesh: Mesh = mesh) -> list[list[Box]]:
            gatherer = StateGatherer(keep=True, split=True)
            gatherer.left.append((torch.empty(0), Sharded(like.whole(), mesh.box(like, rank))))
            return layouts[rank].of_all(gatherer, World(rank, 2))

        half = length // 2
        for found in messages.run(2, exchanged):
            assert [[[tuple(each) for each in box] for box in mine] for mine in found] == [
                [[(0, half)]],
                [[(half, half)]],
            ]
        assert len(told) == times


class Nodes:
    """The memory of some nodes with one rank each."""

    def __init__(self, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slots = [[Slot.make("test") for _ in range(3)] for _ in range(nodes)]
        self._messages = _replace_distributed(monkeypatch)
        self._sequence = 0

    def holds(
        self,
        node: int,
        step: int,
        ranks: Sequence[int] | None,
        *,
        round: int = 1,
        world_size: int = 0,
        phase: int = EVALUATED,
    ) -> None:
        """Have a node hold the shards of some ranks; None: the whole state."""
        number = next(number for number, slot in enumerate(self.slots[node]) if slot.header() is None)
        self._sequence += 1
        part = {} if ranks is None else {PART: {"ranks": [*ranks], "world_size": world_size or len(self.slots)}}
        writer = SlotWriter(self.slots[node][number])
        draft = SlotDraft({"at": step}, part, lambda tensor: True)
        writer.write(draft, Header(self._sequence, round, step, phase, 0))
        writer.close()

    def newest(self, live: dict[int, tuple[int, int, int]] | None = None, size: int = 1) -> list[Newest | None]:
        """Return what each rank finds."""

        def found(rank: int) -> Newest | None:
            link = AgentLink()
            link.slots = self.slots[rank]
            world = World(rank, len(self.slots), node_rank=rank, round=2)
            own = (live or {}).get(rank)
            return newest(MemorySnapshots(link, world), world, 0, [own] if own else [], size=size)

        return self._messages.run(len(self.slots), found)

    def vote(self, size: int, *, whole: bool = False) -> Votes:
        """Return what the nodes agree on before the next snapshot."""

        def told(rank: int) -> Votes:
            link = AgentLink()
            link.slots = self.slots[rank]
            return MemorySnapshots(link, World(rank, len(self.slots), node_rank=rank, round=2)).vote(size, whole=whole)

        first, *others = self._messages.run(len(self.slots), told)
        assert others == [first] * len(others)
        return first


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Nodes]]:
    made: list[Nodes] = []

    def make(number: int) -> Nodes:
        made.append(Nodes(number, monkeypatch))
        return made[-1]

    yield make
    for each in made:
        for slots in each.slots:
            for slot in slots:
                slot.close()


def test_the_newest_complete_snapshot_wins_and_one_warning_names_the_newer_one(
    nodes: Callable[[int], Nodes], caplog: pytest.LogCaptureFixture
) -> None:
    three = nodes(3)
    for node in range(3):
        three.holds(node, 5, [(node - 1) % 3, node])
    three.holds(1, 8, [0, 1])
    with caplog.at_level(logging.INFO):
        found = three.newest()
    for rank, each in enumerate(found):
        assert each is not None
        assert (each.position, [*each.holders], each.everywhere) == ((1, 5), [0, 1, 2], True)
        assert {other: {*part.ranks} for other, part in each.parts.items()} == {0: {0, 2}, 1: {0, 1}, 2: {1, 2}}
        assert each.mine is not None
        assert isinstance(each.mine, InSlot)
        assert (each.mine.slot, each.mine.header.step) == (three.slots[rank][0], 5)
    assert [record.getMessage() for record in caplog.records] == [
        "the nodes do not have all shards of the snapshot of step 8"
    ]


def test_without_all_shards_of_any_snapshot_there_is_none(
    nodes: Callable[[int], Nodes], caplog: pytest.LogCaptureFixture
) -> None:
    two = nodes(2)
    two.holds(0, 5, [3, 0], world_size=4)
    two.holds(1, 5, [2, 3], world_size=4)
    with caplog.at_level(logging.INFO):
        assert two.newest() == [None, None]
    assert len(caplog.records) == 1


def test_a_node_that_has_come_has_no_part(nodes: Callable[[int], Nodes]) -> None:
    three = nodes(3)
    three.holds(0, 5, [1, 0], world_size=2)
    for rank, each in enumerate(three.newest()):
        assert each is not None
        assert (each.position, [*each.holders], each.everywhere) == ((1, 5), [0], False)
        assert (each.mine is None) is (rank != 0)


def test_a_whole_snapshot_of_one_node_is_complete(nodes: Callable[[int], Nodes]) -> None:
    three = nodes(3)
    three.holds(0, 5, [2, 0])
    three.holds(1, 5, None)
    for rank, each in enumerate(three.newest()):
        assert each is not None
        assert (each.position, [*each.holders], {**each.parts}) == ((1, 5), [1], {})
        assert (each.mine is None) is (rank != 1)


def test_an_older_whole_snapshot_wins_over_an_incomplete_one_and_a_newer_over_all(
    nodes: Callable[[int], Nodes],
) -> None:
    three = nodes(3)
    three.holds(0, 8, [2, 0])
    three.holds(2, 5, None)
    assert {each.position for each in three.newest() if each is not None} == {(1, 5)}
    three.holds(1, 2, None, round=2)
    assert {each.position for each in three.newest() if each is not None} == {(2, 2)}


def test_a_live_state_that_is_the_newest_needs_no_shards(nodes: Callable[[int], Nodes]) -> None:
    two = nodes(2)
    two.holds(0, 5, [3, 0], world_size=4)
    for each in two.newest(live={1: (1, 6, 0)}):
        assert each is not None
        assert (each.live, each.position, [*each.holders], {**each.parts}) == (True, (1, 6), [1], {})


def test_a_live_state_in_parts_counts_if_there_is_one_of_each_part(nodes: Callable[[int], Nodes]) -> None:
    """Two replicas of two ranks: one rank has made an update before its replica broke."""
    four = nodes(4)
    four.holds(0, 4, None)
    for lives, position, holders in (
        ({0: (1, 6, 0), 1: (1, 6, 0)}, (1, 6), [0, 1]),
        ({0: (1, 6, 0), 1: (1, 5, 0), 2: (1, 5, 0), 3: (1, 5, 0)}, (1, 5), [1, 2, 3]),
        ({0: (1, 6, 0), 3: (1, 6, 0)}, (1, 6), [0, 3]),
        ({0: (1, 6, 0), 1: (1, 5, 0), 2: (1, 6, 0)}, (1, 4), [0]),
        ({1: (1, 6, 0), 3: (1, 6, 0)}, (1, 4), [0]),
    ):
        for found in four.newest(live=lives, size=2):
            assert found is not None
            assert (found.position, found.holders, found.live) == (position, holders, position != (1, 4))


def test_the_snapshot_that_training_resumes_from_is_kept_until_the_next_is_complete(
    nodes: Callable[[int], Nodes],
) -> None:
    """The agent takes an incomplete one for the newest, and names the slot of the complete one before it."""
    three = nodes(3)
    three.holds(0, 5, [0, 1, 2])
    three.holds(0, 8, [0, 1])
    link = AgentLink()
    link.slots, link.sequence, link._use = three.slots[0], 2, 0
    memory = MemorySnapshots(link, World(first_on_node=True, round=2))
    memory.drop_above((1, 5, EVALUATED), 0)
    for step, found in ((9, [5, 9, None]), (10, [10, 9, None])):
        taken = memory.store(
            {},
            {},
            Header(0, 2, step, EVALUATED, 0),
            stays=lambda tensor: True,
            route=lambda job, size: job,
            wait=True,
        )
        assert taken
        headers = [slot.header() for slot in three.slots[0]]
        assert [None if header is None else header.step for header in headers] == found
        link._use = 0
    memory.close()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("complete", [True, False])
def test_snapshots_of_before_and_after_an_evaluation_are_not_mixed(
    nodes: Callable[[int], Nodes], whole: bool, complete: bool
) -> None:
    """One node holds only the first of them, as it was lost in the second, or came back."""
    three = nodes(3)
    for node in range(3):
        three.holds(node, 5, None if whole else [node, (node + 1) % 3], phase=STEPPED)
    for node in range(2 if complete else 1):
        three.holds(node, 5, None if whole else [node, (node + 1) % 3], phase=EVALUATED)
    newer = complete or whole  # one node alone has all shards only of a whole one
    for rank, each in enumerate(three.newest()):
        assert each is not None
        assert (each.position, each.phase) == ((1, 5), EVALUATED if newer else STEPPED)
        assert [*each.holders] == [*range((2 if complete else 1) if newer else 3)]
        assert (each.mine is None) is (rank not in each.holders)
        assert each.mine is None or each.mine.position[2] == each.phase


def test_the_state_of_a_process_comes_before_a_snapshot_of_its_step(nodes: Callable[[int], Nodes]) -> None:
    two = nodes(2)
    two.holds(0, 6, None)
    for each in two.newest(live={1: (1, 6, 0)}):
        assert each is not None
        assert (each.live, [*each.holders]) == (True, [1])


@pytest.mark.parametrize(("whole_first", "parts"), [(True, {0, 1, 2}), (False, set())])
def test_of_two_snapshots_of_one_step_a_node_takes_the_newer_one(
    nodes: Callable[[int], Nodes], whole_first: bool, parts: set[int]
) -> None:
    three = nodes(3)
    for is_whole in (whole_first, not whole_first):
        for node in range(3):
            three.holds(node, 5, None if is_whole else [node, (node + 1) % 3])
    for each in three.newest():
        assert each is not None
        assert each.mine is not None
        assert ({*each.parts}, each.mine.part.world_size > 0) == (parts, bool(parts))


@pytest.mark.parametrize(("copies", "splits"), [(2.9, True), (3.6, True), (4.6, False)])
def test_snapshots_are_split_if_three_and_the_one_that_is_gathered_have_no_room(
    nodes: Callable[[int], Nodes], monkeypatch: pytest.MonkeyPatch, copies: float, splits: bool
) -> None:
    size = 2**20
    monkeypatch.setattr(room, "room", lambda: (int(copies * size), "here"))
    votes = nodes(3).vote(size)
    assert (votes.split, votes.asked) == (splits, splits)


@pytest.mark.parametrize(("copies", "splits"), [(1.9, True), (3.0, False)])
def test_one_that_is_better_whole_needs_room_for_itself_alone(
    nodes: Callable[[int], Nodes], monkeypatch: pytest.MonkeyPatch, copies: float, splits: bool
) -> None:
    size = 2**20
    monkeypatch.setattr(room, "room", lambda: (int(copies * size), "here"))
    votes = nodes(3).vote(size, whole=True)
    assert (votes.split, votes.asked) == (splits, splits)

"""Orders to form a round of many members, which list only some of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leader_run import Run, hello_of

from elastic_launch.errors import ProtocolError
from elastic_launch.rendezvous.record import Member, Round
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire import outline

STEADY = settings(max_examples=60, deadline=None)


def member(number: int, workers: int = 2, role: str = "default", slots: tuple[int, ...] = ()) -> Member:
    return Member(f"n{number}", f"n{number}1", len(slots) or workers, f"host-n{number}", 7000 + number, role, slots)


def received(formed: Round, index: int, leader: str = "") -> m.Form:
    """Return the order to a member as it decodes and completes it."""
    order = outline.outlined(m.Form(1, formed, 0, "first"), leader)
    mine = formed.members[index]
    if order.outline is not None:
        order = replace(order, slots=mine.slots, index=index)
    told = m.unpack(outline.OrderEncoder().encode(order))
    assert isinstance(told, m.Form)
    hello = hello_of(mine.node_id, address=mine.address, store_port=mine.store_port, role=mine.role, workers=9)
    return outline.completed(told, hello)


members = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(["default", "actor"]), st.booleans()), min_size=1, max_size=12
).map(
    lambda drawn: tuple(
        member(place, workers, role, (1, 4) if partial else ()) for place, (workers, role, partial) in enumerate(drawn)
    )
)


@STEADY
@given(members, st.data())
def test_a_node_finds_the_same_place_in_an_outline_as_in_the_list(
    everybody: tuple[Member, ...], data: st.DataObject
) -> None:
    formed = Round(3, everybody)
    index = data.draw(st.integers(0, len(everybody) - 1))
    leader = data.draw(st.integers(0, len(everybody) - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outline, "MOST_LISTED", 0)
        seen = received(formed, index, everybody[leader].incarnation).round
    assert (seen.number, len(seen.members), seen.world_size) == (3, len(everybody), formed.world_size)
    assert seen.ranks_of(index) == formed.ranks_of(index)
    assert {seen.members[x] == everybody[x] for x in (0, index, leader)} == {True}
    assert [x.role for x in seen.members] == [x.role for x in everybody]
    assert len({x.incarnation for x in seen.members}) == len(everybody), "nodes are counted by it"
    assert seen.index(everybody[index].node_id, everybody[index].incarnation) == index


def test_a_small_round_is_listed_and_a_large_one_outlined_with_a_size_that_does_not_grow() -> None:
    small = Round(1, tuple(map(member, range(outline.MOST_LISTED))))
    assert received(small, 5).round == small
    sizes = []
    for count in (1000, 9000):
        order = outline.outlined(m.Form(1, Round(1, tuple(map(member, range(count)))), 0, "first"), "n71")
        sizes.append(len(m.pack(replace(order, index=count - 1))))
    assert sizes[1] - sizes[0] < 10, "digits of larger numbers"
    assert sizes[1] < 700


def test_ids_that_look_made_up_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outline, "MOST_LISTED", 8)
    strange = Round(1, tuple(replace(member(x), node_id=f"#{99 - x}") for x in range(100)))
    assert received(strange, 7).round == strange


def test_the_encoder_tells_the_outlines_of_two_rounds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outline, "MOST_LISTED", 8)
    encoder = outline.OrderEncoder()
    for number in (1, 2):
        order = outline.outlined(m.Form(1, Round(number, tuple(map(member, range(99)))), 0, "first"), "")
        for index in (98, 0):
            placed = replace(order, index=index, slots=(0, 3))
            assert m.unpack(encoder.encode(placed)) == placed


@pytest.mark.parametrize(
    "spoil",
    [
        {"index": 99},
        {"index": -1},
        {"outline": m.RoundOutline((m.MembersAlike(10**9, 1, "default"),), (0,))},
        {"outline": m.RoundOutline((), (0,))},
        {"outline": m.RoundOutline((m.MembersAlike(99, 1, "default"),), (1,))},
        {"outline": m.RoundOutline((m.MembersAlike(99, 1, "default"),), (0, 1))},
    ],
    ids=["place", "no place", "too many", "no members", "no first", "too few listed"],
)
def test_an_outline_that_contradicts_itself_is_refused(
    spoil: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outline, "MOST_LISTED", 8)
    order = outline.outlined(m.Form(1, Round(1, tuple(map(member, range(99)))), 0, "first"), "")
    with pytest.raises(ProtocolError, match="round 1"):
        outline.completed(replace(order, **{"index": 3, **spoil}), hello_of("n3"))  # type: ignore[arg-type]


def test_a_leader_outlines_a_large_round_to_each_of_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outline, "MOST_LISTED", 2)
    run = Run("3")
    run.reaches = False
    names = "abc"
    sent: dict[str, m.Form] = {}
    for link, name in enumerate(names, 1):
        hello = hello_of(name, limits=str(run.limits), workers=link)
        for instruction in run.machine.hello(link, hello, run.clock.now()):
            order = getattr(instruction, "order", None)
            if isinstance(order, m.Form):
                sent[names[instruction.link - 1]] = outline.completed(order, hello_of(names[instruction.link - 1]))  # type: ignore[union-attr]
    formed = run.machine.record.round
    assert [x.node_id for x in formed.members] == ["a", "b", "c"]
    for index, name in enumerate(names):
        assert sent[name].round.ranks_of(index) == formed.ranks_of(index)
        assert sent[name].round.members[0] == formed.members[0]
    assert [x.node_id for x in sent["b"].round.members] == ["a", "b", "#2"]

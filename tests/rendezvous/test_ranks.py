"""Which nodes are in the next round, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leader_run import hello_of

from elastic_launch.rendezvous.leader.forming import choose
from elastic_launch.rendezvous.leader.nodes import Node
from elastic_launch.rendezvous.record import Member, Round

STEADY = settings(max_examples=100)
"""The same examples in every run, however slow the machine."""


def waiting(node_id: str, *, wanted: int | None = None, arrival: int | None = None) -> Node:
    """A node that waits for a round; by default, nodes arrive in alphabetical order."""
    return Node(hello_of(node_id, wanted_rank=wanted), 0, ord(node_id) if arrival is None else arrival, 7000)


def chosen(nodes: list[Node], limit: int, last: str = "") -> list[str]:
    """Return the ids of the next round's members; ``last`` has those of the last one's, which are letters."""
    before = Round(1, tuple(Member(node_id, f"{node_id}1", 1, "host", 7000) for node_id in last))
    return [node.hello.node_id for node in choose(nodes, before, limit)]


def test_no_nodes() -> None:
    assert chosen([], 4) == []


def test_newcomers_are_ranked_by_arrival() -> None:
    assert chosen([waiting("x", arrival=2), waiting("y", arrival=0), waiting("z", arrival=1)], 4) == ["y", "z", "x"]


def test_survivors_keep_their_order_and_newcomers_come_last() -> None:
    assert chosen([waiting("a"), waiting("c"), waiting("b"), waiting("d")], 9, last="dcb") == ["d", "c", "b", "a"]


@pytest.mark.parametrize(
    ("last", "newcomers", "then"),
    [
        ("a-c", "x", "axc"),
        ("a-c-e", "xy", "axcye"),
        ("a--d", "x", "axd"),
        ("ab-", "x", "abx"),
        ("a-c", "xyz", "axcyz"),
        ("a-c", "", "ac"),
        ("-bc", "x", "bxc"),  # the others connect to the first
        ("--cd", "xy", "cxyd"),
        ("--c", "x", "cx"),
        ("---", "xy", "xy"),
    ],
)
def test_newcomers_take_the_places_of_lost_members(last: str, newcomers: str, then: str) -> None:
    nodes = [waiting(node_id) for node_id in newcomers + last.replace("-", "")]
    assert "".join(chosen(nodes, 9, last)) == then


def test_a_member_that_is_lost_for_want_of_room_leaves_no_place() -> None:
    assert chosen([waiting("a"), waiting("c"), waiting("x")], 2, last="a-c") == ["a", "c"]


def test_an_agent_that_was_restarted_is_a_newcomer() -> None:
    nodes = [waiting("a"), waiting("b")]
    last = Round(1, (Member("b", "b0", 1, "host", 7000), Member("a", "a1", 1, "host", 7000)))
    assert choose(nodes, last, 2) == nodes


def test_newcomers_are_left_out_first_the_latest_before_all() -> None:
    nodes = [waiting("n"), waiting("m"), waiting("z")]
    assert chosen(nodes, 2, last="-z") == ["z", "m"]
    assert chosen(nodes, 1, last="-z") == ["z"]


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_a_wanted_rank_is_given(wanted: int) -> None:
    nodes = [waiting("a"), waiting("b"), waiting("n", wanted=wanted)]
    ranked = chosen(nodes, 3, last="ab")
    assert ranked[wanted] == "n"
    assert [node_id for node_id in ranked if node_id != "n"] == ["a", "b"]


def test_wanting_a_rank_does_not_help_into_a_full_round() -> None:
    assert chosen([waiting("a"), waiting("n", wanted=0)], 1, last="a") == ["a"]


def test_if_two_nodes_want_a_rank_the_first_gets_it() -> None:
    nodes = [waiting("a", wanted=1), waiting("b", wanted=1), waiting("c")]
    assert chosen(nodes, 3) == ["b", "a", "c"]
    assert chosen(nodes, 3, last="bc") == ["c", "b", "a"]


def test_wanted_ranks_beyond_the_round_keep_their_order() -> None:
    nodes = [waiting("a", wanted=7), waiting("b", wanted=3), waiting("c", wanted=0)]
    assert chosen(nodes, 3) == ["c", "b", "a"]


def test_a_negative_wanted_rank_is_none() -> None:
    assert chosen([waiting("a"), waiting("b", wanted=-1)], 2) == ["a", "b"]


@st.composite
def waiting_nodes(draw: st.DrawFn) -> tuple[list[Node], str]:
    """Up to eight nodes, and the members of the last round: some of these nodes, and others that are gone."""
    node_ids = "abcdefgh"[: draw(st.integers(0, 8))]
    wanted = st.sampled_from([None, 0, 1, 2, 7, 100])
    last = draw(st.permutations(node_ids + "x"))
    return [waiting(node_id, wanted=draw(wanted)) for node_id in node_ids], "".join(last[: draw(st.integers(0, 9))])


@STEADY
@given(waiting_nodes(), st.integers(1, 9))
def test_any_nodes(found: tuple[list[Node], str], limit: int) -> None:
    nodes, last = found
    ranked = chosen(nodes, limit, last)
    wishes = {node.hello.node_id: node.hello.wanted_rank for node in nodes}
    assert len(set(ranked)) == len(ranked) == min(len(nodes), limit)
    assert set(ranked) <= wishes.keys()
    survivors = [node_id for node_id in last if node_id in wishes]
    assert set(survivors) <= set(ranked) or len(survivors) > limit
    if survivors and set(wishes.values()) == {None}:
        assert ranked[0] == survivors[0]
        later = [last.index(node_id) for node_id in survivors[1:] if node_id in ranked]
        assert all(ranked.index(last[rank]) <= rank for rank in later), "no survivor moves up"
    plain = [node_id for node_id in survivors if wishes[node_id] is None and node_id in ranked]
    assert plain == [node_id for node_id in ranked if node_id in plain], "survivors keep their order"
    for rank in {wishes[node_id] for node_id in ranked}:
        if rank is not None and rank < len(ranked):
            assert wishes[ranked[rank]] == rank
    assert chosen(nodes[::-1], limit, last) == ranked, "the order of the input does not matter"

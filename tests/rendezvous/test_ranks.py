"""Which nodes are in the next round, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_launch.rendezvous.leader.ranks import Candidate, rank_nodes

STEADY = settings(max_examples=100)
"""The same examples in every run, however slow the machine."""


def candidate(
    node_id: str, *, last: int | None = None, wanted: int | None = None, arrival: int | None = None
) -> Candidate:
    """A candidate; by default, nodes arrive in alphabetical order."""
    return Candidate(node_id, last, wanted, ord(node_id) if arrival is None else arrival)


def test_no_nodes() -> None:
    assert rank_nodes([], 4) == []


def test_newcomers_are_ranked_by_arrival() -> None:
    assert rank_nodes([candidate("x", arrival=2), candidate("y", arrival=0), candidate("z", arrival=1)], 4) == [
        "y",
        "z",
        "x",
    ]


def test_survivors_keep_their_order_and_newcomers_come_last() -> None:
    nodes = [candidate("a", arrival=0), candidate("c", last=2), candidate("b", last=5), candidate("d", last=0)]
    assert rank_nodes(nodes, 9) == ["d", "c", "b", "a"]


def test_newcomers_are_left_out_first_the_latest_before_all() -> None:
    nodes = [candidate("n"), candidate("m"), candidate("z", last=1)]
    assert rank_nodes(nodes, 2) == ["z", "m"]
    assert rank_nodes(nodes, 1) == ["z"]


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_a_wanted_rank_is_given(wanted: int) -> None:
    nodes = [candidate("a", last=0), candidate("b", last=1), candidate("n", wanted=wanted)]
    assert rank_nodes(nodes, 3)[wanted] == "n"
    assert [node for node in rank_nodes(nodes, 3) if node != "n"] == ["a", "b"]


def test_wanting_a_rank_does_not_help_into_a_full_round() -> None:
    assert rank_nodes([candidate("a", last=0), candidate("n", wanted=0)], 1) == ["a"]


def test_if_two_nodes_want_a_rank_the_first_gets_it() -> None:
    nodes = [candidate("a", wanted=1), candidate("b", wanted=1), candidate("c")]
    assert rank_nodes(nodes, 3) == ["b", "a", "c"]
    nodes = [candidate("a", wanted=1), candidate("b", last=0, wanted=1), candidate("c", last=1)]
    assert rank_nodes(nodes, 3) == ["c", "b", "a"]


def test_wanted_ranks_beyond_the_round_keep_their_order() -> None:
    nodes = [candidate("a", wanted=7), candidate("b", wanted=3), candidate("c", wanted=0)]
    assert rank_nodes(nodes, 3) == ["c", "b", "a"]


def test_a_negative_wanted_rank_is_none() -> None:
    assert rank_nodes([candidate("a"), candidate("b", wanted=-1)], 2) == ["a", "b"]


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    """Up to eight nodes, some of them survivors with distinct ranks."""
    size = draw(st.integers(0, 8))
    lasts = draw(st.permutations(range(size)))
    return [
        Candidate(
            f"n{index}",
            draw(st.sampled_from([None, lasts[index]])),
            draw(st.sampled_from([None, 0, 1, 2, 7, 100])),
            index,
        )
        for index in range(size)
    ]


@STEADY
@given(candidates(), st.integers(1, 9))
def test_any_nodes(nodes: list[Candidate], limit: int) -> None:
    ranked = rank_nodes(nodes, limit)
    assert len(set(ranked)) == len(ranked) == min(len(nodes), limit)
    assert set(ranked) <= {node.node_id for node in nodes}
    survivors = sorted((node for node in nodes if node.last_rank is not None), key=lambda node: node.last_rank or 0)
    left_out = [node.node_id for node in survivors if node.node_id not in ranked]
    assert not left_out or len(survivors) > limit
    plain = [node.node_id for node in survivors if node.wanted_rank is None and node.node_id in ranked]
    assert plain == [node_id for node_id in ranked if node_id in plain], "survivors keep their order"
    wanted = [node for node in nodes if node.node_id in ranked and node.wanted_rank is not None]
    for rank in {node.wanted_rank for node in wanted}:
        if rank is not None and rank < len(ranked):
            assert ranked[rank] in {node.node_id for node in wanted if node.wanted_rank == rank}
    assert rank_nodes(list(reversed(nodes)), limit) == ranked, "the order of the input does not matter"

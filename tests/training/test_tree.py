"""The order of addition: the same tree however the leaves are cut into slices."""

from __future__ import annotations

import gc
import operator
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_launch.batch import slice_of
from elastic_launch.training.gradients.tree import fold, joins, segments


def _join(left: str, right: str) -> str:
    return f"({left} {right})"


def _nodes(start: int, stop: int) -> list[tuple[tuple[int, int], str]]:
    stack: list[tuple[tuple[int, int], str]] = []
    for index in range(start, stop):
        value, level = str(index), joins([segment for segment, _ in stack], index)
        for _ in range(level):
            value = _join(stack.pop()[1], value)
        stack.append(((index + 1 - (1 << level), level), value))
    return stack


@given(st.integers(1, 200), st.integers(1, 20))
def test_every_world_size_adds_in_the_same_order(total: int, world: int) -> None:
    alone = fold(total, _nodes(0, total), _join)
    nodes = [node for rank in range(world) for node in _nodes(*slice_of(total, world, rank))]
    assert fold(total, nodes, _join) == alone


@given(st.integers(0, 300), st.integers(0, 100))
def test_joining_leaves_the_fewest_nodes(start: int, length: int) -> None:
    stack = _nodes(start, start + length)
    assert [segment for segment, _ in stack] == segments(start, start + length)
    assert len(stack) <= 2 * max(1, length.bit_length())


def test_the_tree_of_five() -> None:
    assert fold(5, _nodes(0, 5), _join) == "(((0 1) (2 3)) 4)"


@pytest.mark.parametrize("nodes", [[], [((0, 0), "a")], [((0, 1), "a"), ((1, 0), "b")], [((0, 0), "a"), ((0, 0), "a")]])
def test_nodes_that_are_no_tree_are_refused(nodes: list[tuple[tuple[int, int], str]]) -> None:
    with pytest.raises(ValueError, match="do not make up a tree of 2 leaves"):
        fold(2, nodes, _join)


def test_nothing_holds_the_values_after_a_sum() -> None:
    """Also not until garbage is collected: memory that something holds is not used again."""
    values = [{1}, {2}]
    held = weakref.ref(values[0])
    gc.disable()
    try:
        assert fold(2, [((0, 0), values.pop(0)), ((1, 0), values.pop())], operator.or_) == {1, 2}
        assert held() is None
    finally:
        gc.enable()

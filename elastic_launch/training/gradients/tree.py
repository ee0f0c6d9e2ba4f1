"""The fixed binary tree in which an exact reduction adds: pure arithmetic, no torch.

Floating-point addition is not associative, so a sum is bitwise reproducible only if its terms are always added in the
same order. The order here is a binary tree over the micro-batch's index, on whatever rank it was computed: node (start,
level) is the sum over the indices start to start + 2**level - 1, where start is a multiple of 2**level. A node adds its
two halves; if the right half is beyond the last micro-batch, the node is its left half alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Segment = tuple[int, int]
"""A node of the tree: start and level."""

T = TypeVar("T")


def segments(start: int, stop: int) -> list[Segment]:
    """Return the smallest list of nodes that cover the indices from ``start`` to before ``stop``, in order."""
    found = []
    while start < stop:
        level = (stop - start).bit_length() - 1
        if start:
            level = min(level, (start & -start).bit_length() - 1)
        found.append((start, level))
        start += 1 << level
    return found


def joins(nodes: Sequence[Segment], index: int) -> int:
    """Return how many nodes, counted from the last, the next index completes: its value is added to each of these.

    Indices must come in order without gaps. The nodes are then always the :func:`segments` of the range so far: at most
    about 2 * log2 of its length, or log2 plus 1 if the range starts at an aligned index.
    """
    start, level, count = index, 0, 0
    for left, height in reversed(nodes):
        if height != level or left + (1 << height) != start or left % (2 << height):
            break
        start, level, count = left, level + 1, count + 1
    return count


def fold(total: int, nodes: Sequence[tuple[Segment, T]], add: Callable[[T, T], T]) -> T:
    """Return the root of a tree with ``total`` leaves.

    Args:
        nodes: nodes with their values; they must cover the indices from 0 to before ``total``.
    """
    known = dict(nodes)
    if total < 1 or sum(min(total, s + (1 << k)) - s for s, k in known) != total or len(known) != len(nodes):
        raise ValueError(f"The nodes {sorted(known)} do not make up a tree of {total} leaves.")
    return _value(total, known, add, 0, (total - 1).bit_length())


def _value(total: int, known: Mapping[Segment, T], add: Callable[[T, T], T], start: int, level: int) -> T:
    # A function within fold() would refer to itself, and hold the values until garbage is collected.
    if (start, level) in known:
        return known[start, level]
    if level == 0:
        raise ValueError(f"The nodes {sorted(known)} do not make up a tree of {total} leaves.")
    middle = start + (1 << (level - 1))
    left = _value(total, known, add, start, level - 1)
    return left if middle >= total else add(left, _value(total, known, add, middle, level - 1))

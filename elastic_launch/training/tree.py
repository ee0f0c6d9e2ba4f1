"""The fixed binary tree in which an exact reduction adds: pure, no torch.

Floating-point addition is not associative, so a sum is the same to the bit only if it is always taken in the same
order. The order here is a binary tree over the micro-batch's index, whatever rank computed it: node (start, level) is
the sum over the indices start to start + 2**level - 1, where start is a multiple of 2**level; it adds its two halves,
and is its left half alone where the right one lies beyond the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["Segment", "fold", "push", "segments"]

Segment = tuple[int, int]
"""A node of the tree: start and level."""

T = TypeVar("T")


def segments(start: int, stop: int) -> list[Segment]:
    """Return the fewest nodes of the tree that make up a range of indices, in order."""
    found = []
    while start < stop:
        level = (stop - start).bit_length() - 1
        if start:
            level = min(level, (start & -start).bit_length() - 1)
        found.append((start, level))
        start += 1 << level
    return found


def push(stack: list[tuple[Segment, T]], index: int, value: T, add: Callable[[T, T], T]) -> None:
    """Add the next index' value to a stack of nodes, joining every two that are halves of one.

    Indices must come in order without gaps; the stack then always holds :func:`segments` of the range so far, so about
    2 * log2 of its length at most, or log2 plus 1 if the range starts at an aligned index.
    """
    node: Segment = (index, 0)
    while stack:
        (left, level), present = stack[-1]
        if level != node[1] or left + (1 << level) != node[0] or left % (2 << level):
            break
        stack.pop()
        value, node = add(present, value), (left, level + 1)
    stack.append((node, value))


def fold(total: int, nodes: Sequence[tuple[Segment, T]], add: Callable[[T, T], T]) -> T:
    """Return the root of a tree of total leaves from nodes that make up the range 0 to total.

    Raises:
        ValueError: if they do not.
    """
    known = dict(nodes)
    if total < 1 or sum(min(total, s + (1 << k)) - s for s, k in known) != total or len(known) != len(nodes):
        raise ValueError(f"The nodes {sorted(known)} do not make up a tree of {total} leaves.")

    def value(start: int, level: int) -> T:
        if (start, level) in known:
            return known[start, level]
        if level == 0:
            raise ValueError(f"The nodes {sorted(known)} do not make up a tree of {total} leaves.")
        middle = start + (1 << (level - 1))
        left = value(start, level - 1)
        return left if middle >= total else add(left, value(middle, level - 1))

    return value(0, (total - 1).bit_length())

"""Whether a node may join the run, and how its configuration differs from the run's."""

from __future__ import annotations

import shlex
from difflib import SequenceMatcher

from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.wire.messages import PROTOCOL_VERSION, NodeHello
from elastic_launch.system.plain_text import clipped, one_line

LONGEST_COMMAND = 4096
"""Bytes of the command's JSON that a hello carries and that are compared."""

SHOWN = 5
"""Most differences between two commands that are shown."""

SHOWN_BYTES = 200
"""Most bytes that are shown of each part of a difference."""

COMPARED = 256
"""Most arguments that are compared: the time grows with their square."""


def refusal(hello: NodeHello, record: ControlRecord, command: str) -> tuple[str, str] | None:
    """Return why the node cannot join and what to do about it, or None if it can."""
    if hello.version != PROTOCOL_VERSION:
        return (
            f"node {hello.node_id} speaks version {hello.version} of the protocol, "
            f"the run's leader version {PROTOCOL_VERSION}.",
            "Install the same version of elastic-launch on all nodes.",
        )
    if hello.run_id != record.run_id:
        return (
            f"node {hello.node_id} belongs to run {hello.run_id!r}, this endpoint serves another run.",
            "Give both the same --rdzv-id, or another --rdzv-endpoint.",
        )
    if 0 < hello.seen_term < record.first_term:
        return (
            f"node {hello.node_id} belongs to an earlier run {record.run_id!r}, which has ended.",
            "Start it again to join the present one.",
        )
    if hello.digest == record.digest:
        return None
    return (
        f"node {hello.node_id} came with the command `{hello.command}`, run {record.run_id!r} executes `{command}`.",
        "Give the same script, module or program and --rdzv-backend on all nodes, or another --rdzv-id and "
        "--rdzv-endpoint for another run.",
    )


def differences(ours: str, theirs: str) -> tuple[str, tuple[str, ...]]:
    """Compare two commands of one run, written as for a shell.

    Returns:
        The arguments in which theirs differs, as text; and the corresponding parts of ours, which are equal for nodes
        that differ in the same arguments. Both are empty if the commands are equal.
    """
    ours, theirs = clipped(ours, LONGEST_COMMAND), clipped(theirs, LONGEST_COMMAND)
    if ours == theirs:
        return "", ()
    try:
        mine, other = shlex.split(ours)[:COMPARED], shlex.split(theirs)[:COMPARED]
    except ValueError:  # a long command is cut at any point
        return "they are too long to be shown", ()
    if mine == other:
        return "they are too long to be shown", ()
    found: list[tuple[str, str]] = []
    for kind, low, high, first, last in SequenceMatcher(None, mine, other, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        if low and mine[low - 1].startswith("-") and kind == "replace":
            low, first = low - 1, first - 1  # include the flag that it is the value of
        found.append((shlex.join(mine[low:high]), shlex.join(other[first:last])))
    parts = [_in_words(*pair) for pair in found[:SHOWN]]
    if len(found) > SHOWN:
        parts.append(f"{len(found) - SHOWN} more")
    return ", ".join(parts), tuple(mine for mine, _ in found)


def _in_words(mine: str, other: str) -> str:
    mine, other = clipped(one_line(mine), SHOWN_BYTES), clipped(one_line(other), SHOWN_BYTES)
    if not mine:
        return f"`{other}` in addition"
    return f"`{other}` instead of `{mine}`" if other else f"without `{mine}`"

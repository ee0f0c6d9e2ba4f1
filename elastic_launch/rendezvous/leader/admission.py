"""Whether a node may join the run, and how its configuration differs from the run's."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from difflib import SequenceMatcher

from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.rendezvous.leader.nodes import Node
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.wire.messages import PROTOCOL_VERSION, NodeHello
from elastic_launch.system.plain_text import clipped, one_line

Places = Collection[tuple[str, ...]]
"""Arguments of the leader's command in which others differ, see :func:`differences`."""

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
        "Give the same script, module or program, --replica-size and --rdzv-backend on all nodes, or another --rdzv-id "
        "and --rdzv-endpoint for another run.",
    )


def intrusion(
    hello: NodeHello, record: ControlRecord, nodes: Collection[Node], command: str, *, hosted: bool, known: Places
) -> tuple[str, str] | None:
    """Return why a new node seems to belong to another run, which was given this endpoint by mistake; None if not.

    Args:
        nodes: those that the run has.
        hosted: whether the run ends with the leader's node.
        known: in what nodes of the run differ from the leader's command.
    """
    if hello.seen_term or not record.round.number:
        return None
    whose = f"node {hello.node_id} is not one of the nodes of run {record.run_id!r} at this endpoint"
    if hosted and record.limits.max_nodes == 1 and any(node.active for node in nodes):
        return (
            f"{whose}: it has one node (--nnodes 1), which trains.",
            "Give another --rdzv-endpoint, such as another port, for another run.",
        )
    arguments, places = differences(command, hello.command)
    if record.run_id == LaunchConfig.run_id and arguments and places not in known:
        return (
            f"{whose}: it came with other arguments, {arguments}, and neither has an id.",
            "Give another --rdzv-endpoint, such as another port, for another run; or, if the arguments of one run's "
            "nodes differ, the same --rdzv-id to all.",
        )
    return None


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

"""Whether a node may join the run, and how its configuration differs from the run's."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from difflib import SequenceMatcher

from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.events.facts import CommandDiffers, Misfit
from elastic_launch.rendezvous.leader.nodes import Node
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.wire.messages import PROTOCOL_VERSION, NodeHello
from elastic_launch.system.plain_text import clipped

Places = Collection[tuple[str, ...]]
"""Arguments of the leader's command in which others differ, see :class:`CommandDiffers`."""

LONGEST_COMMAND = 4096
"""Bytes of the command's JSON that a hello carries and that are compared."""

COMPARED = 256
"""Most arguments that are compared: the time grows with their square."""


def refusal(hello: NodeHello, record: ControlRecord, command: str) -> Misfit | None:
    """Return why the node cannot join, or None if it can."""
    if hello.version != PROTOCOL_VERSION:
        return Misfit("version", theirs=str(hello.version), ours=str(PROTOCOL_VERSION))
    if hello.run_id != record.run_id:
        return Misfit("run", hello.run_id)
    if 0 < hello.seen_term < record.first_term:
        return Misfit("earlier", record.run_id)
    return None if hello.digest == record.digest else Misfit("command", record.run_id, hello.command, command)


def intrusion(
    hello: NodeHello, record: ControlRecord, nodes: Collection[Node], command: str, *, hosted: bool, known: Places
) -> Misfit | None:
    """Return why a new node seems to belong to another run, which was given this endpoint by mistake; None if not.

    Args:
        nodes: those that the run has.
        hosted: whether the run ends with the leader's node.
        known: in what nodes of the run differ from the leader's command.
    """
    if hello.seen_term or not record.round.number:
        return None
    if hosted and record.limits.max_nodes == 1 and any(node.active for node in nodes):
        return Misfit("intruder", record.run_id)
    differs = differences(command, hello.command)
    if record.run_id == LaunchConfig.run_id and differs is not None and differs.places not in known:
        return Misfit("intruder", record.run_id, differs=differs)
    return None


def differences(ours: str, theirs: str) -> CommandDiffers | None:
    """Return where two commands of one run, written as for a shell, differ; None if they do not."""
    ours, theirs = clipped(ours, LONGEST_COMMAND), clipped(theirs, LONGEST_COMMAND)
    if ours == theirs:
        return None
    try:
        mine, other = shlex.split(ours)[:COMPARED], shlex.split(theirs)[:COMPARED]
    except ValueError:  # a long command is cut at any point
        return CommandDiffers()
    found: list[tuple[str, str]] = []
    for kind, low, high, first, last in SequenceMatcher(None, mine, other, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        if low and mine[low - 1].startswith("-") and kind == "replace":
            low, first = low - 1, first - 1  # include the flag that it is the value of
        found.append((shlex.join(mine[low:high]), shlex.join(other[first:last])))
    return CommandDiffers(tuple(found))

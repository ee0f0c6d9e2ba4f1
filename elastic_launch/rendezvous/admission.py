"""Whether a node fits the run, and if not, what differs."""

from __future__ import annotations

from elastic_launch.config import Limits
from elastic_launch.rendezvous.messages import PROTOCOL_VERSION, Hello
from elastic_launch.rendezvous.record import ControlRecord

__all__ = ["refusal"]


def refusal(hello: Hello, record: ControlRecord, limits: Limits, command: str) -> tuple[str, str] | None:
    """Return why the node cannot take part and what to do about it, or None if it fits."""
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
    resized = record.size is not None and hello.limits == str(limits) and hello.work == record.work
    if hello.digest == record.digest or resized:
        return None
    if hello.limits != str(limits):
        return (
            f"node {hello.node_id} came with {hello.limits}, run {record.run_id!r} has {limits}.",
            "Give the same limits on all nodes, or another --rdzv-id and --rdzv-endpoint for another run.",
        )
    return (
        f"node {hello.node_id} came with the command `{hello.command}`, run {record.run_id!r} executes `{command}`.",
        "Give the same command on all nodes, or another --rdzv-id and --rdzv-endpoint for another run.",
    )

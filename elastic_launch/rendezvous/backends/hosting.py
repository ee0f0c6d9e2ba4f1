"""Explain why this node does or does not host the run, so that a wrong endpoint shows in the first lines of the log.

A node hosts if it can bind the endpoint's address (ADR 0005). The rank that the scheduler gives this node has no
influence; but if the two disagree, the endpoint may be a mistake. Host names prove nothing: network namespaces share
them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from elastic_launch.config.endpoints import Endpoint
from elastic_launch.rendezvous.wire.addresses import is_loopback

RANKS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")
"""Variables in which Slurm and Kubernetes' indexed jobs number the nodes of a job from 0."""

Line = tuple[int, str]


def said_rank(node_rank: int | None, environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return this node's rank by flag or scheduler, and which of them set it; None if neither does."""
    if node_rank is not None:
        return node_rank, f"--node-rank {node_rank}"
    for name in RANKS:
        if (text := environ.get(name, "")).isdecimal():
            return int(text), f"{name}={text}"
    return None


def explain(
    wanted: Endpoint,
    said: tuple[int, str] | None,
    *,
    hosts: bool,
    taken: bool,
    is_host: bool | None,
    nodes: int,
    hidden: str = "",
) -> Line:
    """Return the level and text of the log line on why this node does or does not host the run.

    Args:
        said: see :func:`said_rank`.
        taken: whether the endpoint is an address of this host and its port is in use.
        nodes: the number of nodes that the run may have.
        hidden: the address that this node advertises, if it resolves the endpoint's name to loopback only.
    """
    if hosts:
        why = "is_host is true" if is_host else f"{wanted.host} is an address of this host, and the port was free"
        local = nodes > 1 and is_loopback(wanted)
        if local:
            why = f"{'is_host is true' if is_host else 'the port was free'}, and only this host reaches {wanted.host}"
        text = f"this node hosts the run at {wanted}: {why}"
        if said is not None and said[0] > 0 and not is_host and local:
            return logging.WARNING, (
                f"{text}. But {said[1]} says that it is not the first, and {wanted.host} means each host itself: "
                "unless all nodes are on this host, give the first node's address with --rdzv-endpoint"
            )
        if hidden:
            return logging.WARNING, (
                f"{text}{_also(said, first=False)}. On this host, {wanted.host} resolves only to loopback, which no "
                f"other host can reach: the run listens at all addresses of this host, and other nodes are "
                f"given {hidden}"
            )
        return logging.INFO, f"{text}{_also(said, first=False)}"
    if is_host is False:
        why = "is_host is false"
    elif taken:
        why = "the port is in use on this host, most likely by the agent that hosts it"
    else:
        why = f"{wanted.host} is not an address of this host"
    text = f"this node does not host the run at {wanted}: {why}"
    return logging.INFO, f"{text}{_also(said, first=True) if is_host is None and not taken else ''}"


def _also(said: tuple[int, str] | None, *, first: bool) -> str:
    """Return the scheduler's rank as text, if it is surprising."""
    if said is None or (said[0] == 0) is not first:
        return ""
    return f" (although {said[1]} says that it is {'the' if first else 'not the'} first)"

"""What an agent reports about itself and its orders, besides the leader's decisions: on its console and as an event."""

from __future__ import annotations

import logging
import shlex
import signal

from elastic_agents.workers.failures import describe
from elastic_agents.workers.round_workers import Reaped
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.events.types import OrderReceived, counted
from elastic_launch.rendezvous.wire import messages as m

__all__ = [
    "received",
    "report_ended",
    "report_forwarded",
    "report_kept",
    "report_late",
    "report_missing",
    "report_opened",
    "report_order",
]

_log = logging.getLogger("elastic_launch.agent")

MemberOrder = m.Form | m.Drain | m.Break | m.Evicted | m.RunEnd
"""Orders to a member about its rounds."""

_spared: set[int] = set()
"""Signals already reported as not forwarded to some workers."""


def report_opened(config: LaunchConfig, *, hosting: bool, endpoint: str, address: str) -> None:
    """Print this node's role and endpoint and, on the host, how to start the other nodes."""
    if hosting and config.announce:
        options = [f"--nnodes {config.limits.min_nodes}:{config.limits.max_nodes} --nproc {config.nproc}"]
        if config.limits.max_restarts != 3:
            options.append(f"--max-restarts {config.limits.max_restarts}")
        options.append(f"--rdzv-endpoint {endpoint} --rdzv-id {config.run_id}")
        command = " ".join(["elastic-launch", *options, shlex.join(config.command.display)])
        secret = "" if config.token is None else " and the same token"
        _log.info("this node hosts the run; the others join with%s:\n    %s", secret, command)
    elif config.limits.max_nodes > 1:
        role = "hosts the run" if hosting else "joins"
        _log.info("node %s (%s) %s at %s", config.node_id, address, role, endpoint)


def report_forwarded(number: int, spared: list[int]) -> None:
    """Print, once for each signal, the ranks that it was not forwarded to."""
    name = signal.Signals(number).name
    _log.debug("%s passed on to the workers", name)
    if spared and number not in _spared:
        _spared.add(number)
        ranks = ", ".join(map(str, spared))
        _log.warning("%s is kept from rank %s, which has no handler and would end by it (said once)", name, ranks)


def report_ended(reaped: Reaped) -> None:
    """Print which worker failed."""
    rank, code = reaped.placement.rank, describe(reaped.exit_code)
    _log.warning("rank %d (pid %d) ended with %s in round %d", rank, reaped.pid, code, reaped.round)


def report_kept(number: int, kept: int, started: int) -> None:
    """Print how many workers of a round are kept from the last one."""
    if kept:
        _log.info("round %d: %s kept, %d started", number, counted(kept, "worker"), started)


def report_missing(reaped: Reaped) -> None:
    """Print that a suspended worker has ended."""
    rank, code = reaped.placement.rank, describe(reaped.exit_code)
    _log.warning("rank %d (pid %d), which was suspended, ended with %s", rank, reaped.pid, code)


def report_late(failure: m.Failure) -> None:
    """Print that a stopped worker had failed before, or may have."""
    text = "rank %d (pid %d) had failed before it was stopped: %s"
    if failure.supposed:
        text = "rank %d (pid %d) may have failed before it was stopped; %s"
    _log.warning(text, failure.rank, failure.pid, failure.message)


def received(order: MemberOrder, present: int) -> OrderReceived:
    """Return the event for an order.

    Args:
        present: number of the node's current round.
    """
    kind = "end" if isinstance(order, m.RunEnd) else type(order).__name__.lower()
    number = order.round.number if isinstance(order, m.Form) else present
    cause = order.reason if isinstance(order, m.Evicted) else order.cause
    why = order.kind if isinstance(order, m.Drain | m.Break) else ""
    return OrderReceived(kind, number, order.term, cause, why)


def report_order(order: MemberOrder, number: int, cause: str) -> None:
    """Print what the leader has ordered; the end of the run is reported by the summary.

    Args:
        number: of the round.
    """
    match order:
        case m.Form(round=formed):
            nodes = counted(len(formed.members), "node")
            _log.info("round %d formed: world size %d on %s; workers start", number, formed.world_size, nodes)
        case m.Drain():
            _log.info("round %d drains: %s; the workers stop after the same step", number, cause)
        case m.Break():
            _log.info("round %d broken: %s", number, cause)
        case m.Evicted():
            _log.warning("this node is no longer a member (%s); its workers are killed", cause)

"""What an agent reports about itself and its orders, besides the leader's decisions: on its console and as an event."""

from __future__ import annotations

import logging
import shlex
import signal
from collections.abc import Collection

from elastic_agents.node_state import MemberOrder
from elastic_agents.policy_types import StartWorkers, WorkerExit
from elastic_agents.workers.sessions import command_of
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.events.sentences import ending, how_failed
from elastic_launch.events.types import OrderReceived, counted
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.system.plain_text import clipped, one_line, some

_log = logging.getLogger("elastic_launch.agent")

_LONGEST = 100
"""Maximum number of bytes of a command in a list of processes."""

_spared: set[int] = set()
"""Signals already reported as not forwarded to some workers."""


def opened(config: LaunchConfig, *, hosting: bool, endpoint: str, address: str) -> None:
    """Print this node's role and endpoint and, on the host, how to start the other nodes."""
    if hosting and config.announce:
        nnodes, nproc = f"{config.limits.min_nodes}:{config.limits.max_nodes}", config.nproc + config.idle
        options = [f"--nnodes {nnodes} --nproc {nproc}"]
        if config.replica_size > 1:
            options.append(f"--replica-size {config.replica_size}")
        if config.limits.max_restarts != 3:
            options.append(f"--max-restarts {config.limits.max_restarts}")
        options.append(f"--rdzv-endpoint {endpoint} --rdzv-id {config.run_id}")
        command = " ".join(["elastic-launch", *options, shlex.join(config.command.display)])
        secret = "" if config.token is None else " and the same token"
        _log.info("this node hosts the run; the others join with%s:\n    %s", secret, command)
    elif config.limits.max_nodes > 1:
        role = "hosts the run" if hosting else "joins"
        _log.info("node %s (%s) %s at %s", config.node_id, address, role, endpoint)
    if config.idle:
        text = "%s %s idle: a replica has %d (--replica-size)"
        idle = f"{config.idle} of {counted(config.nproc + config.idle, 'worker')}"
        _log.info(text, idle, "stays" if config.idle == 1 else "stay", config.replica_size)


def forwarded(number: int, spared: list[int]) -> None:
    """Print, once for each signal, the ranks that it was not forwarded to."""
    name = signal.Signals(number).name
    _log.debug("%s passed on to the workers", name)
    if spared and number not in _spared:
        _spared.add(number)
        ranks = ", ".join(map(str, spared))
        _log.warning(
            "%s is not forwarded to rank %s, which has no handler and would be ended by it (said once)", name, ranks
        )


def children(pids: Collection[int], what: str) -> None:
    """Print which processes finished workers have left behind, and what this agent does about them."""
    named = [f"{clipped(one_line(command), _LONGEST)} (pid {pid})" for pid in pids if (command := command_of(pid))]
    if named:
        _log.info("processes that workers have left behind still run, %s: %s", what, some(named))


def kept(start: StartWorkers, started: int, missing: int) -> None:
    """Print how many of this node's workers in a round are not started with it.

    Args:
        started: those that are.
        missing: workers that have no part in the round, and start ahead of a place in another.
    """
    number, kept, ahead = start.form.round.number, len(start.kept), len(start.waiting | start.coming)
    if kept or ahead:
        more = f", {ahead} started ahead" if ahead else ""
        more += f"; {counted(missing, 'more worker')} of this node will join" if missing else ""
        _log.info("round %d: %s kept, %d started%s", number, counted(kept, "worker"), started, more)


def ahead(local_ranks: frozenset[int], seconds: float | None) -> None:
    """Print that workers start ahead of a place in a round, and how long earlier starts took, if that is known."""
    workers, ranks = counted(len(local_ranks), "worker"), ", ".join(map(str, sorted(local_ranks)))
    about = "" if seconds is None else f"earlier starts took about {seconds:.1f} s; "
    _log.info("%s (local rank %s) started ahead of a round: %sthe others do not wait", workers, ranks, about)


def lost_ahead(exited: WorkerExit, failure: Failure | None, following: str) -> None:
    """Print that a worker that was started ahead has ended before it had a place in a round."""
    why = ending(exited.exit_code) if failure is None else how_failed(failure)
    _log.warning(
        "local rank %d (pid %d), started ahead of a round, ended with %s; %s",
        exited.local_rank,
        exited.pid,
        why,
        following,
    )


def late(failure: Failure) -> None:
    """Print that a stopped worker had failed before, or may have."""
    text = "rank %d (pid %d) had failed before it was stopped: %s"
    if failure.supposed:
        text = "rank %d (pid %d) may have failed before it was stopped; %s"
    _log.warning(text, failure.rank, failure.pid, how_failed(failure))


def received(order: MemberOrder, present: int, node_id: str) -> OrderReceived:
    """Return the event for an order that came in the present round."""
    kind = {m.DrainRound: "drain", m.RunEnd: "end", m.LeftOut: "left_out"}.get(
        type(order), type(order).__name__.lower()
    )
    number = order.round.number if isinstance(order, m.Form) else present
    cause = order.reason if isinstance(order, m.Evicted) else order.cause
    why = order.kind if isinstance(order, m.DrainRound | m.Break) else ""
    members = order.round.members if isinstance(order, m.Form) else ()
    workers = sum(member.workers for member in members if member.node_id == node_id)
    suspects = order.suspects if isinstance(order, m.Break) else ()
    world = sum(member.workers for member in members)
    return OrderReceived(kind, number, order.term, cause, why, workers, world, suspects)


def ordered(order: MemberOrder, number: int, cause: str) -> None:
    """Print what the leader has ordered; the end of the run is reported by the summary."""
    match order:
        case m.Form(round=formed):
            nodes = counted(len(formed.members), "node")
            _log.info("round %d formed: world size %d on %s; workers start", number, formed.world_size, nodes)
        case m.DrainRound():
            _log.info("round %d drains: %s; the workers stop after the same step", number, cause)
        case m.Break():
            _log.info("round %d broken: %s", number, cause)
        case m.LeftOut():
            _log.warning("the run goes on without this node, which cannot do what the others do: %s", cause)
        case m.Evicted():
            _log.warning("this node is no longer a member (%s); its workers are killed", cause)

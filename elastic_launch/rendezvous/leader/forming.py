"""Forming the next round from the nodes that wait for it, and having newcomers start before there is one for them.

Also what happens next, as text for users.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_launch.errors import ExitCode
from elastic_launch.events.sentences import sentence
from elastic_launch.events.types import Parked, RoundFormed
from elastic_launch.rendezvous.leader.leavers import is_needed, sources
from elastic_launch.rendezvous.leader.nodes import ACTIVE, EXCLUDED, LEAVING, MEMBER, Node
from elastic_launch.rendezvous.leader.phases import (
    Broken,
    Draining,
    Ended,
    Ending,
    Gathering,
    ParkedRun,
    Phase,
    Running,
    last_failure,
)
from elastic_launch.rendezvous.leader.ranks import choose
from elastic_launch.rendezvous.leader.resizing import NOT_WAITING, joinable, prepared, waiting
from elastic_launch.rendezvous.leader.state import LeaderState
from elastic_launch.rendezvous.leader.verdict import Kind
from elastic_launch.rendezvous.record import Member, Round
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.outline import outlined


def gather(state: LeaderState, phase: Gathering | ParkedRun, now: float) -> Phase:
    """Form the next round once all expected nodes are there; return the phase that follows."""
    if isinstance(phase, Gathering) and phase.ends:
        return _end(state, phase, ExitCode.TERMINATED, phase.ends, now)
    there = state.nodes.count(lacks=NOT_WAITING)
    least, most = state.limits.min_nodes, state.limits.max_nodes
    if state.departing and not (
        there >= least
        and is_needed(state.nodes, state.record.leader.incarnation)
        and sources(state.nodes, waiting(state.nodes))
    ):
        return phase
    settled = phase.after is not None or now - state.last_arrival >= state.timing.join_settle
    if there >= most or (there >= least and settled):
        return _form(state, phase.after, now)
    if there >= least:
        return phase
    if isinstance(phase, ParkedRun):
        if now - phase.at < state.timing.min_wait:
            return phase
        waited = f"--min-wait {state.timing.min_wait:g} s"
        cause = f"{there} of at least {least} nodes (--nnodes) after {waited}"
        return _end(state, phase, ExitCode.TOO_FEW_NODES, cause, now)
    if not there and phase.after is None:
        return phase
    event = Parked(there, least, state.timing.min_wait)
    if state.nodes:
        state.emit(event)
    order = m.UserMessage(state.record.term, sentence(event))
    for node in waiting(state.nodes):
        state.send(node.link, order)
    return ParkedRun(phase.after, now)


def _end(state: LeaderState, phase: Gathering | ParkedRun, code: int, cause: str, now: float) -> Ended:
    failure = last_failure(phase)
    state.end(code, cause, failure, now)
    return Ended(failure)


def _candidates(state: LeaderState, after: Broken | None) -> list[Node]:
    """Return the next round's nodes.

    After the first round, nodes whose workers still import or start ahead, those with too many faults, and those that
    cannot connect to the others are left out if enough remain.
    """
    ready = prepared(state.nodes)
    return ready if after is not None and len(ready) >= state.limits.min_nodes else waiting(state.nodes)


def _form(state: LeaderState, after: Broken | None, now: float) -> Running:
    chosen = choose(_candidates(state, after), state.record.round, state.limits.max_nodes)
    members = tuple(
        Member(x.hello.node_id, x.hello.incarnation, x.workers, x.hello.address, x.store_port, x.hello.role, x.slots)
        for x in chosen
    )
    formed = Round(max(state.floor, state.record.round.number) + 1, members)
    state.first_round = state.first_round or formed.number
    state.gone.clear()
    cause, since = (after.cause, after.at) if after is not None else ("first", state.began)
    budget = state.budget
    left_out = {"faulty": state.exclusion.recorded(now), **state.refused(now)}
    state.commit(replace(state.record, round=formed, **left_out, **budget.recorded))
    served = sources(state.nodes, chosen)
    # One object for all members, or one outline, so that it is encoded once.
    order = outlined(
        m.Form(state.record.term, formed, budget.spent, cause, served, budget.allowed),
        state.record.leader.incarnation,
    )
    for index, node in enumerate(chosen):
        node.begins()
        placed = order if order.outline is None else replace(order, slots=members[index].slots, index=index)
        state.send(node.link, placed)
    for node in state.nodes.where(MEMBER, lacks=ACTIVE):
        node.member = False
    for node in waiting(state.nodes):
        try_reach(state, node)
    names = tuple(member.node_id for member in members)
    term = state.record.term
    state.emit(RoundFormed(formed.number, term, names, formed.world_size, budget.spent, cause, now - since))
    state.resizing.formed(since if after is not None and after.imposed is Kind.MEMBERSHIP else None)
    return Running(now, fetching=bool(served))


def try_reach(state: LeaderState, node: Node) -> None:
    """Have a node that waits try to connect to where the current round's workers meet."""
    first = state.record.round.members[0]
    node.apart = node.apart or None
    order = m.Reach(state.record.term, state.record.round.number, first.address, first.store_port)
    state.send(node.link, order)


def start_ahead(state: LeaderState, phase: Running | Draining | Broken) -> None:
    """Have nodes that could join start their workers while others train, in a run whose workers are live.

    Spares, too: a spare whose workers have started takes a lost member's place at once. A new leader repeats the order;
    a node whose workers have started says so again.
    """
    over = not isinstance(phase, Running) and bool(phase.ends)
    if not state.live or over:
        return
    found = joinable(state.nodes)
    if found and state.some_done:
        return
    for node in found:
        node.ahead = node.importing = True
        state.send(node.link, m.StartAhead(state.record.term, state.record.round.number))


def outlook(phase: Phase, state: LeaderState) -> str:
    """Return what happens next, as text."""
    nodes, limits = state.nodes, state.limits
    match phase:
        case Ended():
            return "the run has ended"
        case Ending():
            return "the run ends"
        case Running():
            return _while_running(state)
        case Draining() | Broken():
            first, ends = False, phase.ends
        case Gathering():
            first, ends = phase.after is None, phase.ends
        case ParkedRun():
            first, ends = phase.after is None, ""
    # A node that is still stopping its workers after a broken round counts: it will join the next one.
    there = nodes.count(lacks=LEAVING)
    if ends:
        return "the run ends"
    if there >= limits.max_nodes:
        return "a round forms"
    if there < limits.min_nodes:
        return f"waiting for nodes: {there} of at least {limits.min_nodes}"
    if not first:
        return "a new round forms"
    return f"the first round forms at {limits.max_nodes} nodes or {state.timing.join_settle:g} s without an arrival"


def _while_running(state: LeaderState) -> str:
    there, most = state.nodes.where(lacks=NOT_WAITING | EXCLUDED), state.limits.max_nodes
    there = [node for node in there if not node.apart]
    if not there:
        return "training goes on"
    if state.nodes.count(ACTIVE) >= most:
        return f"round is full, {len(there)} spare"
    if not state.resizing.pays(state.record.round, most, state.turned, there):
        return "the run ends before a resize pays"
    starting = state.live and all(node.importing or not node.ahead for node in there)
    return "training is resized once workers have started there" if starting else "training is resized"

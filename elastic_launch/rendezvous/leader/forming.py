"""Forming the next round: its members and their order, and having newcomers start before there is one for them.

Also what happens next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic_launch.errors import ExitCode
from elastic_launch.events.facts import Outlook, RunCause, TooFewNodes
from elastic_launch.events.sentences import sentence, why
from elastic_launch.events.types import Parked, RoundFormed
from elastic_launch.rendezvous.leader.nodes import ACTIVE, EXCLUDED, LEAVING, MEMBER, Node, is_needed, sources
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
        return _end(state, phase, ExitCode.TOO_FEW_NODES, TooFewNodes(there, least, state.timing.min_wait), now)
    if not there and phase.after is None:
        return phase
    event = Parked(there, least, state.timing.min_wait)
    if state.nodes:
        state.emit(event)
    order = m.UserMessage(state.record.term, sentence(event))
    for node in waiting(state.nodes):
        state.send(node.link, order)
    return ParkedRun(phase.after, now)


def _end(state: LeaderState, phase: Gathering | ParkedRun, code: int, cause: RunCause, now: float) -> Ended:
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


def choose(nodes: Sequence[Node], last: Round, limit: int) -> list[Node]:
    """Return the members of the next round in rank order, at most ``limit`` of the nodes.

    Survivors keep their order. Other nodes take the places of lost members, and then follow, in order of arrival; they
    are the first to be left out if there are too many nodes. Then each node that asks for an existing rank gets it,
    earlier nodes in that order first, and the others fill the gaps.

    Args:
        last: the previous round; an agent that was restarted since then counts as another.
    """

    def seniority(node: Node) -> tuple[bool, int, int]:
        rank = _rank_in(last, node)
        return rank is None, rank or 0, node.arrival

    order = _placed(sorted(nodes, key=seniority)[:limit], last)
    seats: list[Node | None] = [None] * len(order)
    unseated: list[Node] = []
    for node in order:
        wanted = node.hello.wanted_rank
        if wanted is not None and 0 <= wanted < len(seats) and seats[wanted] is None:
            seats[wanted] = node
        else:
            unseated.append(node)
    # A requested rank beyond this round's size still determines the order.
    rest = iter(sorted(unseated, key=lambda node: _beyond(node.hello.wanted_rank, len(order))))
    return [seat or next(rest) for seat in seats]


def _rank_in(last: Round, node: Node) -> int | None:
    return last.index(node.hello.node_id, node.hello.incarnation)


def _placed(nodes: list[Node], last: Round) -> list[Node]:
    """Move newcomers, which come last, to the places of lost members.

    The first place goes to a survivor if there is one: the others connect to the first member, and none of them may be
    able to connect to a newcomer.
    """
    ranks = [rank for node in nodes if (rank := _rank_in(last, node)) is not None]
    survivors, newcomers = nodes[: len(ranks)], nodes[len(ranks) :]
    placed: list[Node] = []
    for rank, node in zip([0, *ranks[1:]], survivors, strict=False):
        while newcomers and len(placed) < rank:
            placed.append(newcomers.pop(0))
        placed.append(node)
    return placed + newcomers


def _beyond(wanted: int | None, size: int) -> tuple[bool, int]:
    return (True, wanted) if wanted is not None and wanted >= size else (False, 0)


def _form(state: LeaderState, after: Broken | None, now: float) -> Running:
    chosen = choose(_candidates(state, after), state.record.round, state.limits.max_nodes)
    members = tuple(
        Member(x.hello.node_id, x.hello.incarnation, x.workers, x.hello.address, x.store_port, x.hello.role, x.slots)
        for x in chosen
    )
    formed = Round(max(state.floor, state.record.round.number) + 1, members)
    state.first_round = state.first_round or formed.number
    state.gone.clear()
    cause, since = (why(after.cause), after.at) if after is not None else ("first", state.began)
    budget = state.budget
    left_out = {"faulty": state.exclusion.recorded(now), **state.refused(now)}
    state.commit(replace(state.record, round=formed, **left_out, **budget.recorded))
    served = sources(state.nodes, chosen)
    # One object for all members, or one outline, so that it is encoded once.
    order = outlined(
        m.Form(state.record.term, formed, budget.spent, cause, served, budget.allowed, origin=state.origin),
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


def outlook(phase: Phase, state: LeaderState) -> Outlook:
    """Return what happens next."""
    nodes, limits = state.nodes, state.limits
    match phase:
        case Ended():
            return Outlook("ended")
        case Ending():
            return Outlook("ends")
        case Running():
            return _while_running(state)
        case Draining() | Broken():
            first, ends = False, phase.ends
        case Gathering():
            first, ends = phase.after is None, phase.ends
        case ParkedRun():
            first, ends = phase.after is None, None
    # A node that is still stopping its workers after a broken round counts: it will join the next one.
    there = nodes.count(lacks=LEAVING)
    if ends:
        return Outlook("ends")
    if there >= limits.max_nodes:
        return Outlook("forms")
    if there < limits.min_nodes:
        return Outlook("waits", there, limits.min_nodes)
    if not first:
        return Outlook("forms again")
    return Outlook("gathers", of=limits.max_nodes, seconds=state.timing.join_settle)


def _while_running(state: LeaderState) -> Outlook:
    there, most = state.nodes.where(lacks=NOT_WAITING | EXCLUDED), state.limits.max_nodes
    there = [node for node in there if not node.apart]
    if not there:
        return Outlook("trains")
    if state.nodes.count(ACTIVE) >= most:
        return Outlook("full", len(there))
    if not state.resizing.pays(state.record.round, most, state.turned, there):
        return Outlook("too late")
    starting = state.live and all(node.importing or not node.ahead for node in there)
    return Outlook("starts ahead" if starting else "resizes")

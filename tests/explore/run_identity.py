"""When two states of a run count as one: what no decision reads is left out, and nodes are named by their roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elastic_launch.rendezvous.leader.nodes import Node
from explore.agents import Agent, Link, Office
from explore.states import Identity
from explore.workers import ExploredWorker, ExploredWorkers

if TYPE_CHECKING:
    from explore.run_world import RunWorld

__all__ = ["identity"]


def identity(world: RunWorld) -> int:
    """Return the same number for states of a world that behave alike."""
    names = _canonical_names(world)
    order = sorted(world.all, key=lambda agent: names[agent.incarnation])
    checks = world.checks
    state = (
        world.record,
        [office for office in world.leaders if office.alive and office.node.alive],
        [agent if agent.alive else (agent.incarnation, agent.silent) for agent in order],
        world.disturbed,
        world.steps,
        world.stepped,
        world.left,
        world.backs,
        checks.rounds,
        checks._charged,
        checks._free,
        checks._taken_over,
        checks._left_behind,
        checks._charged_ahead,
    )
    return IDENTITY.of(state, world.now, names)


def _canonical_names(world: RunWorld) -> dict[str, str]:
    """New names by which states that differ only in the nodes' names become equal."""

    def key(node_id: str) -> tuple[Any, ...]:
        mine = [agent for agent in world.all if agent.node_id == node_id]
        last = mine[-1]
        leads = world.record is not None and world.record.leader.node_id == node_id
        index = None if world.record is None else world.record.round.index(node_id, last.incarnation)
        known = world.leaders[-1].machine.nodes.get(node_id) if world.leaders else None
        return (
            not leads,
            99 if index is None else index,
            99 if known is None else known.arrival,
            not last.alive,
            last.idle,
            last.cut,
            last.view.phase.value,
            len(mine),
            node_id,
        )

    ids = list(dict.fromkeys(agent.node_id for agent in world.all))
    names: dict[str, str] = {}
    for node_id, new in zip(sorted(ids, key=key), "mnopqrst", strict=False):
        names[node_id] = new
        names[f"host-{node_id}"] = f"host-{new}"
        for number in range(1, sum(agent.node_id == node_id for agent in world.all) + 1):
            names[f"{node_id}{number}"] = f"{new}{number}"
    return names


def _plain(*names: str) -> Callable[[Any], Any]:
    return lambda value: tuple(getattr(value, name) for name in names)


def _node(node: Node) -> Any:
    """A leader's node; only the order of arrivals counts, which is kept with its leader."""
    return {name: getattr(node, name) for name in Node.__slots__ if name != "nodes"} | {"arrival": 0}


def _links(office: Office) -> dict[tuple[str, int], Any]:
    """A leader's links by the nodes at their ends, the oldest of each node first."""
    found: dict[tuple[str, int], Any] = {}
    for number, link in office.links.items():
        name = link.agent.incarnation
        found[name, sum(key[0] == name for key in found)] = link, number in office.greeted
    return found


IDENTITY = Identity(
    {
        Agent: _plain(
            "incarnation",
            "alive",
            "frozen",
            "silent",
            "cut",
            "hangs_until",
            "unheard",
            "code",
            "view",
            "workers",
            "side",
            "succession",
            "detector",
            "due",
            "link",
            "former",
            "retry_at",
            "dialed",
            "record",
            "led_by",
            "sure",
            "answered",
            "closing",
            "asked",
            "search",
        ),
        ExploredWorkers: _plain("by_rank", "done", "symptoms"),
        ExploredWorker: _plain("state", "round", "told", "broken", "said"),
        Link: _plain("up", "down", "node_open", "office_open"),
        Office: lambda x: (
            x.node.incarnation,
            x.machine,
            x.stored,
            _links(x),
            x.closed,
            x.ended,
            x.heard,
            x.news,
            x.began,
            sorted(x.machine.nodes, key=lambda node_id: x.machine.nodes[node_id].arrival),
        ),
        Node: _node,
    },
    ignored=frozenset(
        {"_arrivals", "_owners", "link", "_command", "_compared", "_groups", "_unheard", "node", "world"}
    ),
)

"""The nodes that the leader has a link to, grouped by their flags.

There may be thousands of nodes, and most events concern one of them. What the leader asks after each event, such as
whether all members are ready, is therefore answered from the sizes of a few groups, not by looking at every node.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, ValuesView
from operator import attrgetter

from elastic_launch.rendezvous.record import LocalRanks, Round, whole_replicas
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.system.host_load import HostLoad

_ARRIVAL = attrgetter("arrival")


class _NodeFlag:
    """An attribute of :class:`Node` that is kept as one bit of its flags."""

    def __init__(self, bit: int) -> None:
        self.bit = bit

    def __get__(self, node: Node, kind: type[Node]) -> bool:
        return node.flags & self.bit != 0

    def __set__(self, node: Node, value: bool) -> None:
        node.mark(node.flags | self.bit if value else node.flags & ~self.bit)


ACTIVE, MEMBER, JOINED, READY, DONE, LIVE, STALLS, REGAINS = (1 << place for place in range(8))
NEAR, IMPORTING, AHEAD, EXCLUDED, BARRED, LEAVING, TRAINED, VETERAN = (1 << place for place in range(8, 16))
"""The bits of the flags, for :meth:`ConnectedNodes.count` and :meth:`ConnectedNodes.where`; see :class:`Node`.

``STALLS``: it has reported that its workers are late; ``NEAR``: ``apart`` is False.
"""

_OF_ROUND = ACTIVE | MEMBER | JOINED | READY | DONE | LIVE | STALLS | REGAINS | AHEAD | VETERAN


class Node:
    """A node that the leader has a link to.

    Attributes:
        flags: the bits of the attributes below that are either True or False.
        store_port: where its next worker store listens.
        active: whether it has, or may have, workers of the current round.
        member: whether it is one of the members of the last round that was formed.
        joined, ready, done: whether its workers are started; can be all drained; have all finished with 0.
        live: whether they can all be suspended.
        importing: whether its workers could not begin at once.
        apart: whether it cannot connect to where a round's workers meet; None until it has answered.
        ahead: whether it was ordered to start its workers ahead since it last had a place.
        slots: local ranks with which it could take part in a round; empty for all.
        regains: whether it could take part in the last round with workers that have no part in it.
        excluded: whether it is left out of rounds for now; see :mod:`elastic_launch.rendezvous.leader.exclusion`.
        heard: time of the last sign of life, by the leader's clock; later by the time for which the leader itself was
            suspended since then.
        held: the newest snapshot in its memory when it last had no workers.
        released: whether it was informed that it may exit.
        stalled: its report that its workers are late in the current round; None if they are not.
        trained: whether it has completed a step in this run; see ``messages.Stopped``.
        veteran: whether it had when the current round was formed.
        barred: whether its host is left out of all rounds for now; see ``newcomers``.
        load: how busy its host is, as it said last; only those who ask for the status are told.
    """

    __slots__ = (
        "_apart",
        "_part",
        "_slots",
        "_stalled",
        "arrival",
        "flags",
        "heard",
        "held",
        "hello",
        "link",
        "load",
        "nodes",
        "released",
        "store_port",
    )

    active = _NodeFlag(ACTIVE)
    member = _NodeFlag(MEMBER)
    joined = _NodeFlag(JOINED)
    ready = _NodeFlag(READY)
    done = _NodeFlag(DONE)
    live = _NodeFlag(LIVE)
    regains = _NodeFlag(REGAINS)
    importing = _NodeFlag(IMPORTING)
    ahead = _NodeFlag(AHEAD)
    excluded = _NodeFlag(EXCLUDED)
    barred = _NodeFlag(BARRED)
    leaving = _NodeFlag(LEAVING)
    trained = _NodeFlag(TRAINED)
    veteran = _NodeFlag(VETERAN)

    def __init__(
        self,
        hello: m.NodeHello,
        link: int,
        arrival: int,
        store_port: int,
        *,
        heard: float = 0.0,
    ) -> None:
        self.hello, self.link, self.arrival, self.store_port = hello, link, arrival, store_port
        self.heard, self.released = heard, False
        self.held: m.HeldSnapshot | None = None
        self.flags = NEAR
        self.nodes: ConnectedNodes | None = None
        self.load: HostLoad | None = None
        self._apart: bool | None = False
        self._stalled: m.Stalled | None = None
        self._slots: LocalRanks = ()
        self._part: frozenset[int] | None = None  # local ranks of its workers in the last round; None for all

    def mark(self, flags: int) -> None:
        """Change the flags."""
        before, self.flags = self.flags, flags
        if self.nodes is not None and before != flags:
            self.nodes.moved(self, before)

    @property
    def host(self) -> str:
        """What identifies its host across starts of its agent."""
        return self.hello.host or self.hello.node_id

    @property
    def apart(self) -> bool | None:
        return self._apart

    @apart.setter
    def apart(self, value: bool | None) -> None:
        self._apart = value
        self.mark(self.flags | NEAR if value is False else self.flags & ~NEAR)

    @property
    def stalled(self) -> m.Stalled | None:
        return self._stalled

    @stalled.setter
    def stalled(self, value: m.Stalled | None) -> None:
        self._stalled = value
        self.mark(self.flags & ~STALLS if value is None else self.flags | STALLS)

    @property
    def slots(self) -> LocalRanks:
        return self._slots

    @property
    def workers(self) -> int:
        """Number of workers with which it could take part in a round."""
        return len(self._slots) or self.hello.workers

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Local ranks with which it could take part in a round."""
        return self._slots or tuple(range(self.hello.workers))

    def offer(self, slots: LocalRanks) -> None:
        """Note the local ranks that the node reports; ranks that it does not have, or broken replicas, count as all."""
        exist = bool(slots) and slots[-1] < self.hello.workers
        whole = slots == whole_replicas(slots, self.hello.replica_size)
        self._slots = slots if exist and whole and len(slots) < self.hello.workers else ()
        self.regains = self._part is not None and not self._part.issuperset(self.local_ranks)

    def takes_part(self, slots: LocalRanks) -> None:
        """Note that it is a member of the last round, with these local ranks; empty for all."""
        self._part = frozenset(slots) or None
        regains = self._part is not None and not self._part.issuperset(self.local_ranks)
        self.mark(self.flags & ~REGAINS | MEMBER | (REGAINS if regains else 0))

    def begins(self) -> None:
        """Note that the next round was formed with it, and with all the workers that it offers."""
        self._part, self._stalled, self._apart = frozenset(self._slots) or None, None, bool(self._apart)
        kept = self.flags & ~_OF_ROUND
        near = 0 if self._apart else NEAR
        self.mark(kept | near | ACTIVE | MEMBER | (VETERAN if kept & TRAINED else 0))


class ConnectedNodes(Mapping[str, Node]):
    """The nodes that the leader has a link to, by node id, in order of arrival."""

    def __init__(self) -> None:
        self._by_id: dict[str, Node] = {}
        self._groups: dict[int, dict[str, Node]] = {}  # by flags; none is empty
        self._graces: set[float] = set()
        self._unheard = -math.inf  # none of them was heard from for the last time before that

    def __getitem__(self, node_id: str) -> Node:
        return self._by_id[node_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def values(self) -> ValuesView[Node]:
        return self._by_id.values()

    @property
    def graces(self) -> Collection[float]:
        """The shutdown timeouts of these nodes, and perhaps of some that have gone: usually they have the same."""
        return self._graces

    def silent(self, now: float, limit: float) -> list[Node]:
        """Return the nodes that have been silent for that many seconds; looks at all nodes only if there may be any."""
        if not self._by_id or now < self._unheard + limit:
            return []
        self._unheard = min([node.heard for node in self._by_id.values()])
        return [node for node in self._by_id.values() if now - node.heard >= limit]

    def find(self, node_id: str) -> Node | None:
        """Return the node with that id, or None; faster than ``get``."""
        return self._by_id.get(node_id)

    def add(self, node: Node) -> None:
        """Add a node, which arrived later than all others."""
        node_id = node.hello.node_id
        self._by_id[node_id] = node
        self._groups.setdefault(node.flags, {})[node_id] = node
        self._unheard = min(self._unheard, node.heard)
        self._graces.add(node.hello.shutdown_timeout)
        node.nodes = self

    def remove(self, node: Node) -> None:
        """Remove a node."""
        del self._by_id[node.hello.node_id]
        self._take_from(node.flags, node)
        node.nodes = None

    def moved(self, node: Node, before: int) -> None:
        """Note that a node's flags have changed; ``before`` has the old ones."""
        self._take_from(before, node)
        group = self._groups.get(node.flags)
        if group is None:
            group = self._groups[node.flags] = {}
        group[node.hello.node_id] = node

    def _take_from(self, flags: int, node: Node) -> None:
        group = self._groups[flags]
        del group[node.hello.node_id]
        if not group:
            del self._groups[flags]

    def count(self, has: int = 0, lacks: int = 0) -> int:
        """Return the number of nodes that have all of some flags, and none of others."""
        concerned = has | lacks
        return sum([len(group) for flags, group in self._groups.items() if flags & concerned == has])

    def where(self, has: int = 0, lacks: int = 0) -> list[Node]:
        """Return the nodes that have all of some flags, and none of others, in order of arrival."""
        concerned = has | lacks
        groups = [group for flags, group in self._groups.items() if flags & concerned == has]
        return sorted([node for group in groups for node in group.values()], key=_ARRIVAL)


# Each time its workers stop, a node reports which snapshot its memory holds. A node that leaves after a drain also
# reports where it serves the snapshot, and stays until the leader releases it: at once if no node needs the snapshot,
# else when the next round trains.

MOST_SOURCES = 4
"""Most sources that a round receives; all serve the same snapshot."""


def no_longer_needed(nodes: ConnectedNodes) -> list[Node]:
    """Return the nodes to release once no node needs a snapshot any more."""
    return [node for node in nodes.where(LEAVING, lacks=ACTIVE) if _serves(node) and not node.released]


def is_needed(nodes: ConnectedNodes, incarnation: str) -> bool:
    """Whether a leader whose own node, with that incarnation, leaves is needed until the next round trains."""
    return any(_serves(node) for node in nodes.values() if node.hello.incarnation == incarnation)


def sources(nodes: ConnectedNodes, members: Iterable[Node]) -> tuple[m.SnapshotSource, ...]:
    """Return the sources of the newest snapshot for the members of the next round; none if one of them has it."""
    leavers = [(node.hello.address, node.held) for node in nodes.where(LEAVING)]
    served = [(address, held) for address, held in leavers if held is not None and held.port]
    if not served:
        return ()
    newest = max(held.order for _, held in served)
    if any(node.held is not None and node.held.order >= newest for node in members):
        return ()
    found = [m.SnapshotSource(address, held.port, *newest) for address, held in served if held.order == newest]
    return tuple(found[:MOST_SOURCES])


def saver(nodes: ConnectedNodes, last: Round) -> str:
    """Return the id of the node that saves the newest state if no round follows; empty if no node is known to hold one.

    Of several that hold it, this is one whose processes are kept, as they may have a newer one, else the first by its
    rank in the last round, whose first member saves usually.
    """

    def preference(node: Node) -> tuple[bool, tuple[int, int], bool, int]:
        rank = last.index(node.hello.node_id, node.hello.incarnation)
        # What a node holds whose workers still run is not known.
        held = None if node.active else node.held
        order, kept = ((0, 0), False) if held is None else (held.order, held.kept)
        return node.active, order, kept, -len(last.members) if rank is None else -rank

    holders = [node for node in nodes.where(lacks=LEAVING) if (node.active or node.held is not None)]
    return max(holders, key=preference).hello.node_id if holders else ""


def _serves(node: Node) -> bool:
    return node.held is not None and node.held.port != 0

"""Plans: the shape of a run, and the faults that happen to it, all drawn from a seed."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass

__all__ = [
    "DIVIDED",
    "FORMS",
    "FOR_GOOD",
    "KINDS",
    "MOMENTS",
    "NEEDS",
    "PAIRED",
    "REPLICA",
    "STEPS",
    "Fault",
    "Plan",
    "draw",
    "draw_pairs",
]

REPLICA = 2
"""Ranks of a replica, of which each node has one."""

STEPS = 400
"""Optimizer steps of the training."""

PAIRED_STEPS = 200
"""Optimizer steps of the trainings in plans with pairs, which need more for each."""

LAST = 120
"""Faults begin before so many steps are done, so that the run can come back to its full size before it ends."""

KINDS = {
    "kill worker": 5,
    "two kills": 2,
    "term worker": 1,
    "freeze worker": 2,
    "kill agent": 3,
    "term agent": 3,
    "freeze agent": 2,
    "freeze node": 2,
    "kill guard": 1,
    "kill helper": 2,
    "kill copier": 1,
    "notice": 2,
    "lose all": 1,
    "tear checkpoint": 2,
    "kill etcd": 2,
    "freeze etcd": 2,
    "cut": 6,
    "fill disk": 6,
    "fail storage": 4,
    "hang storage": 4,
    "out of memory": 6,
}
"""Kinds of faults, with their weights."""

NEEDS = {
    "kill etcd": "members",
    "freeze etcd": "members",
    "cut": "hosts",
    "fill disk": "disk",
    "fail storage": "faulty",
    "hang storage": "faulty",
    "out of memory": "limited",
}
"""Kinds that are possible only if the plan has this."""

AT_END = ("kill worker", "freeze worker", "freeze agent", "kill guard", "kill helper", "kill copier")
"""Kinds after which no node must come back: these can happen in the last steps, too."""

FOR_GOOD = "lose node"
"""A node is lost in the last steps, and does not come back."""

PAIRED = {
    "kill worker": 6,
    "kill agent": 5,
    "kill leader": 5,
    "kill tree": 3,
    "freeze leader": 2,
    "freeze worker": 2,
    "freeze agent": 2,
    "freeze node": 1,
    "term worker": 2,
    "term agent": 3,
    "notice": 2,
    "kill guard": 2,
    "kill helper": 3,
    "kill copier": 1,
    "lose all": 1,
    "kill etcd": 2,
    "freeze etcd": 2,
    "fail storage": 2,
    "hang storage": 1,
}
"""Kinds of faults in pairs, with their weights."""

FORMS = {"plain": 2, "evaluating": 3, "trainer": 3, "passes": 3, "heads": 3, "sharded": 4, "stream": 2, "own": 1}
"""Forms of the training in plans with pairs, with their weights."""

DIVIDED = ("sharded", "replicas", "tensor")
"""How a sharded model is divided: over all ranks, or within replicas, among shards or tensor ranks."""

MOMENTS = {
    "place": 3,
    "commit": 2,
    "suspending": 2,
    "forming": 3,
    "placing": 3,
    "restoring": 2,
}
"""Moments at which the second fault of a pair may be aimed, with their weights: the script begins an evaluation, a head
or a later pass; a checkpoint is being written; the end of a round is ordered; the next one is formed; its first worker
has its place; its first rank has the state. The first fault of a pair may be aimed at the first two."""

PLACES = ("evaluating", "trainer", "passes", "heads")
"""Forms that note places."""

APART = 0.3
"""Seconds within which the second fault of a pair follows."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        step: it happens once so many steps are done.
        gap: it happens so many seconds after the last one instead; None: the step counts.
        node, worker: which node, and which of its workers; taken modulo what there is.
        seconds: for how long something is frozen, or gone.
        moment: one of ``MOMENTS``, from which the gap counts, or which is awaited after the step; "": none.
    """

    kind: str
    step: int
    gap: float | None
    node: int
    worker: int
    seconds: float
    moment: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run and its faults.

    Attributes:
        nproc: workers per node.
        members: etcd servers; 0: the run is on c10d.
        voters: whether three nodes keep the record of c10d together.
        live: whether workers may keep their processes.
        start: seconds that the script needs before its first step.
        late: how many of the nodes join only after the first steps.
        every: steps between two durable checkpoints.
        hosts: whether each node has a network namespace of its own, which needs root.
        disk: whether the checkpoints have a small file system of their own, which needs root.
        faulty: whether they have one that can fail and hang, which needs root and FUSE.
        limited: whether each node has a memory control group, which needs root.
        executed: whether agents are executed, not forked from a process that has imported torch.
        last: a fault in the last steps; None: none.
        form: of the training, one of ``FORMS`` or ``DIVIDED``.
        steps: of the training; together, they take the same time in all plans, as long as it is not told to hurry.
    """

    seed: int
    nodes: int
    nproc: int
    members: int
    voters: bool
    live: bool
    start: float
    late: int
    every: int
    hosts: bool
    disk: bool
    faulty: bool
    limited: bool
    executed: bool
    faults: tuple[Fault, ...]
    last: Fault | None
    form: str = "plain"
    steps: int = STEPS

    @property
    def replica(self) -> int:
        """Ranks of a replica of its model."""
        return REPLICA if self.form in ("replicas", "tensor") else 1

    @property
    def all(self) -> tuple[Fault, ...]:
        """All faults, in order."""
        return (*self.faults, *([] if self.last is None else [self.last]))

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def draw(seed: int, most: int = 6) -> Plan:
    """Return the plan of a seed, with up to ``most`` faults."""
    random_ = random.Random(f"chaos {seed}")
    nodes = random_.choice((1, 2, 2, 3, 4))
    hosts, storage = nodes > 1 and random_.random() < 0.25, random_.random()
    disk, faulty = storage < 0.15, 0.15 <= storage < 0.4
    # ip netns exec hides /sys/fs/cgroup, where an agent sees that a worker was killed for lack of memory.
    limited = random_.random() < 0.25 and not hosts
    members = random_.choice((0, 1) if hosts else (0, 0, 1, 3))
    nproc = random_.choice((1, 2)) if nodes < 3 else 1
    every = random_.choice((5, 20))
    has = {"members": members > 0, "hosts": hosts, "disk": disk, "faulty": faulty, "limited": limited}
    kinds = {kind: weight for kind, weight in KINDS.items() if has.get(NEEDS.get(kind, ""), True)}

    def one(kind: str, step: int, gap: float | None) -> Fault:
        seconds = round(random_.choice((0.2, 1.0, 4.0)) * random_.uniform(0.5, 1.5), 3)
        return Fault(kind, step, gap, random_.randrange(nodes), random_.randrange(nproc), seconds)

    faults: list[Fault] = []
    step = random_.randrange(3, 15)
    for _ in range(random_.randint(1, most)):
        (kind,) = random_.choices(list(kinds), list(kinds.values()))
        gap = round(random_.uniform(0.05, 0.5), 3) if faults and random_.random() < 0.3 else None
        if not faults and random_.random() < 0.2:
            gap = round(random_.uniform(0.05, 6.0), 3)  # as the run starts
        if kind == "tear checkpoint":  # there must be a whole one besides
            gap, step = None, max(step, 2 * every + 5)
        faults.append(one(kind, step, gap))
        step = min(LAST, step + random_.randrange(2, 25))
    last = one(random_.choice(AT_END), STEPS - random_.randrange(25), None) if random_.random() < 0.3 else None
    then = random.Random(f"chaos, then {seed}")  # so that what is drawn above stays the same
    if nodes > 1 and then.random() < 0.15:
        last = Fault(FOR_GOOD, STEPS - then.randrange(10, 25), None, then.randrange(nodes), 0, 0.0)
    return Plan(
        seed,
        nodes,
        nproc,
        members,
        voters=nodes > 2 and not members and not hosts and then.random() < 0.4,
        live=random_.random() < 0.7,
        start=random_.choice((0.0, 0.0, 2.0)),
        late=random_.choice((0, 0, 1)) if nodes > 1 else 0,
        every=every,
        hosts=hosts,
        disk=disk,
        faulty=faulty,
        limited=limited,
        executed=then.random() < 0.2,
        faults=tuple(faults),
        last=last,
    )


def draw_pairs(seed: int, most: int = 2) -> Plan:
    """Return the plan of a seed in which up to ``most`` times two faults happen at almost the same time."""
    random_ = random.Random(f"pairs {seed}")
    nodes, members = random_.choice((1, 2, 2, 2, 3)), random_.choice((0, 0, 0, 1))
    nproc = random_.choice((1, 2)) if nodes < 3 else 1
    faulty = random_.random() < 0.2
    has = {"members": members > 0, "faulty": faulty}
    (form,) = random_.choices(list(FORMS), list(FORMS.values()))
    if form == "sharded" and (form := random_.choice(DIVIDED)) != "sharded":
        nproc = REPLICA
    kinds = {kind: weight for kind, weight in PAIRED.items() if has.get(NEEDS.get(kind, ""), True)}
    moments = {each: weight for each, weight in MOMENTS.items() if each != "place" or form in PLACES}

    def one(step: int, gap: float | None, moment: str) -> Fault:
        (kind,) = random_.choices(list(kinds), list(kinds.values()))
        seconds = round(random_.choice((0.2, 1.0, 4.0)) * random_.uniform(0.5, 1.5), 3)
        return Fault(kind, step, gap, random_.randrange(nodes), random_.randrange(nproc), seconds, moment)

    faults: list[Fault] = []
    step = random_.randrange(3, 25)
    for _ in range(random_.randint(1, most)):
        first = random_.choice([*[each for each in ("place", "commit") if each in moments], "", ""])
        faults.append(one(step, None, first))
        second = "" if random_.random() < 0.5 else random_.choices(list(moments), list(moments.values()))[0]
        gap = random_.uniform(0.0, 0.05 if second else APART)
        faults.append(one(step, round(gap, 3), second))
        step = min(LAST, step + random_.randrange(10, 40))
    return Plan(
        seed,
        nodes,
        nproc,
        members,
        voters=nodes > 2 and not members and random_.random() < 0.5,
        live=random_.random() < 0.85,
        start=random_.choice((0.0, 0.0, 1.0)),
        late=0,
        every=random_.choice((3, 10)),
        hosts=False,
        disk=False,
        faulty=faulty,
        limited=False,
        executed=random_.random() < 0.1,
        faults=tuple(faults),
        last=None,
        form=form,
        steps=PAIRED_STEPS,
    )

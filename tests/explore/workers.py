"""The workers of one node in an explored world: what they have been told to do, and what they do by themselves.

They are the environment of the machines, as the simulation's are: each act of a worker is a move of the world.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING

from elastic_agents import policy_types as v
from elastic_launch import contract as c
from elastic_launch.rendezvous.wire import messages as m

if TYPE_CHECKING:
    from explore.agents import Agent

__all__ = ["ExploredWorker", "ExploredWorkers"]


class ExploredWorker:
    """One worker.

    Attributes:
        round: of its place; 0 while it has none.
        state: ``starts``, ``trains``, ``suspended``, ``ahead``, ``waits`` for a place, or ``left`` after a drain.
        told: the orders that it has not carried out: ``kill``, ``end``, ``suspend``, ``drain``, ``exit``.
        broken: whether another rank of its round is gone, so that its next exchange fails.
        said: whether it has reported that.
    """

    __slots__ = ("broken", "round", "said", "state", "told")

    def __init__(self, state: str, number: int) -> None:
        self.state, self.round = state, number
        self.told: set[str] = set()
        self.broken = self.said = False

    @property
    def active(self) -> bool:
        """Whether it takes part in its round."""
        return self.state in ("starts", "trains", "left")


class ExploredWorkers:
    """The workers of a node.

    Attributes:
        done: numbers of the rounds whose workers have finished here.
        kept: how often suspended workers got a place.
        symptoms: local ranks whose worker has ended because another rank was gone.
        codes: with which exit code the last worker of a local rank has ended.
    """

    __slots__ = ("by_rank", "codes", "done", "kept", "node", "symptoms")

    def __init__(self, node: Agent) -> None:
        self.node = node
        self.by_rank: dict[int, ExploredWorker] = {}
        self.done: set[int] = set()
        self.symptoms: set[int] = set()
        self.codes: dict[int, int] = {}
        self.kept = 0

    @property
    def training(self) -> int:
        """Number of the round whose workers train, 0 for none."""
        return max((worker.round for worker in self.by_rank.values() if worker.active), default=0)

    # Orders.

    def start(self, action: v.StartWorkers, slots: Iterable[int]) -> None:
        number = action.form.round.number
        assert not self.training, "workers of two rounds on one node"
        for rank in slots:
            worker = self.by_rank.get(rank)
            if rank in action.kept:
                assert worker is not None, "a suspended worker that is gone gets a place"
                assert worker.state == "suspended", f"a worker that {worker.state} is revived"
                assert worker.round < number, "a suspended worker is revived for a round that it has left"
                self.kept += 1
                worker.state, worker.round = "starts", number
                worker.told.clear()
                worker.broken = worker.said = False
            elif rank in action.waiting or rank in action.coming:
                assert worker is not None, "a worker ahead that is gone gets a place"
                if rank in action.waiting:
                    assert worker.state == "waits", f"a worker that is {worker.state} counts as waiting"
                    worker.state = "starts"
                worker.round = number
            else:
                dies = worker is None or "kill" in worker.told
                assert dies, f"a second worker of local rank {rank}"
                self.by_rank[rank] = ExploredWorker("starts", number)

    def start_ahead(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            worker = self.by_rank.get(rank)
            assert worker is None or "kill" in worker.told, "a worker ahead beside a worker"
            self.by_rank[rank] = ExploredWorker("ahead", 0)

    def kill_ahead(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self.by_rank and self.by_rank[rank].state in ("ahead", "waits"):
                self.by_rank[rank].told.add("kill")

    def give_place(self, rank: int) -> None:
        worker = self.by_rank[rank]
        assert worker.state == "ahead", f"a worker that {worker.state} gets a place"
        worker.state = "starts"

    def tell(self, order: str, ranks: Iterable[int] | None) -> None:
        for rank, worker in self.by_rank.items():
            mine = worker.round if ranks is None else rank in ranks
            if mine and not (order == "suspend" and not worker.active):
                worker.told.add(order)

    # Acts.

    def acts(self) -> list[tuple[str, int]]:
        """What workers can do now without a fault."""
        found: list[tuple[str, int]] = []
        for rank, worker in sorted(self.by_rank.items()):
            told = worker.told
            if "kill" in told:
                found.append(("is killed", rank))
                continue
            if "end" in told or "exit" in told or (worker.state == "left" and not self.node.world.live):
                found.append(("ends", rank))
            elif "suspend" in told or worker.state == "left":
                if worker.active:
                    found.append(("is suspended", rank))
            elif worker.state == "starts" and not worker.broken and worker.round:
                found.append(("begins", rank))
            if worker.broken and worker.active and not (worker.said or "suspend" in told or worker.state == "left"):
                found.append(("loses a peer", rank))
            if worker.state == "ahead":
                found.append(("comes", rank))
            if "drain" in told and worker.state in ("starts", "trains"):
                found.append(("drains", rank))
        return found

    def act(self, what: str, rank: int) -> None:
        worker, world = self.by_rank[rank], self.node.world
        number = worker.round
        match what:
            case "is killed":
                self.end(rank, -signal.SIGKILL)
            case "ends":
                quiet = worker.state in ("left", "suspended") or "exit" in worker.told
                self.end(rank, 0 if quiet else -signal.SIGTERM)
            case "is suspended":
                drained = worker.state == "left"
                worker.state = "suspended"
                worker.told.discard("suspend")
                if not drained:
                    world.lost_peer(number, self.node, rank)
                self._tell(number, rank, c.Suspended(world.steps))
            case "begins":
                worker.state = "trains"
                self._tell(number, rank, c.Ready(world.steps, live=world.live))
            case "loses a peer":
                if world.live and worker.state == "trains":
                    worker.said = True
                    self._tell(number, rank, c.Disconnected(world.steps, "connection closed"))
                else:
                    self.symptoms.add(rank)
                    self.end(rank, 1)
            case "comes":
                if worker.round:
                    self.node.hear(v.Reported(0, rank, c.Ahead()))
                else:
                    worker.state = "waits"
                    self._tell(0, rank, c.Ahead())
            case "drains":
                worker.told.discard("drain")
                worker.state = "left"
                self._tell(number, rank, c.Drained(world.steps, 0.0))

    def crash(self, rank: int, code: int) -> None:
        self.symptoms.discard(rank)
        self.end(rank, code)

    def finish(self, rank: int) -> None:
        worker = self.by_rank[rank]
        if sum(other.round == worker.round for other in self.by_rank.values()) == 1:
            self.done.add(worker.round)
        self.end(rank, 0)

    def end(self, rank: int, code: int) -> None:
        worker = self.by_rank.pop(rank)
        self.codes[rank] = code
        if worker.active and code:
            self.node.world.lost_peer(worker.round, self.node, rank)
        self.node.hear(v.WorkerExit(worker.round, rank, code))

    def die(self) -> None:
        """Die with the node: nothing is reported, but the peers' exchanges break."""
        number, self.by_rank = self.training, {}
        if number:
            self.node.world.lost_peer(number, self.node, -1)

    def lose_peer(self, number: int, but: int) -> None:
        for rank, worker in self.by_rank.items():
            if worker.round == number and worker.active and rank != but:
                worker.broken = True

    def _tell(self, number: int, rank: int, report: c.Message) -> None:
        self.node.hear(v.Reported(number, rank, report))


def order_of(action: v.Action | m.Report) -> str:
    """The order to workers that an action stands for; empty if it is none."""
    match action:
        case v.Terminate():
            return "end"
        case v.Kill():
            return "kill"
        case v.SuspendWorkers():
            return "suspend"
        case v.SendExit():
            return "exit"
        case _:
            return ""

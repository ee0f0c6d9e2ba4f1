"""Voters of a record in which any event may come next: each candidate reads the value, and writes another one.

A candidate is done once it has written a value or read one that is not the first. In a world that ends, each value but
the first is the end of the run: a voter that knows it leaves, as :class:`VotingBackend` does. In others the candidate
that wrote last then leads: it must need no certain one of the other voters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from voter_world import DEAD_AFTER, READER, VoterProcess, VoterWorld, WantedValue

from elastic_launch.rendezvous.backends.c10d import ACK_TIMEOUT
from elastic_launch.rendezvous.voters.messages import VoterAnswer
from elastic_launch.rendezvous.voters.register import Register
from elastic_launch.rendezvous.voters.server import VoterServer
from elastic_launch.rendezvous.voters.voter import Voter
from explore.search import Label, Moves, meet
from explore.states import EPOCH, Identity

__all__ = ["VoterBounds", "VotingWorld"]


PAUSE = DEAD_AFTER / 2
"""Seconds after which a candidate that was refused tries again: more than in fact, but less than a voter lingers."""


@dataclass(frozen=True)
class VoterBounds:
    """What may happen.

    Attributes:
        candidates: the voters that write.
        faults: how many voters may stop.
        lost_files: how many of them without their files.
        lost_messages: how many messages may be lost.
        tried: whether the first candidate has tried to write while the other voters were dead, and had to give up.
        ends: whether what is written is the run's end.
        founded: whether all voters vote in the beginning, and the first candidate has written the first value.
        gives_up: how often an operation may be given up although answers are under way.
    """

    candidates: str = "ab"
    faults: int = 1
    lost_files: int = 0
    lost_messages: int = 0
    tried: bool = False
    ends: bool = False
    founded: bool = True
    gives_up: int = 0


class VotingWorld(VoterWorld):
    """One state of three voters and their candidates.

    Attributes:
        stage: of each candidate: ``reads``, ``settles``, ``writes``, ``waits`` since others have a lease, ``done``, or
            ``leaving``.
        leave_by: when a voter that leaves answers no longer.
        kept: whether the last leader, once all is over, has been found to need no certain voter.
    """

    def __init__(self, bounds: VoterBounds) -> None:
        super().__init__(3, None, now=EPOCH)  # type: ignore[arg-type]
        del self.processes[READER]
        self.bounds = bounds
        self.stage: dict[str, str] = {}
        self.leave_by: dict[str, float] = {}
        self.kept = False
        self.left = bounds.faults
        self.files_left = bounds.lost_files
        self.messages_left = bounds.lost_messages
        self.give_ups = bounds.gives_up
        self.first: str | None = None
        self.asked: set[str] = set()
        if bounds.founded:
            self.calm(DEAD_AFTER)
            writer = self.processes[bounds.candidates[0]]
            self.begin(writer, swap=True)
            self.calm()
            self.first = writer.register.read[1]
            assert self.first is not None
        if bounds.tried:
            self._try(self.processes[bounds.candidates[0]])
        self.stage = dict.fromkeys(bounds.candidates, "reads")

    def _try(self, writer: VoterProcess) -> None:
        others = sorted(self.names - {writer.name})
        for name in others:
            self.stop(name, lose_file=False)
        self.begin(writer, swap=True)
        self.calm()
        self.give_up(writer)
        self.now += DEAD_AFTER
        for name in others:
            self.start(name)
        self.now += DEAD_AFTER  # none of them waits for a leader

    # Moves.

    def moves(self) -> Moves:
        urgent = [(label, True) for label in self._urgent()]
        leaving = bool(self.leave_by)
        dead = [name for name, process in self.processes.items() if not process.alive]
        found: Moves = [(("comes back", name), True) for name in dead if not leaving]
        found += urgent
        found += [(("leaves", name), True) for name in self.stage if self._leaves(name)]
        if not urgent and ("waits" in self.stage.values() or any(self.processes[x].alive for x in self.leave_by)):
            found.append((("time",), True))
        for name, process in self.processes.items():
            if process.alive and name not in self.leave_by:
                if self.left:
                    found.append((("stops", name), False))
                if self.left and self.files_left and self._may_lose(name):
                    found.append((("loses its file", name), False))
            if self.give_ups and process.alive and process.doing is not None and urgent:
                found.append((("gives up", name), False))
        if self.messages_left:
            found += [(("lost", *channel), False) for channel in self._channels()]
        if not urgent and not self.kept and not self.bounds.ends and self._over():
            found.append((("leads on",), True))
        return found

    def _over(self) -> bool:
        """Whether no candidate wants anything any more, and all voters vote."""
        voting = all(process.alive and self._votes(name) for name, process in self.processes.items())
        return voting and all(stage == "done" for stage in self.stage.values())

    def _urgent(self) -> Iterator[Label]:
        channels = self._channels()
        for channel in channels:
            yield "comes", *channel
        asked = self._asked()
        alive = [(name, process) for name, process in self.processes.items() if process.alive]
        staying = [(name, process) for name, process in alive if name not in self.leave_by]
        busy = {channel[0] for channel in channels}
        for name, _ in staying:
            if not self._votes(name) and name not in busy and name not in asked:
                yield "reports", name
        for name, _ in alive:
            if name in self.leave_by and self._exits(name):
                yield "exits", name
        for name, process in staying:
            if self._votes(name) and process.doing is None and self.stage.get(name) in ("reads", "settles", "writes"):
                yield "begins", name
            if process.doing is not None and name not in busy:
                yield "gives up", name

    def _votes(self, name: str) -> bool:
        voter = self.processes[name].voter
        return voter is not None and voter.born and voter.state.founded

    def _asked(self) -> set[str]:
        """The voters without a vote that have asked the others, until all of them have."""
        asking = {name for name, process in self.processes.items() if process.alive and not self._votes(name)}
        return set() if asking <= self.asked else self.asked

    def _channels(self) -> dict[tuple[str, str, str], int]:
        """The connections on which messages are under way, and the first one on each."""
        found: dict[tuple[str, str, str], int] = {}
        for index, (client, voter, message) in enumerate(self.wire):
            answers = isinstance(message, VoterAnswer)
            there = message.voter if isinstance(message, VoterAnswer) else voter
            age = "" if self.processes[client.name] is client else "of an earlier process"
            found.setdefault((client.name, there, ("answer" if answers else "request") + age), index)
        return found

    def _may_lose(self, name: str) -> bool:
        others = [self.files.get(other) for other in self.names if other != name]
        return all(x is not None and x.founded and x.life not in self.discarded for x in others)

    def _leaves(self, name: str) -> bool:
        return self.bounds.ends and self.stage[name] == "done" and self.processes[name].alive

    def _exits(self, name: str) -> bool:
        """Whether a voter's server stops: it has connections of voters that do not leave."""
        others = [x for other, x in self.processes.items() if other != name and x.alive and other not in self.leave_by]
        stop = threading.Event()
        stop.set()
        links = SimpleNamespace(open={index: SimpleNamespace(greeted=True) for index, _ in enumerate(others)})
        over = time.monotonic() + (-1.0 if self.now >= self.leave_by[name] else 1e6)
        server: Any = SimpleNamespace(_stop=stop, _links=links, _leave_by=over)
        return VoterServer._left(server)

    def do(self, label: Label) -> None:
        what, *rest = label
        match what:
            case "comes":
                self._comes(self._channels()[tuple(rest)])
            case "lost":
                self.messages_left -= 1
                del self.wire[self._channels()[tuple(rest)]]
            case "reports":
                self.asked = self._asked() | {rest[0]}
                self.report(self.processes[rest[0]])
            case "begins":
                self._begin(rest[0])
            case "gives up":
                process = self.processes[rest[0]]
                if any(channel[0] == process.name for channel in self._channels()):
                    self.give_ups -= 1
                process.register.give_up()
                doing, process.doing = process.doing, None
                assert doing is not None
                self._after(process, doing)
            case "leaves":
                self.stage[rest[0]], self.leave_by[rest[0]] = "leaving", self.now + ACK_TIMEOUT
            case "exits":
                self.stop(rest[0], lose_file=False)
                self.files.pop(rest[0], None)
            case "stops" | "loses its file":
                self.left -= 1
                self.files_left -= what == "loses its file"
                self.stop(rest[0], lose_file=what == "loses its file")
                self._again(rest[0])
            case "comes back":
                self.start(rest[0])
                self._again(rest[0])
            case "time":
                self.now += PAUSE
                for name, stage in self.stage.items():
                    self.stage[name] = "reads" if stage == "waits" else stage
            case "leads on":
                self._lead_on()

    def _lead_on(self) -> None:
        self.kept = True
        last = max(self.known, key=self.depth)
        leader = next(self.writers[position.ballot] for position, value in self.values.items() if value == last)
        if self.processes[leader.name] is leader:
            self.assert_keeps(leader)

    def _comes(self, index: int) -> None:
        """A message arrives; a voter has the phases of ``voter``, what asks it those of ``register``."""
        client, name, message = self.wire[index]
        if isinstance(message, VoterAnswer):
            phase = f"register {client.register._phase.name.lower()}"
            meet(phase, "refusal" if message.refused else "answer")
        elif (voter := self.processes[name].voter) is not None and self.processes[name].alive:
            phase = "founded" if voter.state.founded else "born" if voter.born else "unborn"
            meet(f"voter {phase}", type(message).__name__)
        self.deliver(index)

    def _again(self, name: str) -> None:
        if name in self.stage and not (self.stage[name] == "done" and not self.bounds.ends):
            self.stage[name] = "reads"

    def _begin(self, name: str) -> None:
        process = self.processes[name]
        voter, register = process.voter, process.register
        assert voter is not None
        if self.stage[name] == "writes":
            before = register.read[1]
            value = f"{name}{len(self.parents)}"
            self.parents[value] = before
            process.doing = WantedValue(self.newest, before, value)
            register.begin_swap(before, value, voter.state.life, voter.state.promised)
            self.send(process)
            self.finish(process)
        else:
            self.begin(process, swap=False, settle=self.stage[name] == "settles")

    def finish(self, process: VoterProcess) -> None:
        doing = process.doing
        super().finish(process)
        if doing is not None and process.doing is None:
            self._after(process, doing)

    def _after(self, process: VoterProcess, doing: WantedValue) -> None:
        """What a candidate does after an operation; one that has read no value settles it."""
        name, outcome = process.name, process.register.outcome
        if name not in self.stage:
            return
        if outcome is not None and outcome.known:
            self.stage[name] = "done" if outcome.written or outcome.value != self.first else "writes"
        elif outcome is not None and outcome.wait > 0 and self.stage[name] != "reads":
            self.stage[name] = "waits"
        else:
            self.stage[name] = "settles" if outcome is not None and self.stage[name] == "reads" else "reads"

    # Identity.

    def identity(self) -> int:
        channels: dict[Any, list[Any]] = {}
        for client, voter, message in self.wire:
            there = message.voter if isinstance(message, VoterAnswer) else voter
            old = self.processes[client.name] is not client
            here = channels.setdefault((client.name, there, isinstance(message, VoterAnswer), old), [])
            here.append((client.register._id - message.id if message.id else "report", message))
        state = (
            {name: (x.alive, x.register, x.voter, x.doing) for name, x in self.processes.items()},
            channels,
            self.files,
            self.discarded,
            self.stage,
            self.leave_by,
            self.kept,
            self.asked,
            (self.left, self.files_left, self.messages_left, self.give_ups),
            self.parents,
            self.known,
            self.newest,
            self.values,
            {ballot: process.name for ballot, process in self.writers.items()},
        )
        return IDENTITY.of(state, self.now, {})

    def goal(self) -> bool:
        alive = [name for name, process in self.processes.items() if process.alive]
        if self.bounds.ends:
            return not alive
        return self.kept and self._over()

    def describe(self) -> str:
        return f"{self.stage} {self.processes}"


IDENTITY = Identity(
    {
        Register: lambda x: (
            x._phase,
            x._held,
            x._renews,
            x._refused,
            x._ballot,
            x._highest,
            x._life,
            x._swap,
            x._base,
            x._before,
            x.outcome,
            x.answers,
            x.read,
        ),
        Voter: lambda x: (x.born, x.state, x._reports, x._leader, x._released, x._heeds, x._until),
    },
    ignored=frozenset({"id"}),
)

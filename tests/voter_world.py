"""Real voters and registers, and the messages between them, which may come in any order, twice, or never.

It checks that there is one value per position and one writer per ballot, and that reads and writes look as if each had
happened at one moment between its beginning and its end.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

from elastic_launch.rendezvous.voters.messages import (
    Accept,
    Ballot,
    ValuePosition,
    VoterAnswer,
    VoterRequest,
    group_of,
)
from elastic_launch.rendezvous.voters.register import Register, RegisterOutcome
from elastic_launch.rendezvous.voters.voter import Voter, VoterState

__all__ = ["DEAD_AFTER", "READER", "VoterProcess", "VoterWorld", "WantedValue"]

DEAD_AFTER = 5.0

READER = "reader"
"""A process without a voter."""


@dataclass(eq=False)
class WantedValue:
    """What a process wants; ``floor`` is the depth of the newest value that was known when it began."""

    floor: int
    expected: str | None = None
    value: str | None = None


@dataclass(eq=False)
class VoterProcess:
    """One process; ``unsure`` is the last value of which it does not know whether it has written it."""

    name: str
    register: Register
    voter: Voter | None
    alive: bool = True
    doing: WantedValue | None = None
    unsure: WantedValue | None = None


@dataclass
class VoterWorld:
    """Some voters, a reader, and the messages between them."""

    size: int
    random: random.Random
    now: float = 0.0
    processes: dict[str, VoterProcess] = field(default_factory=dict)
    files: dict[str, VoterState] = field(default_factory=dict)
    discarded: set[str] = field(default_factory=set)
    wire: list[tuple[VoterProcess, str, VoterRequest | VoterAnswer]] = field(default_factory=list)
    parents: dict[str, str | None] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    newest: int = 0
    values: dict[ValuePosition, str] = field(default_factory=dict)
    writers: dict[Ballot, VoterProcess] = field(default_factory=dict)
    lives: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        self.names = frozenset("abcdefg"[: self.size])
        self.group = group_of("run", self.names)
        for name in sorted(self.names):
            self.start(name)
        self.start(READER)

    def start(self, name: str) -> None:
        voter = None
        if name in self.names:
            self.lives += 1
            state = self.files.get(name)
            voter = Voter(name, self.names - {name}, self.group, state, DEAD_AFTER, self.now, f"{name}{self.lives}")
        register = Register(self.group, self.names, name if voter else "", DEAD_AFTER)
        self.processes[name] = VoterProcess(name, register, voter)

    def stop(self, name: str, *, lose_file: bool) -> None:
        process = self.processes[name]
        process.alive, process.doing = False, None
        others = [self.files.get(x) for x in self.names if x != name]
        if lose_file and all(x is not None and x.founded and x.life not in self.discarded for x in others):
            self.files.pop(name, None)

    # Messages.

    def send(self, process: VoterProcess) -> None:
        for voter, request in process.register.take():
            if isinstance(request, Accept):
                assert self.values.setdefault(request.position, request.value) == request.value, "two values"
                assert self.writers.setdefault(request.position.ballot, process) is process, "two writers"
            if voter == process.name:
                self.serve(process, voter, request)
            else:
                self.wire.append((process, voter, request))

    def serve(self, client: VoterProcess, name: str, request: VoterRequest) -> None:
        process = self.processes[name]
        if not process.alive:
            return
        assert process.voter is not None
        answer = process.voter.handle(request, self.now)
        self.save(process)
        if client is process:
            self.hear(client, answer)
        else:
            self.wire.append((client, "", answer))

    def save(self, process: VoterProcess) -> None:
        assert process.voter is not None
        if process.voter.born:
            self.files[process.name] = process.voter.state
        elif process.name in self.files:  # as of a voter that began again: its old file stays until it is born
            self.discarded.add(self.files[process.name].life)

    def hear(self, process: VoterProcess, answer: VoterAnswer) -> None:
        if not process.alive:
            return
        if process.voter is not None:
            process.voter.heard(answer, self.now)
            self.save(process)
        process.register.hear(answer)
        self.send(process)
        self.finish(process)

    def deliver(self, index: int, *, keep: bool = False) -> None:
        if not self.wire:
            return
        index %= len(self.wire)
        client, voter, message = self.wire[index]
        if not keep:
            del self.wire[index]
        if isinstance(message, VoterAnswer):
            self.hear(client, message)
        else:
            self.serve(client, voter, message)

    def pass_on(self, kind: type, *, to: str) -> None:
        """Deliver the messages of one kind to one process, and only these."""
        chosen = [x for x in self.wire if isinstance(x[2], kind) and (x[1] or x[0].name) == to]
        self.wire = [x for x in self.wire if x not in chosen]
        for client, voter, message in chosen:
            if isinstance(message, VoterAnswer):
                self.hear(client, message)
            else:
                self.serve(client, voter, message)

    # Operations.

    def begin(
        self, process: VoterProcess, *, swap: bool, settle: bool = False, stale: bool = False, again: bool = False
    ) -> None:
        if process.doing is not None or not process.alive or (again and process.unsure is None):
            return
        register, voter = process.register, process.voter
        process.doing = WantedValue(self.newest)
        if voter is None or not (swap or settle):
            register.begin_read(leading=swap)
        elif settle:
            register.begin_settle(voter.state.life, voter.state.promised)
        elif again and process.unsure is not None and process.unsure.value is not None:
            process.doing = process.unsure
            swapped = process.doing.expected, process.unsure.value
            register.begin_swap(*swapped, voter.state.life, voter.state.promised)
        else:
            value = f"{process.name}{len(self.parents)}"
            expected = self.random.choice([None, *self.parents]) if stale else register.read[1]
            self.parents[value] = expected
            process.doing = process.unsure = WantedValue(self.newest, expected, value)
            register.begin_swap(expected, value, voter.state.life, voter.state.promised)
        self.send(process)
        self.finish(process)

    def give_up(self, process: VoterProcess) -> None:
        if process.alive:
            process.doing = None
            process.register.give_up()

    def finish(self, process: VoterProcess) -> None:
        outcome, doing = process.register.outcome, process.doing
        if outcome is None or doing is None:
            return
        process.doing = None
        if not outcome.known:
            return
        self.done += 1
        if doing is process.unsure:
            process.unsure = None
        if doing.value is not None and not outcome.written:
            assert outcome.value != doing.expected, "refused, although the value was the expected one"
        if outcome.written:
            assert outcome.value == doing.value
            assert self.depth(doing.expected) >= doing.floor, "written over a value that it had not read"
        self.learned(outcome.value, doing.floor)

    def learned(self, value: str | None, floor: int) -> None:
        depth = self.depth(value)
        assert depth >= floor, f"{value} is older than what was known before"
        if value is not None:
            chain = set(self.chain(value))
            newest = max(self.known, key=self.depth, default=None)
            assert newest is None or newest in chain or value in set(self.chain(newest)), f"{value} and {newest}"
            self.known.add(value)
        self.newest = max(self.newest, depth)

    def chain(self, value: str | None) -> list[str]:
        found = []
        while value is not None:
            found.append(value)
            value = self.parents[value]
        return found

    def depth(self, value: str | None) -> int:
        return len(self.chain(value))

    def renew(self, leader: VoterProcess) -> bool:
        """Have a leader do what ``MajorityStore.renew`` does, without faults; return whether its lease is renewed."""
        register, voter = leader.register, leader.voter
        assert voter is not None
        register.begin_read(leading=True)
        outcome = self._end(leader)
        if outcome is not None and (not outcome.known or outcome.refused):
            register.begin_settle(voter.state.life, voter.state.promised, leading=True)
            settled = self._end(leader)
            outcome = outcome if outcome.known else settled
        return outcome is not None and outcome.known

    def _end(self, process: VoterProcess) -> RegisterOutcome | None:
        self.send(process)
        self.calm()
        process.register.give_up()
        return process.register.outcome

    def assert_keeps(self, leader: VoterProcess) -> None:
        """Once nothing fails any more, all voters follow the leader, so that it leads on without any one of them."""
        for _ in range(2):  # a refusal that comes after a majority's answers counts in the next one
            assert self.renew(leader), "the lease is not renewed"
        ballot, value = leader.register.ballot, leader.register.read[1]
        promised = {name: state.promised for name, state in self.files.items() if self.processes[name].alive}
        assert set(promised.values()) == {ballot}, f"the leader has ballot {ballot}, the voters promised {promised}"
        for lost in sorted(self.names - {leader.name}):
            later = copy.deepcopy(self)
            later.stop(lost, lose_file=False)
            kept = later.renew(later.processes[leader.name])
            assert kept, f"the leader ends with voter {lost}"
            assert later.processes[leader.name].register.read[1] == value

    def report(self, process: VoterProcess) -> None:
        voter = process.voter
        if process.alive and voter is not None and not (voter.born and voter.state.founded):
            for other in sorted(voter.others):
                self.wire.append((process, other, voter.report_to(other, 0)))

    def calm(self, seconds: float = 0.0) -> None:
        """Deliver everything in order, and let voters report to each other until nothing changes."""
        self.now += seconds
        for _ in range(6):
            for process in list(self.processes.values()):
                self.report(process)
            while self.wire:
                self.deliver(0)

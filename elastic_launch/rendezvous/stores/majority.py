"""The control record, kept by a majority of the hosts that the endpoint names; see ``voters``."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from elastic_launch import codec
from elastic_launch.clock import Clock
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.errors import LeasedError, RecordTooLargeError, StoreError
from elastic_launch.rendezvous.stores.control_store import ControlStore
from elastic_launch.rendezvous.voters.messages import VoterAnswer, VoterRequest, group_of
from elastic_launch.rendezvous.voters.peers import Peers
from elastic_launch.rendezvous.voters.register import Register, RegisterOutcome
from elastic_launch.rendezvous.voters.vote_file import VoteFile
from elastic_launch.rendezvous.voters.voter import Voter
from elastic_launch.system.threads import VitalThread

MAX_RECORD = codec.MAX_BYTES // 2
"""Bytes of the largest record: as text in a message, it takes up to twice as many."""

LATE = 0.1
"""Seconds to wait for the other voters, once a majority has answered and that was not enough."""

LATEST = 8 * LATE
"""The same in later attempts of one operation: each waits twice as long as the one before, up to this."""

RETRY = 0.1
"""Most seconds between two attempts of one operation; drawn at random, so that candidates do not meet forever."""

FOUNDING = 0.1
"""Seconds between two rounds of reports while this node's voter cannot vote."""

GOODBYE = 0.5
"""Seconds that a leader that leaves waits until a majority knows it."""

_HINT_START = "Start the agents on all hosts that --rdzv-endpoint names."
_HINT_LOST = (
    "If that lasts, give all nodes another --rdzv-id, or remove voter-*.json from the run's directory on all hosts."
)

T = TypeVar("T")


class OwnVoter:
    """This node's voter with its file.

    Attributes:
        problem: why its state could not be written the last time; empty if it was.
    """

    def __init__(self, name: str, group: str, others: frozenset[str], file: VoteFile, dead_after: float, now: float):
        self.name = name
        self.file = file
        self.voter = Voter(name, others, group, file.load(group), dead_after, now)
        self.problem = ""

    @property
    def founded(self) -> bool:
        """Whether it votes."""
        return self.voter.born and self.voter.state.founded

    def change(self, act: Callable[[], T]) -> T | None:
        """Have the voter do something, and write its state; return what it returned, or None if writing failed."""
        voter = self.voter
        before = (voter.born, voter.state)
        result = act()
        if voter.born and voter.state is not before[1]:
            try:
                self.file.save(voter.state)
            except OSError as error:
                voter.born, voter.state = before
                self.problem = f"{self.file.path} cannot be written: {error.strerror or error}"
                return None
            self.problem = ""
        return result


class MajorityStore(ControlStore):
    """Thread-safe: operations wait for each other. Answers come from the threads of ``peers``.

    Args:
        endpoints: all voters.
        own: this node's voter, or None: then it only reads.
        lease: seconds for which a leader may be silent.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        run_id: str,
        key: bytes | None,
        clock: Clock,
        own: OwnVoter | None = None,
        lease: float = 0.0,
    ) -> None:
        self._names = frozenset(map(str, endpoints))
        self._own = own
        self._clock = clock
        name = own.name if own is not None else ""
        group = group_of(run_id, self._names)
        self._register = Register(group, self._names, name, lease)
        self._busy = threading.Lock()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._reporting = 0
        others = {str(endpoint): endpoint for endpoint in endpoints if str(endpoint) != name}
        self._peers = Peers(others, key, group, self._heard)
        self._founding = VitalThread(self._found, "voter-founding")
        if own is not None:
            self._founding.start()

    # A store.

    def load(self, timeout: float) -> bytes | None:
        return self._load(timeout, leading=False)

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        own, register = self._own, self._register
        if own is None or not own.founded:
            raise self._lost()
        if len(value) > MAX_RECORD:
            raise RecordTooLargeError(
                f"The control record has {len(value)} bytes; the limit is {MAX_RECORD}.",
                "Start fewer nodes, or give them shorter ids and addresses.",
            )
        before = None if expected is None else expected.decode()
        for left, late in self._attempts(timeout):
            outcome = self._operate(
                lambda: register.begin_swap(before, value.decode(), own.voter.state.life, own.voter.state.promised),
                left,
                late,
            )
            if outcome is not None and outcome.known:
                return outcome.written
            if outcome is not None and outcome.wait > 0:
                break  # another node leads
        raise self._lost(outcome)

    def renew(self, timeout: float) -> bytes | None:
        return self._load(timeout, leading=True)

    def resign(self) -> None:
        self._operate(self._register.begin_release, GOODBYE)

    def close(self) -> None:
        """Close all connections; operations fail from now on."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        self._peers.close()
        if self._founding.ident is not None:
            self._founding.join(1.0)

    def vote(self, request: VoterRequest) -> VoterAnswer | None:
        """Return the own voter's answer to a request from outside; None if its state cannot be written."""
        own = self._own
        assert own is not None
        with self._changed:
            return own.change(partial(own.voter.handle, request, self._clock.now()))

    # Operations.

    def _load(self, timeout: float, *, leading: bool) -> bytes | None:
        register, own = self._register, self._own
        for left, late in self._attempts(timeout):
            ends = time.monotonic() + left
            if own is not None and not own.founded:
                left = min(left, FOUNDING)  # its reports wait for this operation
            outcome = self._operate(lambda: register.begin_read(leading=leading), left, late)
            if outcome is not None and (not outcome.known or outcome.refused) and own is not None and own.founded:
                settled = self._operate(
                    lambda: register.begin_settle(own.voter.state.life, own.voter.state.promised, leading=leading),
                    max(0.0, ends - time.monotonic()),
                    late,
                )
                outcome = outcome if outcome.known else settled
            if outcome is not None and outcome.known:
                return None if outcome.value is None else outcome.value.encode()
        raise self._lost(outcome)

    def _attempts(self, timeout: float) -> Iterator[tuple[float, float]]:
        """Yield, for each attempt of one operation, the seconds left, and those to wait for the other voters."""
        deadline, late = time.monotonic() + timeout, LATE
        yield timeout, late
        while time.monotonic() < deadline and not self._closed.wait(random.uniform(0, RETRY)):
            late = min(2 * late, LATEST)
            yield max(0.0, deadline - time.monotonic()), late

    def _operate(self, begin: Callable[[], None], timeout: float, late: float = LATE) -> RegisterOutcome | None:
        """Carry out an operation; return None if it did not end in time.

        Args:
            late: seconds to wait for the other voters, once a majority has answered and that was not enough.
        """
        deadline = time.monotonic() + timeout
        register = self._register
        if not self._busy.acquire(timeout=max(timeout, 0.001)):
            return None
        try:
            with self._changed:
                begin()
                self._send()
                differs_at: float | None = None
                while register.outcome is None and not self._closed.is_set():
                    now = time.monotonic()
                    if not register.undecided:
                        differs_at = None
                    elif differs_at is None:
                        differs_at = now
                    until = deadline if differs_at is None else min(deadline, differs_at + late)
                    if now >= until:
                        break
                    self._changed.wait(until - now)
                register.give_up()
                return register.outcome
        finally:
            self._peers.rest()
            self._busy.release()

    def _send(self) -> None:
        """Send what the register has for the voters; to the own one directly. Called with the lock held."""
        own, register = self._own, self._register
        while outbox := register.take():
            for voter, request in outbox:
                if own is None or voter != own.name:
                    self._peers.send(voter, request)
                    continue
                answer = own.change(partial(own.voter.handle, request, self._clock.now()))
                if answer is not None:
                    register.hear(answer)

    def _heard(self, answer: VoterAnswer) -> None:
        own = self._own
        with self._changed:
            if own is not None:
                own.change(partial(own.voter.heard, answer, self._clock.now()))
            self._register.hear(answer)
            self._send()
            self._changed.notify_all()

    def _found(self) -> None:
        """While the own voter cannot vote, ask the others for reports."""
        own = self._own
        assert own is not None
        while not self._closed.is_set():
            if not own.founded and self._busy.acquire(timeout=FOUNDING):
                try:
                    with self._changed:
                        self._reporting -= 1  # no id of the register
                        for voter in own.voter.others:
                            self._peers.send(voter, own.voter.report_to(voter, self._reporting))
                        self._changed.wait_for(lambda: own.founded or self._closed.is_set(), FOUNDING)
                finally:
                    self._busy.release()
            self._closed.wait(FOUNDING)

    # What to tell.

    def _lost(self, outcome: RegisterOutcome | None = None) -> StoreError:
        """Return why an operation has failed, and what is to be done."""
        own, answers = self._own, self._register.answers
        if own is not None and own.problem:
            return StoreError(f"This node's voter {own.name} does not vote: {own.problem}.", "Free some space there.")
        if own is not None and not own.founded:
            return self._unfounded(own)
        if outcome is not None and outcome.wait > 0:
            text = f"The voters wait for {outcome.wait:.1f} s more for the leader that they have heard."
            return LeasedError(text, outcome.wait)
        silent = sorted(self._names - set(answers))
        told = "; ".join(f"{voter}: {self._peers.problem(voter) or 'it does not answer'}" for voter in silent)
        if len(self._names) - len(silent) > len(self._names) // 2:
            unable = sorted(voter for voter, answer in answers.items() if not answer.founded)
            if unable:
                if silent:
                    what, hint = f"wait for the others ({told})", _HINT_START
                else:
                    what, hint = "ask the others for it", _HINT_LOST
                return StoreError(f"Voters {', '.join(unable)} have no state yet, and {what}.", hint)
            return StoreError("The voters do not agree yet: a leader is being elected, or writes.")
        lost, voters = len(silent), len(self._names)
        needed = lost - (voters - 1) // 2
        back = "one of them is" if needed == 1 else f"{needed} of them are"
        return StoreError(
            f"{lost} of {voters} voters lost ({told}): waiting until {back} back.",
            "Start the agents on these hosts again.",
        )

    def _unfounded(self, own: OwnVoter) -> StoreError:
        voter = own.voter
        missing = [f"{name} ({self._peers.problem(name) or 'it does not answer'})" for name in voter.missing]
        if missing:
            when = "begins only when all voters are there" if not voter.born else "goes on when they have answered"
            return StoreError(
                f"Voter {own.name} has no state of the run, which {when}; missing: {', '.join(missing)}.",
                _HINT_START,
            )
        if voter.unborn:
            names = ", ".join(sorted([own.name, *voter.unborn]))
            return StoreError(
                f"Voters {names} have no file, but another one has: the run is just beginning, or files are lost.",
                _HINT_LOST,
            )
        return StoreError(f"Voter {own.name} has only just begun.")

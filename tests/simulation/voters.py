"""A control store without servers: some of the simulated hosts keep the record by majority.

The real voters and registers on simulated hosts; ``load`` and ``compare_and_set`` follow ``MajorityStore``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elastic_launch.errors import LeasedError, StoreError
from elastic_launch.rendezvous.stores.majority import FOUNDING, LATE, RETRY
from elastic_launch.rendezvous.voters.messages import Accept, ValuePosition, VoterAnswer, VoterRequest, group_of
from elastic_launch.rendezvous.voters.register import Register, RegisterOutcome
from elastic_launch.rendezvous.voters.voter import Voter, VoterState
from simulation.kernel import Host, Mailbox, Resume, Task, Wait
from simulation.network import Network

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.node import SimNode

__all__ = ["VOTERS", "SimVoters"]

VOTERS = frozenset("abc")
"""The ids of the nodes that vote."""


class _Client:
    """One process: its register, and its voter if it has one."""

    def __init__(self, node: SimNode, group: str, state: VoterState | None) -> None:
        timing, name = node.cluster.timing, node.node_id
        self.node = node
        self.voter: Voter | None = None
        if name in VOTERS:
            now = node.kernel.now
            self.voter = Voter(name, VOTERS - {name}, group, state, timing.dead_after, now, node.incarnation)
        self.register = Register(group, VOTERS, name if self.voter else "", timing.dead_after)
        self.answers = Mailbox(node.kernel, node)
        self.busy = False


class SimVoters:
    """The store of a cluster whose nodes a, b and c vote.

    Attributes:
        down, mute, late: as for :class:`~simulation.network.SimStore`; of messages between voters.
        files: the state of each voter on its disk.
    """

    def __init__(self, cluster: Cluster, network: Network, written: Callable[[bytes, Host], None]) -> None:
        self.down = False
        self.mute: set[str] = set()
        self.late: set[str] = set()
        self.files: dict[str, VoterState] = {}
        self._cluster = cluster
        self._network = network
        self._kernel = network.kernel
        self._written = written
        self._group = group_of("run", VOTERS)
        self._clients: dict[Host, _Client] = {}
        self._accepted: dict[ValuePosition, set[str]] = {}
        self._last: ValuePosition | None = None

    def started(self, node: SimNode) -> None:
        """A process starts."""
        client = self._clients[node] = _Client(node, self._group, self.files.get(node.node_id))
        if client.voter is not None:
            self._kernel.spawn(node, self._found(client, client.voter))

    def lose_file(self, name: str) -> None:
        """A dead voter's file is lost, if no other voter lacks its file."""
        others = [self.files.get(other) for other in VOTERS if other != name]
        if not any(node.node_id == name for node in self._cluster.nodes) and all(x and x.founded for x in others):
            self.files.pop(name, None)
            for voters in self._accepted.values():  # what it has accepted counts no more for what is not written yet
                voters.discard(name)

    def spoil(self) -> None:
        """Nothing: strangers cannot write what voters have accepted."""

    def load(self, host: Host, timeout: float, *, leading: bool = False) -> Wait:
        return self._waiting(host, self._load(self._clients[host], timeout, leading))

    def compare_and_set(self, host: Host, expected: bytes | None, value: bytes, timeout: float) -> Wait:
        return self._waiting(host, self._swap(self._clients[host], expected, value, timeout))

    def _waiting(self, host: Host, task: Task) -> Wait:
        def run(resume: Resume) -> Task:
            try:
                outcome = yield from task
            except StoreError as error:
                outcome = error
            resume(outcome)

        return lambda resume: self._kernel.spawn(host, run(resume))

    def _load(self, client: _Client, timeout: float, leading: bool) -> Task:
        deadline = self._kernel.now + timeout
        register, voter = client.register, client.voter
        while True:
            outcome = yield from self._operate(client, lambda: register.begin_read(leading=leading), deadline)
            if outcome is not None and (not outcome.known or outcome.refused) and _votes(voter):
                settle = lambda: register.begin_settle(voter.state.life, voter.state.promised, leading=leading)  # noqa: E731
                settled = yield from self._operate(client, settle, deadline)
                outcome = outcome if outcome.known else settled
            if outcome is not None and outcome.known:
                return None if outcome.value is None else outcome.value.encode()
            if self._kernel.now >= deadline:
                raise _lost(outcome)
            yield self._kernel.sleep(client.node, self._kernel.random.uniform(0.001, RETRY))

    def _swap(self, client: _Client, expected: bytes | None, value: bytes, timeout: float) -> Task:
        voter, before = client.voter, None if expected is None else expected.decode()
        if not _votes(voter):
            raise StoreError("this node does not vote.")
        assert voter is not None

        def begin() -> None:
            client.register.begin_swap(before, value.decode(), voter.state.life, voter.state.promised)

        deadline = self._kernel.now + timeout
        while True:
            outcome: RegisterOutcome | None = yield from self._operate(client, begin, deadline)
            if outcome is not None and outcome.known:
                return outcome.written
            if self._kernel.now >= deadline or (outcome is not None and outcome.wait > 0):
                raise _lost(outcome)
            yield self._kernel.sleep(client.node, self._kernel.random.uniform(0.001, RETRY))

    def _operate(self, client: _Client, begin: Callable[[], None], deadline: float) -> Task:
        kernel, register = self._kernel, client.register
        while client.busy:
            if kernel.now >= deadline:
                return None
            yield kernel.sleep(client.node, 0.01)
        client.busy = True
        client.answers.take()
        begin()
        self._send(client)
        until = deadline
        while register.outcome is None and kernel.now < until:
            for answer in (yield client.answers.get(until - kernel.now)):
                self._hear(client, answer)
            if register.undecided:
                until = min(until, kernel.now + LATE)
        register.give_up()
        client.busy = False
        return register.outcome

    def _found(self, client: _Client, voter: Voter) -> Task:
        while True:
            if not _votes(voter):
                for other in sorted(voter.others):
                    self._post(client, other, voter.report_to(other, 0))
            yield self._kernel.sleep(client.node, 2 * FOUNDING if not _votes(voter) else 1.0)

    def _hear(self, client: _Client, answer: VoterAnswer) -> None:
        client.register.hear(answer)
        self._send(client)

    def _send(self, client: _Client) -> None:
        while outbox := client.register.take():
            for name, request in outbox:
                if name == client.node.node_id:
                    client.register.hear(self._handle(client, request))
                else:
                    self._post(client, name, request)

    def _post(self, client: _Client, name: str, request: VoterRequest) -> None:
        self._carry(client.node, lambda: self._cluster.host(name), lambda voter: self._serve(client, voter, request))

    def _serve(self, client: _Client, voter: Any, request: VoterRequest) -> None:
        answer = self._handle(self._clients[voter], request)
        if client.node.node_id not in self.mute:
            self._carry(voter, lambda: client.node, lambda node: self._answered(client, answer))

    def _answered(self, client: _Client, answer: VoterAnswer) -> None:
        if client.voter is not None:
            client.voter.heard(answer, self._kernel.now)
            self._save(client)
        client.answers.put(answer)

    def _carry(self, source: Host, target: Callable[[], Any], act: Callable[[Any], None]) -> None:
        """Deliver a message: late, once a partition ends, or never."""

        def arrive() -> None:
            host = target()
            cut = self.down or bool({source.name, host.name if host else ""} & self._network.cut_off)
            if host is None or not host.alive or cut:
                return
            if not self._network.joins(source, host):
                self._network.hold(arrive)
                return
            self._kernel.call(0.0, host, lambda: act(host))

        slow = self._kernel.random.uniform(0, 8.0) if source.name in self.late else self._network.delay()
        self._kernel.call(slow, self._kernel.outside, arrive)

    def _handle(self, client: _Client, request: VoterRequest) -> VoterAnswer:
        assert client.voter is not None
        answer = client.voter.handle(request, self._kernel.now)
        self._save(client)
        if isinstance(request, Accept) and answer.granted:
            self._observe(client, request)
        return answer

    def _save(self, client: _Client) -> None:
        assert client.voter is not None
        if client.voter.born:
            self.files[client.node.node_id] = client.voter.state

    def _observe(self, client: _Client, request: Accept) -> None:
        """Tell the checks of each value once a majority has accepted it."""
        position = request.position
        voters = self._accepted.setdefault(position, set())
        voters.add(client.node.node_id)
        if len(voters) > len(VOTERS) // 2 and (self._last is None or position > self._last):
            self._last = position
            self._written(request.value.encode(), client.node)


def _lost(outcome: RegisterOutcome | None) -> StoreError:
    if outcome is not None and outcome.wait > 0:
        return LeasedError("the voters wait.", outcome.wait)
    return StoreError("it is not known whether that was written.")


def _votes(voter: Voter | None) -> bool:
    return voter is not None and voter.born and voter.state.founded

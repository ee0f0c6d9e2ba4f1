"""The client of a run's leader: finds it by the control record, opens a link, sends a request, reads the answers."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from elastic_launch.clock import MonotonicClock
from elastic_launch.config.backends import BackendKind, kind_of
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.errors import (
    ElasticLaunchError,
    EndpointError,
    ProtocolError,
    RefusedError,
    RendezvousError,
    StoreError,
)
from elastic_launch.rendezvous.admin import messages as a
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.stores.control_store import ControlStore
from elastic_launch.rendezvous.stores.majority import MajorityStore
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.authentication import Channel, link_key
from elastic_launch.rendezvous.wire.seal import ValueSeal
from elastic_launch.secret import Token

TIMEOUT = 4.0
"""Seconds within which the store and the leader must first answer, both together: users are told within 5 s."""

HINT_ENDPOINT = "Check --rdzv-backend, --rdzv-endpoint and --rdzv-id, and that the run is still there."


class RunEndedError(ElasticLaunchError):
    """The run has ended.

    Args:
        code, cause: the recorded exit code and cause.
        saved, root_cause: what the run's files tell, see :class:`elastic_launch.events.types.NodeEnded`.
    """

    def __init__(self, run_id: str, code: int, cause: str, saved: str = "", root_cause: str = "") -> None:
        hint = "\n".join(text for text in (saved, root_cause) if text)
        super().__init__(f"Run {run_id!r} has ended with exit code {code}: {cause}.", hint)
        self.run_id, self.code, self.cause = run_id, code, cause
        self.saved, self.root_cause = saved, root_cause


@dataclass(frozen=True, slots=True)
class Address:
    """How to reach a run.

    Attributes:
        endpoints: one endpoint; or several hosts that keep the record, or addresses of the service that does.
        leader: where the leader may be, if known.
    """

    run_id: str
    backend: str
    endpoints: tuple[Endpoint, ...]
    token: Token | None
    leader: Endpoint | None = None

    def __str__(self) -> str:
        return f"{self.backend} {','.join(map(str, self.endpoints))}"

    @property
    def kind(self) -> BackendKind:
        """What distinguishes its backend."""
        return kind_of(self.backend, len(self.endpoints))


class AdminClient:
    """A link to a run's leader that is not a node's link.

    Raises:
        RendezvousError: if the leader is not found, does not answer or refuses.
        RunEndedError: if the run has ended.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        until = time.monotonic() + TIMEOUT
        if address.leader is not None:
            with contextlib.suppress(RendezvousError):  # the leader may have moved, and something else may listen there
                self._call(address.leader, until - TIMEOUT / 2)
                return
        self._call(_leader(address, until), until)

    def _call(self, where: Endpoint, until: float) -> None:
        self._where = where
        self._channel = Channel.of_node(link_key(self._address.token, self._address.run_id))
        self._orders: deque[m.Order] = deque()
        try:
            self._sock = socket.create_connection((where.host, where.port), max(0.1, until - time.monotonic()))
        except (OSError, UnicodeError) as error:
            if where in self._address.endpoints:
                raise EndpointError(
                    f"Nothing answers at the rendezvous endpoint {where}: {error}.", HINT_ENDPOINT
                ) from error
            raise EndpointError(
                f"The run's leader cannot be reached at {where}: {error}.",
                "If its process is gone, wait until another one leads; else check the network between the hosts.",
            ) from error
        try:
            self._patience = max(0.1, until - time.monotonic())
            self._say(a.Caller(m.PROTOCOL_VERSION, self._address.run_id))
            welcome = self._next()
            if not isinstance(welcome, m.Welcome):
                raise ProtocolError(f"The leader answered a call with {type(welcome).__name__}.")
            self._patience = max(welcome.dead_after, 2 * welcome.beat)
        except BaseException:
            self._sock.close()
            raise

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._sock.close()

    def status(self) -> a.Status:
        """Return the run's status.

        Raises:
            RendezvousError: if the leader does not answer.
            RunEndedError: if the run has ended.
        """
        answer = self._ask(a.AskStatus())
        assert isinstance(answer, a.Status)
        return answer

    def ask(
        self,
        request: a.AskDrain | a.AskSave | a.AskResize | a.AskStacks,
        told: Callable[[a.NodeStacks], object] = lambda told: None,
    ) -> a.AdminAnswer:
        """Send a request, and wait until it is done or can no longer be done; raises the errors of :meth:`status`.

        Args:
            told: called with each node's stacks as they come.
        """
        answer = self._ask(request, told)
        assert isinstance(answer, a.AdminAnswer)
        return answer

    def pause(self, seconds: float) -> None:
        """Wait and keep the link; raises the errors of :meth:`status` if the link or the run ends meanwhile."""
        deadline = time.monotonic() + seconds
        while self._receive(deadline) is not None:
            pass

    def _ask(
        self, request: a.AdminRequest, told: Callable[[a.NodeStacks], object] = lambda told: None
    ) -> a.AdminAnswer | a.Status:
        self._say(request)
        while True:
            order = self._next()
            if isinstance(order, a.NodeStacks):
                told(order)
            if isinstance(order, a.AdminAnswer | a.Status):
                return order

    def _next(self) -> m.Order:
        """Return the next order other than a pulse."""
        while (order := self._receive(time.monotonic() + self._patience)) is not None:
            if not isinstance(order, m.Pulse):
                return order
        raise EndpointError(
            f"The run's leader at {self._where} was silent for {self._patience:.1f} s.",
            "The request may still take effect: ask for the status.",
        )

    def _receive(self, deadline: float) -> m.Order | None:
        """Return the leader's next order; None if there is none by the deadline."""
        while not self._orders:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._exchange(left)
        order = self._orders.popleft()
        if isinstance(order, m.RunEnd):
            raise RunEndedError(self._address.run_id, order.code, order.cause)
        if isinstance(order, m.Refused):
            raise RefusedError(f"The leader refuses: {order.reason}", order.hint)
        return order

    def _exchange(self, seconds: float) -> None:
        """Send what is to be sent, and wait up to so many seconds for what the leader sends."""
        unsent = self._channel.unsent
        self._sock.settimeout(seconds)
        try:
            while unsent:
                del unsent[: self._sock.send(unsent)]
            data = self._sock.recv(262144)
        except TimeoutError:
            return
        except OSError:
            data = b""
        if not data:
            raise EndpointError(
                f"The run's leader at {self._where} closed the link.",
                "It may have ended, or may not lead any more: ask for the status.",
            )
        try:
            orders = [m.unpack(line) for line in self._channel.feed(data)]
        except ProtocolError as error:
            raise EndpointError(
                f"What listens at {self._where} does not answer as a run's leader: {error.message}",
                HINT_ENDPOINT,
            ) from error
        self._orders += [order for order in orders if isinstance(order, m.Order)]

    def _say(self, message: a.Caller | a.AdminRequest) -> None:
        self._channel.send(m.pack(message))


def _leader(address: Address, until: float) -> Endpoint:
    """Return where the leader is: the endpoint itself, or the address in a store, which must answer until then."""
    kind = address.kind
    if kind.fixed_ranks:
        # Imported here because torch takes seconds.
        from elastic_launch.rendezvous.backends.static import published_leader

        found = published_leader(
            address.endpoints[0], address.run_id, address.token, max(0.1, until - time.monotonic())
        )
        return Endpoint(found.address, found.port)
    if not kind.elected:
        return address.endpoints[0]
    patience = max(0.1, until - time.monotonic())
    if kind.voting:
        key = link_key(address.token, address.run_id)
        store: ControlStore = MajorityStore(address.endpoints, address.run_id, key, MonotonicClock())
    else:
        assert kind.service is not None
        store = kind.service.open(address.endpoints, address.run_id)
    with contextlib.closing(store):
        value = store.load(patience)
    if value is None:
        raise StoreError(f"There is no run {address.run_id!r} in {address}.", HINT_ENDPOINT)
    record = ControlRecord.parse(ValueSeal(address.token, address.run_id).open(value))
    if record.end is not None:
        raise RunEndedError(address.run_id, record.end.code, record.end.cause)
    return Endpoint(record.leader.address, record.leader.port)

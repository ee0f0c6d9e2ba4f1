"""A user's way to a run's leader: finds it by the control record, opens a link, asks, reads the answers."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from elastic_launch.config.backends import kind_of
from elastic_launch.config.launch_config import Endpoint
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
from elastic_launch.rendezvous.stores.registry import open_store
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.authentication import Channel, link_key
from elastic_launch.rendezvous.wire.seal import ValueSeal
from elastic_launch.secret import Token

__all__ = ["Address", "AdminClient", "RunEndedError"]

TIMEOUT = 10.0
"""Seconds within which store and leader have to answer at first."""

HINT_ENDPOINT = "Check --rdzv-backend, --rdzv-endpoint and --rdzv-id, and that the run is still there."


class RunEndedError(ElasticLaunchError):
    """The run has ended.

    Args:
        code, cause: as recorded.
    """

    def __init__(self, run_id: str, code: int, cause: str) -> None:
        super().__init__(f"Run {run_id!r} has ended with exit code {code}: {cause}.")
        self.code = code


@dataclass(frozen=True, slots=True)
class Address:
    """Where a run is.

    Attributes:
        endpoints: one, or on etcd several members of the cluster.
        token: the run's, or None.
        leader: where it may be, if somebody has said so.
    """

    run_id: str
    backend: str
    endpoints: tuple[Endpoint, ...]
    token: Token | None
    leader: Endpoint | None = None

    def __str__(self) -> str:
        return f"{self.backend} {','.join(map(str, self.endpoints))}"


class AdminClient:
    """A link to a run's leader, which is no node's.

    Raises:
        RendezvousError: if the leader is not found, does not answer or refuses.
        RunEndedError: if the run has ended.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        if address.leader is not None:
            with contextlib.suppress(RendezvousError):  # it may have moved, and something else may listen there
                self._call(address.leader)
                return
        self._call(_leader(address))

    def _call(self, where: Endpoint) -> None:
        self._where = where
        self._channel = Channel.of_node(link_key(self._address.token, self._address.run_id))
        self._orders: deque[m.Order] = deque()
        self._patience = TIMEOUT
        try:
            self._sock = socket.create_connection((where.host, where.port), TIMEOUT)
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
            self._sock.setblocking(False)
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
        """How the run stands.

        Raises:
            RendezvousError: if the leader does not answer.
            RunEndedError: if the run has ended.
        """
        answer = self._ask(a.AskStatus())
        assert isinstance(answer, a.LeaderFound)
        return answer.status

    def ask(self, request: a.AskDrain | a.AskSave | a.AskResize) -> a.Answer:
        """Ask for something, and wait until it has happened or can happen no more; raises what :meth:`status` does."""
        answer = self._ask(request)
        assert isinstance(answer, a.Answer)
        return answer

    def pause(self, seconds: float) -> None:
        """Wait, and keep the link: raises what :meth:`status` does if it or the run ends meanwhile."""
        deadline = time.monotonic() + seconds
        for order in self._heard_until(deadline):
            self._check(order)

    def _ask(self, request: a.Request) -> a.Answer | a.LeaderFound:
        self._say(request)
        while True:
            order = self._next()
            if isinstance(order, a.Answer | a.LeaderFound):
                return order

    def _next(self) -> m.Order:
        """The next order that is no pulse."""
        silent_at = time.monotonic() + self._patience
        while True:
            for order in self._heard_until(silent_at, first=True):
                silent_at = time.monotonic() + self._patience
                self._check(order)
                if not isinstance(order, m.Pulse):
                    return order
            if time.monotonic() >= silent_at:
                raise EndpointError(
                    f"The run's leader at {self._where} was silent for {self._patience:g} s.",
                    "What was asked may still happen: ask for the status.",
                )

    def _check(self, order: m.Order) -> None:
        if isinstance(order, m.RunEnd):
            raise RunEndedError(self._address.run_id, order.code, order.cause)
        if isinstance(order, m.Refused):
            raise RefusedError(f"The leader refuses: {order.reason}", order.hint)

    def _heard_until(self, deadline: float, *, first: bool = False) -> Iterator[m.Order]:
        """What the leader says until the deadline, or, with ``first``, until it has said something."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            while True:
                while self._orders:
                    yield self._orders.popleft()
                    if first:
                        return
                unsent = selectors.EVENT_WRITE if self._channel.unsent else 0
                selector.modify(self._sock, selectors.EVENT_READ | unsent)
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                for _, events in selector.select(left):
                    self._exchange(events)

    def _exchange(self, events: int) -> None:
        unsent = self._channel.unsent
        try:
            if events & selectors.EVENT_WRITE and unsent:
                del unsent[: self._sock.send(unsent)]
            data = self._sock.recv(262144) if events & selectors.EVENT_READ else None
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data == b"":
            raise EndpointError(
                f"The run's leader at {self._where} closed the link.",
                "It may have ended, or may not lead any more: ask for the status.",
            )
        for line in self._channel.feed(data or b""):
            order = m.unpack(line)
            if isinstance(order, m.Order):
                self._orders.append(order)

    def _say(self, message: a.Caller | a.Request) -> None:
        self._channel.send(m.pack(message))


def _leader(address: Address) -> Endpoint:
    """Return where the leader is: at the endpoint itself, or where a store says."""
    kind = kind_of(address.backend)
    if kind.fixed_ranks:
        # Imported where it is used: torch takes seconds.
        from elastic_launch.rendezvous.backends.static import published_leader

        found = published_leader(address.endpoints[0], address.run_id, address.token, TIMEOUT)
        return Endpoint(found.address, found.port)
    if not kind.elected:
        return address.endpoints[0]
    with contextlib.closing(open_store(address.backend, address.endpoints, address.run_id)) as store:
        value = store.load(TIMEOUT)
    if value is None:
        raise StoreError(f"There is no run {address.run_id!r} in {address}.", HINT_ENDPOINT)
    record = ControlRecord.parse(ValueSeal(address.token, address.run_id).open(value))
    if record.end is not None:
        raise RunEndedError(address.run_id, record.end.code, record.end.cause)
    return Endpoint(record.leader.address, record.leader.port)

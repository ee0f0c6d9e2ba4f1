"""The control record in etcd, through its v3 API and etcd-client-py.

This module works around the client's behaviour, as measured on etcd-client-py 0.5.1 and etcd 3.5:

- With several endpoints, it keeps choosing dead and frozen ones. So every member has its own client, and they are
  tried in turn, the last good one first.
- A call to a frozen member ends only if the caller ends it.
- A write without an answer may be committed later.
- A watch ends with its member, cannot start at a given revision, and stays silent forever if its member is cut off or
  its token has expired. So the record is read again and again instead.
- There is no TLS.

The record is compared by value, so a write sends the old and the new one: both must fit into the server's
``--max-request-bytes`` (1.5 MiB unless configured).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import etcd_client

from elastic_launch.config.endpoints import Endpoint
from elastic_launch.errors import DeniedError, EndpointError, InternalError, RecordTooLargeError, StoreError
from elastic_launch.rendezvous.stores.control_store import ControlStore
from elastic_launch.system.threads import ThreadDied, VitalThread

_PATIENCE = 1.0
"""Seconds that each member gets at first, if there is time; doubled with every pass over the members."""
_LONGEST_PATIENCE = 10.0
_BACKSTOP = 15.0
"""Seconds after which the client itself ends a call; this module ends its calls earlier."""
_PAUSE = 0.05
"""Seconds between the first and second pass over the members; doubled, up to a second, with every further pass."""
_GRACE = 2.0
"""Seconds that a caller waits for the loop beyond a deadline that the loop itself enforces."""

_HINT_ENDPOINT = "Check --rdzv-endpoint, and that an etcd member is up and reachable there."
_HINT_USER = "Check ELASTIC_LAUNCH_ETCD_USER and ELASTIC_LAUNCH_ETCD_PASSWORD (etcdctl --user U:P endpoint health)."
_HINT_GIVE = "Set ELASTIC_LAUNCH_ETCD_USER and ELASTIC_LAUNCH_ETCD_PASSWORD."
_HINT_UNSET = "Unset ELASTIC_LAUNCH_ETCD_USER."
_HINT_GRANT = "Grant it readwrite on the prefix /elastic-launch/."
_HINT_SIZE = "Start etcd with a larger --max-request-bytes, or fewer nodes: a write sends the old record and the new."
_FINAL = (
    ("user name is empty", "it asks for a user and a password", _HINT_GIVE, DeniedError),
    ("authentication failed", "it refuses the user or the password", _HINT_USER, DeniedError),
    ("authentication is not enabled", "a user was given, but it has none", _HINT_UNSET, DeniedError),
    ("permission denied", "the user has no right to the record", _HINT_GRANT, DeniedError),
    ("request is too large", "the request is too large for it", _HINT_SIZE, RecordTooLargeError),
    ("message larger than max", "the request is too large for it", _HINT_SIZE, RecordTooLargeError),
    (
        "database space exceeded",
        "it is out of space and takes no writes (alarm NOSPACE)",
        "Compact and defragment it, then etcdctl alarm disarm; or start it with a larger --quota-backend-bytes.",
        StoreError,
    ),
)
"""Answers that every other member would also give: a part of the message, its meaning, what to do, the error."""

_HINT_NO_ETCD = "Give --rdzv-endpoint the client addresses of etcd 3.4 or later, without TLS."
_UNREACHED = {"tcp connect error": "nothing accepts a connection there", "dns error": "its name does not resolve"}
_NO_ETCD = ("h2 protocol error: http2 error", "operation was canceled", "HTTP status code", "unknown service")
"""Parts of the client's messages if no etcd is reached. A member that is just dying may cause them once."""

_runtime = threading.Lock()
"""Held while the client's threads, which all stores share, may be starting or ending. The client starts the threads
with its first open context, ends them with the last, and hangs if it does both at the same time."""

T = TypeVar("T")


class EtcdUnreachableError(EndpointError, StoreError):
    """No endpoint has an etcd that can be reached."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a member gave no result; ``hint`` is set if no other member would give one either.

    It is ``hopeless`` if no etcd is reached there, and ``other`` if something else is.
    """

    reason: str
    hint: str = ""
    kind: type[StoreError] = StoreError
    hopeless: bool = False
    other: bool = False


class _Link:
    """One client for one member, connected when first needed.

    Opening and closing run in separate tasks, kept in ``unfinished``, which must never be cancelled: the client would
    count a context whose opening was cancelled as open, and keep its threads forever.
    """

    def __init__(
        self, endpoint: Endpoint, credentials: tuple[str, str] | None, unfinished: set[asyncio.Task[Any]]
    ) -> None:
        options = etcd_client.ConnectOptions().with_timeout(_BACKSTOP).with_connect_timeout(_BACKSTOP)
        if credentials:
            options = options.with_user(*credentials)
        self._client = etcd_client.Client([f"http://{endpoint}"], options)
        self._context: Any = None
        self._opening: asyncio.Task[Any] | None = None
        self._unfinished = unfinished

    async def open(self) -> Any:
        """Return the communicator. Logs in if there are credentials; connects only with the first call."""
        if self._opening is None:
            self._context = self._client.connect()
            self._opening = self._keep(_enter(self._context))
        return await asyncio.shield(self._opening)

    def close(self) -> None:
        """Disconnect soon; the next ``open`` connects again."""
        if self._opening is not None:
            self._keep(_leave(self._context, self._opening))
            self._context = self._opening = None

    def _keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return task


async def _enter(context: Any) -> Any:
    return await context.__aenter__()


async def _leave(context: Any, opening: asyncio.Task[Any]) -> None:
    with contextlib.suppress(etcd_client.ClientError):
        await opening
        await context.__aexit__(None, None, None)


class EtcdStore(ControlStore):
    """One run's control record in etcd, under ``/elastic-launch/runs/<run id>/record``.

    Creating one does not connect. Thread-safe; one daemon thread serves all callers.

    Args:
        endpoints: client addresses of members; one is enough, but only the given ones are tried.
        user, password: credentials of an etcd user that may read and write the key; both or neither.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], run_id: str, *, user: str | None = None, password: str | None = None
    ) -> None:
        self._endpoints = endpoints
        self._key = f"/elastic-launch/runs/{run_id}/record".encode()
        self._credentials = (user, password or "") if user is not None else None
        self._current = 0
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._unfinished: set[asyncio.Task[Any]] = set()
        self._links = [self._link(member) for member in range(len(self._endpoints))]
        self._died: ThreadDied | None = None
        self._thread = VitalThread(self._serve, "etcd-store", owner=self._failed)
        self._thread.start()

    def load(self, timeout: float) -> bytes | None:
        return self._call(self._load, timeout)

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        return self._call(lambda deadline: self._swap(expected, value, deadline), timeout)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_GRACE + _BACKSTOP)

    def _call(self, work: Callable[[float], Coroutine[Any, Any, T]], timeout: float) -> T:
        with self._lock:
            if self._closed:
                raise self._closed_error()
            if self._died is not None:
                raise InternalError(f"the etcd client failed: {self._died.error}")
            coroutine = work(self._loop.time() + timeout)
            future = asyncio.run_coroutine_threadsafe(self._until_cancelled(coroutine), self._loop)
        try:
            return future.result(timeout + _GRACE)
        except TimeoutError:
            future.cancel()
            raise StoreError(f"The client of etcd at {self._where()} hung for {timeout:g} s.") from None

    async def _until_cancelled(self, work: Coroutine[Any, Any, T]) -> T:
        # A cancellation's traceback refers to the call it ended; the future would keep it until garbage collection.
        with contextlib.suppress(asyncio.CancelledError):
            return await work
        raise self._closed_error() if self._closing.is_set() else asyncio.CancelledError

    def _failed(self, died: ThreadDied) -> None:
        self._died = died

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        # This context connects to nothing: while it is open, closing others does not end the client's threads.
        guard = etcd_client.Client(["http://127.0.0.1:9"])
        context = guard.connect()
        with _runtime:
            await context.__aenter__()
        await self._closing.wait()
        calls = asyncio.all_tasks() - {asyncio.current_task()} - self._unfinished
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for link in self._links:
            link.close()
        while self._unfinished:
            await asyncio.wait(self._unfinished)
        with _runtime:
            await context.__aexit__(None, None, None)
            # The client runs a call in two tasks, and starts its threads anew if the second one begins after their end:
            # a call that was cancelled as it began can do that. Another context ends such threads, too.
            async with guard.connect():
                pass

    async def _load(self, deadline: float) -> bytes | None:
        return await self._ask("read", self._get, deadline)

    async def _get(self, communicator: Any) -> bytes | None:
        value = await communicator.get(self._key)
        return None if value is None else bytes(value)

    async def _swap(self, expected: bytes | None, value: bytes, deadline: float) -> bool:
        """Repeat the write until its outcome is known.

        Writing twice is harmless: no value occurs twice, so any write, by this client or others, makes the comparison
        fail from then on. Only then must the value be read to learn whose it is.
        """
        equal = etcd_client.CompareOp.EQUAL
        if expected is None:
            compare = etcd_client.Compare.version(self._key, equal, 0)
        else:
            compare = etcd_client.Compare.value(self._key, equal, expected)
        write = etcd_client.Txn().when([compare]).and_then([etcd_client.TxnOp.put(self._key, value)])
        tried = False

        async def attempt(communicator: Any) -> bool:
            nonlocal tried
            again, tried = tried, True
            try:
                if (await communicator.txn(write)).succeeded():
                    return True
            except etcd_client.ClientError:
                # Refused for lack of space, it may have been written before or just now: etcd checks again afterwards.
                if await self._get(communicator) == value:
                    return True
                raise
            return again and await self._get(communicator) == value

        return await self._ask(f"write of {len(value) + len(expected or b'')} bytes", attempt, deadline)

    async def _ask(self, what: str, operation: Callable[[Any], Awaitable[T]], deadline: float) -> T:
        """Ask the members in turn, the last good one first, until one answers or time runs out.

        Raises:
            EtcdUnreachableError: as soon as all members were twice found unreachable.
            DeniedError: if the user or password is not accepted.
            RecordTooLargeError: if a write is larger than a member accepts.
            StoreError: if the answer is an error that other members would repeat, or time runs out.
        """
        started, pause, hopeless = self._loop.time(), _PAUSE, 0
        failures: dict[int, _Failure] = {}
        patience = min(_PATIENCE, (deadline - started) / len(self._links))
        while True:
            for _ in self._links:
                member = self._current
                left = deadline - self._loop.time()
                if left <= 0 and member in failures:
                    seconds = f"{deadline - started:.3g} s"
                    raise StoreError(
                        f"The {what} was not answered by etcd within {seconds}: {self._told(failures)}.",
                        "Check that most members are up and that this host reaches one (etcdctl endpoint health).",
                    )
                outcome = await self._try(self._links[member], operation, min(patience, left))
                if not isinstance(outcome, _Failure):
                    return outcome
                failures[member] = outcome
                if outcome.hint:
                    raise outcome.kind(f"etcd failed the {what}: {self._told({member: outcome})}.", outcome.hint)
                if self._current == member:
                    self._current = (member + 1) % len(self._links)
            # With calls from several threads, one pass may meet a member twice and another one not at all.
            all_seen = len(failures) == len(self._links)
            hopeless = hopeless + 1 if all_seen and all(failure.hopeless for failure in failures.values()) else 0
            if hopeless == 2:
                hint = _HINT_NO_ETCD if any(failure.other for failure in failures.values()) else _HINT_ENDPOINT
                raise EtcdUnreachableError(f"No etcd was found for the {what}: {self._told(failures)}.", hint)
            await asyncio.sleep(min(pause, max(0.0, deadline - self._loop.time())))
            patience, pause = min(2 * patience, _LONGEST_PATIENCE), min(2 * pause, 1.0)

    async def _try(self, link: _Link, operation: Callable[[Any], Awaitable[T]], timeout: float) -> T | _Failure:
        # In a separate task, an error would refer to itself through its traceback and so keep the connection.
        try:
            async with asyncio.timeout(timeout):
                return await operation(await link.open())
        except TimeoutError:
            failure = _Failure("it does not answer")
        except etcd_client.ClientError as error:
            failure = _diagnosed(error)
        link.close()  # a new connection may work after packet loss, and has a new token
        return failure

    def _link(self, member: int) -> _Link:
        return _Link(self._endpoints[member], self._credentials, self._unfinished)

    def _told(self, failures: dict[int, _Failure]) -> str:
        return "; ".join(f"{self._endpoints[member]}: {failure.reason}" for member, failure in failures.items())

    def _where(self) -> str:
        return ",".join(map(str, self._endpoints))

    def _closed_error(self) -> StoreError:
        return StoreError(f"The etcd store at {self._where()} is closed.")


def _diagnosed(error: etcd_client.ClientError) -> _Failure:
    detail = error.args[0] if error.args else ""
    message = str(detail.get("message", "")) if isinstance(detail, dict) else str(detail)
    for part, meaning, hint, kind in _FINAL:
        if part in message:
            return _Failure(meaning, hint, kind)
    for part, meaning in _UNREACHED.items():
        if part in message:
            return _Failure(meaning, hopeless=True)
    if any(part in message for part in _NO_ETCD):
        return _Failure("what listens there does not speak etcd's v3 API, or wants TLS", hopeless=True, other=True)
    if message == "transport error":
        message = "it closes connections, as a server does that requires TLS or is stopping"
    return _Failure(message or type(error).__name__)

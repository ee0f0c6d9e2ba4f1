"""All sockets listen at the advertised address only."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from harness import free_port

from elastic_launch.clock import MonotonicClock
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.launch_config import Command, LaunchConfig, Limits
from elastic_launch.errors import ExitCode, UnresolvedError
from elastic_launch.events.types import Event
from elastic_launch.rendezvous.backends.c10d import C10dBackend
from elastic_launch.rendezvous.backends.election import ElectedBackend
from elastic_launch.rendezvous.node.membership import Membership
from elastic_launch.rendezvous.node.membership_events import MembershipEvent, RendezvousLost
from elastic_launch.rendezvous.stores.static_store import host_store
from elastic_launch.rendezvous.wire.addresses import listen, routable_address, try_listen
from elastic_launch.rendezvous.worker_store import WorkerStore
from elastic_launch.testing import MemoryStore

ADVERTISED, ELSEWHERE = "127.0.0.1", "127.0.0.2"


class Sink:
    def emit(self, event: Event) -> None:
        return


@pytest.fixture(autouse=True, scope="module")
def libuv_pipe() -> None:
    """libuv opens one pipe per process with the first store and keeps it: this must not count as a leak."""
    host_store(listen(ADVERTISED), ADVERTISED, 10).close()


def _listens_only_here(port: int) -> None:
    with socket.create_connection((ADVERTISED, port), timeout=10):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((ELSEWHERE, port), timeout=10)


def _config(**options: object) -> LaunchConfig:
    command = Command(("python", "train.py"), ("train.py",))
    return LaunchConfig(command, **{"limits": Limits(1, 4), **options})  # type: ignore[arg-type]


def test_a_listener() -> None:
    with listen(ADVERTISED) as listener:
        _listens_only_here(listener.getsockname()[1])
    listener, _ = try_listen(Endpoint(ADVERTISED, 0))
    assert listener is not None
    with listener:
        _listens_only_here(listener.getsockname()[1])


def test_the_worker_store_reserved_and_served() -> None:
    store = WorkerStore(ADVERTISED)
    with contextlib.closing(store):
        _listens_only_here(store.reserve())
        port = store.reserve()
        server = store.serve(10)
        assert server.port == port
        _listens_only_here(port)
        del server


def test_the_endpoint_of_c10d(tmp_path: Path) -> None:
    config = _config(endpoint=Endpoint(ADVERTISED, 0), log_dir=tmp_path)
    with contextlib.closing(C10dBackend(config, MonotonicClock(), Sink())) as backend:
        place = backend.open()
        assert place.hosting
        assert place.endpoint is not None
        _listens_only_here(place.endpoint.port)
        assert backend.find_leader(10).port == place.endpoint.port, "one port for all"


@pytest.mark.parametrize("most", [1, 2])
def test_a_local_address_that_does_not_resolve_is_named_as_such(most: int, tmp_path: Path) -> None:
    """There is no --rdzv-endpoint that a user could check."""
    config = _config(log_dir=tmp_path, local_addr="no such host", limits=Limits(1, most))
    backend = C10dBackend(config, MonotonicClock(), Sink())
    with (
        contextlib.closing(backend),
        pytest.raises(UnresolvedError, match=r"^--local-addr no such host does") as raised,
    ):
        backend.open()
    assert "rdzv" not in f"{raised.value.message} {raised.value.hint}"


def test_a_limit_that_is_reached_as_the_rendezvous_opens_has_its_remedy(tmp_path: Path) -> None:
    config, heard = _config(log_dir=tmp_path, limits=Limits(1, 1)), queue.SimpleQueue[MembershipEvent]()
    backend = C10dBackend(config, MonotonicClock(), Sink())
    membership = Membership(config, backend, MonotonicClock(), heard.put, lambda address: 29500)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        membership.start()
        lost = heard.get(timeout=20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        membership.close()
    assert isinstance(lost, RendezvousLost)
    assert "has failed: [Errno 24] Too many open files: the limit of open files is reached" in lost.error.message
    assert "ulimit -Hn" in lost.error.hint
    assert lost.error.exit_code == ExitCode.TRAINING_FAILED


def test_the_links_of_an_elected_leader(tmp_path: Path) -> None:
    config = _config(backend="etcd", endpoint=Endpoint(ADVERTISED, 2379), log_dir=tmp_path)
    store = MemoryStore()  # one for all views: a leader that finds its record gone stops listening
    with contextlib.closing(ElectedBackend(config, MonotonicClock(), Sink(), lambda: store)) as backend:
        backend.open()
        leader = backend.find_leader(10)
        assert leader.address == ADVERTISED
        _listens_only_here(leader.port)


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host's own name is 127.0.1.1 in /etc/hosts."""
    ask = socket.getaddrinfo

    def answer(host: str, *arguments: Any, **options: Any) -> Any:
        return ask("127.0.1.1" if host == "node0" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answer)


@pytest.mark.usefixtures("debian")
def test_an_endpoint_that_its_host_knows_by_loopback_only_is_reached_from_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(endpoint=Endpoint("node0", free_port()), log_dir=tmp_path)
    with contextlib.closing(C10dBackend(config, MonotonicClock(), Sink())) as backend:
        place = backend.open()
        assert (place.hosting, place.address) == (True, routable_address())
        assert place.endpoint is not None
        for address in ("node0", ELSEWHERE, place.address, backend.find_leader(1).address):
            with socket.create_connection((address, place.endpoint.port), timeout=10):
                pass
        with contextlib.closing(C10dBackend(config, MonotonicClock(), Sink())) as second:
            assert not second.open().hosting
    told = [record.getMessage() for record in caplog.records if "resolves only to loopback" in record.getMessage()]
    assert len(told) == 1
    assert f"listens at all addresses of this host, and other nodes are given {place.address}" in told[0]


@pytest.mark.usefixtures("debian")
@pytest.mark.parametrize(("host", "nodes"), [("127.0.1.1", 4), ("localhost", 4), ("node0", 1)])
def test_loopback_that_is_meant_stays_loopback(tmp_path: Path, host: str, nodes: int) -> None:
    config = _config(endpoint=Endpoint(host, 0), log_dir=tmp_path, limits=Limits(1, nodes))
    with contextlib.closing(C10dBackend(config, MonotonicClock(), Sink())) as backend:
        place = backend.open()
        assert place.endpoint is not None
        assert ip_address(place.address).is_loopback
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((ELSEWHERE, place.endpoint.port), timeout=10)

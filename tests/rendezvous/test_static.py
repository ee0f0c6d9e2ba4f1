"""Tests of the static backend's host, against real stores."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace

import pytest
from harness import free_port, wait_for
from torch.distributed import TCPStore

from elastic_launch.clock import MonotonicClock
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.launch_config import Command, LaunchConfig, Limits
from elastic_launch.errors import EndpointError, RefusedError, StoreError
from elastic_launch.events.types import Event
from elastic_launch.rendezvous.backends.c10d import FoundLeader
from elastic_launch.rendezvous.backends.static import StaticBackend, published_leader
from elastic_launch.rendezvous.record import ControlRecord, Leader, Round
from elastic_launch.rendezvous.stores.static_store import NotAStoreError, connect_store, host_store
from elastic_launch.rendezvous.wire.addresses import listen
from elastic_launch.secret import Token


class Events:
    def emit(self, event: Event) -> None:
        return


@pytest.fixture(autouse=True, scope="module")
def libuv_pipe() -> None:
    """libuv opens one pipe per process with the first store and keeps it: this must not count as a leak."""
    host_store(listen("127.0.0.1"), "127.0.0.1", 10).close()


def backend(port: int, host: str = "127.0.0.1", node_rank: int = 0) -> StaticBackend:
    command = Command(("python",), ("train.py",))
    config = LaunchConfig(
        command, Limits(2, 2), backend="static", endpoint=Endpoint(host, port), node_rank=node_rank,
        is_host=node_rank == 0, local_addr="127.0.0.1",
    )  # fmt: skip
    return StaticBackend(config, MonotonicClock(), Events())


def test_node_0_hosts_also_where_its_address_is_translated() -> None:
    port = free_port()
    with contextlib.closing(backend(port, "192.0.2.7")) as host:  # an address that is nowhere
        place = host.open()
        assert place.hosting
        leader = published_leader(Endpoint("127.0.0.1", port), "none", None, 10)
        assert (leader.address, leader.port) == ("127.0.0.1", host.find_leader(1).port)


def test_keys_of_the_workers_go_before_a_round_is_written() -> None:
    port = free_port()
    with contextlib.closing(backend(port)) as host:
        host.open()
        worker = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        worker.set("default_pg/0//0", "stale")
        record = ControlRecord("run", "digest", 1, Leader("node-0", "i", "127.0.0.1", 1)).renewed()
        for number, left in ((0, True), (1, False), (1, True), (2, False)):
            worker.set("default_pg/0//0", "stale")
            following = replace(record, round=Round(number)).renewed().encode()
            assert host._write(b"", following, 10)
            assert worker.check(["default_pg/0//0"]) is left
        assert published_leader(Endpoint("127.0.0.1", port), "none", None, 10)
        del worker


@pytest.mark.parametrize("value", [b"", b"garbage", b'{"run_id":"other","incarnation":"","address":"","port":1}', None])
def test_what_others_write_in_the_place_of_the_leaders_address_is_repaired(
    value: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    endpoint = Endpoint("127.0.0.1", port)
    with contextlib.closing(backend(port)) as host, contextlib.closing(backend(port, node_rank=1)) as node:
        host.open()
        node.open()
        with contextlib.closing(connect_store(endpoint, 10)) as stranger:
            assert stranger._store is not None
            if value is None:
                stranger._store.delete_key("elastic_launch/leader")
            else:
                stranger.publish(value, 10)

        def found() -> FoundLeader | None:
            try:
                return node.find_leader(10)
            except StoreError:
                return None

        wait_for("the repair", lambda: "it is repaired" in caplog.text)
        repaired = wait_for("the leader's address", found)
        assert repaired is not None
        assert repaired.port == host.find_leader(1).port


def test_another_runs_store_is_refused_if_it_stays_so() -> None:
    port = free_port()
    with contextlib.closing(backend(port)) as host:
        host.open()
        with pytest.raises(RefusedError, match="serves run 'none', not 'yours'"):
            published_leader(Endpoint("127.0.0.1", port), "yours", None, 10)
        with pytest.raises(RefusedError, match="This node has a token, run 'none' has none"):
            published_leader(Endpoint("127.0.0.1", port), "none", Token("correct-horse-battery", "test"), 10)


def test_nothing_listens() -> None:
    with pytest.raises(EndpointError, match="Nothing answers"):
        connect_store(Endpoint("127.0.0.1", free_port()), 1.0)


def test_a_service_other_than_a_store_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint("127.0.0.1", server.getsockname()[1])
        with pytest.raises(NotAStoreError, match="does not answer"):
            connect_store(endpoint, 1.0)


def test_a_store_that_went_away_is_an_error() -> None:
    listener = listen("127.0.0.1")
    endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
    host = host_store(listener, "127.0.0.1", 10)
    client = connect_store(endpoint, 10)
    host.close()
    with pytest.raises(StoreError, match="the store at"):
        client.leader(10)
    client.close()


def test_a_port_in_use_is_named_with_the_flag_that_requested_it() -> None:
    in_use = r"\(--node-rank 0\), but its port is in use"
    with listen("127.0.0.1") as taken, pytest.raises(EndpointError, match=in_use):
        backend(taken.getsockname()[1]).open()

"""Tests of the static backend's host, against real stores."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import free_port
from torch.distributed import TCPStore

from elastic_launch.clock import MonotonicClock
from elastic_launch.config import Command, Endpoint, LaunchConfig, Limits
from elastic_launch.errors import EndpointError
from elastic_launch.events import Event
from elastic_launch.rendezvous.backend import C10dBackend
from elastic_launch.rendezvous.c10d import connect_store, host_store
from elastic_launch.rendezvous.net import listen
from elastic_launch.rendezvous.record import ControlRecord, Leader, Round
from elastic_launch.rendezvous.shared_store import SharedStore


class Events:
    def emit(self, event: Event) -> None:
        return


@pytest.fixture(autouse=True, scope="module")
def libuv_pipe() -> None:
    """libuv makes one pipe per process with the first store and keeps it: that is no leak of the first test."""
    host_store(listen("127.0.0.1"), "127.0.0.1", "run", 10).close()


def backend(port: int, host: str = "127.0.0.1") -> C10dBackend:
    command = Command(("python",), ("train.py",))
    config = LaunchConfig(
        command, Limits(2, 2), backend="static", endpoint=Endpoint(host, port), node_rank=0, is_host=True,
        local_addr="127.0.0.1",
    )  # fmt: skip
    return C10dBackend(config, MonotonicClock(), Events())


def test_node_0_hosts_also_where_its_address_is_translated() -> None:
    port = free_port()
    host = backend(port, "192.0.2.7")  # an address that is nowhere
    try:
        place = host.open()
        assert place.hosting
        store = connect_store(Endpoint("127.0.0.1", port), "none", 10)
        value = store.load(10)
        store.close()
        assert value is not None
        assert ControlRecord.parse(value).leader.address == "127.0.0.1"
    finally:
        host.close()


def test_keys_of_the_workers_go_before_a_round_is_written_and_the_record_stays() -> None:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    server = host_store(listener, "127.0.0.1", "run", 10)
    shared = SharedStore(server, server)
    worker = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    try:
        record = ControlRecord("run", "digest", 1, Leader("node-0", "i", "127.0.0.1", 1)).renewed()
        assert shared.compare_and_set(None, record.encode(), 10)
        for number, left in ((0, True), (1, False), (1, True), (2, False)):
            worker.set("default_pg/0//0", "stale")
            following = replace(record, round=Round(number)).renewed()
            assert shared.compare_and_set(record.encode(), following.encode(), 10)
            assert worker.check(["default_pg/0//0"]) is left
            record = following
        assert shared.load(10) == record.encode()
    finally:
        del worker
        shared.close()


def test_a_port_that_is_in_use_is_named_with_who_asked_for_it() -> None:
    in_use = r"\(--node-rank 0\), but its port is in use"
    with listen("127.0.0.1") as taken, pytest.raises(EndpointError, match=in_use):
        backend(taken.getsockname()[1]).open()

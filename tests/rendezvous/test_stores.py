"""One conformance suite for all control stores."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from etcd_servers import Member, cluster

from elastic_launch.rendezvous.stores.control_store import ControlStore
from elastic_launch.rendezvous.stores.etcd import EtcdStore
from elastic_launch.rendezvous.stores.etcd_service import EtcdService
from elastic_launch.testing import MemoryStore

TIMEOUT = 10.0

Open = Callable[[], ControlStore]
"""Opens a further view of one and the same store."""


@pytest.fixture(autouse=True, scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    with cluster(tmp_path_factory.mktemp("etcd")) as members:
        EtcdStore(
            EtcdService().parse(members[0].address), "first"
        ).close()  # the client's first use opens descriptors permanently
        yield members[0]


_runs = itertools.count()


@pytest.fixture(params=["memory", "etcd"])
def open_store(request: pytest.FixtureRequest) -> Iterator[Open]:
    if request.param == "memory":
        memory = MemoryStore()
        yield lambda: memory
        return
    yield from _open_etcd(request.getfixturevalue("etcd"))


def _open_etcd(member: Member) -> Iterator[Open]:
    run, opened = f"run{next(_runs)}", []

    def another() -> ControlStore:
        opened.append(EtcdStore(EtcdService().parse(member.address), run))
        return opened[-1]

    yield another
    for store in reversed(opened):
        store.close()


def test_a_new_store_is_empty(open_store: Open) -> None:
    assert open_store().load(TIMEOUT) is None


def test_only_the_expected_value_is_replaced(open_store: Open) -> None:
    a, b = open_store(), open_store()
    assert a.compare_and_set(None, b"one", TIMEOUT)
    assert not b.compare_and_set(None, b"other", TIMEOUT)
    assert not b.compare_and_set(b"wrong", b"other", TIMEOUT)
    assert b.load(TIMEOUT) == b"one"
    assert b.compare_and_set(b"one", b"two", TIMEOUT)
    assert not a.compare_and_set(b"one", b"three", TIMEOUT)
    assert a.load(TIMEOUT) == b"two"


def test_expecting_a_missing_value_writes_nothing(open_store: Open) -> None:
    store = open_store()
    assert not store.compare_and_set(b"something", b"new", TIMEOUT)
    assert store.load(TIMEOUT) is None


def test_of_many_writers_exactly_one_wins(open_store: Open) -> None:
    stores = [open_store() for _ in range(8)]
    start = threading.Barrier(len(stores))

    def write(number: int) -> bool:
        start.wait()
        return stores[number].compare_and_set(None, b"from %d" % number, TIMEOUT)

    with ThreadPoolExecutor(len(stores)) as pool:
        won = list(pool.map(write, range(len(stores))))
    assert won.count(True) == 1
    assert stores[0].load(TIMEOUT) == b"from %d" % won.index(True)


def test_a_large_value(open_store: Open, request: pytest.FixtureRequest) -> None:
    # etcd takes requests of 1.5 MiB, with the old value and the new one, unless configured.
    size = 750_000 if request.node.callspec.params["open_store"] == "etcd" else 2_000_000
    store, first, second = open_store(), b"x" * size, b"y" * size
    assert store.compare_and_set(None, first, TIMEOUT)
    assert store.compare_and_set(first, second, TIMEOUT)
    assert open_store().load(TIMEOUT) == second

"""The control record on real etcd servers that die, freeze, refuse and run full."""

from __future__ import annotations

import contextlib
import http.server
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from etcd_servers import DEBIAN, SERVERS, Member, Proxy, cluster, endpoints
from harness import free_port, wait_for

from elastic_launch.errors import DeniedError, EndpointError, StoreError
from elastic_launch.rendezvous.stores.etcd import EtcdStore, EtcdUnreachableError
from elastic_launch.rendezvous.stores.etcd_service import EtcdService

TIMEOUT = 20.0
SHORT = 1.5
"""Seconds for calls that are to fail by their deadline."""

READS = "etcd_mvcc_range_total"


@pytest.fixture(autouse=True, scope="module")
def first_use() -> None:
    """The client's first use opens descriptors permanently: they must not count as a leak of the first test."""
    EtcdStore(EtcdService().parse("127.0.0.1:9"), "first").close()


MOSTLY = [SERVERS[0], pytest.param(DEBIAN, id="debian", marks=pytest.mark.soak)]
"""For tests of what does not depend on the server's version: its errors, transactions, watches and users do."""


@pytest.fixture(scope="module", params=MOSTLY)
def shared(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Member]:
    with cluster(tmp_path_factory.mktemp("etcd"), server=request.param) as members:
        yield members[0]


@pytest.fixture
def etcd(shared: Member) -> Iterator[Member]:
    """A server that other tests use, too, one after the other; each begins without values."""
    yield shared
    shared.control("del", "--prefix", "/elastic-launch/")


@pytest.fixture(params=SERVERS)
def own(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Member]:
    """A server that a test may set up."""
    with cluster(tmp_path, server=request.param) as members:
        yield members[0]


@pytest.fixture(params=MOSTLY)
def trio(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Member]]:
    with cluster(tmp_path, 3, server=request.param) as members:
        yield members


@contextlib.contextmanager
def opened(
    where: str | Member | list[Member], user: str | None = None, password: str | None = None
) -> Iterator[EtcdStore]:
    if not isinstance(where, str):
        where = endpoints(where if isinstance(where, list) else [where])
    with contextlib.closing(EtcdStore(EtcdService().parse(where), "run", user=user, password=password)) as store:
        yield store


class Writer:
    """Appends to a chain of values: each names its number, its writer's own count, and its predecessor's name."""

    def __init__(self, store: EtcdStore, name: str, parents: dict[bytes, bytes]) -> None:
        self.store = store
        self.won: list[bytes] = []
        self._name = name
        self._parents = parents
        self._tries = 0

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            with contextlib.suppress(StoreError):
                self._append()

    def _append(self) -> None:
        present = self.store.load(TIMEOUT)
        assert present is not None
        self._tries += 1
        value = f"{int(present.split()[0]) + 1} {self._name}{self._tries}".encode()
        self._parents[value] = present
        if self.store.compare_and_set(present, value, TIMEOUT):
            self.won.append(value)


@pytest.mark.parametrize("trio", SERVERS, indirect=True)
def test_no_update_is_lost_while_members_freeze_and_die(trio: list[Member]) -> None:
    parents: dict[bytes, bytes] = {}
    stop = threading.Event()
    orders = trio, trio[::-1]
    with opened(orders[0]) as one, opened(orders[1]) as two, ThreadPoolExecutor(2) as pool:
        assert one.compare_and_set(None, b"0 start", TIMEOUT)
        writers = [Writer(one, "a", parents), Writer(two, "b", parents)]
        running = [pool.submit(writer.run, stop) for writer in writers]

        def progress() -> None:
            goals = [(writer, len(writer.won) + 10) for writer in writers]
            wait_for("both writers to get on", lambda: all(len(writer.won) >= goal for writer, goal in goals))

        try:
            progress()
            leader = leading(trio)
            leader.freeze()
            progress()
            leader.thaw()
            wait_for("the thawed member", leader.healthy)
            leading(trio).kill()
            progress()
        finally:
            stop.set()
        for future in running:
            future.result(2 * TIMEOUT)
        last = one.load(TIMEOUT)
        assert last is not None
        assert two.load(TIMEOUT) == last
    chain = [last]
    while chain[-1] != b"0 start":
        chain.append(parents[chain[-1]])
    assert [int(value.split()[0]) for value in reversed(chain)] == list(range(len(chain)))
    won = writers[0].won + writers[1].won
    assert len(set(won)) == len(won)
    assert set(won) <= set(chain)


def leading(members: list[Member]) -> Member:
    return next(member for member in members if member.metric("etcd_server_is_leader"))


def test_calls_to_frozen_members_end_by_their_deadline(trio: list[Member]) -> None:
    with opened(trio) as store, ThreadPoolExecutor(3) as pool:
        assert store.compare_and_set(None, b"one", TIMEOUT)
        for member in trio:
            member.freeze()
        calls: list[Callable[[], object]] = [
            lambda: store.load(SHORT),
            lambda: store.compare_and_set(b"one", b"two", SHORT),
            lambda: store.renew(SHORT),
        ]
        for future in [pool.submit(call) for call in calls]:
            with pytest.raises(StoreError, match=rf"{trio[2].address}: it does not answer"):
                future.result(TIMEOUT)
        for member in trio:
            member.thaw()
        assert store.load(TIMEOUT) in (b"one", b"two")


def test_when_all_members_are_dead_a_call_fails_and_names_them(trio: list[Member]) -> None:
    with opened(trio) as store:
        assert store.load(TIMEOUT) is None
        for member in trio:
            member.kill()
        with pytest.raises(EtcdUnreachableError) as caught:
            store.load(TIMEOUT)
        assert all(f"{member.address}: nothing accepts a connection" in caught.value.message for member in trio)
        assert "--rdzv-endpoint" in caught.value.hint
        with pytest.raises(StoreError):
            store.compare_and_set(None, b"one", TIMEOUT)
        with pytest.raises(StoreError):
            store.renew(TIMEOUT)


@pytest.mark.parametrize("loss", [Member.kill, pytest.param(Member.freeze, marks=pytest.mark.slow)])
def test_a_leader_reads_on_when_a_member_is_lost(trio: list[Member], loss: Callable[[Member], None]) -> None:
    with opened(trio) as reader, opened(trio[1:]) as writer:
        assert reader.renew(TIMEOUT) is None
        loss(trio[0])
        assert writer.compare_and_set(None, b"new", TIMEOUT)
        assert reader.renew(2 * TIMEOUT) == b"new"


@pytest.fixture
def proxy(etcd: Member) -> Iterator[Proxy]:
    with contextlib.closing(Proxy(etcd.address)) as proxy:
        yield proxy


@pytest.mark.parametrize("shared", SERVERS, indirect=True)
def test_a_write_whose_answer_was_lost_is_found_to_be_done(etcd: Member, proxy: Proxy) -> None:
    with opened(proxy.address) as store, opened(etcd) as direct, ThreadPoolExecutor(1) as pool:
        assert store.compare_and_set(None, b"one", TIMEOUT)
        proxy.mute = True
        writing = pool.submit(store.compare_and_set, b"one", b"two", TIMEOUT)
        wait_for("the write", lambda: direct.load(TIMEOUT) == b"two")
        proxy.lose()
        proxy.mute = False
        assert writing.result(TIMEOUT)


def test_a_write_whose_answer_was_lost_and_that_was_replaced_is_not_won(etcd: Member, proxy: Proxy) -> None:
    with opened(proxy.address) as store, opened(etcd) as direct, ThreadPoolExecutor(1) as pool:
        assert store.load(TIMEOUT) is None
        proxy.mute = True
        writing = pool.submit(store.compare_and_set, None, b"mine", TIMEOUT)
        wait_for("the write", lambda: direct.load(TIMEOUT) == b"mine")
        assert direct.compare_and_set(b"mine", b"theirs", TIMEOUT)
        proxy.lose()
        proxy.mute = False
        assert not writing.result(TIMEOUT)


def test_a_write_whose_outcome_cannot_be_learned_is_an_error(etcd: Member, proxy: Proxy) -> None:
    with opened(proxy.address) as store:
        assert store.load(TIMEOUT) is None
        proxy.mute = True
        with pytest.raises(StoreError, match="write of 4 bytes was not answered"):
            store.compare_and_set(None, b"mine", SHORT)


def test_a_write_to_a_frozen_server_is_resolved_once_it_thaws(etcd: Member) -> None:
    with opened(etcd) as store, ThreadPoolExecutor(1) as pool:
        assert store.compare_and_set(None, b"one", TIMEOUT)
        etcd.freeze()
        with pytest.raises(StoreError):
            store.compare_and_set(b"one", b"two", 0.3)  # stays in the server's socket
        writing = pool.submit(store.compare_and_set, b"one", b"three", TIMEOUT)
        etcd.thaw()
        won = writing.result(TIMEOUT)
        assert store.load(TIMEOUT) == (b"three" if won else b"two")


def test_users_and_passwords(own: Member) -> None:
    with opened(own, "root", "secret") as store, pytest.raises(DeniedError, match="it has none"):
        store.load(TIMEOUT)
    own.control("user", "add", "root", "--new-user-password", "secret")
    own.control("user", "grant-role", "root", "root")
    own.control("user", "add", "guest", "--new-user-password", "guest")
    own.control("auth", "enable")
    with opened(own) as store, pytest.raises(DeniedError, match="asks for a user and a password"):
        store.load(TIMEOUT)
    with opened(own, "root", "wrong") as store, pytest.raises(DeniedError, match="refuses the user or the password"):
        store.load(TIMEOUT)
    with opened(own, "guest", "guest") as store, pytest.raises(DeniedError, match="no right to the record") as caught:
        store.load(TIMEOUT)
    assert "/elastic-launch/" in caught.value.hint
    with opened(own, "root", "secret") as store:
        assert store.compare_and_set(None, b"one", TIMEOUT)
        assert store.load(TIMEOUT) == b"one"
        own.control("--user", "root:secret", "auth", "disable")  # which voids all tokens
        own.control("auth", "enable")
        assert store.load(TIMEOUT) == b"one"


def test_the_manifests_script_closes_etcd_to_all_but_the_run(own: Member) -> None:
    script = Path(__file__).parents[2] / "examples" / "kubernetes" / "components" / "etcd" / "users.py"

    def users(password: str) -> subprocess.Popen[str]:
        env = {"ENDPOINTS": own.url, "ROOT_PASSWORD": "of-root", "TRAIN_PASSWORD": password}
        return subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True)

    # As all pods of a job do at once, then a pod that replaces one, then those of a job with another secret.
    for password, pods in [("first", 3), ("first", 1), ("second", 2)]:
        started = [users(password) for _ in range(pods)]
        for pod in started:
            assert "train may use /elastic-launch/" in pod.communicate(timeout=60)[0]
            assert pod.returncode == 0
        with opened(own, "train", password) as store:
            assert store.load(TIMEOUT) in (None, b"kept")
            store.compare_and_set(None, b"kept", TIMEOUT)
    for user in ([], ["--user", "train:first"]):
        with pytest.raises(subprocess.CalledProcessError):
            own.control(*user, "get", "/elastic-launch/runs/run/record")
    assert "kept" in own.control("--user", "train:second", "get", "/elastic-launch/runs/run/record")
    with pytest.raises(subprocess.CalledProcessError):
        own.control("--user", "train:second", "get", "other")
    assert own.healthy()


def test_a_full_server_is_reported_with_a_hint(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, ("--quota-backend-bytes", "200000")) as members, opened(members) as store:
        value: bytes | None = None

        def fill() -> None:
            nonlocal value
            for number in range(200):
                following = b"%d" % number * 20_000
                store.compare_and_set(value, following, TIMEOUT)
                value = following

        with pytest.raises(StoreError, match="out of space") as caught:
            fill()
        assert "alarm disarm" in caught.value.hint
        assert store.load(TIMEOUT) == value


@pytest.mark.parametrize("shared", SERVERS, indirect=True)
@pytest.mark.parametrize("size", [1_600_000, 5_000_000])
def test_a_value_that_is_too_large_is_reported(etcd: Member, size: int) -> None:
    with opened(etcd) as store:
        with pytest.raises(StoreError, match=rf"write of {size} bytes.*too large") as caught:
            store.compare_and_set(None, b"x" * size, TIMEOUT)
        assert "--max-request-bytes" in caught.value.hint
        assert store.load(TIMEOUT) is None


def test_a_web_server_is_not_an_etcd() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            with opened(f"127.0.0.1:{server.server_port}") as store:
                with pytest.raises(EtcdUnreachableError, match="does not speak etcd's v3 API") as caught:
                    store.load(TIMEOUT)
                assert "etcd 3.4 or later" in caught.value.hint
        finally:
            server.shutdown()
            thread.join(TIMEOUT)


def test_a_name_that_does_not_resolve() -> None:
    with opened("nowhere.invalid:2379") as store, pytest.raises(EndpointError, match="does not resolve"):
        store.load(TIMEOUT)


def test_members_that_do_not_exist_are_passed_over(etcd: Member) -> None:
    with opened(f"127.0.0.1:{free_port()},nowhere.invalid,{etcd.address}") as store:
        assert store.compare_and_set(None, b"one", TIMEOUT)
        assert store.load(TIMEOUT) == b"one"


def test_closing_in_the_middle_of_a_read_keeps_no_connection(etcd: Member, proxy: Proxy) -> None:
    with opened(proxy.address) as store, ThreadPoolExecutor(1) as pool:
        assert store.load(TIMEOUT) is None
        proxy.mute = True
        before = etcd.metric(READS)
        reading = pool.submit(store.load, TIMEOUT)
        wait_for("the read", lambda: etcd.metric(READS) > before)
        store.close()
        with pytest.raises(StoreError, match="is closed"):
            reading.result(TIMEOUT)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.soak)])
def test_stores_that_open_and_close_at_once_do_not_hang(count: int) -> None:
    def use(_: int) -> None:
        with opened("127.0.0.1:9") as store, pytest.raises(StoreError):
            store.load(0.001)  # which often ends while the client is still opening

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(use, number) for number in range(count)]:
            future.result(TIMEOUT)

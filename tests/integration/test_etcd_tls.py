"""An etcd that accepts only TLS with client certificates, reached through etcd's own proxy."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_servers import Certificates, GrpcProxy, Member, cluster
from harness import Job, wait_for

from elastic_launch.errors import StoreError
from elastic_launch.rendezvous.stores.etcd import EtcdStore
from elastic_launch.rendezvous.stores.etcd_service import EtcdService

TIMEOUT = 20.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates"),
]


@pytest.fixture(autouse=True, scope="module")
def first_use() -> None:
    """The client's first use opens descriptors permanently: they must not count as a leak of the first test."""
    EtcdStore(EtcdService().parse("127.0.0.1:9"), "first").close()


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates.make(tmp_path)


@pytest.fixture
def trio(tmp_path: Path, certificates: Certificates) -> Iterator[list[Member]]:
    (tmp_path / "etcd").mkdir()
    with cluster(tmp_path / "etcd", 3, tls=certificates) as members:
        yield members


@pytest.fixture
def proxy(tmp_path: Path, trio: list[Member], certificates: Certificates) -> Iterator[GrpcProxy]:
    proxy = GrpcProxy(tmp_path, trio, certificates)
    try:
        wait_for("the proxy to be healthy", proxy.healthy)
        yield proxy
    finally:
        proxy.kill()


def opened(address: str) -> contextlib.closing[EtcdStore]:
    return contextlib.closing(EtcdStore(EtcdService().parse(address), "run"))


def test_writes_and_reads_pass_through_the_proxy(proxy: GrpcProxy) -> None:
    with opened(proxy.address) as one, opened(proxy.address) as two:
        assert one.load(TIMEOUT) is None
        assert one.compare_and_set(None, b"one", TIMEOUT)
        assert two.load(TIMEOUT) == b"one"
        assert not two.compare_and_set(None, b"other", TIMEOUT)
        assert two.compare_and_set(b"one", b"two", TIMEOUT)
        assert one.load(TIMEOUT) == b"two"


def test_the_store_works_when_members_behind_the_proxy_are_lost(proxy: GrpcProxy, trio: list[Member]) -> None:
    leader = next(member for member in trio if member.metric("etcd_server_is_leader"))
    with opened(proxy.address) as one, opened(proxy.address) as two:
        assert one.compare_and_set(None, b"one", TIMEOUT)
        leader.kill()
        assert one.compare_and_set(b"one", b"two", TIMEOUT)
        assert two.load(2 * TIMEOUT) == b"two"
        next(member for member in trio if member is not leader).kill()
        with pytest.raises(StoreError):
            one.compare_and_set(b"two", b"three", 2.0)


def test_a_server_that_wants_tls_is_recognized(trio: list[Member]) -> None:
    with opened(trio[0].address) as store, pytest.raises(StoreError) as caught:
        store.load(3.0)
    assert "TLS" in str(caught.value)


def test_a_run_continues_through_the_proxy_when_its_leader_is_killed(job: Job, proxy: GrpcProxy) -> None:
    where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", proxy.address, "--rdzv-id", "run", "--nnodes", "1:2"]
    agents = {name: job.launch(*where, "--node-id", name, name=name) for name in "ab"}
    job.world(2)
    leader = wait_for("a leader", lambda: job.events("leader_elected"))[-1]["node"]
    agents.pop(leader).kill()
    job.world(1, after=1)
    job.finish()
    assert [agent.wait(30) for agent in agents.values()] == [0]

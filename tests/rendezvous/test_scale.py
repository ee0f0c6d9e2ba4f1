"""The cost of many nodes: writes to the store, messages, the record's size; and the benchmark's own counting."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import Member, cluster
from harness import wait_for

from elastic_launch.clock import MonotonicClock
from elastic_launch.config.endpoints import parse_endpoint
from elastic_launch.config.launch_config import Command, LaunchConfig, Limits, Timing
from elastic_launch.events.types import Event
from elastic_launch.rendezvous.backends.registry import backend_of
from elastic_launch.rendezvous.leader import service
from elastic_launch.rendezvous.node.membership import Membership
from elastic_launch.rendezvous.node.membership_events import MembershipEvent
from elastic_launch.rendezvous.stores.etcd import EtcdStore
from elastic_launch.rendezvous.stores.etcd_service import EtcdService
from elastic_launch.rendezvous.wire import messages as m

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "rendezvous.py"
TIMING = Timing(join_settle=5.0, beat=0.1, dead_after=2.0, min_wait=20.0, read_timeout=5.0)
READS = 'grpc_server_handled_total{grpc_code="OK",grpc_method="Range",grpc_service="etcdserverpb.KV",grpc_type="unary"}'


class Node:
    """A node whose workers start and stop at once."""

    def __init__(self, name: str, member: Member, run_id: str, limits: Limits) -> None:
        endpoint = parse_endpoint(member.address)
        config = LaunchConfig(
            Command(("python", "train.py"), ("train.py",)),
            limits,
            run_id=run_id,
            backend="etcd",
            endpoint=endpoint,
            endpoints=(endpoint,),
            timing=TIMING,
            node_id=name,
        )
        self.sizes: list[int] = []
        self.ends: list[m.RunEnd] = []
        clock = MonotonicClock()
        self.membership = Membership(config, backend_of(config, clock, self), clock, self.hear, lambda address: 29500)
        self.membership.start()

    def emit(self, event: Event) -> None:
        """Ignore events."""

    def hear(self, event: MembershipEvent) -> None:
        match event:
            case m.Form(round=formed):
                self.sizes.append(len(formed.members))
                self.membership.report(m.Joined(formed.number))
            case m.Break(round=number):
                self.membership.report(m.Stopped(number, 29500))
            case m.RunEnd():
                self.ends.append(event)


def close(nodes: list[Node]) -> None:
    """Close all in parallel: the leader of an ended run waits for the others."""
    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        list(pool.map(lambda node: node.membership.close(), nodes))


@contextlib.contextmanager
def etcd_of(directory: Path, *options: str) -> Iterator[Member]:
    with cluster(directory, options=options) as members:
        EtcdStore(EtcdService().parse(members[0].address), "first").close()
        yield members[0]


@pytest.fixture(scope="module", autouse=True)
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    with etcd_of(tmp_path_factory.mktemp("etcd")) as member:
        yield member


@pytest.fixture
def start() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start_one(*arguments: Any) -> Node:
        nodes.append(Node(*arguments))
        return nodes[-1]

    yield start_one
    close(nodes)


def test_etcd_is_written_once_per_leader_and_round_and_never_in_between(
    etcd: Member, start: Callable[..., Node]
) -> None:
    def writes() -> float:
        return etcd.metric("etcd_mvcc_put_total")

    began = writes()
    first = start("a", etcd, "quiet", Limits(2, 3))
    wait_for("a to lead", lambda: writes() == began + 1)
    others = [start(name, etcd, "quiet", Limits(2, 3)) for name in "bc"]
    wait_for("a round", lambda: all(node.sizes == [3] for node in (first, *others)))
    formed, read = writes(), etcd.metric(READS)
    assert formed == began + 2, "the leader, the round"
    # The leader reads the record once a second; meanwhile each link has ten beats each way.
    wait_for("three seconds of beats", lambda: etcd.metric(READS) >= read + 3)
    assert writes() == formed
    others.pop().membership.close()
    wait_for("the next round", lambda: all(node.sizes == [3, 2] for node in (first, *others)))
    assert writes() == formed + 1


def test_a_record_that_etcd_refuses_ends_the_run_with_the_reason(tmp_path: Path, start: Callable[..., Node]) -> None:
    with etcd_of(tmp_path, "--max-request-bytes", "1900") as member:
        nodes = [start(letter * 190, member, "large", Limits(4, 4)) for letter in "abcd"]
        wait_for("the end", lambda: all(node.ends for node in nodes))
        assert not any(node.sizes for node in nodes)
        assert {node.ends[0].code for node in nodes} == {95}
        assert "too large" in nodes[0].ends[0].cause
        assert "--max-request-bytes" in nodes[0].ends[0].cause
        close(nodes)


def test_a_record_too_long_for_a_line_ends_the_run_with_the_reason(
    etcd: Member, start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_RECORD", 932)
    nodes = [start(letter * 190, etcd, "long", Limits(2, 2)) for letter in "ab"]
    wait_for("the end", lambda: all(node.ends for node in nodes))
    assert {node.ends[0].code for node in nodes} == {95}
    assert "the limit is 932" in nodes[0].ends[0].cause


def test_beats_are_slower_where_thousands_of_nodes_may_beat() -> None:
    patient = Timing(dead_after=20.0)
    assert [patient.beat_among(nodes) for nodes in (1, 1000, 1500, 100_000)] == [1.0, 1.0, 1.5, 4.0]
    assert Timing().beat_among(100_000) == 1.0, "a node must count itself as cut off before its leader does"
    assert Timing(beat=0.1).beat_among(500) == 0.5
    assert Timing(beat=2.4).beat_among(1) == 2.4


def benchmark(directory: Path, *options: str) -> dict[str, Any]:
    result = directory / "result.json"
    command = [sys.executable, str(BENCHMARK), "--runs", "1", "--rest", "0.5", "--json", str(result), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def without_beats(lines: dict[str, int]) -> dict[str, int]:
    return {name: number for name, number in lines.items() if name not in ("beat", "pulse")}


def test_the_benchmark_counts_the_protocols_messages(tmp_path: Path) -> None:
    found = benchmark(tmp_path, "--nodes", "2", "4", "--who", "c10d", "etcd", "--simulate", "64")
    for size in (2, 4):
        for who in ("c10d", "etcd"):
            (run,) = found["measured"][str(size)][who]
            join, again = (without_beats(run[phase]["lines"]) for phase in ("join", "re-join"))
            assert join == {**dict.fromkeys(("nodehello", "welcome", "form", "joined"), size), "usermessage": size - 1}
            assert again == dict.fromkeys(("break", "stopped", "form", "joined"), size - 1)
            # The leader and the round; on c10d there is no store.
            assert run["join"]["written"] == (0 if who == "c10d" else 2)
            assert (run["re-join"]["written"], run["rest"]["writes"]) == (0 if who == "c10d" else 1, 0)
    (simulated,) = found["simulated"]
    assert simulated["join"]["messages"] * 64 == 4 * 64 + 63
    assert simulated["re-join"]["messages"] == 4
    assert (simulated["rest"]["messages"], simulated["rest"]["writes"]) == (1, 0)
    assert (simulated["join"]["writes"], simulated["re-join"]["writes"]) == (1, 1)
    assert 64 * 100 < simulated["record"] < simulated["request"] < 2 * simulated["record"] < 64 * 300


@pytest.mark.slow
def test_the_benchmark_also_measures_torch(tmp_path: Path) -> None:
    found = benchmark(tmp_path, "--nodes", "3", "--who", "c10d", "torch")
    (torchs,) = found["measured"]["3"]["torch"]
    assert torchs["join"]["written"] >= 3, "each node adds itself"
    assert torchs["rest"]["messages"] + torchs["re-join"]["messages"] > 0

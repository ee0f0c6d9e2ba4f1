"""How the rendezvous scales: first join and re-join of N nodes, ours on c10d and on etcd beside torch's, in one run.

Every node has a link, a client of the store and a thread of its own over real sockets; no workers are started. The
first node, which hosts the run, and the last one are processes of their own, the others share some. The one that
is lost is killed. Prints medians and ratios as Markdown tables; asserts no figure.

    python benchmarks/rendezvous.py --nodes 2 8 32 64 128 256 --runs 3 --json rendezvous.json
    python benchmarks/rendezvous.py --nodes --simulate 1024 4096 16384
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import rendezvous_model as model
from network import own_network
from rendezvous_nodes import BEATS, Spec, serve

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from etcd_servers import Member, cluster

WHO = ("c10d", "etcd", "torch")
START_TIMEOUT = 60.0
ETCD_MESSAGES = ("grpc_server_msg_received_total", "grpc_server_msg_sent_total")
ETCD_BYTES = ("etcd_network_client_grpc_received_bytes_total", "etcd_network_client_grpc_sent_bytes_total")
PHASES = ("join", "re-join", "rest")

Record = dict[str, Any]


class Missing(Exception):
    """A measurement returned no figure."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--nodes", type=int, nargs="*", default=[2, 8, 32, 64, 128, 256])
    add("--who", nargs="+", choices=WHO, default=list(WHO))
    add("--runs", type=int, default=3, help="repetitions of each")
    add("--processes", type=int, default=2, help="that the nodes between the first and the last share")
    add("--rest", type=float, default=3.0, help="seconds for which nothing changes, counted, too")
    add("--timeout", type=float, default=60.0, help="seconds that a join may take")
    add("--torch-most", type=int, default=64, help="largest N that torch's is asked for")
    add("--torch-keep-alive", type=int, default=1, help="seconds of its keep_alive_interval; torch's default is 5")
    add("--torch-last-call", type=int, default=1, help="seconds of its last_call_timeout; torch's default is 30")
    add("--simulate", type=int, nargs="+", default=[], help="drive the leader's machine alone with so many nodes")
    add("--json", type=Path, help="file for all measurements")
    return parser.parse_args()


class Etcd:
    """An etcd server's own counters."""

    def __init__(self, member: Member) -> None:
        self._url = f"{member.url}/metrics"

    def tally(self) -> Counter[str]:
        found = Counter[str]()
        with urllib.request.urlopen(self._url, timeout=5.0) as answer:
            lines = answer.read().decode().splitlines()
        for line in lines:
            name, _, value = line.rpartition(" ")
            short, _, labels = name.partition("{")
            if short in ETCD_MESSAGES:
                found["store"] += int(float(value))
            if short == ETCD_MESSAGES[0] and 'grpc_method="Txn"' in labels:
                found["writes"] += int(float(value))
            if short in ETCD_BYTES:
                found["bytes"] += int(float(value))
            if short == "etcd_mvcc_put_total":
                found["written"] += int(float(value))
        return found


class Job:
    """One run's processes."""

    def __init__(self, who: str, size: int, args: argparse.Namespace, etcd: Member | None) -> None:
        self._etcd = Etcd(etcd) if etcd and who == "etcd" else None
        endpoint = etcd.address if etcd and who == "etcd" else free_endpoint()
        run = f"{who}-{size}-{time.monotonic_ns()}"
        shares = [tuple(range(1, size - 1)[part :: args.processes]) for part in range(args.processes)]
        context = multiprocessing.get_context("fork")
        self._hosts: list[tuple[BaseProcess, Connection]] = []
        self._timeout = args.timeout
        for nodes in ((0,), *filter(None, shares), (size - 1,)):
            ours, theirs = context.Pipe()
            spec = Spec(who, run, endpoint, nodes, size, args.torch_keep_alive, args.torch_last_call)
            process = context.Process(target=serve, args=(spec, theirs))
            process.start()
            theirs.close()
            self._hosts.append((process, ours))
        for process, pipe in self._hosts:
            self._receive(process, pipe, START_TIMEOUT)

    def tell(self, *command: Any) -> float:
        """Send a command to all processes; return when."""
        now = time.monotonic()
        for _, pipe in self._hosts:
            pipe.send(command)
        return now

    def ask(self, *command: Any) -> list[Any]:
        self.tell(*command)
        return [self._receive(process, pipe, self._timeout + 5) for process, pipe in self._hosts]

    def count(self) -> Counter[str]:
        total = self._etcd.tally() if self._etcd else Counter[str]()
        for tally in self.ask("count"):
            total.update(tally)
        return total

    def formed(self, size: int) -> tuple[float, int]:
        """When the last node had its round of that size, and how many rounds that took."""
        reports = self.ask("report", size, self._timeout)
        missing = [report["missing"] for report in reports if "missing" in report]
        if missing:
            raise Missing(f"after {self._timeout:g} s: {missing[0]}")
        return max(report["at"] for report in reports), max(report["rounds"] for report in reports)

    def lose(self) -> tuple[float, Counter[str]]:
        """Kill a node that is not the leader; return when, and its counters."""
        last_leads = bool(self._ask(*self._hosts[-1], "leads"))
        process, pipe = self._hosts.pop(0 if last_leads else -1)
        counted = Counter[str](self._ask(process, pipe, "count"))
        now = time.monotonic()
        process.kill()
        process.join()
        pipe.close()
        return now, counted

    def close(self) -> None:
        for process, _ in self._hosts:
            process.kill()
        for process, pipe in self._hosts:
            process.join()
            pipe.close()

    def _ask(self, process: BaseProcess, pipe: Connection, *command: Any) -> Any:
        pipe.send(command)
        return self._receive(process, pipe, self._timeout)

    def _receive(self, process: BaseProcess, pipe: Connection, seconds: float) -> Any:
        if not pipe.poll(seconds):
            raise Missing(f"process {process.pid} with some of the nodes does not answer")
        return pipe.recv()


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def measure(who: str, size: int, args: argparse.Namespace, etcd: Member | None) -> Record:
    """First join, rest and re-join after a loss: seconds and counters, of all nodes together."""
    with closing(Job(who, size, args, etcd)) as job:
        start = job.count()
        began = job.tell("join")
        joined, _ = job.formed(size)
        after_join = job.count()
        time.sleep(args.rest)
        rested = job.count()
        lost, gone = job.lose()
        before_loss = rested - gone
        job.tell("lost")
        again, rounds = job.formed(size - 1)
        after_loss = job.count()
    if rounds != 2:
        print(f"{who}, {size} nodes: {rounds} rounds, not 2: nodes were late, and came back", file=sys.stderr)
    return {
        "rounds": rounds,
        "join": figures(joined - began, start, after_join, size),
        "rest": figures(args.rest, after_join, rested, size),
        "re-join": figures(again - lost, before_loss, after_loss, size - 1),
    }


def figures(seconds: float, before: Counter[str], after: Counter[str], nodes: int) -> Record:
    tally = after.copy()
    tally.subtract(before)
    lines = {name: count for name, count in tally.items() if name not in ("bytes", "store", "writes", "written")}
    beats = sum(lines.get(name, 0) for name in BEATS)
    return {
        "seconds": seconds,
        "messages": (sum(lines.values()) - beats + tally["store"]) / nodes,
        "beats": beats / nodes,
        "bytes": tally["bytes"] / nodes,
        "writes": tally["writes"],
        "written": tally["written"],
        "lines": {name: count for name, count in sorted(lines.items()) if count},
    }


def table(everything: dict[str, dict[str, list[Record]]]) -> None:
    print("| nodes | who | phase | seconds | / torch | messages per node | / torch | kB per node | writes | made |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for size, by_who in everything.items():
        for who, runs in by_who.items():
            for phase in PHASES:
                print("| " + " | ".join([size, who, phase, *row(runs, by_who.get("torch", []), phase)]) + " |")


def row(runs: list[Record], base: list[Record], phase: str) -> list[str]:
    """The medians of a phase; seconds with minimum and maximum. At rest, the messages are the beats."""
    if not runs:
        return ["-"] * 7

    def of(name: str, records: list[Record]) -> float:
        return statistics.median(float(record[phase][name]) for record in records)

    def messages(records: list[Record]) -> float:
        return of("messages", records) + (of("beats", records) if phase == "rest" else 0)

    seconds = [float(record[phase]["seconds"]) for record in runs]
    spread = f"{statistics.median(seconds):.3f} ({min(seconds):.3f}..{max(seconds):.3f})"
    slower = f"{of('seconds', runs) / of('seconds', base):.3f}" if base else "-"
    more = f"{messages(runs) / messages(base):.2f}" if base and messages(base) else "-"
    writes = (f"{of(name, runs):g}" for name in ("writes", "written"))
    return [spread, slower, f"{messages(runs):.1f}", more, f"{of('bytes', runs) / 1e3:.1f}", *writes]


def main() -> int:
    args = arguments()
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, elastic-launch {version('elastic-launch')}, torch {version('torch')}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}; "
        f"{args.runs} runs: median (least..greatest){'' if own_network() else '; no network of its own'}\n"
    )
    everything: dict[str, dict[str, list[Record]]] = {str(size): {who: [] for who in args.who} for size in args.nodes}
    failed = False
    with ExitStack() as stack:
        etcd = None
        if args.nodes and "etcd" in args.who:
            etcd = stack.enter_context(cluster(Path(tempfile.mkdtemp(prefix="etcd-"))))[0]
        for size in args.nodes:
            for _ in range(args.runs):
                for who in args.who:
                    if who == "torch" and size > args.torch_most:
                        continue
                    try:
                        everything[str(size)][who].append(measure(who, size, args, etcd))
                    except Missing as error:
                        failed = True
                        print(f"{who}, {size} nodes: no figure {error}", file=sys.stderr)
    if args.nodes:
        table(everything)
    simulated = [model.simulate(size) for size in args.simulate]
    if simulated:
        model.table(simulated)
    if args.json:
        args.json.write_text(json.dumps({"measured": everything, "simulated": simulated}, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

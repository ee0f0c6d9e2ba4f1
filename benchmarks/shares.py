"""Measures how long a durable copy takes when 1, 2, 4, ... nodes write it together, to storage with a fixed rate per
node.

The nodes are agents' snapshot stores in one process; the copying processes are those of real runs. The storage is a
local directory behind an fsspec driver that waits. A copy's time is from the order to the end of the first node's
copier.

    python benchmarks/shares.py --mib 512 --rate 100 --nodes 1 2 4
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import slow_storage
import torch

from elastic_agents.snapshots.snapshot_store import SnapshotStore
from elastic_launch.contract import Copied, Copying, CopyJob, Save, Stored
from elastic_launch.snapshot.memory.slot import EVALUATED, Header, Slot
from elastic_launch.snapshot.memory.slot_state import SlotDraft, SlotWriter
from elastic_launch.snapshot.storage.shares import nonce_of

TENSORS = 64
TIMEOUT = 600.0


class Node:
    """A snapshot store with a snapshot, and the file count of its copy."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.copied: Copied | None = None
        self.snapshot_store = SnapshotStore(lambda: True, self._tell)
        self.snapshot_store.start()

    def fill(self, state: dict[str, torch.Tensor]) -> None:
        """Write a state into its first slot."""
        _, descriptors = self.snapshot_store.offer()
        draft = SlotDraft(state, {}, lambda tensor: True)
        writer = SlotWriter(Slot(*descriptors[:2]))
        writer.write(draft, Header(1, 1, 1, EVALUATED, 0))
        writer.close()

    def _tell(self, told: Copied | Copying | Save | None) -> None:
        if isinstance(told, Copied):
            self.copied = told
            self.ended.set()


def measure(url: str, count: int, state: dict[str, torch.Tensor]) -> float:
    """Return the seconds that one copy takes."""
    nodes = [Node() for _ in range(count)]
    try:
        for node in nodes:
            node.fill(state)
        began = time.monotonic()
        for rank, node in enumerate(nodes):
            job = CopyJob(1, 1, 1, url, now=True, shares=count, share=rank, nonce=nonce_of(int(began * 1e6), 1, 1))
            node.snapshot_store.stored(Stored(0, job))
        if not nodes[0].ended.wait(TIMEOUT):
            raise TimeoutError(f"no copy within {TIMEOUT:g} s")
        took = time.monotonic() - began
        copied = nodes[0].copied
        if copied is None or copied.error:
            raise RuntimeError(f"no copy: {copied}")
        return took
    finally:
        for node in nodes:
            node.snapshot_store.wait(TIMEOUT)
            node.snapshot_store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure copies that several nodes write together.")
    parser.add_argument("--mib", type=int, default=512, help="of tensors [512]")
    parser.add_argument(
        "--rate", type=float, default=100.0, help="MiB a second that the storage takes from a node [100]"
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    state = {f"layer{index:02}": torch.rand(args.mib * 2**18 // TENSORS) for index in range(TENSORS)}
    with tempfile.TemporaryDirectory() as directory:
        environ = slow_storage.install(Path(directory, "driver"), 0.0, Path(directory, "log"))
        os.environ.update(environ, **{slow_storage.RATE: str(args.rate * 2**20)})
        sys.path.append(str(Path(directory, "driver")))  # a node's own processes get its path, not PYTHONPATH
        print(f"{args.mib} MiB, {args.rate:g} MiB/s from each node: seconds of a copy, median (least..greatest)")
        for count in args.nodes:
            times = [measure(f"slow://{directory}/{count}-{run}", count, state) for run in range(args.runs)]
            print(f"{count} nodes: {statistics.median(times):.2f} ({min(times):.2f}..{max(times):.2f})", flush=True)


if __name__ == "__main__":
    sys.exit(main())

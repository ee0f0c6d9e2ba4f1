"""Where a standstill goes: torch alone aborts, or shrinks, a process group with an absent rank, and makes a new one.

Three ranks make groups and use them. The last rank then stays away from a collective, in which the others are stopped;
they make a new group of two and use that. Prints a line of JSON for each case, with the seconds of each phase on rank
0. gloo cannot abort: its ranks take part in all collectives, and destroy the group.

    WORKLOAD_GPU=1 python benchmarks/gpu_probe.py    # on a GPU, with all backends that torch has for it
    python benchmarks/gpu_probe.py --facts           # print what torch has, and nothing else
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

RANKS = 3
LIMIT = 15.0 if "WORKLOAD_GPU" in os.environ else 60.0
"""Seconds for a case; it takes about five."""
GPU_BACKENDS = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")
ABORTABLE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class Case:
    """What is tried.

    Attributes:
        groups: number of groups, the default one included.
        end: ``each`` aborts group after group, ``all`` aborts them in one call, ``shrink`` shrinks the default group.
        eager: whether communicators are made with the group, for a GPU that it is given.
        nonblocking: whether NCCL's calls return before they are done.
    """

    backend: str
    groups: int = 1
    end: str = "all"
    eager: bool = False
    nonblocking: bool = False


def cases(backends: list[str]) -> list[Case]:
    first, *others = backends
    found = [Case(first, 1, "each"), Case(first), Case(first, 3, "each"), Case(first, 3), Case(first, eager=True)]
    if first != "gloo":
        found += [Case(first, eager=True, nonblocking=True), Case(first, end="shrink")]
        found += [Case(first, end="shrink", eager=True)]
    return found + [Case(each, groups) for each in others for groups in (1, 3)]


class Rank:
    """One rank: sends each phase with its seconds."""

    def __init__(self, case: Case, rank: int, pipe: Connection) -> None:
        self._case, self._rank, self._pipe, self._began = case, rank, pipe, 0.0
        self._device = torch.device("cpu") if case.backend == "gloo" else torch.device("cuda", 0)

    def run(self, ports: tuple[int, int]) -> None:
        case, absent = self._case, self._device.type == "cuda"
        if absent:
            torch.cuda.set_device(self._device)
            torch.zeros(1, device=self._device)
        self._began = time.monotonic()
        self._form(RANKS, ports[0])
        groups = [None, *(dist.new_group(backend=case.backend) for _ in range(case.groups - 1))]
        self._phase("init")
        self._use("first collective", groups, RANKS)
        self._use("second collective", groups, RANKS)
        if absent and self._rank == RANKS - 1:
            time.sleep(2 * LIMIT)
        if absent:
            dist.all_reduce(torch.ones(1000, device=self._device))
            time.sleep(0.3)
            self._began = time.monotonic()
            self._abort(groups)
        else:
            dist.destroy_process_group()
            self._phase("leave")
        if self._rank == RANKS - 1:
            return
        if case.end != "shrink" or not absent:
            self._form(RANKS - 1, ports[1])
            self._phase("new init")
        self._use("new first collective", [None], RANKS - 1)
        self._use("new second collective", [None], RANKS - 1)

    def _abort(self, groups: list[Any]) -> None:
        if self._case.end == "shrink":
            dist.shrink_group([RANKS - 1], shrink_flags=distributed_c10d.SHRINK_ABORT)
            return self._phase("shrink")
        if self._case.end == "each":
            for group in reversed(groups):
                (group or dist.group.WORLD)._get_backend(self._device).abort()  # type: ignore[union-attr]
            self._phase("abort")
        distributed_c10d._abort_process_group()
        self._phase("leave" if self._case.end == "each" else "abort")

    def _form(self, size: int, port: int) -> None:
        how: dict[str, Any] = {"timeout": timedelta(seconds=LIMIT), "world_size": size, "rank": self._rank}
        how |= {"device_id": self._device} if self._case.eager and self._device.type == "cuda" else {}
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(self._case.backend, store=store, **how)

    def _use(self, phase: str, groups: list[Any], size: int) -> None:
        for group in groups:
            tensor = torch.ones(250_000, device=self._device)
            dist.all_reduce(tensor, group=group)
            if float(tensor[0]) != size:
                raise RuntimeError(f"a sum of ones over {size} ranks is {float(tensor[0])}")
        self._phase(phase)

    def _phase(self, name: str) -> None:
        self._pipe.send((name, round(time.monotonic() - self._began, 4)))
        self._began = time.monotonic()


def rank_main(case: Case, rank: int, ports: tuple[int, int], pipe: Connection) -> None:
    os.environ |= ABORTABLE | {"NCCL_HOSTID": str(os.getpid())}
    os.environ |= {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"} if case.nonblocking else {}
    error = None
    try:
        Rank(case, rank, pipe).run(ports)
    except Exception as raised:  # noqa: BLE001  the error is the result of the probe
        error = f"{type(raised).__name__}: {raised}"[:300]
    pipe.send(("end", error))
    time.sleep(LIMIT)  # the end of a process may hang, and is not measured


def measure(case: Case) -> dict[str, Any]:
    """Run a case; return the seconds of rank 0's phases, and what was wrong."""
    context, ours = multiprocessing.get_context("fork"), list[Connection]()
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    processes = []
    for rank in range(RANKS):
        pipe, theirs = context.Pipe()
        ours.append(pipe)
        ports = stores[0].port, stores[1].port
        processes.append(context.Process(target=rank_main, args=(case, rank, ports, theirs), daemon=True))
        processes[-1].start()
    found: dict[str, Any] = {**asdict(case), "phases": {}, "error": f"nothing further within {LIMIT:g} s"}
    deadline = time.monotonic() + LIMIT
    while ours[0].poll(max(0.0, deadline - time.monotonic())):
        name, what = ours[0].recv()
        if name == "end":
            found["error"] = what
            break
        found["phases"][name] = what
    for process in processes:
        process.kill()
        process.join()
    return found


def facts() -> dict[str, Any]:
    """What torch has."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__, "CUDA": torch.version.cuda}
    found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    found["backends"] = [name for name in ("gloo", *GPU_BACKENDS) if dist.is_backend_available(name)]
    found["shrink_group"] = hasattr(dist, "shrink_group")
    return found


def main() -> None:
    if "--facts" in sys.argv:
        return print(json.dumps(facts()))
    # This process, of which ranks are forked, must not ask CUDA.
    gpu = "WORKLOAD_GPU" in os.environ
    for case in cases([name for name in GPU_BACKENDS if gpu and dist.is_backend_available(name)] or ["gloo"]):
        print(json.dumps(measure(case)), flush=True)


if __name__ == "__main__":
    main()

"""Processes that take part in rounds, as tests order: a process that imports torch once forks each of them.

Each has two threads, as a worker has: one carries out one order after the other, and the other, which reads them,
disconnects the round's groups itself, while the first one waits in a collective.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from elastic_launch import collective_dump
from elastic_launch.training.live.groups import RoundGroups
from elastic_launch.training.live.waits import Waits, wait_in
from elastic_launch.training.ranks import exchange
from elastic_launch.training.ranks.world import GROUP_TIMEOUT

TIMEOUT = timedelta(seconds=40)

AT_ONCE = ("disconnect", "dump")
"""Orders that are carried out while the process waits in a collective."""


class Aborts(dist.ProcessGroup):
    """A backend that is written in Python, and says what it does by its methods."""

    aborted = 0

    def getBackendName(self) -> str:
        return "aborts"

    def abort(self) -> None:
        self.aborted += 1


class Rank:
    """One process of a world; its public methods are the orders."""

    def __init__(self) -> None:
        self.groups = RoundGroups()
        self.kept: list[Any] = []
        self.store: dist.TCPStore | None = None

    def set_environment(self, variables: dict[str, str]) -> None:
        """Set variables that torch reads when it forms groups, or when it is imported."""
        os.environ.update(variables)
        dist.set_debug_level_from_env()

    def host(self) -> int:
        """Host the store of a new round instead of the last one's, and return its port."""
        self.store = None
        self.store = dist.TCPStore("::", 0, is_master=True, wait_for_workers=False)
        return self.store.port

    def begin(self) -> None:
        """Begin a new round."""
        self.groups = RoundGroups(last=self.groups)

    def form(self, rank: int, size: int, port: int, subgroups: int = 1, address: str = "127.0.0.1") -> float:
        """Form the groups of a new round, and return how many seconds that took."""
        began = time.monotonic()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR=address, MASTER_PORT=str(port))
        with self.groups.forming():
            dist.init_process_group("gloo", timeout=TIMEOUT)
        for _ in range(subgroups):
            with self.groups.forming():
                dist.new_group(backend="gloo", timeout=TIMEOUT)
        assert not self.groups.foreign
        assert self.groups.breakable
        return time.monotonic() - began

    def form_gpu(self, rank: int, size: int, port: int) -> None:
        """Form the groups of a new round, with a GPU for each rank."""
        torch.cuda.set_device(rank % torch.cuda.device_count())
        # NCCL refuses a GPU for a second rank only on the same host.
        os.environ.update(NCCL_HOSTID=f"host of rank {rank}", NCCL_SOCKET_IFNAME="lo")
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with self.groups.forming():
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT)

    def form_other(self, port: int, backend: str) -> list[str]:
        """Form a round of one with another backend, and return those of its backends that nothing can end."""
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.Backend.register_backend("aborts", lambda store, rank, size, timeout: Aborts(rank, size), devices=["cpu"])
        with self.groups.forming():
            dist.init_process_group(backend, rank=0, world_size=1, timeout=TIMEOUT)
        assert self.groups.breakable == (not self.groups.unbreakable)
        return self.groups.unbreakable

    def aborts(self) -> int:
        """Return how often the round's group was aborted."""
        group = dist.group.WORLD
        assert isinstance(group, Aborts)
        return group.aborted

    def reduce_gpu(self) -> float:
        """Return the sum over the ranks of their ranks + 1, computed on their GPUs."""
        tensor = torch.full((1000,), dist.get_rank() + 1.0, device="cuda")
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        return float(tensor[0])

    def confirm(self) -> None:
        """Confirm an exchange, without a GPU."""
        self.groups.confirm((), GROUP_TIMEOUT)

    def dump(self) -> str:
        """Return what torch's flight recorders have, as JSON."""
        return collective_dump._dump().decode()

    def reduce(self, numbers: int = 1) -> float:
        """Return the sum over the ranks of their ranks + 1."""
        tensor = torch.full((numbers,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor)
        assert bool((tensor == tensor[0]).all())
        return float(tensor[0])

    def reduce_held(self, seconds: float) -> tuple[float, str]:
        """Reduce in an inner group, which is held for so many seconds before; return the sum, and an error after it."""
        with self.groups.forming(inner=True):
            inner = dist.new_group(backend="gloo", timeout=TIMEOUT)
        assert self.groups.breakable
        tensor, error = torch.full((1,), dist.get_rank() + 1.0), ""
        with self.groups.held():
            time.sleep(seconds)
            dist.all_reduce(tensor, group=inner)
        try:
            dist.all_reduce(tensor.clone(), group=inner)
        except RuntimeError as raised:
            error = f"RuntimeError: {raised}"
        return float(tensor), error

    def transfer(self, how: str, numbers: int = 10_000_000) -> None:
        """Have rank 0 send numbers to rank 1, in one of several ways; the waits for it end.

        ``state`` and ``chunks`` are ways of the library, as on GPUs, where a script's works are left alone.
        """
        waits = Waits(lambda: self.groups.lost(), all_works=how not in ("state", "chunks"))
        tensor, receives = torch.ones(numbers), dist.get_rank() == 1
        try:
            if how == "state":
                exchange.broadcast_state({"numbers": tensor}, 0, dist.get_rank())
            elif how == "chunks":
                exchange.swap([] if receives else [(tensor, 1)], [(tensor, 0)] if receives else [])
            elif how == "broadcast":
                dist.broadcast(tensor, src=0)
            elif how == "functional":
                operators, name = torch.ops._c10d_functional, distributed_c10d._get_default_group().group_name
                wait_in(lambda: operators.wait_tensor(operators.broadcast(tensor, 0, name)))
            elif receives:
                dist.recv(tensor, src=0)
            else:
                dist.send(tensor, dst=1)
        finally:
            waits.close()

    def reduce_for_ever(self, numbers: int = 100_000) -> None:
        while True:
            self.reduce(numbers)

    def backward(self) -> list[str]:
        """Reduce gradients while others are computed, over and over; return the errors of one broken pass."""
        model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))
        works: list[dist.Work] = []

        def reduce(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            work = dist.all_reduce(parameter.grad, async_op=True)
            assert work is not None
            works.append(work)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(reduce)
        errors: list[str] = []
        while not errors:
            try:
                model(torch.ones(8, 300)).sum().backward()
            except RuntimeError as error:
                errors.append(str(error))
            for work in works:
                try:
                    work.wait()
                except RuntimeError as error:
                    errors.append(str(error))
            works.clear()
        return errors

    def post(self, count: int) -> None:
        """Post collectives, and do not wait for them."""
        self.kept += [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(count)]

    def drop(self) -> None:
        """Drop the posted collectives."""
        self.kept.clear()

    def leave(self) -> float:
        """Leave the round's groups, and return how many seconds that took."""
        began = time.monotonic()
        self.groups.leave()
        return time.monotonic() - began

    def open_own(self) -> None:
        """Open a listening socket and a connection to it, as a script may do."""
        server = socket.create_server(("127.0.0.1", 0))
        self.kept += [server, socket.create_connection(server.getsockname()), server.accept()[0]]

    def form_and_open(self, rank: int, size: int, port: int) -> float:
        """Like :meth:`form`, while another thread serves connections."""
        opening, opened = threading.Event(), threading.Event()

        def serve() -> None:
            opening.wait()
            self.open_own()
            server, ours, theirs = self.kept[-3:]
            selector = selectors.DefaultSelector()
            for each in (server, ours, theirs):
                selector.register(each, selectors.EVENT_READ)
            self.kept.append(selector)
            opened.set()

        thread = threading.Thread(target=serve)
        thread.start()
        new_group = dist.new_group

        def form(**options: Any) -> Any:
            opening.set()
            opened.wait()
            return new_group(**options)

        dist.new_group = form
        try:
            return self.form(rank, size, port)
        finally:
            dist.new_group = new_group
            thread.join()

    def use_own(self) -> int:
        """Return how many of the script's own sockets work."""
        sockets = [each for each in self.kept if isinstance(each, socket.socket)]
        for server, ours, theirs in zip(sockets[::3], sockets[1::3], sockets[2::3], strict=True):
            ours.sendall(b"1")
            assert theirs.recv(1) == b"1"
            with socket.create_connection(server.getsockname()) as another:
                server.accept()[0].close()
                assert another.recv(1) == b""
        return len(sockets)

    def own_group(self) -> None:
        """Form a group as a script may do."""
        self.kept.append(dist.new_group(backend="gloo", group_desc="of the script"))

    def form_another(self) -> None:
        """Form a further group of the round."""
        with self.groups.forming():
            dist.new_group(backend="gloo", timeout=TIMEOUT)

    def keep_group(self) -> None:
        """Keep a reference to the round's group."""
        self.kept.append(dist.group.WORLD)

    def facts(self) -> dict[str, Any]:
        """Return what this process has."""
        gc.collect()
        return {
            "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
            "threads": len(os.listdir("/proc/self/task")),
            "memory": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            "hooks": _hooks(),
            "used": self.groups.used(),
            "foreign": self.groups.foreign,
            "initialized": dist.is_initialized(),
        }


def _hooks() -> int:
    """Return how many handlers of uncaught exceptions torch has wrapped around each other."""
    count, hook = 0, sys.excepthook
    while hook is not sys.__excepthook__:
        inner = inspect.getclosurevars(hook).nonlocals
        count, hook = count + 1, inner["old_hook"]
    return count


def be(orders: socket.socket) -> None:
    """Carry out orders until there are none left; each is answered by its result, or its error."""
    rank, waiting = Rank(), queue.SimpleQueue[dict[str, Any] | None]()
    answering = threading.Lock()

    def answer(order: dict[str, Any], act: Callable[..., Any]) -> None:
        try:
            found = {"result": act(*order["arguments"])}
        except RuntimeError as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        with answering:
            orders.sendall(json.dumps({"number": order["number"], "at": time.monotonic(), **found}).encode() + b"\n")

    def read() -> None:
        with orders.makefile("r") as lines:
            for line in lines:
                order = json.loads(line)
                if order["name"] in AT_ONCE:
                    answer(order, getattr(rank.groups if order["name"] == "disconnect" else rank, order["name"]))
                else:
                    waiting.put(order)
        waiting.put(None)

    threading.Thread(target=read, name="orders", daemon=True).start()
    while (order := waiting.get()) is not None:
        answer(order, getattr(rank, order["name"]))


def serve(requests: socket.socket) -> None:
    """Fork a process for each descriptor that arrives; answer a process' number with how it ended."""
    while True:
        data, received, _, _ = socket.recv_fds(requests, 100, 1)
        if not data:
            return
        if not received:
            requests.sendall(b"%d" % os.waitstatus_to_exitcode(os.waitpid(int(data), 0)[1]))
        elif pid := os.fork():
            os.close(received[0])
            requests.sendall(b"%d" % pid)
        else:
            requests.close()
            be(socket.socket(fileno=received[0]))
            return


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))

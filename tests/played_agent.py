"""An agent that a test plays: it speaks with workers on a real socket, serves their stores, and gives them places."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from harness import SLOWNESS, Agent, wait_for
from torch._C._distributed_c10d import TCPStore

from elastic_launch import contract as c
from elastic_launch.rendezvous.worker_store import WorkerStore
from elastic_launch.shared_progress import SharedProgress
from elastic_launch.snapshot.memory.slot import Slot

M = TypeVar("M", bound=c.Message)


class Worker:
    """A worker's connection.

    Attributes:
        heard: its messages so far, in order.
        gone: whether it has closed the connection.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.heard: list[c.Message] = []
        self.gone = False

    def said(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if isinstance(message, kind)]

    def wait(self, kind: type[M], times: int = 1) -> M:
        """Wait until it has sent messages of a kind; return the last one."""
        wait_for(f"{times} x {kind.__name__} after {self.heard}", lambda: len(self.said(kind)) >= times, 60)
        return self.said(kind)[-1]

    def tell(self, message: c.Message) -> None:
        self.sock.sendall(c.pack(message))


class PlayedAgent:
    """Plays the agent of one node.

    Args:
        workers: how many workers the node has.
        on_ahead: called with each worker that waits for a place, in a thread.

    Attributes:
        processes: the workers that it has started.
        stores: the store of each round.
        progress: where the workers write their steps.
        confirms, hangs_up: whether it confirms that workers are drained, or ends their connections then.
    """

    def __init__(self, workers: int = 1, on_ahead: Callable[[Worker], object] = lambda worker: None) -> None:
        self.address = f"@played-agent-{secrets.token_hex(8)}"
        self.processes: list[Agent] = []
        self._workers = workers
        self.on_ahead, self.confirms, self.hangs_up = on_ahead, True, False
        self._connected: dict[int, Worker] = {}
        self._stores: dict[int, tuple[WorkerStore, int]] = {}
        self.stores: dict[int, TCPStore] = {}
        self._slots = [Slot.make(f"played-{number}") for number in range(c.SLOTS)]
        self._use, self._sequence = 0, 0
        self.progress = SharedProgress.make("played-progress")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address[1:])
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def worker(self, local_rank: int) -> Worker:
        """Wait until a worker has connected."""
        return wait_for(f"worker {local_rank}", lambda: self._connected.get(local_rank), 60)

    def connected(self, local_rank: int) -> bool:
        return local_rank in self._connected

    def placement(self, number: int, rank: int, local_rank: int, world_size: int) -> c.Placement:
        """A place in a round, whose store is served from now on."""
        if number not in self._stores:
            store = WorkerStore("127.0.0.1")
            self._stores[number] = store, store.reserve()
            self.stores[number] = store.serve(60 * SLOWNESS)
        return c.Placement(
            rank=rank,
            local_rank=local_rank,
            group_rank=0,
            world_size=world_size,
            local_world_size=world_size,
            group_world_size=1,
            master_addr="127.0.0.1",
            master_port=self._stores[number][1],
            role_rank=rank,
            role_world_size=world_size,
            first_on_node=not rank,
        )

    def place(self, number: int, world_size: int, local_ranks: Sequence[int]) -> None:
        """Give workers, in the order of their ranks, their places in a round."""
        for rank, local_rank in enumerate(local_ranks):
            self.tell_place(self.worker(local_rank), number, rank, local_rank, world_size)

    def tell_place(self, worker: Worker, number: int, rank: int, local_rank: int, world_size: int) -> None:
        placement = self.placement(number, rank, local_rank, world_size)
        worker.tell(c.Place(number, "5eed", placement, 0, 3, "membership", self._use, self._sequence, False))

    def environment(self, number: int, rank: int, local_rank: int, world_size: int) -> dict[str, str]:
        """The environment of a worker that starts in a round."""
        return c.worker_environment(
            self.placement(number, rank, local_rank, world_size),
            run_id="played",
            run_number="5eed",
            role="default",
            restarts=0,
            max_restarts=3,
            round_number=number,
            reason="first",
            error_file="",
            socket=self.address,
        )

    def ahead(self, local_rank: int) -> dict[str, str]:
        """The environment of a worker that starts ahead of a place."""
        return c.ahead_environment(self.environment(1, 0, local_rank, self._workers), workers=self._workers)

    def start(self, environment: dict[str, str], directory: Path, script: Path, *arguments: str) -> Agent:
        """Start a worker, whose output goes to the directory."""
        env = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "attempts:0", **environment}
        self.processes.append(Agent([str(script), *arguments], directory, "worker", env, forked=True, script=True))
        return self.processes[-1]

    def close(self) -> None:
        """End what still runs."""
        for process in self.processes:
            process.kill()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread
        self._threads[0].join()
        for worker in list(self._connected.values()):
            self.hang_up(worker)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self.progress.close()
        for slot in self._slots:
            slot.close()
        self.stores.clear()
        for store, _ in self._stores.values():
            store.close()

    def hang_up(self, worker: Worker) -> None:
        with contextlib.suppress(OSError):
            worker.sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._listen, args=(Worker(sock),)))
            self._threads[-1].start()

    def _listen(self, worker: Worker) -> None:
        with worker.sock, worker.sock.makefile("rb") as lines, contextlib.suppress(OSError):
            for line in lines:
                message = c.unpack(line, c.FROM_WORKERS)
                match message:
                    case c.WorkerHello(local_rank=local_rank):
                        slots = c.SnapshotSlots(c.SLOTS, self._use, self._sequence, False, patience_s=30.0)
                        descriptors = [number for slot in self._slots for number in (slot.tensors, slot.head)]
                        socket.send_fds(worker.sock, [c.pack(slots)], [*descriptors, self.progress.descriptor])
                        self._connected[local_rank] = worker
                    case c.Ahead():
                        self.on_ahead(worker)
                    case c.Stored(slot=slot, job=job):
                        self._use, self._sequence = (slot + 1) % c.SLOTS, job.sequence
                        worker.tell(c.Use(self._use))
                    case c.MayCommit(number=number):
                        worker.tell(c.CommitAnswer(number, True))
                    case c.Drained() if self.hangs_up:
                        worker.sock.shutdown(socket.SHUT_RDWR)
                    case c.Drained() if self.confirms:
                        worker.tell(c.Noted())
                worker.heard.append(message)
        worker.gone = True

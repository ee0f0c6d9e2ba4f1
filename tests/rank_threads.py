"""Threads in the ranks' places, and what they send to each other instead of torch.distributed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

from torch import Tensor

TIMEOUT = 30.0
"""Seconds after which a rank gives up to wait for another."""


class Messages:
    """Takes the place of the module ``torch.distributed``.

    As with gloo, what is sent has arrived only once it is received, and each kind of call has an order of its own.
    """

    def __init__(self) -> None:
        self.sent = 0
        """Bytes in calls of ``isend``."""
        self._lock = threading.Lock()
        self._queues: dict[tuple[str, int, int], queue.Queue[tuple[Tensor, threading.Event] | None]] = {}
        self._here = threading.local()
        self._all = threading.Barrier(1)

    def run(self, ranks: int, function: Callable[[int], Any]) -> list[Any]:
        """Return what a function returns on each rank; the error of the first rank that fails ends all others."""
        self._all = threading.Barrier(ranks)
        kinds, each = ("send", "broadcast", "all_gather"), range(ranks)
        self._queues = {ends: queue.Queue() for ends in product(kinds, each, each)}
        errors: list[BaseException] = []

        def as_rank(rank: int) -> Any:
            self._here.rank = rank
            try:
                return function(rank)
            except BaseException as error:  # noqa: BLE001 - it is raised again below
                errors.append(error)
                self._all.abort()
                for messages in self._queues.values():
                    messages.put(None)
                return None

        with ThreadPoolExecutor(ranks) as pool:
            found = list(pool.map(as_rank, range(ranks)))
        if errors:
            raise errors[0]
        return found

    @property
    def unread(self) -> int:
        """How many messages were sent and not received."""
        return sum(messages.qsize() for messages in self._queues.values())

    @property
    def waiting(self) -> int:
        """How many ranks are in a barrier that others have not come to."""
        return self._all.n_waiting

    def isend(self, tensor: Tensor, dst: int) -> Work:
        with self._lock:
            self.sent += tensor.nbytes
        received = self._put("send", tensor, dst)
        return Work(lambda: received.wait(TIMEOUT) or _give_up())

    def irecv(self, tensor: Tensor, src: int) -> Work:
        return Work(lambda: self._get("send", tensor, src))

    def broadcast(self, tensor: Tensor, src: int, group: object = None, async_op: bool = False) -> None:
        if src != self._here.rank:
            self._get("broadcast", tensor, src)
            return
        for rank in range(self._all.parties):
            if rank != src:
                self._put("broadcast", tensor, rank)

    def all_gather(
        self, gathered: Sequence[Tensor], tensor: Tensor, group: None = None, async_op: bool = False
    ) -> None:
        for rank in range(len(gathered)):
            self._put("all_gather", tensor, rank)
        for rank, entry in enumerate(gathered):
            self._get("all_gather", entry, rank)

    def all_reduce(self, tensor: Tensor, async_op: bool = False) -> None:
        self._all.wait(timeout=TIMEOUT)

    def _put(self, kind: str, tensor: Tensor, target: int) -> threading.Event:
        received = threading.Event()
        self._queues[kind, self._here.rank, target].put((tensor.clone(), received))
        return received

    def _get(self, kind: str, tensor: Tensor, source: int) -> None:
        message = self._queues[kind, source, self._here.rank].get(timeout=TIMEOUT)
        if message is None:
            _give_up()
        else:
            assert message[0].shape == tensor.shape, "another message than was waited for"
            tensor.copy_(message[0])
            message[1].set()


class Work:
    """What is sent or received meanwhile."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


def _give_up() -> None:
    raise RuntimeError("another rank has failed, or has not received a message")

"""A control store on the server under which the workers meet, too: the static backend's, whose port users give.

A worker takes any key that it finds for one of its own round. So before a round is written, what workers of the last
one left is removed: whoever was in it has stopped by then, and nobody of the next one has started.
"""

from __future__ import annotations

from elastic_launch.rendezvous.c10d import C10dStore
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.store import ControlStore

__all__ = ["SharedStore"]


class SharedStore:
    """See the module.

    Args:
        store: the control store in the form in which records are read; closed with this one.
        server: what it is made of.
    """

    def __init__(self, store: ControlStore, server: C10dStore) -> None:
        self._store = store
        self._server = server
        self._round = 0

    def load(self, timeout: float) -> bytes | None:
        return self._store.load(timeout)

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        number = ControlRecord.parse(value).round.number
        if number > self._round:
            self._server.remove_others(timeout)
            self._round = number
        return self._store.compare_and_set(expected, value, timeout)

    def wait_changed(self, known: bytes | None, timeout: float) -> bytes | None:
        return self._store.wait_changed(known, timeout)

    def close(self) -> None:
        self._store.close()

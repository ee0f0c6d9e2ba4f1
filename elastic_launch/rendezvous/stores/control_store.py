"""The interface of a control store, and the store in the leader's own memory. ``etcd`` is another one."""

from __future__ import annotations

import threading
from typing import Protocol

from elastic_launch.errors import StoreError


class ControlStore(Protocol):
    """Holds one value, the control record, under the run id.

    Every call ends by its deadline. Every value written must differ from all earlier ones (the record's nonce ensures
    this), so that a writer can distinguish its own write from another's.
    """

    def load(self, timeout: float) -> bytes | None:
        """Return the value, or None if there is none yet.

        Raises:
            StoreError: if the store did not answer within timeout seconds.
        """
        ...

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        """Write ``value`` if the current one equals ``expected`` (None: if there is none); return whether it did.

        Raises:
            StoreError: if the outcome could not be learned within timeout seconds.
        """
        ...

    def wait_changed(self, known: bytes | None, timeout: float) -> bytes | None:
        """Return the value once it differs from ``known``, or ``known`` after ``timeout`` seconds.

        Raises:
            StoreError: if the store did not answer.
        """
        ...

    def resign(self) -> None:
        """Note that the last writer no longer leads: a store that would protect it need not."""
        return

    def close(self) -> None:
        """Release what the store holds."""
        ...


class MemoryStore(ControlStore):
    """A control store in this process's memory. Thread-safe.

    It waits in real time, on a condition variable, so that a change ends the wait at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._value: bytes | None = None
        self._closed = False

    def load(self, timeout: float) -> bytes | None:
        with self._changed:
            self._check_open()
            return self._value

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        with self._changed:
            self._check_open()
            if self._value != expected:
                return False
            self._value = value
            self._changed.notify_all()
            return True

    def wait_changed(self, known: bytes | None, timeout: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._value != known, timeout)
            self._check_open()
            return self._value

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("The store in memory is closed.")

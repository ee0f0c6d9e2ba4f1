"""Wakes a thread that waits in a selector."""

from __future__ import annotations

import contextlib
import io
import os
import threading


class Waker:
    """Register it in the selector to read: it is ready from :meth:`wake` to :meth:`clear`.

    Raises:
        OSError: if no descriptor is left.
    """

    def __init__(self) -> None:
        self._file = io.FileIO(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), "r+")
        self._lock = threading.Lock()  # its number may be another file's once it is closed

    def fileno(self) -> int:
        return self._file.fileno()

    def wake(self) -> None:
        """Never waits; may be called from any thread, also after :meth:`close`, which makes it do nothing."""
        with self._lock:
            if not self._file.closed:
                os.eventfd_write(self._file.fileno(), 1)

    def clear(self) -> None:
        """Called by the woken thread, before it looks what there is to do."""
        with contextlib.suppress(BlockingIOError):  # it was not woken
            os.eventfd_read(self._file.fileno())

    def close(self) -> None:
        """Called by the thread as it ends; a selector forgets a closed one, so the thread would not be woken."""
        with self._lock:
            self._file.close()

"""The file to which a node's events are written."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from elastic_launch.clock import Clock
from elastic_launch.events.incidents import Incidents
from elastic_launch.events.types import Event, event_name
from elastic_launch.system.private_files import make_private, open_private
from elastic_launch.system.whole_writes import write_whole
from elastic_launch.system.writer_thread import Writer


class JsonLines:
    """Appends events to a file as JSON lines.

    Args:
        path: the file; created with its directory at the first event.
        on_error: called once if the file cannot be written; the run continues.
        writer: writes in the background; without one, events are written synchronously.
        version: version of elastic-launch; the first line has it, for readers of another version.
        incidents: which incident an event belongs to; its line has the id.
    """

    def __init__(
        self,
        path: Path,
        clock: Clock,
        on_error: Callable[[OSError], None],
        writer: Writer | None = None,
        version: str = "",
        incidents: Incidents | None = None,
    ) -> None:
        self.path = path
        self._incidents = incidents
        self._clock = clock
        self._on_error: Callable[[OSError], None] | None = on_error
        self._writer = writer
        self._lock = threading.Lock()
        self._whole = False  # whether the file is known to end with a whole line
        self._about: dict[str, str | int] = {"version": version} if version else {}

    def emit(self, event: Event) -> None:
        about, self._about = self._about, {}
        incident = None if self._incidents is None else self._incidents.add(event)
        if incident is not None:
            about = {"incident": incident, **about}
        line = json.dumps(
            {
                "event": event_name(type(event)),
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "clock": round(self._clock.now(), 6),
                **about,
                **asdict(event),
            }
        )
        data = f"{line}\n".encode()
        if self._writer is None:
            self._append(data)
            return
        if self._writer.stuck:
            self._complain(TimeoutError(errno.ETIMEDOUT, "the file system does not answer"))
        self._writer.put(self._append, data)

    def _append(self, data: bytes) -> None:
        with self._lock:
            try:
                make_private(self.path.parent)
                descriptor = open_private(self.path, os.O_WRONLY | os.O_APPEND)
                try:
                    # A full disk may have taken half of a line, also of an earlier agent: this one must not extend it.
                    rest = b"\n" + data if not self._whole and self._is_torn(descriptor) else data
                    self._whole = False
                    write_whole(descriptor, rest)
                    self._whole = True
                finally:
                    os.close(descriptor)
            except OSError as error:
                self._complain(error)

    def _is_torn(self, descriptor: int) -> bool:
        if size := os.fstat(descriptor).st_size:
            with open(self.path, "rb") as file:
                file.seek(size - 1)
                return file.read(1) != b"\n"
        return False

    def _complain(self, error: OSError) -> None:
        on_error, self._on_error = self._on_error, None
        if on_error:
            on_error(error)

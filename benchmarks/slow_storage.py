"""Slow storage: fsspec's ``slow://`` is a local directory to which a checkpoint's tensors are written slowly.

Like any installed driver, it is found by an entry point, in all processes that have its directory on their path.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

__all__ = ["DELAY", "LOG", "RATE", "SlowFileSystem", "install"]

DELAY = "SLOW_STORAGE_SECONDS"
LOG = "SLOW_STORAGE_LOG"
RATE = "SLOW_STORAGE_RATE"
"""Bytes a second that are accepted from each writer; unlimited if it is not set."""
TENSORS = ".safetensors"


class _Metered(AbstractContextManager["_Metered"]):
    """A file that accepts a limited number of bytes a second."""

    def __init__(self, file: Any, rate: float) -> None:
        self._file, self._rate = file, rate
        self._began, self._written = time.monotonic(), 0

    def write(self, data: Any) -> int:
        self._written += len(data)
        written = int(self._file.write(data))
        time.sleep(max(0.0, self._began + self._written / self._rate - time.monotonic()))
        return written

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *raised: object) -> None:
        self.close()


class SlowFileSystem(LocalFileSystem):
    """Waits before it writes tensors, and logs when each write began and ended."""

    protocol = "slow"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, str):
            path = path.removeprefix("slow://")
        return LocalFileSystem._strip_protocol(path)

    def unstrip_protocol(self, name: str) -> str:
        return f"slow://{self._strip_protocol(name)}"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        began = time.monotonic()
        if "w" in mode and path.endswith(TENSORS):
            time.sleep(float(os.environ[DELAY]))
            with Path(os.environ[LOG]).open("a") as log:
                log.write(json.dumps({"began": began, "ended": time.monotonic()}) + "\n")
        file = super()._open(path, mode, **options)
        metered = RATE in os.environ and "w" in mode and path.endswith(TENSORS)
        return _Metered(file, float(os.environ[RATE])) if metered else file


def install(directory: Path, seconds: float, log: Path) -> dict[str, str]:
    """Install it as a distribution in a directory; return the environment in which it is found."""
    about = directory / "slow_storage-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-storage\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[fsspec.specs]\nslow = slow_storage:SlowFileSystem\n")
    (directory / "slow_storage.py").write_text(Path(__file__).read_text())
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, DELAY: f"{seconds:g}", LOG: str(log)}

"""Storage that takes its time: fsspec's ``slow://`` is a local directory into which a checkpoint's tensors go slowly.

It is found by an entry point, as any driver that is installed, in all processes that have its directory on their path.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

__all__ = ["DELAY", "LOG", "SlowFileSystem", "install"]

DELAY = "SLOW_STORAGE_SECONDS"
LOG = "SLOW_STORAGE_LOG"
TENSORS = ".safetensors"


class SlowFileSystem(LocalFileSystem):
    """Waits before it writes tensors, and notes from when to when that took."""

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
        return super()._open(path, mode, **options)


def install(directory: Path, seconds: float, log: Path) -> dict[str, str]:
    """Make an installed distribution of it in a directory; return the environment in which it is found."""
    about = directory / "slow_storage-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-storage\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[fsspec.specs]\nslow = slow_storage:SlowFileSystem\n")
    (directory / "slow_storage.py").write_text(Path(__file__).read_text())
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, DELAY: f"{seconds:g}", LOG: str(log)}

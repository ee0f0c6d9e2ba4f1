"""Headless Chromium, controlled through a pipe (https://chromedevtools.github.io/devtools-protocol)."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import SLOWNESS

FLAGS = (
    "--headless",
    "--hide-scrollbars",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
KEYS = {"Tab": 9, "ArrowDown": 40}


class Browser:
    """A page in a window.

    Attributes:
        errors: what went wrong in its scripts, and what its policy refused.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._pending = write, read, b""
        self._session: dict[str, str] = {}
        self._number = 0
        self.errors: list[str] = []

    def open(self, url: str) -> None:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Runtime", "Log", "Page"):
            self.ask(f"{domain}.enable")
        self.ask("Page.navigate", url=url)

    def ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60 * SLOWNESS
        while True:
            while b"\0" not in self._pending:
                ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
                assert ready, f"the browser does not answer {method}"
                data = os.read(self._read, 65536)
                assert data, "the browser has ended"
                self._pending += data
            line, _, self._pending = self._pending.partition(b"\0")
            found = json.loads(line)
            self._hear(found)
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]

    def _hear(self, found: dict[str, Any]) -> None:
        if found.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(found["params"]["exceptionDetails"]))
        if found.get("method") == "Log.entryAdded" and "Content Security" in found["params"]["entry"]["text"]:
            self.errors.append(found["params"]["entry"]["text"])

    def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self.ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def width(self, pixels: int) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=pixels, height=740, deviceScaleFactor=1, mobile=True)

    def colours(self, scheme: str) -> None:
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path, width: int) -> None:
        """Take a picture of the whole page in a window of this width and as high as the page."""
        size = {"width": width, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", height=740, **size)
        height = self.value("document.documentElement.scrollHeight")
        self.ask("Emulation.setDeviceMetricsOverride", height=height, **size)
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
        self.ask("Emulation.clearDeviceMetricsOverride")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium; it has ended afterwards."""
    chromium = shutil.which("chromium")
    assert chromium
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, contextlib.ExitStack() as stack:
        ends = []
        for _ in range(2):
            for end in os.pipe():
                # The browser has its ends as 3 and 4, so none of ours may have these numbers.
                ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
                os.close(end)
                stack.callback(os.close, ends[-1])
        theirs, write, read, back = ends
        shell = f'exec "$0" "$@" 3<&{theirs} 4>&{back} {theirs}<&- {back}>&-'
        command = ["bash", "-c", shell, chromium, *FLAGS, f"--user-data-dir={profile}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, pass_fds=(theirs, back), **quiet) as process:
            made = Browser(write, read)
            try:
                yield made
            finally:
                made._session = {}
                with contextlib.suppress(AssertionError, OSError):
                    made.ask("Browser.close")
                try:
                    process.wait(20 * SLOWNESS)
                except subprocess.TimeoutExpired:
                    process.kill()

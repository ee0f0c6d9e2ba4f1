"""Simulated metadata services of three clouds, written from their documented protocols, with faults.

``metadata_servers.py CLOUD DIRECTORY [HOST PORT]`` serves until it is killed. Its answers are in DIRECTORY/state.json,
read for each request: ``documents`` by path, ``fault`` (see :meth:`_Handler._faulty`), ``tokens`` (AWS: older ones are
no
longer valid). The requests that it received are in DIRECTORY/requests.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

__all__ = ["ADDRESS", "Service", "serving"]

ADDRESS = "169.254.169.254"

GCP = "/computeMetadata/v1/instance/"
AZURE = "/metadata/scheduledevents"
NAME = "/metadata/instance/compute/name"


class Service:
    """What a test configures on a server, and what the server recorded."""

    def __init__(self, directory: Path, base: str = f"http://{ADDRESS}") -> None:
        self.directory = directory
        self.base = base
        if not (directory / "state.json").exists():
            self._write({"documents": {}, "fault": "", "tokens": 1})

    @property
    def state(self) -> dict[str, Any]:
        return dict(json.loads((self.directory / "state.json").read_text()))

    def _write(self, state: dict[str, Any]) -> None:
        new = self.directory / "state.new"
        new.write_text(json.dumps(state))
        new.rename(self.directory / "state.json")

    def tell(self, path: str, body: object | None) -> None:
        """Set a document: text, or a JSON value; None removes it."""
        state = self.state
        state["documents"][path] = body if isinstance(body, str) else json.dumps(body)
        if body is None:
            del state["documents"][path]
        self._write(state)

    def break_by(self, fault: str) -> None:
        self._write(self.state | {"fault": fault})

    def expire_tokens(self) -> None:
        self._write(self.state | {"tokens": self.state["tokens"] + 1})

    def asked(self, method: str = "", path: str = "") -> list[dict[str, Any]]:
        """The requests received so far, by method and beginning of the path."""
        try:
            lines = (self.directory / "requests.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [x for x in found if x["method"].startswith(method) and x["path"].startswith(path)]


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self._serve()

    do_PUT = do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Discard the message."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.server.note({"method": self.command, "path": self.path, "headers": dict(self.headers), "body": body})
        with contextlib.suppress(OSError):
            if not self._faulty(self.server.service.state["fault"]):
                getattr(self, f"_{self.server.cloud}")()

    def _answer(self, status: int, body: str = "", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def _faulty(self, fault: str) -> bool:
        match fault.partition(":"):
            case "status", _, status:
                self._answer(int(status))
            case "garbage", _, _:
                self.wfile.write(b"\x00\xff\xfe not HTTP\r\n\r\n")
            case "page", _, _:  # a captive portal
                self._answer(200, "<html>please log in</html>", Metadata_Flavor="Google", ETag="x")
            case "huge", _, _:
                self._answer(200, "x" * 2_000_000)
            case "trickle", _, _:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not self.server.closing.wait(0.05):
                    self.wfile.write(b"x")
            case "silent", _, _:
                self.server.closing.wait()
            case _:
                return False
        return True

    def _document(self, path: str) -> str | None:
        return self.server.service.state["documents"].get(path)

    def _aws(self) -> None:
        token = f"token-{self.server.service.state['tokens']}"
        if self.command == "PUT":
            ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            valid = self.path == "/latest/api/token" and ttl.isdigit() and 1 <= int(ttl) <= 21600
            self._answer(200 if valid else 400, token if valid else "")
        elif self.headers.get("X-aws-ec2-metadata-token") != token:
            self._answer(401)
        else:
            found = self._document(self.path)
            self._answer(404 if found is None else 200, found or "")

    def _gcp(self) -> None:
        where = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(where.query).items()}
        if self.headers.get("Metadata-Flavor") != "Google" or self.headers.get("X-Forwarded-For"):
            self._answer(403)
            return
        until = time.monotonic() + float(query.get("timeout_sec", "1e9"))
        while True:
            found = self._document(where.path)
            etag = f"{hash(found) & 0xFFFFFFFF:x}"
            waits = query.get("wait_for_change") == "true" and query.get("last_etag") == etag
            if not waits or time.monotonic() > until or self.server.closing.wait(0.02):
                break
        self._answer(404 if found is None else 200, found or "", Metadata_Flavor="Google", ETag=etag)

    def _azure(self) -> None:
        where = urlsplit(self.path)
        version = parse_qs(where.query).get("api-version")
        if self.headers.get("Metadata", "").lower() != "true" or not version:
            self._answer(400)
        elif self.command == "POST":
            self._answer(200 if where.path == AZURE and version == ["2020-07-01"] else 400)
        else:
            found = self._document(where.path)
            self._answer(404 if found is None else 200, found or "")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, cloud: str, service: Service, where: tuple[str, int]) -> None:
        self.cloud, self.service = cloud, service
        self.closing = threading.Event()
        self._lock = threading.Lock()
        super().__init__(where, _Handler)

    def note(self, request: dict[str, Any]) -> None:
        with self._lock, (self.service.directory / "requests.jsonl").open("a") as file:
            file.write(json.dumps(request) + "\n")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have gone; some tests are about that."""


@contextlib.contextmanager
def serving(cloud: str, directory: Path) -> Iterator[Service]:
    """Run a server in this process, at a free port."""
    service = Service(directory)
    server = _Server(cloud, service, ("127.0.0.1", 0))
    service.base = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="metadata")
    thread.start()
    try:
        yield service
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    cloud, directory, host, port = [*sys.argv[1:], ADDRESS, "80"][:4]
    _Server(cloud, Service(Path(directory)), (host, int(port))).serve_forever()

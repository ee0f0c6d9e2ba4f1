"""A control store as another package has it: a small server, its client, and its description."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic_launch.config.backends import SERVICES_GROUP, StoreService
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.errors import StoreError
from elastic_launch.rendezvous.stores.control_store import ControlStore
from elastic_launch.system.findings import Finding, good


class Shelf(socketserver.ThreadingTCPServer):
    """Keeps a value for each run; each connection carries one request and its answer, as lines of JSON."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.values: dict[str, str] = {}
        self.changing = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        line = self.rfile.readline()
        if not line:
            return  # only a look whether anything listens
        request, shelf = json.loads(line), self.server
        assert isinstance(shelf, Shelf)
        with shelf.changing:
            found = shelf.values.get(request["run"])
            if "value" in request and found == request["expected"]:
                shelf.values[request["run"]] = request["value"]
        self.wfile.write(json.dumps({"found": found, "runs": len(shelf.values)}).encode())


class ShelfStore(ControlStore):
    """A client for one run's record."""

    def __init__(self, endpoint: Endpoint, run_id: str) -> None:
        self._where = endpoint
        self._run_id = run_id

    def load(self, timeout: float) -> bytes | None:
        return self._found({}, timeout)

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        was = None if expected is None else expected.decode()
        return self._found({"expected": was, "value": value.decode()}, timeout) == expected

    def close(self) -> None:
        return

    def _found(self, request: dict[str, str | None], timeout: float) -> bytes | None:
        found = asked(self._where, {"run": self._run_id, **request}, timeout)["found"]
        return None if found is None else str(found).encode()


def asked(where: Endpoint, request: dict[str, str | None], timeout: float) -> dict[str, object]:
    try:
        with socket.create_connection((where.host, where.port), timeout) as link:
            link.sendall(json.dumps(request).encode() + b"\n")
            return dict(json.loads(link.makefile("rb").read()))
    except (OSError, ValueError) as error:
        raise StoreError(f"The shelf at {where} does not answer: {error}.") from error


class ShelfService(StoreService):
    name = "shelf"
    port = 4711

    def open(self, endpoints: Sequence[Endpoint], run_id: str) -> ControlStore:
        return ShelfStore(endpoints[0], run_id)

    def removal(self, run_id: str) -> str:
        return f"clear {run_id} from the shelf"

    def probe(self, endpoint: Endpoint) -> Iterator[Finding]:
        yield good(f"the shelf at {endpoint} has the records of runs: {asked(endpoint, {'run': ''}, 5.0)['runs']}")


def installed(directory: Path) -> str:
    """Declare the entry point of a package with this module; return a PYTHONPATH with which it is found."""
    described = directory / "shelf-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[{SERVICES_GROUP}]\nshelf = {__name__}:ShelfService\n")
    return f"{directory}:{Path(__file__).parent}"

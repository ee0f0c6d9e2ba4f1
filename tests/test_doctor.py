"""``elasticctl doctor``: each problem is found on this host as it is, or made for the test, and has a remedy."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from etcd_servers import cluster
from harness import Job, free_port

from elastic_launch.cli import doctor, doctor_storage
from elastic_launch.cli.elasticctl import main
from elastic_launch.errors import ExitCode
from elastic_launch.rendezvous.admin import client
from elastic_launch.rendezvous.wire import addresses
from elastic_launch.snapshot.format.manifest import directory_name
from elastic_launch.system.findings import clock

IMPORTS = doctor._TORCH


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in doctor._INTERFACES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "_TORCH", "print('[null, null]')")  # the import takes seconds


def told(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, list[str]]:
    """The exit code, and a line for each finding with its remedy."""
    code = main(["doctor", *flags])
    return code, capsys.readouterr().out.replace("\n         -> ", " -> ").splitlines()


def problems(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("ok ")]


@contextlib.contextmanager
def answering(words: bytes) -> Iterator[int]:
    """A server that says something to each client, and then waits for it to hang up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer, contextlib.suppress(OSError):
                    peer.sendall(words)
                    while peer.recv(4096):
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_this_host_is_fit_to_run_the_tests(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TORCH", IMPORTS)
    code, lines = told(capsys)
    assert code == 0
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    assert any(f"torch can be imported; it has {cuda} and " in line for line in lines), lines
    assert lines[0].startswith("ok       elastic-launch ")
    assert not [line for line in lines if line.startswith("error")]


def test_every_problem_has_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines = told(capsys, "--rdzv-endpoint", "no.such.host.invalid:29400")
    assert problems(lines)
    assert all(" -> " in line for line in problems(lines))


def test_an_interface_that_does_not_exist_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo,nosuch0")
    code, lines = told(capsys)
    assert code == 1
    (found,) = [line for line in lines if "NCCL_SOCKET_IFNAME" in line]
    assert found.startswith("error    NCCL_SOCKET_IFNAME names nosuch0, and this host has no such interface.")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^nosuch0")
    assert told(capsys)[0] == 0, "it excludes interfaces"


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("NCCL_SOCKET_IFNAME", "l", ""),
        ("NCCL_SOCKET_IFNAME", "=lo", ""),
        ("NCCL_SOCKET_IFNAME", "=l", "l"),
        ("GLOO_SOCKET_IFNAME", "l", ""),
        ("GLOO_SOCKET_IFNAME", "=lo", "=lo"),
        ("GLOO_SOCKET_IFNAME", "^nosuch0", "^nosuch0"),
    ],
)
def test_only_nccl_has_marks_for_names_of_interfaces(variable: str, value: str, named: str) -> None:
    found = [finding.text for finding in doctor._interfaces({variable: value})]
    assert found == ([f"{variable} names {named}, and this host has no such interface."] if named else [])


def test_a_directory_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = told(capsys, "--log-dir", "/proc/logs")
    assert code == 1
    assert any(line.startswith("error    logs cannot be written to /proc/logs") for line in lines)


def test_a_torch_without_cuda_beside_gpus_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.os, "listdir", lambda path: ["nvidia0", "nvidia1", "nvidiactl", "null"])
    monkeypatch.setattr(doctor, "installed_torch", lambda: "2.13.0+cpu")
    code, lines = told(capsys)
    assert code == 1
    assert any("this host has 2 GPUs, but torch 2.13.0+cpu is a CPU build." in line for line in lines)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "raise ImportError('libcudart.so.12: no such file')",
            "error    torch cannot be imported: ImportError: libcuda",
        ),
        ("print('[]')", "error    torch cannot be imported: exit code 0"),
        ("import time; time.sleep(60)", "error    importing torch takes more than 0.5 s."),
        ('print(\'["12.8", "2.27.3"]\')', "ok       torch can be imported; it has CUDA 12.8 and NCCL 2.27.3; other"),
    ],
)
def test_what_torch_is_built_with_is_asked_in_a_process(
    script: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_TORCH", script)
    if "sleep" in script:
        monkeypatch.setattr(doctor, "IMPORT_PATIENCE", 0.5)
    code, lines = told(capsys)
    assert any(line.startswith(said) for line in lines), lines
    assert code == said.startswith("error")


def test_the_checkpoints_directory_is_examined(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    new = tmp_path / "not" / "yet"
    code, lines = told(capsys, "--checkpoint", str(new))
    assert code == 0
    assert any(
        line.startswith(f"ok       checkpoints can be written to {new}, which will be made, with ") for line in lines
    )
    assert not list(tmp_path.iterdir()), "the file is removed"
    code, lines = told(capsys, "--checkpoint", "/proc/checkpoints")
    assert code == 1
    assert any(line.startswith("error    checkpoints cannot be written to /proc/checkpoints") for line in lines)
    (tmp_path / directory_name(7, 1, "0123456789abcdef")).mkdir()
    (tmp_path / "file").touch()
    _, lines = told(capsys, "--checkpoint", str(tmp_path))
    assert f"ok       1 checkpoint can be seen in {tmp_path}" in lines
    code, lines = told(capsys, "--checkpoint", str(tmp_path / "file"))
    assert code == 1
    assert any("Not a directory" in line for line in problems(lines))
    stop = threading.Event()
    monkeypatch.setattr(doctor_storage, "_written", lambda directory: stop.wait(20))
    monkeypatch.setattr(doctor_storage, "PATIENCE", 0.1)
    code, lines = told(capsys, "--checkpoint", str(new))
    stop.set()
    assert code == 1
    assert any(line.startswith(f"error    {new} does not take a file within 0.1 s.") for line in lines)


def test_storage_that_is_full_or_read_only_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On a real file system where mounting is allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(disk)]
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0

    if shutil.which("mount") is None or not mount("size=64k"):
        disk.chmod(0o500)
        code, lines = told(capsys, "--checkpoint", str(disk))
        assert code == 1
        assert any(f"checkpoints cannot be written to {disk}: Permission denied" in line for line in lines)
        return
    try:
        with contextlib.suppress(OSError), open(disk / "large", "wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        code, lines = told(capsys, "--checkpoint", str(disk))
        assert code == 1
        expected = f"error    checkpoints cannot be written to {disk}: No space left on device. -> Free space there"
        assert any(line.startswith(expected) for line in lines), lines
        assert mount("remount,ro")
        code, lines = told(capsys, "--checkpoint", str(disk))
        assert code == 1
        expected = f"error    checkpoints cannot be written to {disk}: Read-only file system. -> Give the training"
        assert any(line.startswith(expected) for line in lines), lines
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=30)


def test_a_url_that_cannot_be_opened_has_a_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, lines = told(capsys, "--checkpoint", f"file://{tmp_path}/runs/a")
    assert (code, problems(lines)) == (0, [])
    for url, remedy in (
        ("gs://bucket/run", "pip install gcsfs"),
        ("nothing://bucket/run", "choose another URL or a directory"),
        ("memory://run", "Give a directory, or a URL of a store."),
        ("ftp://me:secret@host/run", "FSSPEC_FTP_PASSWORD"),
        (f"file://{tmp_path}/file/a", "Check that this host reaches the storage."),
    ):
        (tmp_path / "file").touch()
        code, lines = told(capsys, "--checkpoint", url)
        assert code == 1, url
        assert any(remedy in line for line in problems(lines)), (url, lines)
        assert "secret" not in "".join(lines)
    stop = threading.Event()
    monkeypatch.setattr(doctor_storage, "try_out", lambda url: stop.wait(20))
    monkeypatch.setattr(doctor_storage, "URL_PATIENCE", 0.1)
    code, lines = told(capsys, "--checkpoint", "s3://bucket/run")
    stop.set()
    assert code == 1
    assert any("s3://bucket/run does not answer within 0.1 s. -> Check the network" in line for line in lines)


def test_the_address_that_gloo_takes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the addresses of this host's name: another host's, a loopback one, and one that others reach."""
    found: list[str] = []

    def getaddrinfo(*args: object, **more: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in found]

    def said(given: str | None = None) -> str:
        (finding,) = doctor._gloo("n1", "10.0.0.5", given)
        assert bool(finding.remedy) == (finding.level is not doctor.Level.GOOD)
        return f"{finding.level.value} {finding.text}"

    monkeypatch.setattr(doctor.socket, "getaddrinfo", getaddrinfo)
    found = ["192.0.2.77"]
    assert said().startswith("warning this host has no address to which n1 resolves: gloo takes a loopback one.")
    found = ["192.0.2.77", "127.0.0.1", "127.0.0.2"]
    assert said().startswith("warning the first address of n1 is 127.0.0.1, which other hosts cannot reach")
    here = addresses.routable_address()
    if here != "127.0.0.1":  # of a host without a network
        found = [here]
        assert said() == f"ok gloo takes {here} on the interface {addresses.interface_of(here)}"
    assert said("eth7") == "ok gloo takes the interface eth7 (GLOO_SOCKET_IFNAME)"


@pytest.mark.parametrize(
    ("ahead", "unsure", "said"),
    [
        (0.1, 0.05, "ok       this host's clock is within 0.2 s"),
        (-3.0, 1.5, "ok       this host's clock is within 4.5 s"),
        (3.0, 0.5, "warning  this host's clock is 3.0 s ahead of the leader's"),
        (-90.0, 0.5, "warning  this host's clock is 90.0 s behind the leader's"),
    ],
)
def test_a_clock_is_off_only_if_it_surely_is(ahead: float, unsure: float, said: str) -> None:
    found = clock(ahead, unsure, "the leader's", ".", "Run an NTP client.")
    assert f"{found.level.value:<8} {found.text}".startswith(said)
    assert bool(found.remedy) == said.startswith("warning")


def test_etcds_health_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(tmp_path, options=("--quota-backend-bytes", "1000000")) as (member,):
        flags = ("--rdzv-backend", "etcd", "--rdzv-id", "x", "--rdzv-endpoint", member.address)
        _, lines = told(capsys, *flags)
        assert any(line.endswith(f"at {member.address} is healthy, without an alarm") for line in lines), lines
        member.fill()
        code, lines = told(capsys, *flags)
        assert code == 1
        (found,) = [line for line in lines if "has raised the alarm NOSPACE." in line]
        assert "etcdctl alarm disarm" in found


def test_what_is_not_etcd_does_not_tell_its_health(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(b"no HTTP\r\n\r\n") as port:
        flags = ("--rdzv-backend", "etcd", "--rdzv-id", "x", "--rdzv-endpoint", f"127.0.0.1:{port}")
        _, lines = told(capsys, *flags)
    assert any("does not tell its health: /version answers no HTTP (BadStatusLine)" in line for line in lines), lines


def test_a_slow_resolver_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SLOW", -1.0)
    _, lines = told(capsys)
    assert any("torch does it for each connection to its store" in line for line in problems(lines))


def test_a_free_port_of_this_host_will_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = told(capsys, "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    assert code == 0
    assert lines[-1].endswith("is this host and the port is free: the agent that starts here hosts the run")


def test_nothing_that_listens_on_another_host_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "try_listen", lambda endpoint: (None, False))
    code, lines = told(capsys, "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    assert code == 1
    assert "Connection refused" in lines[-1]


def test_a_host_that_drops_packets_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*args: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(doctor.socket, "create_connection", connect)
    code, lines = told(capsys, "--rdzv-endpoint", "127.0.0.1:29400")
    assert code == 1
    assert any("a firewall may drop packets" in line for line in lines)


def test_a_stranger_at_the_endpoint_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        code, lines = told(capsys, "--rdzv-endpoint", f"127.0.0.1:{port}")
        assert code == 1
        assert f"error    What listens at 127.0.0.1:{port} does not answer as a run's leader" in lines[-1]
        assert main(["status", "--rdzv-endpoint", f"127.0.0.1:{port}"]) == ExitCode.RENDEZVOUS
        assert "does not answer as a run's leader" in capsys.readouterr().err


def test_a_stranger_that_says_nothing_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TIMEOUT", 0.2)
    with answering(b"") as port:
        code, lines = told(capsys, "--rdzv-endpoint", f"127.0.0.1:{port}")
    assert code == 1
    assert f"error    The run's leader at 127.0.0.1:{port} was silent for 0.2 s." in lines[-1]


def test_etcd_that_does_not_run_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--rdzv-backend", "etcd", "--rdzv-id", "x", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    code, lines = told(capsys, *flags)
    assert code == 1
    assert any("Start etcd, or correct --rdzv-endpoint." in line for line in lines)


def test_a_run_that_can_be_joined_is_shown(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    agent = job.node("a", nnodes="1:2")
    job.world(1)
    code, lines = told(capsys, "--rdzv-endpoint", f"127.0.0.1:{job.port}")
    assert code == 0
    assert "its leader a answers in" in lines[-3]
    assert lines[-1].startswith("ok       this host's clock is within ")
    code, lines = told(capsys, "--rdzv-endpoint", f"127.0.0.1:{job.port}", "--rdzv-id", "other")
    assert code == 1
    assert "this leader leads another run, not 'other'" in lines[-1]
    job.finish()
    assert agent.wait() == 0


def test_the_interface_of_an_address_is_found() -> None:
    assert addresses.interface_of("127.0.0.1") == "", "other hosts cannot use it"
    assert addresses.interface_of("192.0.2.77") == ""
    assert addresses.interface_of("no address") == ""
    here = addresses.routable_address()
    known = [name for _, name in socket.if_nameindex()]
    assert here == "127.0.0.1" or addresses.interface_of(here) in known


@pytest.mark.parametrize(
    ("found", "usable"),
    [(["127.0.1.1"], False), (["10.0.0.5"], True), (["::1", "10.0.0.5"], True), ([], False)],
)
def test_a_name_is_usable_if_it_has_an_address_that_others_reach(
    found: list[str], usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(*args: object, **more: object) -> list[tuple[object, ...]]:
        if not found:
            raise socket.gaierror(-2, "unknown")
        return [(socket.AF_INET, 0, 0, "", (address, 0)) for address in found]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)
    assert addresses.has_usable_name(5.0) is usable


def test_a_resolver_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *args, **more: answer.wait(20) and [])
    assert not addresses.has_usable_name(0.01)
    answer.set()
    for thread in threading.enumerate():
        if thread.name == "bounded call":
            thread.join(20)


def test_a_run_on_this_host_is_examined_while_it_is_alive(capsys: pytest.CaptureFixture[str], job: Job) -> None:
    agent = job.launch("--standalone", "--rdzv-id", "r")
    job.world(1)
    _, lines = told(capsys, "--log-dir", str(job.logs))
    assert any("ok       run r has 1 node of 1:1; its leader" in line for line in lines), lines
    job.finish()
    assert agent.wait() == 0
    code, lines = told(capsys, "--log-dir", str(job.logs))
    assert code == 0
    assert lines[-1] == "ok       run r has ended with exit code 0: all workers finished"


def test_without_a_run_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = told(capsys)
    assert code == 0
    assert lines[-1].startswith("ok       There is no run in ")

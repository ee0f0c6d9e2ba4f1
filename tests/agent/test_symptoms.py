"""Consequences of another rank's failure are distinguished from a rank's own failure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import SCRIPTS, SLOWNESS, free_port

from elastic_agents.workers.failures import raised_in
from elastic_launch.symptoms import BROKEN_CONNECTION, TIME_OUT, symptom_in, symptom_of_abort

PAIR = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
BUFFER = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, "

# As torch 2.13 prints them; the slow test below makes real processes print most of them again.
SAID = [
    (f"RuntimeError: {PAIR}Connection closed by peer [127.0.0.1]:55948. This is typically caused by a remote worker "
     "crashing.", BROKEN_CONNECTION),
    (f"RuntimeError: {PAIR}Read error [127.0.0.1]:26249: Connection reset by peer.", BROKEN_CONNECTION),
    (f"RuntimeError: {PAIR}Write error [127.0.0.1]:26249: Broken pipe", BROKEN_CONNECTION),
    ("RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error", BROKEN_CONNECTION),
    (f"RuntimeError: {BUFFER}Timed out waiting 3000ms for recv operation to complete", TIME_OUT),
    ("RuntimeError: Application timeout caused pair closure", TIME_OUT),
    ("RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms", TIME_OUT),
    ("torch.distributed.DistStoreError: wait timeout after 3000ms, keys: /nokey", TIME_OUT),
    ("torch.distributed.DistStoreError: Timed out after 4 seconds waiting for clients. 1/2 clients joined.", TIME_OUT),
    ("torch.distributed.DistNetworkError: The client socket has timed out after 3000ms while trying to connect to "
     "(127.0.0.1, 35082).", TIME_OUT),
    ("torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote "
     "server shutdown or crash?", BROKEN_CONNECTION),
    ("DistNetworkError: Connection reset by peer", BROKEN_CONNECTION),
    (f"{NCCL}remote process exited or there was a network error, NCCL version 2.27.5", BROKEN_CONNECTION),
    ("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.", BROKEN_CONNECTION),
    ("ConnectionResetError: [Errno 104] Connection reset by peer", BROKEN_CONNECTION),
    ("BrokenPipeError: [Errno 32] Broken pipe", BROKEN_CONNECTION),
    ("requests.exceptions.ConnectionError: HTTPConnectionPool(host='x', port=80)", BROKEN_CONNECTION),
    ("TimeoutError", TIME_OUT),
]  # fmt: skip

OWN = [
    "ValueError: the connection was closed by peer, Connection closed by peer",
    "RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0",
    "RuntimeError: timed out",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "RuntimeError: DataLoader worker (pid 42) is killed by signal: Killed.",
    f"{NCCL}unhandled cuda error, NCCL version 2.27.5",
    "MemoryError",
    "",
]


@pytest.mark.parametrize(("error", "symptom"), SAID)
def test_a_symptom_is_known_by_the_type_and_the_message(error: str, symptom: str) -> None:
    assert symptom_in(error) == symptom


@pytest.mark.parametrize("error", OWN)
def test_other_errors_are_a_ranks_own(error: str) -> None:
    assert symptom_in(error) == ""


def test_nccls_watchdog_aborts_the_process() -> None:
    said = (
        "[rank1]:[E1121 10:00:00.1 ProcessGroupNCCL.cpp:684] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=2, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'"
    )
    assert symptom_of_abort(said) == TIME_OUT
    assert symptom_of_abort("terminate called after throwing an instance of 'std::bad_alloc'") == ""


CASES = {
    "another rank is killed": BROKEN_CONNECTION,
    "another rank exits": BROKEN_CONNECTION,
    "another rank hangs": TIME_OUT,
    "the store has no such key": TIME_OUT,
    "the store is gone": BROKEN_CONNECTION,
    "there is no store": TIME_OUT,
    "another rank does not come": TIME_OUT,
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with what rank 1 prints in each case."""
    directory = tmp_path_factory.mktemp("said")
    cases = [f"{case}={free_port()}" for case in CASES]
    command = [sys.executable, str(SCRIPTS / "broken_links.py"), str(directory), *cases]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            assert process.wait(60 * SLOWNESS) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return directory


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_what_torch_says(case: str, said: Path) -> None:
    """A torch that uses other words must not go unnoticed."""
    lines = (said / case).read_text().splitlines()
    index = raised_in(lines, stopped=False)
    assert index is not None, lines
    assert symptom_in(lines[index].removeprefix("[rank1]: ")) == CASES[case], lines[index]

"""``--node-check``: a short test of the node's own hardware before it joins a run.

A node with a faulty device or disk would break every round that it takes part in. The test runs in a process of its
own, since a faulty device may hang or end it.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from elastic_agents.helpers import helper_command, helper_environment
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import ElasticLaunchError, ExitCode
from elastic_launch.events.types import NodeChecked

LIMIT = 60.0
"""Seconds that the test may take; it takes about three."""

SIZE = 1024
"""Rows and columns of the matrices that are multiplied."""

TIMES = 8
"""How often each device multiplies them; all products must be equal to the bit."""

MEMORY = 64 * 2**20
"""Bytes of memory that are written and read on each device."""

DISK = 8 * 2**20
"""Bytes that are written to the log directory and read again."""


class NodeCheckError(ElasticLaunchError):
    """The node has failed the test of ``--node-check``; it joins no run."""

    exit_code = ExitCode.STARTUP_FAILURE


class _Mismatch(Exception):
    """What a device or disk did wrong."""


def check_node(config: LaunchConfig) -> NodeChecked:
    """Test this node: memory and arithmetic of the CPU and each GPU, and the disk with the run's logs.

    Raises:
        NodeCheckError: if a result is wrong, or the test fails or hangs.
    """
    code = "from elastic_agents.probes.node_check import probe; probe(sys.argv[1])"
    command = helper_command(code, str(config.log_dir))
    hint = "Repair or replace the node, or start it without --node-check."
    try:
        done = subprocess.run(command, env=helper_environment(), capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise NodeCheckError(f"--node-check: the test has not ended within {LIMIT:g} s.", hint) from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise NodeCheckError(f"--node-check: {reason}.", hint)
    return NodeChecked(**json.loads(lines[-1]))


def probe(directory: str) -> None:
    """Test this host, and print the figures as JSON; runs in a process of its own.

    Raises:
        SystemExit: with the reason, if a result is wrong.
    """
    import torch

    torch.manual_seed(0)
    devices = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    try:
        memory, compute = [_memory(device) for device in devices], [_compute(device) for device in devices]
        disk = _disk(directory)
    except _Mismatch as error:
        raise SystemExit(str(error)) from None
    found = NodeChecked(
        len(devices) - 1,
        memory_gb_s=round(2 * MEMORY / max(memory) / 1e9, 2),
        compute_gflop_s=round(2 * SIZE**3 / max(compute) / 1e9, 1),
        disk_mb_s=round(2 * DISK / disk / 1e6, 1),
    )
    print(json.dumps(asdict(found)))


def _memory(device: str) -> float:
    """Copy a pattern and compare the copy; return the seconds."""
    import torch

    pattern = torch.arange(MEMORY // 8, dtype=torch.int64, device=device) * 0x9E3779B1
    if device != "cpu":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    if not torch.equal(pattern.clone(), pattern):
        raise _Mismatch(f"memory of {device} does not keep what is written to it")
    return time.perf_counter() - began


def _compute(device: str) -> float:
    """Multiply matrices, and compare the product with itself and with one of higher precision; return the seconds."""
    import torch

    left, right = (torch.rand(SIZE, SIZE, device=device) for _ in range(2))
    first, times = left @ right, []
    for _ in range(TIMES):
        began = time.perf_counter()
        product = left @ right
        different = not torch.equal(product, first)  # waits for the device
        times.append(time.perf_counter() - began)
        if different:
            raise _Mismatch(f"{device} computes different products of the same matrices")
    if not torch.allclose(first.double(), left.double() @ right.double(), rtol=1e-2):
        raise _Mismatch(f"{device} computes wrong products")
    return sorted(times)[TIMES // 2]


def _disk(directory: str) -> float:
    """Write a file to the device, and compare what is read; return the seconds."""
    data, began = os.urandom(DISK), time.perf_counter()
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            if file.read() != data:
                raise _Mismatch(f"a file in {directory} does not keep what is written to it")
    except OSError as error:
        raise _Mismatch(f"{directory} cannot be written: {error}") from None
    return time.perf_counter() - began

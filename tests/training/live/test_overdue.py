"""A process whose collective outlasts its timeout ends, with gloo's recorder in place of NCCL's, which has its form."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from harness import SLOWNESS, free_port

SCRIPT = """
import os, time, torch, torch.distributed as dist
from elastic_launch.training.live.overdue import end_if_overdue

dist.init_process_group("gloo")
end_if_overdue(1.0, torch._C._distributed_c10d._dump_fr_trace_json, lambda: False)
for _ in range(30):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
if os.environ["RANK"] == "1":
    input()
dist.all_reduce(torch.ones(1))
"""


def test_a_process_ends_that_waits_too_long_in_a_collective_and_none_that_goes_on() -> None:
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    waits, absent = (
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**env, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    )
    with waits, absent:
        try:
            _, told = waits.communicate(timeout=40 * SLOWNESS)
            assert waits.returncode == -signal.SIGABRT, told
            assert "Watchdog caught collective operation timeout: number 31 of process group 0 has not" in told
            assert absent.poll() is None
        finally:
            waits.kill()
            absent.kill()

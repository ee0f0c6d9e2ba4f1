"""Rank 1 of two fails in a way that follows from rank 0, and prints its exception as Python does.

``broken_links.py CASE RANK PORT``
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
from torch import distributed as dist

case, rank, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
SHORT = timedelta(seconds=2)


def store(timeout: timedelta = SHORT) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timeout, wait_for_workers=False)


def wait_for_the_end() -> None:
    time.sleep(120)


match case:
    case "the store has no such key":
        own = store()
        if rank == 1:
            own.get("nosuchkey")
        wait_for_the_end()
    case "the store is gone":
        own = store(timedelta(seconds=60))
        if rank == 0:
            own.wait(["connected"])
            os._exit(0)
        own.set("connected", "1")
        own.get("nosuchkey")
    case "there is no store":
        if rank == 1:
            store()
    case "another rank does not come":
        if rank == 1:
            os.environ["RANK"] = "0"
            dist.init_process_group("gloo", timeout=SHORT)
    case _:
        dist.init_process_group("gloo")  # with time for both to begin
        data = torch.ones(4)
        dist.all_reduce(data)
        group = dist.new_group(timeout=SHORT) if "hangs" in case else None
        if case == "another rank is killed" and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        elif case == "another rank exits" and rank == 0:
            os._exit(3)
        elif case == "another rank hangs" and rank == 0:
            wait_for_the_end()
        dist.all_reduce(data, group=group)

"""In each case, rank 1 of two fails in a way that follows from rank 0, and prints its exception as Python does.

``broken_links.py DIRECTORY CASE=PORT...``: the stderr of each rank 1 goes to the file in DIRECTORY that is named CASE.
All cases run side by side in forked processes, so that torch is imported once.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
from torch import distributed as dist

SHORT = timedelta(seconds=2)


def wait_for_the_end() -> None:
    time.sleep(120)


def run(case: str, rank: int, port: int) -> None:
    def store(timeout: timedelta = SHORT) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timeout, wait_for_workers=False)

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
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


def start(case: str, rank: int, port: int, output: str) -> int:
    """Fork a rank; return its pid."""
    if pid := os.fork():
        return pid
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
    try:
        run(case, rank, port)
    except RuntimeError:
        sys.excepthook(*sys.exc_info())
    sys.stderr.flush()
    os._exit(1)


def main() -> None:
    directory, *cases = sys.argv[1:]
    first, second = set(), set()
    for case, port in (text.split("=") for text in cases):
        first.add(start(case, 0, int(port), os.devnull))
        second.add(start(case, 1, int(port), f"{directory}/{case}"))
    while second:
        ended, _ = os.wait()
        first.discard(ended)
        second.discard(ended)
    for pid in first:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()

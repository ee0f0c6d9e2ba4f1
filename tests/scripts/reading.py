"""A worker that restores a model from a directory, and prints how many bytes it has read from files meanwhile.

Arguments: the directory, the model's width, and the fault of the reading worker in its first start: ``kill``,
``hang``, or ``hide`` (others cannot open what it has read).
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import elastic_launch as el
from elastic_launch.snapshot import stall
from elastic_launch.snapshot.storage.shared_copies import Copies


def asked() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])  # rchar: what reading calls returned


def kill(copies: Copies, source: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(copies: Copies, source: int) -> None:
    time.sleep(1000)


def hidden(copies: Copies) -> dict[str, object]:
    return {**told(copies), "pid": 2**22 + 1}  # no process has it


with el.session() as run:
    befalls = sys.argv[3] if len(sys.argv) > 3 and not run.restarts else ""
    stall.STALL = 3.0 if befalls else stall.STALL
    told = Copies.told
    if befalls == "hide":
        Copies.told = hidden  # type: ignore[method-assign]
    elif befalls:
        Copies.take = {"kill": kill, "hang": hang}[befalls]  # type: ignore[assignment]
    torch.manual_seed(run.rank)
    model = nn.Linear(1000, int(sys.argv[2]))
    run.register("model", model)
    before = asked()
    step = run.resume(el.Checkpoint(sys.argv[1], every=1))
    print(f"rank {run.rank} asked for {asked() - before} bytes, weights {el.weights_sha256(model)[:16]}", flush=True)
    for number in range(step, 2):
        run.boundary(number + 1, end=number == 1)

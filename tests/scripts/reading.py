"""A worker that restores a model from a directory, and prints how many bytes of tensors it has read meanwhile.

Arguments: the directory, the model's width, and what befalls the reading worker in its first start: ``kill``, ``hang``,
or ``slow`` (the read takes longer than the workers wait for each other).
"""

import os
import signal
import sys
import time
from collections.abc import Iterator

import torch
from torch import nn

import elastic_launch as el
from elastic_launch.snapshot import stall
from elastic_launch.snapshot.storage import directory

asked = 0
read_chunks = directory.read_chunks


def followed(descriptor: int) -> Iterator[memoryview]:
    global asked
    if befalls == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if befalls == "hang":
        time.sleep(1000)
    for _ in range(14 if befalls == "slow" else 0):
        time.sleep(0.5)
        stall.advanced()
    for chunk in read_chunks(descriptor):
        asked += len(chunk)
        yield chunk


befalls = sys.argv[3] if len(sys.argv) > 3 and not int(os.environ["TORCHELASTIC_RESTART_COUNT"]) else ""
with el.session(timeout=5.0 if befalls == "slow" else None) as run:
    stall.STALL = 3.0 if befalls == "hang" else stall.STALL
    stall.WARN = 1.0 if befalls == "slow" else stall.WARN
    directory.read_chunks = followed
    torch.manual_seed(run.rank)
    model = nn.Linear(1000, int(sys.argv[2]))
    run.register("model", model)
    step = run.resume(el.Checkpoint(sys.argv[1], every=1))
    print(f"rank {run.rank} asked for {asked} bytes, weights {el.weights_sha256(model)[:16]}", flush=True)
    for number in range(step, 2):
        run.boundary(number + 1, end=number == 1)

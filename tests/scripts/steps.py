"""A worker that simulates training: collectives, steps and checkpoints, each recorded with this host's clock.

Every step is one all-reduce with gloo, then a line in ``steps.jsonl``. Rank 0 saves after every ``EVERY`` steps, in
many small writes that take about half a second together, and commits by a rename. All go on from the newest
checkpoint, and end when there is a file ``finish``.
"""

import json
import os
import pathlib
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

EVERY = 5
CHUNKS = 50

directory = pathlib.Path(sys.argv[1])
number, rank = int(os.environ["ELASTIC_LAUNCH_ROUND"]), int(os.environ["RANK"])
node = os.environ["NODE"]


def note(file, **what):
    line = {"clock": time.clock_gettime(time.CLOCK_BOOTTIME), "node": node, "round": number, "rank": rank, **what}
    with (directory / file).open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def save(step):
    path = directory / f"checkpoint-{number}-{step}"
    part = path.with_suffix(f".{node}.part")
    with part.open("w") as file:
        for _ in range(CHUNKS):  # a process that was stopped in between has to do the rest
            file.write("x" * 100)
            file.flush()
            time.sleep(0.01)
    part.rename(path)
    note("commits.jsonl", step=step)


def newest():
    found = [path.name.split("-")[1:] for path in directory.glob("checkpoint-*-*") if path.suffix != ".part"]
    return max(((int(r), int(s)) for r, s in found), default=(0, 0))[1]


with (directory / "started.jsonl").open("a") as file:
    env = {k: v for k, v in os.environ.items() if k.isupper()}
    file.write(json.dumps({"pid": os.getpid(), "children": [], "argv": sys.argv[1:], "env": env}) + "\n")
dist.init_process_group("gloo", timeout=timedelta(seconds=100))
start = torch.tensor([newest() if rank == 0 else 0])
dist.broadcast(start, 0)
step = int(start)
while True:
    step += 1
    time.sleep(0.03)
    told = torch.tensor([1.0, float((directory / "finish").exists())])
    dist.all_reduce(told)
    assert told[0] == dist.get_world_size()
    note("steps.jsonl", step=step, world=dist.get_world_size())
    if told[1] > 0:
        break
    if rank == 0 and step % EVERY == 0:
        save(step)
dist.destroy_process_group()

"""Print torch's settings before, in and after a session; with ``hang`` one rank never reaches a collective."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import elastic_launch as el


def say(when):
    deterministic = torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if os.environ.get("RANK", "0") == "0":
        print(
            f"{when}: {torch.get_num_threads()} threads, deterministic {deterministic}, benchmark {benchmark}",
            flush=True,
        )


torch.set_num_threads(3)
torch.backends.cudnn.benchmark = True
with el.session(timeout=timedelta(seconds=2)) as run:
    say("in the session")
    torch.manual_seed(0)
    for exact in (False, True):
        model = nn.Linear(4, 4)
        loader = el.ElasticLoader(torch.randn(8, 4), el.GlobalBatch(8, 4))
        for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), 0.1), until="1ba", exact=exact):
            say(f"exact={exact}")
            for x in step:
                step.backward(step.model(x).square().mean())
            step.update()
    if "hang" in sys.argv:
        if run.rank:
            time.sleep(60)
        dist.barrier()
say("after it")

"""Saves to a relative directory, and changes its working directory: ``changing_directory.py ELSEWHERE STEPS``.

In its first round it ends with an error once a checkpoint has been written. Where it resumes is noted beside the
directory in which it starts.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import elastic_launch as el

elsewhere, steps, here = Path(sys.argv[1]), int(sys.argv[2]), Path.cwd()
with el.session() as run:
    model = nn.Linear(8, 8)
    run.register("model", model)
    checkpoint = el.Checkpoint("checkpoints", every=4)
    os.chdir(elsewhere)
    step = run.resume(checkpoint)
    with (here.parent / "resumed.txt").open("a") as file:
        first = file.tell() == 0
        file.write(f"{step}\n")
    while step < steps:
        with torch.no_grad():
            model.weight += 1
        step += 1
        os.chdir(elsewhere if step % 2 else "/")
        if run.boundary(step, end=step == steps):
            break
        if first:
            time.sleep(0.1)
            if list(here.glob("checkpoints/step-*/manifest.json")):
                sys.exit("the first round ends")

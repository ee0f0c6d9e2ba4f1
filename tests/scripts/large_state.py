"""Train with a state of a given size: ``large_state.py DIRECTORY MIB STEPS [CHECKPOINTS]``.

In the first process, the first step waits for a file ``go`` in the directory, and the fifth for a checkpoint. The last
line names the step from which the last process went on.
"""

import sys
import time
from pathlib import Path

import torch

import elastic_launch as el

directory, mib, steps = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
saving = el.Checkpoint(sys.argv[4], every=2, keep=9) if sys.argv[4:] else None
with el.session(threads=1) as run:
    # Weights and momentum, half of the state each.
    model = torch.nn.Linear(mib * 2**20 // 8 // 1024, 1024, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)
    data = torch.utils.data.TensorDataset(torch.ones(4, model.in_features))
    loader = el.ElasticLoader(data, el.GlobalBatch(1, micro=1))
    for step in run.steps(loader, model, optimizer, until=f"{steps}ba", checkpoint=saving):
        for (x,) in step:
            step.backward(model(x).mean())
        if not run.restarts and not (directory / "go").exists():
            (directory / "waiting").touch()
            while not (directory / "go").exists():
                time.sleep(0.02)
        while saving is not None and step.number == 5 and not any(Path(sys.argv[4]).glob("step-*")):
            time.sleep(0.02)
        step.update()
    print(f"went on from step {run.resumed_step}", flush=True)

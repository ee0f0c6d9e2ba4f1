"""State of kinds that only NumPy and the standard library have; with ``bad`` one that no checkpoint holds."""

import sys
from collections import defaultdict, namedtuple

import numpy as np
import torch
from torch import nn

import elastic_launch as el

Best = namedtuple("Best", "step loss")


class Extra:
    def __init__(self):
        self.kept = {"best": Best(0, np.float64(9.0)), "seen": defaultdict(list), "names": {"a"}}

    def state_dict(self):
        return {"kept": self.kept, "random": np.random.get_state()}

    def load_state_dict(self, state):
        self.kept = state["kept"]
        np.random.set_state(state["random"])


with el.session() as run:
    extra, model = Extra(), nn.Linear(4, 4)
    lr = np.longdouble(0.1) if "bad" in sys.argv else np.float64(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    run.register("extra", extra)
    loader = el.ElasticLoader(torch.randn(64, 4), el.GlobalBatch(16, 4))
    for step in run.steps(loader, model, optimizer, until="20ba", checkpoint=el.Checkpoint(sys.argv[1], every=5)):
        for x in step:
            step.backward(step.model(x).square().mean())
        step.update()
        extra.kept["best"] = Best(step.number, np.float64(step.loss))
        extra.kept["seen"][step.number % 2].append(step.number)
    if run.rank == 0:
        seen = {key: len(value) for key, value in extra.kept["seen"].items()}
        print("restarts", run.restarts, type(extra.kept["best"]).__name__, type(extra.kept["best"].loss), seen)

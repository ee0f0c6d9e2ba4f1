"""newcomer.py DIRECTORY: trains until ``DIRECTORY/over`` exists; the variable CANNOT says what this node cannot do."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import elastic_launch as el

directory, CANNOT = Path(sys.argv[1]), os.environ.get("CANNOT", "")
if CANNOT == "import":
    import module_that_this_node_lacks  # type: ignore[import-not-found]  # noqa: F401


class Restored:
    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if CANNOT == "restore":
            raise KeyError("value")


with el.session() as run:
    if CANNOT.endswith("late"):
        assert run.rank  # so that it has its place before its arguments are known
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.register("restored", Restored())
    data = TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)
    if "content" in CANNOT:
        data.tensors[1][63] = 7  # a sample of the same kind, with another label
    loader = el.ElasticLoader(data, el.GlobalBatch(4, 2), seed=8 if "seed" in CANNOT else 7)
    for step in run.steps(loader, model, optimizer, until="100000ba"):
        for x, y in step:
            if CANNOT == "step":
                raise ValueError("this node cannot do a step")
            step.backward(F.cross_entropy(step.model(x), y))
        step.update()
        (directory / "trained").touch()
        if (directory / "over").exists():
            run.request_stop()
        time.sleep(0.02)
    (directory / f"ended-{run.rank}").write_text(f"{step.number} {run.restarts}")

"""The ends of two epochs of a dataset of 10^9 computed samples; each rank writes how long its start took."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

import elastic_launch as el


class Virtual(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), index % 97, torch.rand(()).item()])


def main() -> None:
    with el.session() as run:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
        before, began, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic(), time.process_time()
        loader = el.ElasticLoader(Virtual(), el.GlobalBatch(64, micro=16), seed=1)
        took: list[float] = []
        indices: list[int] = []
        for step in run.steps(loader, model, optimizer, until="4ba", exact=True):
            for sample in step:
                took = took or [time.monotonic() - began, time.process_time() - cpu]
                indices += sample[:, 0].long().tolist()
                step.backward(step.model(sample).mean())
            step.update()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        result = {"seconds": took[0], "cpu": took[1], "MiB": grown / 1024, "indices": indices}
        (Path(sys.argv[1]) / f"rank-{run.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

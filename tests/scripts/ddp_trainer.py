"""Trains a layer with DDP as PyTorch's own tutorial does: the model's owner is freed after the process group.

The argument says how it ends: ``destroy`` (the group, as the last line), ``leave`` (it is left as it is), ``exit``
(code 3 by ``sys.exit``), ``raise`` (an exception), ``often`` (as ``destroy``, many times, each in a group of its own).
"""

from __future__ import annotations

import os
import sys

import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup, destroy_process_group, init_process_group, new_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, steps: int, group: ProcessGroup | None = None) -> None:
        self.model = DDP(torch.nn.Linear(20, 1), process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        data = TensorDataset(torch.rand(32 * steps, 20), torch.rand(32 * steps, 1))
        self.batches = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))

    def train(self) -> None:
        for source, targets in self.batches:
            self.optimizer.zero_grad()
            F.mse_loss(self.model(source), targets).backward()
            self.optimizer.step()


def main(ending: str, steps: int) -> None:
    init_process_group("gloo")
    trainer = Trainer(steps)
    trainer.train()
    if ending == "raise":
        raise RuntimeError("after the training")
    if ending == "exit":
        sys.exit(3)
    if ending != "leave":
        destroy_process_group()


def in_a_group_of_its_own() -> None:
    group = new_group()
    trainer = Trainer(4, group)
    trainer.train()
    destroy_process_group(group)


def held() -> tuple[int, int]:
    """This process' threads and descriptors."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    if sys.argv[1] == "often":
        init_process_group("gloo")
        in_a_group_of_its_own()
        before = held()
        for _ in range(30):
            in_a_group_of_its_own()
        assert held() == before, f"groups are left: {before}, then {held()}"
    else:
        main(sys.argv[1], 64)

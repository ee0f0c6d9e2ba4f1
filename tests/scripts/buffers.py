"""A worker whose model has buffers of every kind; prints their hash and their values on each rank."""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastic_launch as el

RULES = {"queue": "last", "seen": "sum", "lowest": "min", "highest": "max", "place": "last", "loss_total": "sum"}


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.register_buffer("queue", torch.zeros(8, 3))  # a MoCo queue, and the next position to write
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))  # samples
        self.register_buffer("lowest", torch.full((3,), float("inf")))
        self.register_buffer("highest", torch.full((3,), float("-inf"), dtype=torch.bfloat16))
        self.register_buffer("loss_total", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        places = (int(self.place) + torch.arange(len(x))) % len(self.queue)
        self.queue[places] = x
        self.place.copy_((self.place + len(x)) % len(self.queue))
        self.seen += len(x)
        self.lowest = torch.minimum(self.lowest, x.amin(0))
        self.highest.copy_(torch.maximum(self.highest, x.amax(0)))
        self.loss_total += x.sum() / 3
        return self.layers(x + self.queue.mean(0) + self.seen * 1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--no-rules", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    with el.session() as run:
        model = Stateful()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = el.ElasticLoader(data, el.GlobalBatch(12, micro=2), seed=0)
        rules = None if arguments.no_rules else RULES
        until = f"{arguments.steps}ba"
        for step in run.steps(loader, model, optimizer, until=until, exact=arguments.exact, buffers=rules):
            for x, y in step:
                step.backward(nn.functional.mse_loss(step.model(x), y))
            step.update()
        values = f"seen {int(model.seen)} place {int(model.place)} lowest {model.lowest.tolist()}"
        print(f"rank {run.rank} hash {el.weights_sha256(model)[:16]} {values}", flush=True)


if __name__ == "__main__":
    main()

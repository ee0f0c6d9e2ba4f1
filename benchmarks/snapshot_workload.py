"""A model of millions of parameters, trained with this project's library, that logs when its steps end.

In addition to what noting() writes, each line has the step after which the last in-memory snapshot was taken.
"""

from __future__ import annotations

import time

import torch
from workload import SEED, noting, parser

import elastic_launch as el

LAYERS = 6
SAMPLES = 512


def network(width: int) -> torch.nn.Module:
    torch.manual_seed(SEED)
    layers: list[torch.nn.Module] = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def main() -> None:
    options = parser()
    options.add_argument("--width", type=int, default=2048, help=f"of {LAYERS} square layers")
    options.add_argument("--global-batch", type=int, default=64)
    options.add_argument("--micro-batch", type=int, default=8)
    options.add_argument("--no-snapshots", action="store_true", help="take none in memory")
    options.add_argument("--url", default="", help="where durable checkpoints go")
    options.add_argument("--every", type=int, default=50, help="steps between durable checkpoints")
    args = options.parse_args()
    with noting(args.file) as note, el.session() as run:
        model = network(args.width)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        inputs = torch.randn(SAMPLES, args.width)
        data = torch.utils.data.TensorDataset(inputs, inputs.flip(1))
        loader = el.ElasticLoader(data, el.GlobalBatch(args.global_batch, micro=args.micro_batch), seed=SEED)
        checkpoint = el.Checkpoint(args.url, every=args.every, keep=1) if args.url else None
        # Only this benchmark needs to disable snapshots, or to know when they are taken.
        memory = run._engine.saver._memory
        memory.writes = memory.writes and not args.no_snapshots
        for step in run.steps(loader, model, optimizer, checkpoint=checkpoint, until=f"{args.steps}ba"):
            for sample, target in step:
                step.backward(torch.nn.functional.mse_loss(step.model(sample), target))
            step.update()
            note(step.number, snapshot=memory.rhythm.last)
            time.sleep(args.sleep)


if __name__ == "__main__":
    main()

"""The same training as workload.py, by this project's library: what it notes is the same, what it loses is less."""

import argparse
import time
from pathlib import Path

from workload import WIDTH, noting


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a layer for as long as a benchmark needs.")
    parser.add_argument("--file", type=Path, required=True, help="where the lines go")
    parser.add_argument("--steps", type=int, default=3000, help="after which it ends by itself")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds to sleep after each step")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with noting(args.file) as note:
        note(0)
        # Not at the top: these take seconds, and step 0 has to be noted before.
        import torch

        import elastic_launch as el

        with el.session() as run:
            model = torch.nn.Linear(WIDTH, WIDTH)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            loader = el.ElasticLoader(
                torch.utils.data.TensorDataset(torch.ones(64, WIDTH)), el.GlobalBatch(16, micro=4)
            )
            for step in run.steps(loader, model, optimizer, until=f"{args.steps}ba"):
                for (sample,) in step:
                    step.backward(step.model(sample).square().mean())
                step.update()
                note(step.number)
                time.sleep(args.sleep)


if __name__ == "__main__":
    main()

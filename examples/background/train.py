"""Evaluate checkpoints in programs of their own, and serve the results while the training runs.

    elastic-launch --standalone --nproc 2 examples/background/train.py --checkpoint runs/background --every 40

Each checkpoint is evaluated by this script with --evaluate, as a single process beside the workers. A server on each
node shows the results: http://localhost:8000. When the training ends, the last evaluations are waited for, and the
server is ended. What a worker that is killed has started ends with it; the worker in its place starts a server again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastic_launch as el


def data() -> tuple[Tensor, Tensor]:
    images, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    return images.float().div(16), labels


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Beside(el.Callback):
    """Starts what runs beside the training."""

    def __init__(self, run: el.Run, args: argparse.Namespace) -> None:
        self._run, self._args = run, args
        self._serves = False

    def on_round(self, start: el.RoundStart) -> None:
        # In the first round of this process: the local rank is the same in all, and the worker in its place has it too.
        if self._run.world.local_rank == 0 and not self._serves:
            self._serves = True
            where = [str(self._args.port), "--bind", "127.0.0.1", "--directory", str(self._args.results)]
            command = [sys.executable, "-m", "http.server", *where]
            self._run.background(subprocess.Popen(command, stderr=subprocess.DEVNULL), wait=0)

    def on_checkpoint(self, end: el.CheckpointEnd) -> None:
        if end.path is not None:
            command = [sys.executable, __file__, "--evaluate", str(end.step), *sys.argv[1:]]
            self._run.background(subprocess.Popen(command, env=el.clean_environment()), wait="10min")


def train(args: argparse.Namespace) -> None:
    args.results.mkdir(parents=True, exist_ok=True)
    with el.session() as run:
        images, labels = data()
        torch.manual_seed(0)
        model = network().to(run.device)
        trainer = el.Trainer(
            run,
            model,
            torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
            el.ElasticLoader(TensorDataset(images[360:], labels[360:]), el.GlobalBatch(64, micro=8), seed=0),
            loss_fn=nn.functional.cross_entropy,
            checkpoint=el.Checkpoint(args.checkpoint, every=args.every, keep=10),  # more than are evaluated at a time
            exact=True,
            callbacks=[el.Progress(every=20), Beside(run, args)],
        )
        trainer.fit(args.epochs)
        if run.rank == 0:
            print(f"weights {el.weights_sha256(model)}", flush=True)


def evaluate(args: argparse.Namespace) -> None:
    with el.session() as run:
        images, labels = (values[:360].to(run.device) for values in data())
        model = network().to(run.device).eval()
        model.load_state_dict(el.load_checkpoint(args.checkpoint, step=args.evaluate, weights_only=True)["model"])
        with torch.no_grad():
            accuracy = float((model(images).argmax(dim=1) == labels).float().mean())
        result = {"step": args.evaluate, "accuracy": round(accuracy, 4), "world_size": run.world_size}
        print(json.dumps(result), flush=True)
        (args.results / f"step-{args.evaluate}.json").write_text(json.dumps(result) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--checkpoint", required=True, help="directory or URL to save to and to resume from")
    parser.add_argument("--every", default="40", help="interval of checkpoints: steps, or a duration such as 30s")
    parser.add_argument("--results", type=Path, default=Path("results"), help="directory of the evaluations")
    parser.add_argument("--port", type=int, default=8000, help="port of the server")
    parser.add_argument("--evaluate", type=int, metavar="STEP", help="evaluate the checkpoint of this step, and end")
    args = parser.parse_args()
    train(args) if args.evaluate is None else evaluate(args)


if __name__ == "__main__":
    main()

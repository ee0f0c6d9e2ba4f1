"""Train on torchdata's StatefulDataLoader, with one loader for each micro-batch of the global batch.

    pip install torchdata
    elastic-launch --standalone --nproc 2 examples/stateful/train.py --exact --checkpoint runs/stateful

The data are windows of this project's documentation. The model counts in a buffer how often it has seen each window;
the buffer is part of the state, so it counts what has trained the final weights. At any number of workers and after any
restart it is the same, and with --exact so are the weights: compare the results.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import elastic_launch as el

TEXTS = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
CONTEXT = 32
WINDOWS = 600
BATCH = el.GlobalBatch(24, micro=4)


class Windows(IterableDataset[tuple[int, Tensor]]):
    """Every so manieth window of a text, in another order in each pass."""

    def __init__(self, tokens: Tensor, shard: int, shards: int) -> None:
        self.tokens, self.own = tokens, torch.arange(shard, WINDOWS, shards)
        self.number = self.given = 0  # of the pass; windows given in it

    def set_epoch(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        order = torch.randperm(len(self.own), generator=torch.Generator().manual_seed(self.number))
        while self.given < len(self.own):
            window = int(self.own[order[self.given]])
            self.given += 1
            yield window, self.tokens[window * CONTEXT : (window + 1) * CONTEXT + 1]
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 256))
        self.register_buffer("seen", torch.zeros(WINDOWS, dtype=torch.int64))

    def count(self, windows: Tensor) -> None:
        self.seen.index_add_(0, windows, torch.ones_like(windows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--exact", action="store_true", help="the same weights to the bit at any number of workers")
    parser.add_argument("--checkpoint", help="directory or URL to save to and to resume from")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes of each loader")
    parser.add_argument("--step-time", type=float, default=0.0, help="least seconds per step, to watch a run")
    parser.add_argument("--result", type=Path, help="file to which rank 0 writes the result as JSON")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    text = "".join(path.read_text() for path in TEXTS).encode()
    tokens = torch.tensor(list(text[: WINDOWS * CONTEXT + 1]))

    def make_loader(shard: int, shards: int) -> StatefulDataLoader[tuple[Tensor, Tensor]]:
        data = Windows(tokens, shard, shards)
        return StatefulDataLoader(data, batch_size=BATCH.micro, drop_last=True, num_workers=args.loader_workers)

    with el.session() as run:
        torch.manual_seed(0)
        model = Model().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = el.StatefulLoader(make_loader, BATCH)
        checkpoint = el.Checkpoint(args.checkpoint, every="30s") if args.checkpoint else None
        rules = {"buffers": {"seen": "sum"}, "exact": args.exact}
        for step in run.steps(loader, model, optimizer, checkpoint=checkpoint, until=f"{args.steps}ba", **rules):
            began = time.monotonic()
            for windows, samples in step:
                step.model.count(windows.to(run.device))
                samples = samples.to(run.device)
                logits = step.model(samples[:, :-1])
                step.backward(nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()))
            step.update(clip_norm=1.0)
            if run.rank == 0 and step.number % 5 == 0:
                print(f"step {step.number} loss {step.loss:.4f} world size {run.world_size}", flush=True)
            time.sleep(max(0.0, args.step_time - (time.monotonic() - began)))
        if run.rank == 0:
            seen = Counter(model.seen.tolist())
            result = {"steps": args.steps, "windows_by_times_seen": dict(sorted(seen.items()))}
            result |= {"weights_sha256": el.weights_sha256(model), "worlds": run.worlds, "restarts": run.restarts}
            print(json.dumps(result), flush=True)
            if args.result:
                args.result.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

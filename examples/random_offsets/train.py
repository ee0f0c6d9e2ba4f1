"""Train on random pieces of one long array, as nanoGPT does; there is no dataset and there are no epochs.

    elastic-launch --standalone --nproc 2 examples/random_offsets/train.py --exact --checkpoint runs/offsets

The array is this project's documentation, character by character. With --exact the final weights are bitwise identical
at any number of workers and after any restart: compare weights_sha256 in the result.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import elastic_launch as el

TEXTS = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
CONTEXT = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--exact", action="store_true", help="the same weights to the bit at any number of workers")
    parser.add_argument("--checkpoint", help="directory or URL to save to and to resume from")
    parser.add_argument("--step-time", type=float, default=0.0, help="least seconds per step, to watch a run")
    parser.add_argument("--result", type=Path, help="file to which rank 0 writes the result as JSON")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    tokens = torch.tensor(list("".join(path.read_text() for path in TEXTS).encode()))

    def get_batch(step: int, micro: el.MicroBatch) -> tuple[Tensor, Tensor]:
        # From torch's global generator, which is seeded for this step and micro-batch.
        starts = torch.randint(len(tokens) - CONTEXT, (len(micro),)).tolist()
        pieces = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts])
        return pieces[:, :-1], pieces[:, 1:]

    with el.session() as run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 256))
        model.to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = el.FunctionLoader(get_batch, el.GlobalBatch(24, micro=4), seed=0)
        checkpoint = el.Checkpoint(args.checkpoint, every="30s") if args.checkpoint else None
        loss = float("nan")
        for step in run.steps(
            loader, model, optimizer, checkpoint=checkpoint, until=f"{args.steps}ba", exact=args.exact
        ):
            began = time.monotonic()
            for inputs, targets in step:
                logits = step.model(inputs.to(run.device))
                step.backward(nn.functional.cross_entropy(logits.flatten(0, 1), targets.to(run.device).flatten()))
            step.update(clip_norm=1.0)
            loss = step.loss
            if run.rank == 0 and step.number % 20 == 0:
                print(f"step {step.number} loss {loss:.4f}", flush=True)
            time.sleep(max(0.0, args.step_time - (time.monotonic() - began)))
        if run.rank == 0:
            result = {"steps": args.steps, "loss": loss, "weights_sha256": el.weights_sha256(model)}
            result |= {"worlds": run.worlds, "restarts": run.restarts, "resumed_step": run.resumed_step}
            print(json.dumps(result), flush=True)
            if args.result:
                args.result.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

"""Train a GAN: two models and two optimizers, whose updates are saved together or not at all.

    elastic-launch --standalone --nproc 2 examples/gan/train.py --checkpoint runs/gan

The generator learns to draw points on a circle. In each step the discriminator has the first pass over the step's
micro-batches, and the generator the second. A worker that is killed between the two loses neither: the others go on
with the second pass. The weights are bitwise identical at any number of workers and after any fault.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import elastic_launch as el

NOISE = 4


def circle(points: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    angles = 2 * math.pi * torch.rand(points, generator=generator)
    radii = 1 + 0.05 * torch.randn(points, generator=generator)
    return torch.stack([radii * angles.cos(), radii * angles.sin()], dim=1)


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs)
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--checkpoint", help="directory or URL to save to and to resume from")
    parser.add_argument("--result", type=Path, help="file to which rank 0 writes the result as JSON")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with el.session() as run:
        torch.manual_seed(0)
        generator, discriminator = network(NOISE, 2).to(run.device), network(2, 1).to(run.device)
        models = {"generator": generator, "discriminator": discriminator}
        optimizers = {name: torch.optim.Adam(x.parameters(), lr=2e-3, betas=(0.5, 0.9)) for name, x in models.items()}
        loader = el.ElasticLoader(circle(2048), el.GlobalBatch(64, micro=16), seed=0)
        checkpoint = el.Checkpoint(args.checkpoint, every="30s") if args.checkpoint else None

        def drawn(count: int) -> Tensor:
            return generator(torch.randn(count, NOISE).to(run.device))

        losses = {"discriminator": math.nan, "generator": math.nan}
        for step in run.steps(loader, models, optimizers, checkpoint=checkpoint, until=f"{args.steps}ba", exact=True):
            for real in step:
                told, guessed = discriminator(real.to(run.device)), discriminator(drawn(len(real)).detach())
                step.backward(softplus(-told).mean() + softplus(guessed).mean())
            step.update(optimizer="discriminator")
            losses["discriminator"] = step.loss

            for real in step:  # as many points as in the first pass, from other random numbers
                step.backward(softplus(-discriminator(drawn(len(real)))).mean())
            step.update(optimizer="generator", clip_norm=1.0)
            losses["generator"] = step.loss

            if run.rank == 0 and step.number % 100 == 0:
                print(f"step {step.number} " + " ".join(f"{name} {x:.4f}" for name, x in losses.items()), flush=True)
        if run.rank == 0:
            torch.manual_seed(1)
            with torch.no_grad():
                radii = drawn(1000).norm(dim=1)
            result = {"steps": args.steps, "radius": float(radii.mean()), "spread": float(radii.std())}
            result |= {f"{name}_sha256": el.weights_sha256(model) for name, model in models.items()}
            result |= {"worlds": run.worlds, "restarts": run.restarts, "resumed_step": run.resumed_step}
            print(json.dumps(result), flush=True)
            if args.result:
                args.result.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

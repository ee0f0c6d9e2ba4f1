"""A GAN in whose steps a process ends at a chosen place: ``passes.py DIRECTORY [FLAGS]``.

The discriminator is trained in every step, the generator in every fifth one. Between the two passes the script changes
something of its own that is saved. ``--end R:K:S:PLACE:HOW``: in round R, rank K ends at a PLACE of step S: ``first``
``second`` or ``third`` (in the forward pass of that pass), ``between`` or ``after``, once all ranks have come to that
place, and HOW is ``kill``, ``lose`` (with its agent) or ``raise``. ``--behind R:K:S``: there the first pass' exchange
fails on this rank alone, when the others have it. Rank 0 writes ``result.json``.
"""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from ranks import await_ranks, come
from torch import Tensor, nn
from torch.nn.functional import softplus

import elastic_launch as el
from elastic_launch.training import steps
from elastic_launch.training.checkpoints.snapshot_interval import Rhythm
from elastic_launch.training.gradients.means import MeanTable

EVERY = 5


class Average:
    """A part of the state that is not the same if it is changed twice."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [parameter.detach().clone() for parameter in model.parameters()]
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        torch._foreach_lerp_(self.values, [parameter.detach() for parameter in model.parameters()], 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.updates = [value.clone() for value in state["values"]], state["updates"]


def behind(run: el.Run, where: tuple[int, int], step: int) -> None:
    """Make the exchange of a step's first pass fail here, with the traceback of one of the library's own."""
    fails = "def fails(whole):\n    def means(self, samples, where):\n        if due(where):\n"
    fails += "            raise RuntimeError('Connection closed by peer')\n        return whole(self, samples, where)\n"
    space: dict[str, Any] = {
        "__name__": steps.__name__,
        "due": lambda text: text == f"step {step}" and (run.world.round, run.rank) == where,
    }
    exec(fails + "    return means", space)
    MeanTable.means = space["fails"](MeanTable.means)  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--default", action="store_true")
    parser.add_argument("--freeze", action="store_true", help="freeze networks in some steps and passes")
    parser.add_argument("--toggle", action="store_true", help="freeze a network from a step's end to the next head")
    parser.add_argument("--carry", action="store_true", help="use in the second pass what the first one has left")
    parser.add_argument("--exchange", action="store_true", help="exchange something between the two passes")
    parser.add_argument("--thrice", action="store_true", help="a third pass after the second one")
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--checkpoint")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--end", action="append", default=[])
    parser.add_argument("--behind")
    args = parser.parse_args()
    ends = {tuple(end.split(":")[:4]): end.split(":")[4] for end in args.end}

    with el.session() as run:
        torch.manual_seed(0)
        real = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)) + 2
        g, d = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 4)), nn.Linear(4, 1)
        optimizers = {"g": torch.optim.Adam(g.parameters(), 0.01), "d": torch.optim.Adam(d.parameters(), 0.01)}
        schedulers = {name: torch.optim.lr_scheduler.StepLR(each, 5) for name, each in optimizers.items()}
        average = Average(d)
        run.register("average", average)
        loader = el.ElasticLoader(real, el.GlobalBatch(16, args.micro))
        if args.behind:
            number, rank, step_number = map(int, args.behind.split(":"))
            behind(run, (number, rank), step_number)

        def reached(place: str, step: el.Step) -> None:
            if any((end[0], *end[2:]) == (str(run.world.round), str(step.number), place) for end in ends):
                # A rank can have made a pass while another one still waits for a part of its gradients.
                here = f"{run.world.round}-{step.number}-{place}"
                come(args.directory, here, run.rank)
                await_ranks(args.directory, here, range(run.world_size))
            how = ends.get((str(run.world.round), str(run.rank), str(step.number), place))
            if how == "raise":
                raise ValueError(f"told to fail: {place}")
            if how == "lose":
                os.kill(os.getppid(), signal.SIGKILL)
            if how is not None:
                os.kill(os.getpid(), signal.SIGKILL)

        losses = []
        options: dict[str, Any] = {"scheduler": schedulers, "exact": not args.default}
        if args.checkpoint:
            options["checkpoint"] = el.Checkpoint(args.checkpoint, every=1000)
            Rhythm.due = lambda self, step: step < 3  # type: ignore[method-assign]
        for step in run.steps(loader, {"g": g, "d": d}, optimizers, until=f"{args.steps}ba", **options):
            fakes: list[Tensor] = []
            g[0].requires_grad_(not args.freeze or step.number > 3)
            d.requires_grad_(True)
            for x in step:
                fakes.append(g(torch.randn_like(x)))
                reached("first", step)
                step.backward(softplus(-d(x)).mean() + softplus(d(fakes[-1].detach())).mean())
            step.update(optimizer="d")
            average.update(d)
            losses.append(step.loss)
            if args.exchange:
                el.dist.barrier()
            reached("between", step)
            if step.number % EVERY == 0:
                d.requires_grad_(not args.freeze)
                for number, x in enumerate(step):
                    fake = fakes[number].detach() * g(torch.ones_like(x)) if args.carry else g(torch.randn_like(x))
                    reached("second", step)
                    step.backward(softplus(-d(fake)).mean() + average.values[1].sum() * fake.mean())
                step.update(optimizer="g", clip_norm=1.0)
                losses.append(step.loss)
                d.requires_grad_(True)
            if step.number % EVERY == 0 and args.thrice:
                average.update(d)
                for x in step:
                    reached("third", step)
                    step.backward(softplus(-d(x)).mean() + average.values[0].sum() * d(x).square().mean())
                step.update(optimizer="d")
            reached("after", step)
            for scheduler in schedulers.values():
                scheduler.step()
            d.requires_grad_(not args.toggle)
        if run.rank == 0:
            hashes = [el.weights_sha256(model)[:16] for model in (g, d)]
            size = float(sum(parameter.abs().sum() for model in (g, d) for parameter in model.parameters()))
            result = {"hashes": hashes, "size": size, "updates": average.updates, "losses": losses[-2:]}
            result |= {"worlds": run.worlds, "restarts": run.restarts, "resumed": run.resumed_step}
            (args.directory / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

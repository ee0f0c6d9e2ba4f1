"""Small trainings in exact mode of several forms, noted as by ``changes.py``: ``forms.py DIRECTORY --form FORM``.

``evaluating``: evaluations, and schedules by step, by epoch and by their results. ``trainer``: a Trainer that
evaluates. ``passes``: two passes in a step, with a registered average that changes between them. ``heads``: registered
objects that change at the head of a step. ``sharded``: FSDP over all ranks; ``replicas``: within replicas of two;
``tensor``: two tensor ranks in each replica. ``own``: a loop of the script's own, over integers. Each notes in
``places.jsonl`` when it begins an evaluation, a head or a later pass. ``hash`` in ``result.json`` is that of the
weights, or integers, and of all else that is saved.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from changes import Notes, network
from passes import Average
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import CyclicLR, ExponentialLR, LinearLR, ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

import elastic_launch as el

SAMPLES, BATCH = 96, el.GlobalBatch(16, 4)


class Form:
    """What all forms have in common."""

    def __init__(self, args: argparse.Namespace, run: el.Run) -> None:
        self.args, self.run, self.notes = args, run, Notes(args.directory, run)
        self.notes.start()
        inputs = torch.randn(SAMPLES + 24, 6, generator=torch.Generator().manual_seed(3))
        targets = inputs[:, :3].argmax(dim=1)
        numbers = torch.arange(SAMPLES)
        time.sleep(args.start_time)
        self.inputs = inputs
        # The number of a sample is in its target, since a Trainer's loss is given no more.
        self.training = TensorDataset(inputs[:SAMPLES], torch.stack([targets[:SAMPLES], numbers], dim=1))
        self.held_out = TensorDataset(inputs[SAMPLES:], targets[SAMPLES:])
        self.checkpoint = el.Checkpoint(args.checkpoint, every=args.every) if args.checkpoint else None
        self.evaluated = -1

    @property
    def loader(self) -> el.ElasticLoader:
        return el.ElasticLoader(self.training, BATCH, seed=1)

    @property
    def steps(self) -> dict[str, Any]:
        """Options of ``run.steps``."""
        return {"until": f"{self.args.steps}ba", "exact": True, "checkpoint": self.checkpoint}

    def hurries(self) -> bool:
        return (self.args.directory / "hurry").exists()

    def at(self, place: str, step: int) -> None:
        """Note a place, and stay there for a moment, so that a fault can hit it."""
        if not self.hurries():
            self.notes.note("places.jsonl", place=place, step=step)
            time.sleep(self.args.step_time / 4)

    def samples(self, step: int, targets: Tensor) -> Tensor:
        """Note the samples of a micro-batch; return its targets."""
        numbers = targets[:, 1].tolist()
        line = {"step": step, "micro": numbers[0], "numbers": numbers}
        with (self.args.directory / "samples.jsonl").open("a") as lines:  # no use of the world, which others have
            lines.write(json.dumps(line) + "\n")
        return targets[:, 0]

    def wait(self, began: float) -> None:
        while time.monotonic() < began + self.args.step_time and not self.hurries():
            time.sleep(0.01)

    def stepped(self, step: int) -> None:
        self.notes.resumed()  # the round may have changed within the step
        if self.run.rank == 0:
            self.notes.note("steps.jsonl", step=step)

    def timed(self, steps: Any) -> Iterator[el.Step]:
        """Steps that take their time, and are noted."""
        for step in steps:
            began = time.monotonic()
            self.notes.resumed()
            yield step
            self.wait(began)
            self.stepped(step.number)

    def evaluates(self, step: int) -> None:
        if self.evaluated != step:
            self.evaluated = step
            self.at("evaluation", step)

    def finish(self, weights: str, **state: Any) -> None:
        if self.run.rank == 0:
            text = json.dumps(state, default=str, sort_keys=True)
            found = hashlib.sha256(f"{weights} {text}".encode()).hexdigest()
            result = {"hash": found, "weights": weights, "state": text, "resumed": self.run.resumed_step}
            result |= {"worlds": self.run.worlds, "restarts": self.run.restarts}
            (self.args.directory / "result.json").write_text(json.dumps(result))


def evaluating(form: Form) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedulers = {
        "warm-up": LinearLR(optimizer, 0.1, total_iters=8),
        "by epoch": StepLR(optimizer, 1, gamma=0.99),
        "plateau": ReduceLROnPlateau(optimizer, "max", factor=0.9, patience=0, threshold=0.01),
    }

    def measure(batch: list[Tensor]) -> dict[str, Tensor]:
        form.evaluates(now)
        output = model(batch[0])
        right = (output.argmax(dim=1) == batch[1]).float().mean()
        return {"loss": nn.functional.cross_entropy(output, batch[1]), "accuracy": right}

    evaluator = el.Evaluator(
        el.ElasticLoader(form.held_out, el.GlobalBatch(12, 2), shuffle=False),
        measure,
        metrics=["loss", "accuracy"],
        every="7ba",
        on_result=lambda x: schedulers["plateau"].step(x.metrics["accuracy"]),
    )
    now, loader = 0, form.loader
    saving: Any = {"scheduler": schedulers, "evaluator": evaluator}
    for step in form.timed(form.run.steps(loader, model, optimizer, **form.steps, **saving)):
        now = step.number
        for features, targets in step:
            classes = form.samples(step.number, targets)
            step.backward(nn.functional.cross_entropy(model(features), classes))
        step.update()
        schedulers["warm-up"].step()
        if step.number % loader.steps_per_epoch == 0:
            schedulers["by epoch"].step()
    history = [[x.step, x.metrics] for x in evaluator.history]
    form.finish(el.weights_sha256(model), history=history, rates=[g["lr"] for g in optimizer.param_groups])


def trainer(form: Form) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        if targets.dim() > 1:
            targets = form.samples(fitted.step + 1, targets)
        else:
            form.evaluates(fitted.step)
        return nn.functional.cross_entropy(output, targets)

    class Paced(el.Callback):
        began = 0.0

        def on_round(self, start: el.RoundStart) -> None:
            form.notes.resumed()

        def on_step(self, end: el.StepEnd) -> None:
            form.wait(self.began)
            form.stepped(end.step)
            self.began = time.monotonic()

    fitted = el.Trainer(
        form.run,
        model,
        optimizer,
        form.loader,
        loss_fn=loss_fn,
        scheduler={
            "by step": el.Schedule(ExponentialLR(optimizer, 0.995)),
            "plateau": el.Schedule(ReduceLROnPlateau(optimizer, factor=0.9, patience=0), metric="loss"),
        },
        clip_norm=1.0,
        eval_loader=el.ElasticLoader(form.held_out, el.GlobalBatch(12, 2), shuffle=False),
        eval_every="7ba",
        checkpoint=form.checkpoint,
        exact=True,
        callbacks=[Paced()],
    )
    fitted.fit(f"{form.args.steps}ba")
    history = [[x.step, x.metrics] for x in fitted.history]
    form.finish(el.weights_sha256(model), history=history, rates=[g["lr"] for g in optimizer.param_groups])


def passes(form: Form) -> None:
    g, d = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 6)), nn.Linear(6, 1)
    optimizers = {"g": torch.optim.Adam(g.parameters(), 0.01), "d": torch.optim.Adam(d.parameters(), 0.01)}
    schedulers = {name: StepLR(each, 5, gamma=0.9) for name, each in optimizers.items()}
    average = Average(d)
    form.run.register("average", average)
    softplus = nn.functional.softplus
    steps = form.run.steps(form.loader, {"g": g, "d": d}, optimizers, **form.steps, scheduler=schedulers)
    for step in form.timed(steps):
        for features, targets in step:
            form.samples(step.number, targets)
            fake = g(torch.randn_like(features)).detach()
            step.backward(softplus(-d(features)).mean() + softplus(d(fake)).mean())
        step.update(optimizer="d")
        average.update(d)
        form.at("pass", step.number)
        if step.number % 2 == 0:
            for features, _ in step:
                fake = g(torch.randn_like(features))
                step.backward(softplus(-d(fake)).mean() + average.values[1].sum() * fake.mean())
            step.update(optimizer="g", clip_norm=1.0)
        for scheduler in schedulers.values():
            scheduler.step()
    weights = " ".join(el.weights_sha256(model) for model in (g, d))
    form.finish(weights, average=[value.tolist() for value in average.values], updates=average.updates)


class Counter:
    """A weight of the loss that each head changes, by a generator of the script's own."""

    def __init__(self) -> None:
        self.count, self.generator = 0, torch.Generator().manual_seed(5)

    def step(self) -> float:
        self.count += 1
        return min(1.0, self.count / 40) + float(torch.rand((), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state.pop("count")  # it may change what it gets
        self.generator.set_state(state.pop("generator"))


def heads(form: Form) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = CyclicLR(optimizer, 0.001, 0.02, step_size_up=4, cycle_momentum=False)
    counter, averaged = Counter(), torch.optim.swa_utils.AveragedModel(model)
    form.run.register("counter", counter)
    form.run.register("averaged", averaged)
    steps = form.run.steps(form.loader, model, optimizer, **form.steps, scheduler=scheduler)
    for step in form.timed(steps):
        scheduler.step()
        weight = counter.step()
        form.at("head", step.number)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5 + weight / 10
        for features, targets in step:
            output = model(features)
            classes = form.samples(step.number, targets)
            step.backward(nn.functional.cross_entropy(output, classes) + weight * output.square().mean())
        step.update()
        averaged.update_parameters(model)
    weights = " ".join(map(el.weights_sha256, (model, averaged)))
    form.finish(weights, count=counter.count, next=counter.step(), scheduler=scheduler.last_epoch)


def sharded(form: Form) -> None:
    mesh = init_device_mesh("cpu", (form.run.world_size,)) if form.run.world_size > 1 else None
    divided(form, mesh, None)


def replicas(form: Form) -> None:
    mesh = form.run.mesh(shard=2)["shard"] if form.run.world_size > 1 else None
    divided(form, mesh, None)


def tensor(form: Form) -> None:
    divided(form, None, form.run.mesh(tensor=2)["tensor"])


def divided(form: Form, shards: DeviceMesh | None, parts: DeviceMesh | None) -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 3))
    if parts is not None:
        parallelize_module(model, parts, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for module in (model[2], model) if shards is not None else ():
        fully_shard(module, mesh=shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = ExponentialLR(optimizer, 0.99)
    for step in form.timed(form.run.steps(form.loader, model, optimizer, **form.steps, scheduler=scheduler)):
        for features, targets in step:
            classes = form.samples(step.number, targets)
            step.backward(nn.functional.cross_entropy(model(features), classes))
        step.update(clip_norm=0.5)
        scheduler.step()
    form.finish(el.weights_sha256(model), rate=optimizer.param_groups[0]["lr"])


class Integers:
    """A state whose sums do not depend on the number of ranks, so that a loop of one's own is exact, too."""

    def __init__(self) -> None:
        self.values = torch.arange(6)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"].clone()


def own(form: Form) -> None:
    run, integers = form.run, Integers()
    run.register("integers", integers)
    checkpoint = form.checkpoint or el.Checkpoint(str(form.args.directory / "own"), every=1000)
    step = run.resume(checkpoint, {"global batch": BATCH.size})
    form.notes.resumed()
    while step < form.args.steps:
        began = time.monotonic()
        epoch, within = divmod(step, SAMPLES // BATCH.size)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        order = order[within * BATCH.size : (within + 1) * BATCH.size]
        total = torch.zeros(6, dtype=torch.int64)
        for micro in BATCH.plan(run.world_size, run.rank).micro_batches:
            numbers = order[micro.start : micro.stop]
            form.samples(step + 1, torch.stack([numbers, numbers], dim=1))
            total += (form.inputs[numbers] * 1000).long().sum(0)
        if run.world_size > 1:
            torch.distributed.all_reduce(total)
        integers.values = integers.values * 31 + total
        step += 1
        form.wait(began)
        form.stepped(step)
        if run.boundary(step, end=step == form.args.steps):
            break
    if not run.draining:
        form.finish(str(integers.values.tolist()))


FORMS = {each.__name__: each for each in (evaluating, trainer, passes, heads, sharded, replicas, tensor, own)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-time", type=float, default=0.1)
    parser.add_argument("--checkpoint")
    parser.add_argument("--every", type=int, default=100000)
    parser.add_argument("--start-time", type=float, default=0.0)
    args = parser.parse_args()
    with el.session() as run:
        torch.manual_seed(0)
        FORMS[args.form](Form(args, run))


if __name__ == "__main__":
    main()

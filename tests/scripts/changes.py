"""A tiny training in exact mode that notes what it does: each step, each snapshot, each restoring, by round.

Each rank 0 notes its steps in ``steps.jsonl``, so a step that is there twice was done again; each node's writer notes
in ``snapshots.jsonl`` what is whole in memory, and each rank in ``places.jsonl`` its place in each round. Options:

``--due-until``     from this step on, no snapshot is due but after ``--due-at``
``--start-time``    passes before the training begins; ``--later-time``, too, in a process of a later round
``--step-time``     of each step, until there is a file ``hurry``
``--die-within``    ``R:S:K``: rank K of round R kills itself in the forward pass of step S
``--stream``        the data are in shards; each rank notes in ``samples.jsonl`` which samples it has loaded
``--stateful``      they come from loaders with a state, of a shard each or of the rank; likewise
``--samples``       likewise, of the usual data
``--odd-data``      the first worker of this rank has other samples than the others
``--forget``        there is a scheduler, or an average of the model, that nothing saves
``--shard``         the model is sharded over all ranks
``--hard``          it has layers that are tied, frozen, of bfloat16, or have fewer rows than there are ranks
``--clip``          gradients are clipped by a share of their norm
``--verify``        the share of the steps that are verified
``--beside``        each process has another one in the background, which ends 2 s after the training
``--no-compare``    replicas are compared only at the end
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.snapshot.memory.slot import Header
from elastic_launch.training.checkpoints.memory import MemorySnapshots
from elastic_launch.training.checkpoints.snapshot_interval import Rhythm
from elastic_launch.training.ranks.replicas import ReplicaCheck

LENGTHS = [13, 0, 29, 7, 31, 16]
"""Numbers of samples in the shards of ``--stream``; a shard is named by its place."""


class Shards:
    """What opens a shard of ``--stream``: the odd ones can only be iterated, if any."""

    def __init__(self, inputs: torch.Tensor, seek: bool) -> None:
        self.inputs, self.seek = inputs, seek

    def __call__(self, name: str) -> Any:
        place = int(name)
        first = sum(LENGTHS[:place])
        rows = [(number, self.inputs[number]) for number in range(first, first + LENGTHS[place])]
        return rows if self.seek or place % 2 == 0 else iter(rows)


def decoded(row: tuple[int, torch.Tensor]) -> tuple[Any, ...]:
    number, features = row
    return features + 0.01 * torch.randn(6), features[:3].argmax(), number


class Reading:
    """A loader of every so manieth sample, in another order in each pass; its place is saved."""

    def __init__(self, inputs: torch.Tensor, shard: int, shards: int) -> None:
        self._inputs, self._numbers = inputs, torch.arange(shard, len(inputs), shards)
        self._pass = self._given = self._from = 0

    def set_epoch(self, number: int) -> None:
        self._pass = number

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        order = torch.randperm(len(self._numbers), generator=torch.Generator().manual_seed(self._pass))
        first, self._from = self._from, 0
        for self._given, places in enumerate(order.split(4)[first:], first + 1):
            yield decoded_all(self._inputs, self._numbers[places])

    def __len__(self) -> int:
        return len(self._numbers) // 4

    def state_dict(self) -> dict[str, Any]:
        return {"given": torch.tensor(self._given)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._from = int(state["given"])


def decoded_all(inputs: torch.Tensor, numbers: torch.Tensor) -> tuple[Any, ...]:
    rows = [decoded((int(number), inputs[number])) for number in numbers]
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows]), numbers


class Notes:
    def __init__(self, directory: Path, run: el.Run) -> None:
        self._directory, self._run = directory, run
        self.interval = 1
        self.beside = 0
        self._round = 0

    def note(self, file: str, **what: Any) -> None:
        run, node = self._run, os.environ.get("NODE", "")
        where = {"node": node, "round": run.world.round, "rank": run.rank, "world": run.world_size}
        with (self._directory / file).open("a") as lines:
            lines.write(json.dumps({"clock": time.monotonic(), **where, **what}) + "\n")

    def start(self) -> None:
        env = {name: value for name, value in os.environ.items() if name.isupper()}
        with (self._directory / "started.jsonl").open("a") as lines:  # without the use of the world that others have
            lines.write(json.dumps({"pid": os.getpid(), "children": [], "env": env}) + "\n")

    def resumed(self) -> None:
        """Note each rank's place in a round, and where the round resumes, once."""
        run = self._run
        if run.world.round == self._round:
            return
        self._round = run.world.round
        replica = {"replica": run.replica, "replicas": run.replicas, "replica_rank": run.replica_rank}
        told = [os.environ[f"ELASTIC_LAUNCH_REPLICA{name}"] for name in ("", "S", "_RANK")]
        assert told == [str(number) for number in replica.values()]
        self.note("places.jsonl", pid=os.getpid(), beside=self.beside, **replica)
        if run.rank == 0:
            self.note("resumed.jsonl", step=run.resumed_step, restarts=run.restarts)

    def follow_snapshots(self, room_until: int) -> None:
        """Note the step of each snapshot once all of it is in its slot; from a step on there is no room for them."""
        store, settle, begun = MemorySnapshots.store, MemorySnapshots.settle, []

        def storing(self: MemorySnapshots, state: Any, meta: Any, header: Header, **options: Any) -> bool:
            if header.step >= room_until:
                MemorySnapshots._lack = lambda self, size: "no room in this test"  # type: ignore[method-assign]
            stored = store(self, state, meta, header, **options)
            begun.extend([header.step] if stored else [])
            if options["wait"]:
                settle_and_note(self)
            return stored

        def settle_and_note(self: MemorySnapshots) -> None:
            settle(self)
            notes.interval = self.rhythm.interval
            while begun:
                notes.note("snapshots.jsonl", step=begun.pop())

        notes = self
        MemorySnapshots.store, MemorySnapshots.settle = storing, settle_and_note  # type: ignore[method-assign]


def network() -> nn.Module:
    torch.manual_seed(0)
    # BatchNorm and Dropout: buffers and random numbers have to survive, too.
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))


class Tied(nn.Sequential):
    """Uses its middle twice."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 1), nn.Linear(1, 7).bfloat16(), nn.Linear(7, 3))
        self[4].bias.requires_grad_(False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        wide = torch.relu(self[1](torch.relu(self[1](self[0](features)))))
        found: torch.Tensor = self[4](wide + self[3](self[2](wide).bfloat16()).float())
        return found


def seen(args: argparse.Namespace) -> dict[str, Any]:
    """What a process that outlives rounds must not have more of."""
    found: dict[str, Any] = {}
    if args.compile:
        found["graphs"] = dict(torch._dynamo.utils.counters["stats"])
    if args.loader_workers:
        found["loaders"] = sorted(child.pid for child in multiprocessing.active_children())
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-time", type=float, default=0.1)
    parser.add_argument("--checkpoint")
    parser.add_argument("--every", type=int, default=100000)
    parser.add_argument("--split", type=int, default=2**30)
    parser.add_argument("--room-until", type=int, default=100000)
    parser.add_argument("--due-until", type=int, default=100000)
    parser.add_argument("--due-at", type=int, default=-1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--die-within", default="0:0:0")
    parser.add_argument("--say", default="")
    parser.add_argument("--start-time", type=float, default=0.0)
    parser.add_argument("--later-time", type=float, default=0.0)
    parser.add_argument("--samples", action="store_true")
    parser.add_argument("--stream", choices=["seek", "skip"])
    parser.add_argument("--stateful", choices=["shards", "hold", "repeat"])
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--hard", action="store_true")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--verify", default=False)
    parser.add_argument("--no-compare", action="store_true")
    parser.add_argument("--odd-data")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--forget", choices=["scheduler", "average"])
    args = parser.parse_args()
    deadly = tuple(map(int, args.die_within.split(":")))

    with el.session(live=True) as run:
        notes = Notes(args.directory, run)
        notes.start()
        if args.beside:
            text = "while [ ! -e result.json ]; do sleep 0.1; done; sleep 2; touch $PPID.waited"
            notes.beside = run.background(subprocess.Popen(["sh", "-c", text], cwd=args.directory)).pid
        print(args.say, end="", flush=True)
        notes.follow_snapshots(args.room_until)
        due = Rhythm.due
        Rhythm.due = lambda self, step: (  # type: ignore[method-assign]
            step == args.due_at or (step < args.due_until and due(self, step))
        )
        if args.no_compare:
            ReplicaCheck.wanted = lambda self: False  # type: ignore[method-assign]
        inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(3))
        if args.odd_data and args.odd_data == os.environ["RANK"]:
            inputs += 0.5
        numbers = [torch.arange(len(inputs))] if args.samples else []
        dataset = TensorDataset(inputs, inputs[:, :3].argmax(dim=1), *numbers)
        first = os.environ.get("ELASTIC_LAUNCH_ROUND", "1") == "1"  # not a number in a worker that starts ahead
        time.sleep(args.start_time if first else args.start_time + args.later_time)
        torch.manual_seed(0)
        model = (Tied() if args.hard else network()).to(run.device)
        if args.shard:
            mesh = init_device_mesh(run.device.type, (run.world_size,))
            for layer in (model[0], *([model[3]] if args.hard else []), model):
                fully_shard(layer, mesh=mesh)
        optimizer: torch.optim.Optimizer
        if args.hard:
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, amsgrad=True)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        saving = {"every": args.every, "split": args.split}
        checkpoint = el.Checkpoint(args.checkpoint, **saving) if args.checkpoint else None
        options = {"num_workers": args.loader_workers, "persistent_workers": args.persistent}
        options["compare_samples"] = not args.odd_data
        if args.stream:
            opened = Shards(inputs, args.stream == "seek")
            places = sorted(range(len(LENGTHS)), reverse=os.environ.get("NODE") == "reversed")
            names, lengths = [str(place) for place in places], [LENGTHS[place] for place in places]
            dataset = el.ShardedStream(names, open=opened, lengths=lengths, decode=decoded, buffer=10, lanes=2)
        loader: el.Loader
        if args.stateful == "shards":
            loader = el.StatefulLoader(partial(Reading, inputs), el.GlobalBatch(16, 4), seed=1)
        elif args.stateful:
            reading = Reading(inputs, run.rank, run.world_size)
            loader = el.StatefulLoader(reading, el.GlobalBatch(16, 4), seed=1, on_resize=args.stateful)
        else:
            loader = el.ElasticLoader(dataset, el.GlobalBatch(16, 4), seed=1, **options)
        if args.compile:
            model.compile(backend=args.backend)
        scheduler = average = None
        if args.forget == "scheduler":
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        if args.forget == "average":
            average = torch.optim.swa_utils.AveragedModel(model)
        how = {"until": f"{args.steps}ba", "exact": True, "verify": args.verify}
        for step in run.steps(loader, model, optimizer, checkpoint=checkpoint, **how):
            began, again = time.monotonic(), step.repeated
            notes.resumed()
            for features, targets, *numbers in step:
                features, targets = features.to(run.device), targets.to(run.device)
                current = step._transaction._pass.current  # None in a pass that counts nothing
                if numbers and current is not None:
                    micro = step.plan.micro_batches[current].index
                    notes.note("samples.jsonl", step=step.number, micro=micro, numbers=numbers[0].tolist())
                with torch.autocast(run.device.type, torch.bfloat16, enabled=args.autocast):
                    loss = nn.functional.cross_entropy(step.model(features), targets)
                step.backward(loss)
                if (run.world.round, step.number, run.rank) == deadly:
                    os.kill(os.getpid(), signal.SIGKILL)
            while time.monotonic() < began + args.step_time and not (args.directory / "hurry").exists():
                time.sleep(0.01)
            if args.clip:
                step.update(0.5 * step.grad_norm())
            else:
                step.update()
            if scheduler is not None:
                scheduler.step()
            if average is not None:
                average.update_parameters(model)
            notes.resumed()  # the round may have changed within the step
            if run.rank == 0 and step.repeated == again:  # else it was broken off
                notes.note("steps.jsonl", step=step.number, again=again, interval=notes.interval, **seen(args))
        weights = el.weights_sha256(model)
        if run.rank == 0:
            agreed = run._engine.saver.agreed
            result = {"hash": weights, "agreed": agreed, "worlds": run.worlds, "restarts": run.restarts}
            (args.directory / "result.json").write_text(json.dumps(result | {"resumed": run.resumed_step}))


if __name__ == "__main__":
    main()

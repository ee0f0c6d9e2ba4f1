"""A training in which a rank hangs: ``hanging.py DIRECTORY [flags]``.

With a file ``hang`` in DIRECTORY that contains KIND RANK STEP, that rank hangs from that step on, once, in the
function of that name; ``twice`` after it has that rank hang in the first step after that, too; ``skip`` leaves out an
exchange of the script's own (``--meet``). Each rank 0 notes its steps in ``steps.jsonl``. With ``--slow`` some steps
are followed by what takes longer than a step may, each in another way, and saves are slow. With ``--evaluate`` a
Trainer trains, whose evaluations are slow, as its saves with ``--every``, and whose steps differ by a factor of 10.
Slow saves and evaluations are noted in ``slow.jsonl``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import elastic_launch as el

LONG = 13.0
NEVER = 10000


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def sleep() -> None:
    time.sleep(3600)


def write() -> None:
    _, full = os.pipe()
    with open(full, "wb", buffering=0) as file:
        while True:  # a signal ends a single call
            file.write(bytes(1 << 16))


def loader() -> None:
    time.sleep(3600)


def meet(group: Any) -> None:
    dist.all_reduce(torch.zeros(1), group=group)


class Plan:
    """The hang that is planned, if there is one."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "hang"

    def take(self, kinds: str, rank: int, step: int = 1 << 30) -> str:
        """Return the kind of hang that this rank is to have now, if it is one of these; "" if not."""
        try:
            kind, hung, at, *again = self._file.read_text().split()
        except FileNotFoundError:
            return ""
        if kind not in kinds.split() or int(hung) != rank or step < int(at):
            return ""
        self._file.rename(self._file.with_suffix(".taken"))
        if again:
            new = self._file.with_suffix(".new")  # other ranks read it at any time
            new.write_text(f"{kind} {hung} 0")
            new.rename(self._file)
        return kind


class Data(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, plan: Plan, rank: int, delay: Callable[[], None] | None = None) -> None:
        self._plan, self._rank, self._delay = plan, rank, delay
        self._inputs = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._plan.take("loader", self._rank):
            loader()
        if self._delay and index == 0:
            self._delay()
        return self._inputs[index], self._inputs[index, :3].argmax()


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def slowly(run: el.Run, step: int) -> None:
    """After some steps, do what takes longer than a step may."""
    at = step % 80
    if at == 20 and run.rank == 1:
        with run.expect("upload", "1min"):
            time.sleep(LONG)
    if at == 30 and run.rank == 0:
        spin(LONG)
    if 40 <= at < 60:
        time.sleep((at % 10) * 0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--step-time", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=100000)
    parser.add_argument("--meet", action="store_true")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--evaluate", action="store_true", help="train with a Trainer, whose evaluations are slow")
    parser.add_argument("--every", type=int, default=NEVER, help="steps between two checkpoints, which are slow")
    parser.add_argument("--loader-workers", type=int, default=0)
    args = parser.parse_args()
    directory, plan = args.directory, Plan(args.directory)

    def note(file: str, **what: Any) -> None:
        where = {"clock": time.monotonic(), "round": run.world.round, "rank": run.rank, "world": run.world_size}
        with (directory / file).open("a") as lines:
            lines.write(json.dumps({**where, **what}) + "\n")

    with el.session() as run:
        env = {name: value for name, value in os.environ.items() if name.isupper()}
        note("started.jsonl", pid=os.getpid(), children=[], env=env)
        torch.manual_seed(0)
        group = dist.new_group() if args.meet else None
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data = el.ElasticLoader(Data(plan, run.rank), el.GlobalBatch(12, 2), seed=1, num_workers=args.loader_workers)

        def pause(what: str) -> None:
            time.sleep(LONG)
            note("slow.jsonl", what=what)

        if args.slow or args.every < NEVER:
            run.on_save(lambda: pause("save") if run.rank == 0 else None)
        saving = el.Checkpoint(directory / "checkpoints", every=args.every)
        if args.evaluate:
            shown = Data(plan, run.rank, lambda: pause("evaluation"))
            slow = el.ElasticLoader(shown, el.GlobalBatch(12, 2), shuffle=False)
            done = itertools.count()

            def loss(outputs: Tensor, targets: Tensor) -> Tensor:
                time.sleep(args.step_time / 10 * (1 + next(done) // 3 % 10))  # three on each of two ranks are a step
                return nn.functional.cross_entropy(outputs, targets)

            trainer = el.Trainer(
                run, model, optimizer, data, loss_fn=loss, eval_loader=slow, eval_every="20ba", checkpoint=saving
            )
            trainer.fit(f"{args.steps}ba")
            return
        checkpoint = saving if args.slow else None
        for step in run.steps(data, model, optimizer, until=f"{args.steps}ba", checkpoint=checkpoint):
            for features, targets in step:
                if kind := plan.take("stop deadlock sleep write", run.rank, step.number):
                    {"stop": stop, "deadlock": deadlock, "sleep": sleep, "write": write}[kind]()
                step.backward(nn.functional.cross_entropy(step.model(features), targets))
            time.sleep(args.step_time)
            step.update()
            if group is not None and not plan.take("skip", run.rank, step.number):
                meet(group)
            if args.slow:
                slowly(run, step.number)
            if run.rank == 0:
                note("steps.jsonl", step=step.number)


if __name__ == "__main__":
    main()

"""What a step costs: default and exact mode, with snapshots in memory, beside plain DistributedDataParallel.

For each model, world size and number of micro-batches there are three sets of processes on this machine, one for each
mode: plain DDP without a launcher, the others under elastic-launch, whose agent keeps snapshots. They do blocks of
steps in turn; those that do not have their turn wait without work. Prints medians and ratios as a Markdown table;
asserts no figure. Where other programs run, the CPU time of the first rank's steps (all its threads, those that write
snapshots too) says more than the clock.

    python benchmarks/training.py --json training.json        # the whole table, in perhaps half an hour
    python benchmarks/training.py --widths 64 --worlds 2 --accumulate 1
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from jobs import free_port, program

MODES = ("ddp", "default", "exact")
VERIFIED = ("0.1%", "1%", "10%", "100%")  # exact mode that verifies this share of the steps
UNITS = ("seconds", "cpu", "bytes")
TURN_TIMEOUT = 900.0
SAMPLES = 4096


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 4, 16], help="micro-batches of each rank")
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        default=[64, 2048],
        help="of six square layers: 2048 makes 25 million",
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 4], help="in a block, for each width")
    parser.add_argument("--blocks", type=int, default=7, help="measurements of each mode")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--modes", nargs="+", choices=(*MODES, *VERIFIED), default=list(MODES))
    parser.add_argument("--json", type=Path, help="file for all measurements")
    for name in ("--worker", "--mode"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if len(args.steps) == 1:
        args.steps *= len(args.widths)
    if len(args.steps) != len(args.widths):
        parser.error("--steps: give one number, or one for each of --widths")
    return args


# Code of the workers


def model(width: int) -> Any:
    from torch import nn

    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def plain_ddp(args: argparse.Namespace, data: Any, run: Any, until: int) -> Iterator[None]:
    """A hand-written training loop."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    network = model(args.widths[0])
    module = DistributedDataParallel(network) if run.world_size > 1 else network
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    accumulation = args.accumulate[0]
    sampler: Any = DistributedSampler(data, run.world_size, run.rank, drop_last=True)
    loader = DataLoader(data, args.micro_batch, sampler=sampler)

    def endless() -> Iterator[Any]:
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    batches = endless()
    for _ in range(until):
        optimizer.zero_grad()
        for number in range(accumulation):
            inputs, targets = next(batches)
            synced = number == accumulation - 1 or module is network
            with nullcontext() if synced else module.no_sync():
                (torch.nn.functional.mse_loss(module(inputs), targets) / accumulation).backward()
        optimizer.step()
        yield


def ours(args: argparse.Namespace, data: Any, run: Any, until: int) -> Iterator[None]:
    """The same with the library's loop."""
    import torch

    import elastic_launch as el

    network = model(args.widths[0])
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    size = args.micro_batch * args.accumulate[0] * run.world_size
    loader = el.ElasticLoader(data, el.GlobalBatch(size, args.micro_batch))
    verify = args.mode in VERIFIED and args.mode
    for step in run.steps(loader, network, optimizer, until=f"{until}ba", exact=args.mode != "default", verify=verify):
        for inputs, targets in step:
            step.backward(torch.nn.functional.mse_loss(step.model(inputs), targets))
        step.update()
        yield


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import TensorDataset

    import elastic_launch as el

    steps, directory = args.steps[0], Path(args.worker)
    with el.session() as run, ExitStack() as stack:
        until = (args.blocks + 1) * steps
        inputs = torch.randn(SAMPLES, args.widths[0], generator=torch.Generator().manual_seed(0))
        data = TensorDataset(inputs, inputs.flip(1))
        plain = args.mode == "ddp"
        loop = plain_ddp(args, data, run, until) if plain else ours(args, data, run, until)
        first = run.rank == 0
        turns = stack.enter_context((directory / f"{args.mode}.go").open("rb", buffering=0)) if first else None
        results = stack.enter_context((directory / f"{args.mode}.done").open("w")) if first else None
        # Only this benchmark needs to know when snapshots are taken.
        memory = run._engine.saver._memory
        for _ in range(args.blocks + 1):
            if turns is not None:
                turns.read(1)
            if run.world_size > 1:
                dist.barrier()
            before, started, spent = loopback_bytes(), time.monotonic(), time.process_time()
            snapshots: set[int] = set() if memory is None else {memory.rhythm.last}
            for _ in range(steps):
                next(loop)
                if memory is not None:
                    snapshots.add(memory.rhythm.last)
            if not plain:
                run._engine.saver.settle()  # ongoing writes belong to these steps
            if run.world_size > 1:
                dist.barrier()
            if results is not None:
                measured = {
                    "cpu": (time.process_time() - spent) / steps,
                    "seconds": (time.monotonic() - started) / steps,
                    "bytes": (loopback_bytes() - before) / steps / run.world_size,
                    "snapshots": max(0, len(snapshots) - 1),
                    "peak": peak_memory(),
                }
                results.write(json.dumps(measured) + "\n")
                results.flush()
        next(loop, None)
        del loop


def loopback_bytes() -> int:
    """Bytes that this host has sent to itself."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    return 0


def peak_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


# Code that runs the workers


class World:
    """The processes of one mode; they run a block of steps on demand."""

    def __init__(self, mode: str, world: int, options: list[object], directory: Path) -> None:
        self.mode = mode
        self.blocks: list[dict[str, Any]] = []
        for name in ("go", "done"):
            os.mkfifo(directory / f"{mode}.{name}")
        # Opened for both directions: opening one end alone would wait for the other.
        self._go = os.open(directory / f"{mode}.go", os.O_RDWR)
        self._done = os.open(directory / f"{mode}.done", os.O_RDWR)
        self._pipes = [self._go, self._done]
        self._pending = b""
        script = [__file__, *map(str, options), "--worker", str(directory), "--mode", mode]
        common = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        if mode == "ddp":
            place = {
                "WORLD_SIZE": world,
                "LOCAL_WORLD_SIZE": world,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": free_port(),
            }
            common |= {name: str(value) for name, value in place.items()}
            places = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
            commands = [([sys.executable, *script], each) for each in places]
        else:
            launcher = [program("elastic-launch"), "--standalone", "--nproc", str(world)]
            launcher += ["--hang-timeout", "off"]  # they wait for their turn
            commands = [([*launcher, "--log-dir", str(directory / f"{mode}-logs"), *script], common)]
        self._messages = directory / f"{mode}.stderr"
        with self._messages.open("wb") as errors:
            self._processes = [subprocess.Popen(command, env=env, stderr=errors) for command, env in commands]

    def turn(self) -> None:
        """Run a block of steps.

        Raises:
            SystemExit: if the processes end or take too long.
        """
        os.write(self._go, b"1")
        deadline = time.monotonic() + TURN_TIMEOUT
        while b"\n" not in self._pending:
            if select.select([self._done], [], [], 1.0)[0]:
                self._pending += os.read(self._done, 65536)
            elif any(process.poll() is not None for process in self._processes) or time.monotonic() > deadline:
                codes = [process.poll() for process in self._processes]
                raise SystemExit(f"{self._messages.read_text()[-4000:]}\n{self.mode}: exit codes {codes} within a turn")
        line, self._pending = self._pending.split(b"\n", 1)
        self.blocks.append(json.loads(line))

    def end(self) -> None:
        """Wait for the processes, or end them if they have blocks left."""
        for process in self._processes:
            try:
                process.wait(60.0)
            except subprocess.TimeoutExpired:
                self.stop()

    def stop(self) -> None:
        """End the processes. A launcher ends its workers."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(30.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for number in self._pipes:
            os.close(number)
        self._pipes = []


def measure(world: int, width: int, steps: int, accumulate: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of each block, by mode."""
    options: list[object] = ["--blocks", args.blocks, "--steps", steps, "--widths", width]
    options += ["--accumulate", accumulate, "--micro-batch", args.micro_batch]
    directory = Path(tempfile.mkdtemp(prefix="training-"))
    worlds: list[World] = []
    try:
        for mode in args.modes:
            worlds.append(World(mode, world, options, directory))
        for _ in range(args.blocks + 1):
            for each in worlds:
                each.turn()
        for each in worlds:
            each.end()
    finally:
        for each in worlds:
            each.stop()
        shutil.rmtree(directory, ignore_errors=True)
    # The first block includes one-time allocation and connection setup.
    return {each.mode: each.blocks[1:] for each in worlds}


def spread(values: list[float], unit: float = 1.0) -> str:
    ordered = sorted(value / unit for value in values)
    return f"{statistics.median(ordered):.2f} ({ordered[0]:.2f}..{ordered[-1]:.2f})"


def main() -> None:
    args = arguments()
    if args.worker:
        worker(args)
        return
    import torch

    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f} before; micro-batches of "
        f"{args.micro_batch}; medians of {args.blocks} blocks of {', '.join(map(str, args.steps))} steps "
        "(least..greatest)\n"
    )
    print(
        "| parameters | ranks | micro-batches of each | mode | ms per step | / DDP | CPU ms per step | / DDP "
        "| more than DDP | snapshots | MB sent per rank and step | peak MB of rank 0 |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    everything: dict[str, Any] = {}
    for width, steps in zip(args.widths, args.steps, strict=True):
        size = 6 * (width**2 + width)
        parameters = f"{size / 1e6:.1f} million" if size >= 1e6 else f"{size:,}"
        for world in args.worlds:
            for accumulate in args.accumulate:
                measured = measure(world, width, steps, accumulate, args)
                everything[f"width {width}, {world} ranks, {accumulate} micro-batches"] = measured
                middle = {
                    mode: {unit: statistics.median(block[unit] for block in blocks) for unit in UNITS}
                    for mode, blocks in measured.items()
                }
                for mode, blocks in measured.items():
                    base, own = middle.get("ddp", middle[mode]), middle[mode]
                    seconds, cpu = ([block[unit] for block in blocks] for unit in ("seconds", "cpu"))
                    print(
                        f"| {parameters} | {world} | {accumulate} | {mode} | {spread(seconds, 1e-3)} "
                        f"| {own['seconds'] / base['seconds']:.2f} | {spread(cpu, 1e-3)} "
                        f"| {own['cpu'] / base['cpu']:.2f} | {(own['cpu'] - base['cpu']) * 1e3:+.2f} "
                        f"| {sum(block['snapshots'] for block in blocks)} | {own['bytes'] / 1e6:.1f} "
                        f"| {blocks[-1]['peak'] / 1e6:.0f} |",
                        flush=True,
                    )
    print(f"\nload {os.getloadavg()[0]:.2f} after")
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()

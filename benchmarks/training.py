"""What a step costs: exact and default mode beside plain DistributedDataParallel, on one machine, in one run.

At each world size one set of processes holds a model for each mode and does blocks of steps with them in turn, on the
same global batches. Prints medians and ratios as a Markdown table; asserts no figure. Where other programs run, the CPU
time of the first rank's steps (all its threads) says more than the clock.

    python benchmarks/training.py --worlds 1 2 4 --blocks 7 --steps 4 --json training.json
    python benchmarks/training.py --width 64 --accumulate 1 4 16 --steps 50
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

MODES = ("ddp", "default", "exact")
UNITS = ("seconds", "cpu", "bytes")
LAUNCH_TIMEOUT = 900.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--blocks", type=int, default=7, help="measurements of each mode")
    parser.add_argument("--steps", type=int, default=4, help="steps in each")
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument(
        "--accumulate", type=int, nargs="+", help="micro-batches of each rank in a step, in place of --global-batch"
    )
    parser.add_argument(
        "--width", type=int, default=2048, help="of six square layers: 2048 makes 25 million parameters"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", type=Path, help="file for all measurements")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# What a worker does


def model(width: int) -> Any:
    from torch import nn

    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def plain_ddp(args: argparse.Namespace, data: Any, run: Any, until: int) -> Iterator[None]:
    """The loop that people write by hand."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    network = model(args.width)
    module = DistributedDataParallel(network) if run.world_size > 1 else network
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    accumulation = args.global_batch // args.micro_batch // run.world_size
    sampler: Any = DistributedSampler(data, run.world_size, run.rank, drop_last=True)
    batches = iter(DataLoader(data, args.micro_batch, sampler=sampler))
    for _ in range(until):
        optimizer.zero_grad()
        for number in range(accumulation):
            inputs, targets = next(batches)
            synced = number == accumulation - 1 or module is network
            with nullcontext() if synced else module.no_sync():
                (torch.nn.functional.mse_loss(module(inputs), targets) / accumulation).backward()
        optimizer.step()
        yield


def ours(args: argparse.Namespace, data: Any, run: Any, until: int, exact: bool) -> Iterator[None]:
    """The same by the library's loop."""
    import torch

    import elastic_launch as el

    network = model(args.width)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    loader = el.ElasticLoader(data, el.GlobalBatch(args.global_batch, args.micro_batch))
    # A run of its own for each mode: one has a single loop at a time.
    own = el.Run(run.world, run.device)
    try:
        for step in own.steps(loader, network, optimizer, until=f"{until}ba", exact=exact):
            for inputs, targets in step:
                step.backward(torch.nn.functional.mse_loss(step.model(inputs), targets))
            step.update()
            yield
    finally:
        own.close()
        own.release()


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import TensorDataset

    import elastic_launch as el

    with el.session() as run:
        until = (args.blocks + 1) * args.steps
        inputs = torch.randn(until * args.global_batch, args.width)
        data = TensorDataset(inputs, inputs.flip(1))
        loops = {
            mode: plain_ddp(args, data, run, until) if mode == "ddp" else ours(args, data, run, until, mode == "exact")
            for mode in args.modes
        }
        times: dict[str, list[float]] = {mode: [] for mode in args.modes}
        cpu: dict[str, list[float]] = {mode: [] for mode in args.modes}
        sent: dict[str, list[float]] = {mode: [] for mode in args.modes}
        for block in range(args.blocks + 1):
            for mode in args.modes:
                if run.world_size > 1:
                    dist.barrier()
                before, started, spent = loopback_bytes(), time.monotonic(), time.process_time()
                for _ in range(args.steps):
                    next(loops[mode])
                if run.world_size > 1:
                    dist.barrier()
                # The first block pays for what is allocated and connected once.
                if block:
                    cpu[mode].append((time.process_time() - spent) / args.steps)
                    times[mode].append((time.monotonic() - started) / args.steps)
                    sent[mode].append((loopback_bytes() - before) / args.steps / run.world_size)
        for loop in loops.values():
            loop.close()  # type: ignore[attr-defined]
        if run.rank == 0:
            args.worker.write_text(json.dumps({"seconds": times, "cpu": cpu, "bytes": sent, "peak": peak_memory()}))
        del loops


def loopback_bytes() -> int:
    """Bytes that this host sent to itself."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    return 0


def peak_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


# What runs them


def launch(world: int, modes: list[str], args: argparse.Namespace, blocks: int, global_batch: int) -> dict[str, Any]:
    """Run a world's processes and return what its first rank measured."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        options = ["--blocks", blocks, "--steps", args.steps, "--width", args.width, "--worker", result]
        options += ["--global-batch", global_batch, "--micro-batch", args.micro_batch, "--modes", *modes]
        command = [sys.executable, __file__, *map(str, options)]
        place = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        common = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        processes = [
            subprocess.Popen(
                command,
                env={**common, **{name: str(value) for name, value in place.items()}}
                | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(world)
        ]
        try:
            deadline = time.monotonic() + LAUNCH_TIMEOUT
            codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit(f"world size {world}, {', '.join(modes)}: exit codes {codes}")
        return dict(json.loads(result.read_text()))


def spread(values: list[float], unit: float = 1.0) -> str:
    ordered = sorted(value / unit for value in values)
    return f"{statistics.median(ordered):.3f} ({ordered[0]:.3f}..{ordered[-1]:.3f})"


def main() -> None:
    args = arguments()
    if args.worker:
        worker(args)
        return
    import torch

    parameters = 6 * (args.width**2 + args.width)
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}; "
        f"{parameters / 1e6:.2f} million parameters, micro-batches of {args.micro_batch}; medians (least..greatest)\n"
    )
    print(
        "| ranks | micro-batches of each | mode | ms per step | / DDP | CPU ms per step | more than DDP "
        "| MB sent per rank and step | / DDP | peak MB of rank 0 |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    everything: dict[str, Any] = {}
    for world in args.worlds:
        batches = [args.micro_batch * world * count for count in args.accumulate or ()] or [args.global_batch]
        for global_batch in batches:
            measured = launch(world, args.modes, args, args.blocks, global_batch)
            everything[f"{world}, {global_batch}"] = measured
            each = global_batch / args.micro_batch / world
            for mode in args.modes:
                seconds, sent, cpu = (measured[what][mode] for what in ("seconds", "bytes", "cpu"))
                # Each mode alone: the peak of a process that holds all three would be theirs together.
                alone = launch(world, [mode], args, 1, global_batch)["peak"]
                measured.setdefault("peaks", {})[mode] = alone
                base = {what: statistics.median(measured[what].get("ddp", measured[what][mode])) for what in UNITS}
                more = statistics.median(sent) / base["bytes"] if world > 1 else 1.0
                print(
                    f"| {world} | {each:g} | {mode} | {spread(seconds, 1e-3)} "
                    f"| {statistics.median(seconds) / base['seconds']:.2f} | {spread(cpu, 1e-3)} "
                    f"| {(statistics.median(cpu) - base['cpu']) * 1e3:+.2f} | {statistics.median(sent) / 1e6:.1f} "
                    f"| {more:.2f} | {alone / 1e6:.0f} |",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()

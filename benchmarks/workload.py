"""What the benchmarks train: a plain DDP script that notes the time of every optimizer step.

It imports nothing of any launcher and stands on torchrun's environment variables alone. Every rank appends one JSON
line per step to the same file: {"step", "rank", "world", "pid", "clock"}, the last by ``time.monotonic()``, which all
processes of a Linux host share. Step 0 is the script's first act, before it imports torch: what comes before is the
launcher's share, what comes after is its own. With ``--snapshot`` it saves every so many steps, and goes on from there.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

WIDTH = 32
COLLECTIVE_TIMEOUT = timedelta(minutes=2)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a layer for as long as a benchmark needs.")
    parser.add_argument("--file", type=Path, required=True, help="where the lines go")
    parser.add_argument("--steps", type=int, default=3000, help="after which it ends by itself")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds to sleep after each step")
    parser.add_argument("--snapshot", type=Path, help="file to save to and to go on from")
    parser.add_argument("--every", type=int, default=10, help="steps between snapshots")
    return parser.parse_args()


@contextmanager
def noting(path: Path) -> Iterator[Callable[[int], None]]:
    """Give a function that appends the line of one step: in one write, so that lines never mix."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def note(step: int) -> None:
        line = {"step": step, "rank": rank, "world": world, "pid": os.getpid(), "clock": time.monotonic()}
        os.write(file, json.dumps(line).encode() + b"\n")

    try:
        yield note
    finally:
        os.close(file)


def train(args: argparse.Namespace, note: Callable[[int], None]) -> None:
    # Not at the top: these take seconds, and step 0 has to be noted before.
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    ddp = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batch = torch.ones(8, WIDTH)
    done = 0
    if args.snapshot and args.snapshot.exists():
        state = torch.load(args.snapshot)
        ddp.module.load_state_dict(state["model"])
        done = state["step"]
    for step in range(done + 1, args.steps + 1):
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
        note(step)
        if args.snapshot and step % args.every == 0 and dist.get_rank() == 0:
            new = args.snapshot.with_suffix(".new")
            torch.save({"model": ddp.module.state_dict(), "step": step}, new)
            new.rename(args.snapshot)
        time.sleep(args.sleep)
    # With these two alive, destroying the process group hangs now and then.
    del ddp, optimizer
    dist.destroy_process_group()


def main() -> None:
    args = parse_args()
    with noting(args.file) as note:
        note(0)
        train(args, note)


if __name__ == "__main__":
    main()

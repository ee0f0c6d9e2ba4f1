"""Measures time and peak memory of snapshots, durable copies and restores of a state of some gigabytes.

One worker has a model whose state, with the momentum of its optimizer, has the given size. It takes snapshots in
memory and durable copies, and is killed; the next worker restores the newest snapshot. A second run restores the
checkpoint from the disk. Memory of the agent's slots is counted once, for the worker that has them mapped.

    python benchmarks/large_state.py --gib 2 --directory /var/tmp
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STEPS = 8


def work(directory: Path, gib: float, steps: int) -> None:
    """The worker: notes the time of each step and restore."""
    import torch

    import elastic_launch as el

    count = max(1, round(gib * 2**30 / 2 / 2**26))  # parameters of 64 MiB, and as much momentum

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ParameterList(torch.ones(2**24) for _ in range(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([block[0] * x.mean() for block in self.blocks]).sum()

    def note(what: str, seconds: float) -> None:
        with (directory / "notes.jsonl").open("a") as file:
            file.write(json.dumps({"what": what, "seconds": seconds}) + "\n")

    torch.set_num_threads(1)
    with el.session() as run:
        model = Model().to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        loader = el.ElasticLoader(torch.utils.data.TensorDataset(torch.ones(64, 1)), el.GlobalBatch(1, micro=1))
        checkpoint = el.Checkpoint(directory / "checkpoints", every=STEPS // 2, keep=1)
        entered = began = time.monotonic()
        run.on_checkpoint(lambda outcome: note("durable copy", outcome.seconds))
        for step in run.steps(loader, model, optimizer, until=f"{steps}ba", checkpoint=checkpoint):
            if began == entered:
                note("start" if step.number == 1 else f"restore at step {step.number - 1}", time.monotonic() - began)
            began = time.monotonic()
            for (x,) in step:
                step.backward(model(x.to(run.device)))
            step.update()
            note(f"step {step.number}", time.monotonic() - began)


@contextmanager
def sampled(root: int) -> Iterator[dict[str, int]]:
    """Sample the memory of all processes below one; yields the peaks in bytes, by kind."""
    peaks: dict[str, int] = {}
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.05):
            own = shared = 0
            for pid in below(root):
                found = memory(pid)
                own += found[0]
                shared = max(shared, found[1])
            for name, value in {"own memory of all processes": own, "slots": shared, "both": own + shared}.items():
                peaks[name] = max(peaks.get(name, 0), value)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def below(root: int) -> list[int]:
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def memory(pid: int) -> tuple[int, int]:
    """Return the bytes of a process' anonymous memory, and of the shared memory that it has mapped."""
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return 0, 0
    own, shared = (int(lines.get(name, "0").split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    return own, shared


def launch(directory: Path, gib: float, steps: int, faults: str = "") -> dict[str, int]:
    own = [str(Path(__file__).resolve()), "--worker", str(directory), "--gib", str(gib), "--steps", str(steps)]
    command = [sys.executable, "-m", "elastic_launch", "--standalone", "--log-dir", str(directory / "logs"), *own]
    environ = {**os.environ, **({"ELASTIC_LAUNCH_FAULTS": faults} if faults else {})}
    process = subprocess.Popen(command, env=environ)
    with sampled(process.pid) as peaks:
        code = process.wait(1200)
    if code:
        sys.exit(f"large_state: exit code {code}")
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state [2]")
    parser.add_argument("--directory", type=Path, help="where to make a directory for checkpoints")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.gib, args.steps)
        return
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
        kill = json.dumps([{"rank": 0, "step": STEPS - 1, "round": 1}])
        for title, peaks in (
            ("train, killed once", launch(directory, args.gib, STEPS, kill)),
            ("resume from the disk", launch(directory, args.gib, STEPS + 2)),
        ):
            print(f"{title}, at most: " + ", ".join(f"{kind} {value / 2**30:.2f} GiB" for kind, value in peaks.items()))
        print(f"load average after: {os.getloadavg()[0]:.1f}")
        for line in (directory / "notes.jsonl").read_text().splitlines():
            note = json.loads(line)
            print(f"{note['what']}: {note['seconds']:.2f} s")


if __name__ == "__main__":
    main()

"""What a step costs on a GPU with live rounds and without, for models of several sizes, in float32 and bfloat16.

Two ranks train each model under a launcher of its own. So that no time is spent on one start after the other, several
launchers start at the same time, and then train in turn. Prints a line of JSON for each training.

    python benchmarks/gpu_steps.py --millions 0.3 8 100
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from jobs import Job, Missing, Others, Record, Stop, become_subreaper, program

WARM = 6
"""Steps that are left out: they include one-time allocation, the set-up of connections and the first snapshot."""
MICRO = 8
LAYERS = 6
LIVE = ("--no-live", "default", "confirmed")
LIMIT = 60.0 if "WORKLOAD_GPU" in os.environ else 240.0
"""Seconds for the start of a group of launchers, and for each training."""


def measured(millions: float) -> tuple[int, int]:
    """The steps between two synchronizations with the GPU, and how often these are measured; the median counts."""
    return (10, 12) if millions < 1 else (10, 6) if millions < 50 else (3, 5)


def work(file: Path, number: int, kind: str) -> None:
    """A worker: build everything, wait for its turn, and train."""
    import torch
    from elastic_workload import LIVE as ASKED
    from workload import noting

    import elastic_launch as el

    millions, dtype, extra, live = kind.split(",")
    with noting(file) as note, ExitStack() as stack:
        try:
            run = stack.enter_context(el.session(live=ASKED["default" if live == "--no-live" else live]))
            width = round((float(millions) * 1e6 / LAYERS) ** 0.5)
            layers = [torch.nn.Linear(width, width) for _ in range(LAYERS)]
            model = torch.nn.Sequential(*layers).to(run.device, getattr(torch, dtype))
            inputs = torch.randn(MICRO, width, device=run.device, dtype=getattr(torch, dtype))
            if extra == "graph":
                model = torch.cuda.make_graphed_callables(model, (inputs,))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            autocast = torch.autocast(run.device.type, torch.bfloat16, enabled=extra == "autocast")
            data = torch.utils.data.TensorDataset(torch.arange(64))
            note(0, mark="ready", kind=kind)
            while not file.with_name(f"turn-{number}").exists():
                time.sleep(0.01)
            began, times = 0.0, list[float]()
            loader = el.ElasticLoader(data, el.GlobalBatch(2 * MICRO, MICRO))
            block, times_measured = measured(float(millions))
            for step in run.steps(loader, model, optimizer, until=f"{WARM + block * times_measured}ba"):
                for _numbers in step:
                    with autocast:
                        loss = step.model(inputs).square().mean()
                    step.backward(loss)
                step.update()
                if step.number >= WARM and (step.number - WARM) % block == 0:
                    if run.device.type == "cuda":
                        torch.cuda.synchronize()
                    now = time.monotonic()
                    times += [(now - began) / block] if began else []
                    began = now
            if run.rank == 0:
                note(0, mark="done", kind=kind, times=times)
        except Exception as error:
            note(0, mark="failed", kind=kind, error=f"{type(error).__name__}: {error}"[:300])
            raise


def start(job: Job, number: int, kind: str) -> None:
    live = [kind.rpartition(",")[2]] if "--no-live" in kind else []
    own = ["--log-dir", str(job.directory / f"logs-{number}"), "--hang-timeout", "off", "--max-restarts", "0", *live]
    script = [__file__, "--file", str(job.directory / "steps.jsonl"), "--worker", str(number), kind]
    job.start([program("elastic-launch"), "--standalone", "--nproc", "2", *own, *script])


def train(job: Job, kinds: list[str]) -> None:
    """Start these trainings, have them train in turn, and print what they have measured."""

    def marked(kind: str, mark: str) -> Record:
        job.limit(LIMIT)
        return job.until(f"{kind}: {mark}", lambda x: x.get("kind") == kind and x["mark"] in (mark, "failed"))

    for number, kind in enumerate(kinds):
        start(job, number, kind)
    for number, kind in enumerate(kinds):
        millions, dtype, extra, live = kind.split(",")
        found: Record = {"millions": float(millions), "dtype": dtype, "extra": extra, "live": live}
        try:
            for each in kinds if number == 0 else ():
                marked(each, "ready")
            (job.directory / f"turn-{number}").touch()
            done = marked(kind, "done")
            if done["mark"] == "done":
                found |= {"ms": 1000 * statistics.median(done["times"]), "least": 1000 * min(done["times"])}
            else:
                found["error"] = done["error"]
        except Missing as error:
            found["error"] = str(error)
        print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", nargs="+", default=["0.3", "8", "100"], help="of parameters [0.3 8 100]")
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16"], help="of parameters")
    parser.add_argument("--extra", nargs="*", default=["autocast", "graph"], help="on the second model, in float32")
    parser.add_argument("--together", type=int, default=max(2, (os.cpu_count() or 2) * 3 // 4), help="launchers")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.file, int(args.worker[0]), args.worker[1])
    plain = [f"{size},{dtype},-" for size in args.millions for dtype in args.types]
    others = [f"{args.millions[min(1, len(args.millions) - 1)]},float32,{extra}" for extra in args.extra]
    kinds = [f"{kind},{live}" for kind in plain + others for live in LIVE]
    stop = Stop()
    stop.catch()
    become_subreaper()
    for first in range(0, len(kinds), args.together):
        with Job(stop, LIMIT, Others(0)) as job:
            train(job, kinds[first : first + args.together])


if __name__ == "__main__":
    sys.exit(main())

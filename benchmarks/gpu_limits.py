"""Two runs with less than they ask for: ``micro="auto"`` with too little memory, and a node without the others' GPU.

The first one must find micro-batches that fit. The second one must fail with an error that names the device. Prints a
line of JSON. Without a GPU, memory that is full is played, and the second node has other micro-batches instead.

    WORKLOAD_GPU=1 python benchmarks/gpu_limits.py memory
    WORKLOAD_GPU=1 python benchmarks/gpu_limits.py mixed
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from jobs import Job, Others, Record, Stop, become_subreaper, free_port, program

ROOM = 2**30
"""Bytes of the GPU's memory that a rank may have."""
SAMPLE = 2**22
"""Float32 numbers that a sample needs, at least twice."""
BATCH = 128
"""Samples of a step: the first micro-batches, half of it, do not fit."""
FITS = 20
"""Samples that fit where this is played."""
LIMIT = 60.0 if "WORKLOAD_GPU" in os.environ else 240.0


def work(result: Path) -> None:
    """A worker of the first run."""
    import torch
    import workload  # noqa: F401  shares the GPU

    import elastic_launch as el

    def loss_fn(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        if not output.is_cuda and len(output) > FITS:
            raise torch.OutOfMemoryError("played: memory is full")
        wide = output.sum(1, keepdim=True) * torch.ones(SAMPLE if output.is_cuda else 1, device=output.device)
        return wide.square().mean()

    with el.session() as run:
        if run.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(ROOM / torch.cuda.mem_get_info()[1])
        model = torch.nn.Linear(8, 8).to(run.device)
        data = torch.utils.data.TensorDataset(torch.ones(2 * BATCH, 8), torch.ones(2 * BATCH))
        loader = el.ElasticLoader(data, el.GlobalBatch(BATCH, micro="auto"))
        trainer = el.Trainer(run, model, torch.optim.SGD(model.parameters(), lr=1e-3), loader, loss_fn=loss_fn)
        trainer.fit("10ba")
        if run.rank == 0:
            found = {"micro": trainer.loader.batch.micro, "steps": trainer.step, "device": run.device.type}
            result.write_text(json.dumps(found))


def measure(job: Job, what: str) -> Record:
    result, gpu, port = job.directory / "result.json", "WORKLOAD_GPU" in os.environ, free_port()
    launcher = [program("elastic-launch"), "--max-restarts", "0", "--log-dir", str(job.directory / "logs")]
    if what == "memory":
        job.start([*launcher, "--standalone", "--nproc", "2", __file__, "worker", str(result)])
    for host in ("true", "false") if what == "mixed" else ():
        where = ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", f"is_host={host}"]
        micro, blind = ("4", {"CUDA_VISIBLE_DEVICES": ""}) if host == "false" else ("8", {})
        script = job.script("elastic_workload.py", "--steps", "100", "--micro", "8" if gpu else micro)
        job.start([*launcher, *where, "--node-id", f"host-{host}", *script], blind)
    job.sleep(time.monotonic() + LIMIT)
    output = "\n".join(path.read_text(errors="replace") for path in sorted(job.directory.glob("output-*.log")))
    found = {"what": what, "ended": not job.running, "output": output[-3000:]}
    if what == "memory":
        found |= json.loads(result.read_text()) if result.exists() else {}
        return {**found, "passed": 0 < found.get("micro", 0) < BATCH // 2}
    word = "device" if gpu else "micro-batch"
    errors = [line for line in output.splitlines() if "UsageError" in line and word in line]
    return {**found, "error": (errors or [""])[-1], "passed": bool(errors) and found["ended"]}


def main() -> None:
    if sys.argv[1] == "worker":
        return work(Path(sys.argv[2]))
    stop = Stop()
    stop.catch()
    become_subreaper()
    with Job(stop, LIMIT, Others(0)) as job:
        print(json.dumps(measure(job, sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())

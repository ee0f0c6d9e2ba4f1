"""Train with a need for memory that grows.

``growing_need.py DIRECTORY MIB MORE CHECKPOINTS [RANK | loader | often | once | thread]``

The state takes MIB MiB, and from step 9 of 14 on each process takes MORE MiB besides it. Step 8 waits for a file ``go``
in the directory. The last line has the step from which the process went on, and the weights. With RANK, only the need
of that rank grows, which the kernel kills first, and snapshots are rare. With ``loader``, it is that of a loader's
process: it takes the memory when there is the file, and it has loaded the samples of three steps. With ``often``, a
checkpoint is saved every third step. With ``once``, the kernel kills these processes first, and after a restart their
need does not grow. With ``thread``, a thread takes the memory once there is a file ``grow``, also while the process is
suspended.
"""

import os
import sys
import threading
import time
from pathlib import Path

import torch

import elastic_launch as el
from elastic_launch.training.checkpoints import snapshot_interval

GROWS, STEPS = 9, 14
loads, often, once, threads = (sys.argv[5:] == [mode] for mode in ("loader", "often", "once", "thread"))
# Without RANK, each step is followed by a snapshot, so that two slots are in use; with it, only the first steps are.
grows = int(sys.argv[5]) if sys.argv[5:] and sys.argv[5].isdecimal() else None
snapshot_interval.SHARE = 1000.0 if grows is None else 1e-9

directory, mib, more = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


def wait_until_idle(pid: int) -> None:
    """Wait until the main thread of a process has used no processor time for a second."""
    used, since = "", time.monotonic()
    while time.monotonic() < since + 1:
        time.sleep(0.1)
        now = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
        if now != used:
            used, since = now, time.monotonic()


class Greedy(torch.utils.data.TensorDataset):
    """Takes the memory in a loader's process, which the kernel kills first."""

    loaded, taken = 0, b""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self.loaded += 1
        if self.loaded == 1:
            Path("/proc/self/oom_score_adj").write_text("1000")
        if self.loaded > 6 and not self.taken and (directory / "go").exists():
            wait_until_idle(os.getppid())  # the worker waits for this sample then, and needs no memory at that moment
            self.taken = b"x" * (more * 2**20)
        return super().__getitem__(index)


def take() -> None:
    while not (directory / "grow").exists():
        time.sleep(0.02)
    (directory / "grow").unlink()
    print(len(b"x" * (more * 2**20)))


with el.session(threads=1) as run:
    if grows == run.rank or once or threads:
        Path("/proc/self/oom_score_adj").write_text("1000")
    if threads:
        threading.Thread(target=take, daemon=True).start()
    torch.manual_seed(0)
    # Weights and momentum, half of the state each.
    model = torch.nn.Linear(mib * 2**20 // 8 // 1024, 1024, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = (Greedy if loads else torch.utils.data.TensorDataset)(torch.randn(28, model.in_features))
    loader = el.ElasticLoader(data, el.GlobalBatch(2, micro=1), seed=0, num_workers=int(loads))
    saving = el.Checkpoint(sys.argv[4], every=3 if often else STEPS - 2)
    taken = b""
    for step in run.steps(loader, model, optimizer, until=f"{STEPS}ba", checkpoint=saving, exact=True):
        greedy = not loads and not threads and grows in (None, run.rank) and not (once and run.restarts)
        if step.number >= GROWS and not taken and greedy:
            taken = b"x" * (more * 2**20)
        for (x,) in step:
            step.backward(step.model(x).square().mean())
        if step.number == GROWS - 1:
            (directory / f"waiting-{run.rank}").touch()
            while not (directory / "go").exists():
                time.sleep(0.02)
        step.update()
    print(f"went on from step {run.resumed_step}, weights {el.weights_sha256(model)}", flush=True)

"""A worker that joins the others in a process group at every start, and reports the group's address.

``<directory>/die-<rank>``: end by SIGKILL, once. ``<directory>/finish``: end with 0, all after the same sum.
"""

import json
import os
import pathlib
import signal
import sys
import time

import torch
import torch.distributed as dist

directory, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
dist.init_process_group("gloo")
while True:
    total = torch.tensor([1.0, float((directory / "finish").exists())])
    dist.all_reduce(total)
    if not (directory / f"met-{os.environ['ELASTIC_LAUNCH_ROUND']}-{rank}").exists():
        names = ("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE")
        said = {name: os.environ[name] for name in names} | {"sum": float(total[0])}
        path = directory / f"met-{os.environ['ELASTIC_LAUNCH_ROUND']}-{rank}"
        path.with_suffix(".new").write_text(json.dumps(said))
        path.with_suffix(".new").rename(path)
    if total[1] > 0:
        break
    if (directory / f"die-{rank}").exists():
        (directory / f"die-{rank}").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
dist.destroy_process_group()

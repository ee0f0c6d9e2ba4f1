"""Run a script and note its optimizer steps; hold them back: ``gated.py DIRECTORY SCRIPT [ARGUMENT ...]``.

Each step appends a line to DIRECTORY/optimizer.jsonl. Behind the n-th step of a process in a round, n being what
DIRECTORY/hold says, it waits until DIRECTORY/go-ROUND is there. While DIRECTORY/slow is there, each step takes a while.
Every optimizer of torch's is followed, whichever framework calls it.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

directory, script, *arguments = sys.argv[1:]
work = Path(directory)
hold = int((work / "hold").read_text())
number = count = 0


def stepped(*_: Any) -> None:
    global number, count
    before, number = number, int(os.environ["ELASTIC_LAUNCH_ROUND"])
    count = count + 1 if number == before else 1
    noted = {
        "round": number,
        "node": os.environ["GROUP_RANK"],
        "rank": int(os.environ["RANK"]),
        "world": int(os.environ["WORLD_SIZE"]),
        "count": count,
        "pid": os.getpid(),
    }
    with (work / "optimizer.jsonl").open("a") as file:
        file.write(json.dumps(noted) + "\n")
    if (work / "slow").exists():
        time.sleep(0.2)
    while count == hold and not (work / f"go-{number}").exists():
        time.sleep(0.02)


register_optimizer_step_post_hook(stepped)
sys.argv = [script, *arguments]
sys.path[0] = str(Path(script).parent)
runpy.run_path(script, run_name="__main__")

"""A plain worker that needs no other rank: it notes each step as ``steps.py`` does, and its child does so, too.

The lines of the latter are in ``children.jsonl``. Both end when there is a file ``finish``.
"""

import json
import os
import pathlib
import sys
import time

directory = pathlib.Path(sys.argv[1])
number, rank = int(os.environ["ELASTIC_LAUNCH_ROUND"]), int(os.environ["RANK"])


def steps(file, **what):
    step = 0
    while not (directory / "finish").exists():
        step += 1
        time.sleep(0.02)
        line = {"clock": time.clock_gettime(time.CLOCK_BOOTTIME), "node": os.environ["NODE"], "round": number}
        line |= {"rank": rank, "step": step, "world": int(os.environ["WORLD_SIZE"]), **what}
        with (directory / file).open("a") as lines:
            lines.write(json.dumps(line) + "\n")


child = os.fork()
if child == 0:
    steps("children.jsonl")
    os._exit(0)
with (directory / "started.jsonl").open("a") as file:
    env = {k: v for k, v in os.environ.items() if k.isupper()}
    file.write(json.dumps({"pid": os.getpid(), "children": [child], "argv": sys.argv[1:], "env": env}) + "\n")
steps("steps.jsonl")
os.waitpid(child, 0)

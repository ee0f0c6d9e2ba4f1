"""A worker that is controlled by files in a directory; it needs no torch and so starts at once.

``finish``: exit 0. ``exit-<rank>``: a number; exit with it, once. ``raise-<rank>``: raise, once. Started with
``--ignore-term`` it ignores SIGTERM and SIGINT; with ``--child`` it starts a grandchild that sleeps.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

directory = pathlib.Path(sys.argv[1])
flags = sys.argv[2:]
rank = os.environ["RANK"]
if "--ignore-term" in flags:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
children = [subprocess.Popen(["sleep", "600"]).pid] if "--child" in flags else []
line = {
    "pid": os.getpid(),
    "children": children,
    "argv": sys.argv[1:],
    "env": {k: v for k, v in os.environ.items() if k.isupper()},
}
with (directory / "started.jsonl").open("a") as file:
    file.write(json.dumps(line) + "\n")
print(f"rank {rank} of {os.environ['WORLD_SIZE']} in round {os.environ.get('ELASTIC_LAUNCH_ROUND')}", flush=True)


def take(name):
    path = directory / name
    try:
        text = path.read_text()
        path.unlink()
    except FileNotFoundError:
        return None
    return text


while not (directory / "finish").exists():
    code = take(f"exit-{rank}")
    if code is not None:
        print(f"rank {rank} leaves with {code}", file=sys.stderr, flush=True)
        sys.exit(int(code))
    if take(f"raise-{rank}") is not None:
        raise OSError(f"rank {rank} was told to fail")
    time.sleep(0.02)

"""A worker that notes the signal handling of processes that it starts: ``children.py FILE [library]``.

FILE gets, by the sort of process, its caught, ignored and blocked signals. With ``library`` this is done in the loop of
the training library, otherwise without it. ``before`` is a process that was forked before the session.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

MASKS = re.compile(r"^Sig(?:Cgt|Ign|Blk):\t\w+$", re.MULTILINE)
SHOW = f"import re; print(re.findall({MASKS.pattern!r}, open('/proc/self/status').read(), re.MULTILINE))"


def masks(_: int = 0) -> list[str]:
    return MASKS.findall(Path("/proc/self/status").read_text())


class Masks(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[str]:
        return masks()


def forked() -> list[str]:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writing, json.dumps(masks()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with open(reading) as file:
        found: list[str] = json.load(file)
    return found


def in_thread() -> list[str]:
    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.append(forked()))
    thread.start()
    thread.join()
    return found[0]


def spawned() -> list[str]:
    """Through posix_spawn, which executes without a fork of Python's."""
    reading, writing = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, writing, 1)]
    shell = ["sh", "-c", "grep -E '^Sig(Cgt|Ign|Blk)' /proc/self/status"]
    os.waitpid(os.posix_spawn("/bin/sh", shell, os.environ, file_actions=actions), 0)
    os.close(writing)
    with open(reading) as file:
        return MASKS.findall(file.read())


def executed(**options: Any) -> str:
    return subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True, **options).stdout


def children() -> dict[str, Any]:
    found: dict[str, Any] = {"fork": forked(), "fork in a thread": in_thread(), "posix_spawn": spawned()}
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            found[f"pool, {method}"] = pool.map(masks, [0])[0]
    with ProcessPoolExecutor(2) as executor:
        found["executor"] = executor.submit(masks).result()
    found["executed"], found["executed, preexec"] = executed(), executed(preexec_fn=lambda: None)
    found["executed, signals as they are"] = executed(restore_signals=False)
    for persistent in (False, True):
        loader = DataLoader(Masks(), 1, num_workers=1, persistent_workers=persistent, collate_fn=lambda rows: rows[0])
        found[f"loader, persistent_workers={persistent}"] = next(iter(loader))
    return found


def main() -> None:
    file, *library = sys.argv[1:]
    if not library:
        found = {"worker": masks(), **children()}
    else:
        import elastic_launch as el

        before = multiprocessing.get_context("fork").Pool(1)
        with el.session() as run:
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = el.ElasticLoader(TensorDataset(torch.ones(8, 2)), el.GlobalBatch(4, micro=2), seed=0)
            for step in run.steps(data, model, optimizer, until="1ba"):
                for (inputs,) in step:
                    step.backward(model(inputs).sum())
                step.update()
                found = {"before": before.map(masks, [0])[0], **children()}
                before.terminate()
                before.join()
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

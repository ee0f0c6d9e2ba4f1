"""Runs a script as on GPUs, where an exchange that is aborted may end with wrong values: ``in_doubt.py SCRIPT ...``.

With ``SPOIL=R:S:K`` rank K of round R kills itself in the update of step S, and this update is wrong on the others.
With ``LATE=K`` rank K does not learn then that step S is exchanged, while those that are left update by it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from typing import Any

import torch

from elastic_launch.training import passes, rounds
from elastic_launch.training.together import OptimizerSteps

real_step, updates = OptimizerSteps.step, 0


def step(self: OptimizerSteps, chosen: list[torch.optim.Optimizer]) -> Any:
    global updates
    updates += 1
    skipped = real_step(self, chosen)
    number, at, rank = os.environ.get("SPOIL", "0:0:0").split(":")
    if os.environ["ELASTIC_LAUNCH_ROUND"] == number and updates == int(at):
        if os.environ["RANK"] == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        with torch.no_grad():
            for group in chosen[0].param_groups:
                for parameter in group["params"]:
                    parameter.add_(1.0)
    return skipped


OptimizerSteps.step = step  # type: ignore[method-assign]

# What raises in it must look like a part of the library.
late = """
def exchange(self, engine, *args):
    real(self, engine, *args)
    if is_late():
        while not engine.rounds.is_over:
            time.sleep(0.01)
        raise RuntimeError("Connection closed by peer")
"""


def is_late() -> bool:
    number, at, _ = os.environ.get("SPOIL", "0:0:0").split(":")
    late_here = os.environ.get("LATE") == os.environ["RANK"] and os.environ["ELASTIC_LAUNCH_ROUND"] == number
    return late_here and updates + 1 == int(at)


names = {"__name__": "elastic_launch.training.late", "real": passes.Pass.exchange, "is_late": is_late, "time": time}
exec(late, names)
passes.Pass.exchange = names["exchange"]  # type: ignore[method-assign]
rounds.may_end_wrong = lambda device: True
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")

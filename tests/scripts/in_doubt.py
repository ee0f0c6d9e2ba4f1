"""Runs a script as on GPUs, where an exchange that is aborted may end with wrong values: ``in_doubt.py SCRIPT ...``.

With ``SPOIL=R:S:K`` rank K of round R kills itself in the update of step S, and this update is wrong on the others.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

import torch

from elastic_launch.training import rounds
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
rounds.may_end_wrong = lambda device: True
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")

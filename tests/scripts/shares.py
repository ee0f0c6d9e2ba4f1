"""Run a script under gated.py, and note each step's samples: ``shares.py DIRECTORY SCRIPT [ARGUMENT ...]``.

DIRECTORY/shares.jsonl gets a line for each optimizer step of each rank, with what identifies the samples that the rank
has put into its DDP model since the step before: their first values.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

VARIABLES = {"round": "ELASTIC_LAUNCH_ROUND", "rank": "RANK", "world": "WORLD_SIZE"}
work = Path(sys.argv[1])
samples: list[float] = []


def entered(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    if isinstance(module, DistributedDataParallel):
        samples.extend(inputs[0][:, 0].tolist())


def stepped(*_: Any) -> None:
    noted = {name: int(os.environ[variable]) for name, variable in VARIABLES.items()}
    with (work / "shares.jsonl").open("a") as file:
        file.write(json.dumps({**noted, "samples": samples}) + "\n")
    samples.clear()


register_module_forward_pre_hook(entered)
register_optimizer_step_post_hook(stepped)
runpy.run_path(str(Path(__file__).with_name("gated.py")), run_name="__main__")

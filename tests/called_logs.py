"""Logs specs of a third-party package, which the agent's process imports by this file's name."""

from __future__ import annotations

import os

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest


class OwnSpecs(DefaultLogsSpecs):
    """torch's own specs under another name; they change the environment of the agent's process."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        os.environ["SET_BY_SPECS"] = "meanwhile"
        return super().reify(envs)

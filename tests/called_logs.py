"""Logs specs of a third-party package, which the agent's process imports by this file's name."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs


class OwnSpecs(DefaultLogsSpecs):
    """torch's own specs under another name."""

"""Elastic, fault-tolerant launcher for PyTorch training.

``import elastic_launch`` alone imports no torch: whatever needs it is loaded on first use.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

TYPE_CHECKING = False  # programs import this before all else, and typing takes several milliseconds
if TYPE_CHECKING:
    from typing import Any

    from elastic_launch import integrations as integrations
    from elastic_launch.batch import BatchPlan as BatchPlan
    from elastic_launch.batch import GlobalBatch as GlobalBatch
    from elastic_launch.batch import MicroBatch as MicroBatch
    from elastic_launch.error_file import do_not_retry as do_not_retry
    from elastic_launch.training import dist as dist
    from elastic_launch.training import samplers as samplers
    from elastic_launch.training.callbacks import Callback as Callback
    from elastic_launch.training.callbacks import Progress as Progress
    from elastic_launch.training.checkpoint import Checkpoint as Checkpoint
    from elastic_launch.training.checkpoint import weights_sha256 as weights_sha256
    from elastic_launch.training.loader import ElasticLoader as ElasticLoader
    from elastic_launch.training.loader import FunctionLoader as FunctionLoader
    from elastic_launch.training.session import Run as Run
    from elastic_launch.training.session import session as session
    from elastic_launch.training.trainer import Trainer as Trainer

_HOMES = {
    "BatchPlan": "elastic_launch.batch",
    "Checkpoint": "elastic_launch.training.checkpoint",
    "ElasticLoader": "elastic_launch.training.loader",
    "FunctionLoader": "elastic_launch.training.loader",
    "GlobalBatch": "elastic_launch.batch",
    "MicroBatch": "elastic_launch.batch",
    "Run": "elastic_launch.training.session",
    "Callback": "elastic_launch.training.callbacks",
    "Progress": "elastic_launch.training.callbacks",
    "Trainer": "elastic_launch.training.trainer",
    "do_not_retry": "elastic_launch.error_file",
    "session": "elastic_launch.training.session",
    "weights_sha256": "elastic_launch.training.checkpoint",
}

_MODULES = {
    "dist": "elastic_launch.training.dist",
    "integrations": "elastic_launch.integrations",
    "samplers": "elastic_launch.training.samplers",
}

__all__ = [
    "BatchPlan",
    "Callback",
    "Checkpoint",
    "ElasticLoader",
    "FunctionLoader",
    "GlobalBatch",
    "MicroBatch",
    "Progress",
    "Run",
    "Trainer",
    "__version__",
    "dist",
    "do_not_retry",
    "integrations",
    "samplers",
    "session",
    "weights_sha256",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""Elastic, fault-tolerant launcher for PyTorch training.

``training/``        sessions, loops and the trainer of a training script
``integrations/``    callbacks for other frameworks
``batch``            the arithmetic of the global batch
``error_file``       how a worker leaves its exception
``errors``           every error that a user can meet
``faults``           faults on purpose, for tests of a script
``api``              runs started from Python; ``api_config`` reads torch's configuration
``cli/``             the programs ``elastic-launch``, ``elastic-composer`` and ``elasticctl``
``config/``          the validated configuration of a launch
``launch``           ``python -m elastic_launch.launch``, as ``torch.distributed.launch``
``run_path``         ``--run-path``
``safe_path``        keeps the working directory from hiding installed packages
``rendezvous/``      nodes form rounds of workers
``snapshot/``        checkpoints and snapshots
``events/``          typed events; ``observe/`` makes the ledger from them
``contract``         what agent and worker say to each other; ``shared_progress`` is memory that they share
``secret``           the run's token
``clock``            time as a dependency; ``testing`` has fakes
``system/``          the process and its operating system

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
    from elastic_launch.training.callbacks import Callback as Callback
    from elastic_launch.training.callbacks import Progress as Progress
    from elastic_launch.training.checkpoints.checkpoint import Checkpoint as Checkpoint
    from elastic_launch.training.checkpoints.checkpoint import weights_sha256 as weights_sha256
    from elastic_launch.training.data import samplers
    from elastic_launch.training.data.loader import ElasticLoader as ElasticLoader
    from elastic_launch.training.data.loader import FunctionLoader as FunctionLoader
    from elastic_launch.training.session import Run as Run
    from elastic_launch.training.session import session as session
    from elastic_launch.training.trainer import Trainer as Trainer

_HOMES = {
    "BatchPlan": "elastic_launch.batch",
    "Checkpoint": "elastic_launch.training.checkpoints.checkpoint",
    "ElasticLoader": "elastic_launch.training.data.loader",
    "FunctionLoader": "elastic_launch.training.data.loader",
    "GlobalBatch": "elastic_launch.batch",
    "MicroBatch": "elastic_launch.batch",
    "Run": "elastic_launch.training.session",
    "Callback": "elastic_launch.training.callbacks",
    "Progress": "elastic_launch.training.callbacks",
    "Trainer": "elastic_launch.training.trainer",
    "do_not_retry": "elastic_launch.error_file",
    "session": "elastic_launch.training.session",
    "weights_sha256": "elastic_launch.training.checkpoints.checkpoint",
}

_MODULES = {
    "dist": "elastic_launch.training.dist",
    "integrations": "elastic_launch.integrations",
    "samplers": "elastic_launch.training.data.samplers",
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

"""Elastic, fault-tolerant launcher for PyTorch training.

``training/``        sessions, loops and the trainer of a training script
``integrations/``    callbacks for other frameworks
``batch``            the arithmetic of the global batch
``error_file``       how a worker reports its exception
``errors``           every error that users can see; ``symptoms`` tells causes from consequences
``faults``           injected faults, for testing a script
``api``              runs started from Python; ``api_config`` reads torch's configuration
``cli/``             the programs ``elastic-launch``, ``elastic-composer`` and ``elasticctl``
``config/``          the validated configuration of a launch
``launch``           ``python -m elastic_launch.launch``, like ``torch.distributed.launch``
``run_path``         ``--run-path``
``safe_path``        keeps the working directory from shadowing installed packages
``rendezvous/``      nodes form rounds of workers
``snapshot/``        checkpoints and snapshots
``failure``          what is known of a failed worker
``events/``          typed events, and the sentences on them and on failures; ``observe/`` builds the ledger
``codec``            bounded JSON for messages and records
``contract``         the protocol between agent and worker; ``shared_progress`` is memory that they share
``stack_dump``       a worker writes its stacks on a signal
``collective_dump``  a worker's last collectives, which it writes when its agent asks
``secret``           the run's token
``clock``            time as a dependency; ``testing`` has fakes
``system/``          the process and the operating system

``import elastic_launch`` alone does not import torch: modules that need it are loaded on first use.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

TYPE_CHECKING = False  # programs import this first, and importing typing takes several milliseconds
if TYPE_CHECKING:
    from typing import Any

    from elastic_launch import integrations
    from elastic_launch.batch import BatchError, BatchPlan, GlobalBatch, MicroBatch
    from elastic_launch.contract import Best
    from elastic_launch.error_file import do_not_retry
    from elastic_launch.errors import ElasticLaunchError, UsageError
    from elastic_launch.snapshot.errors import (
        CheckpointError,
        CheckpointGoneError,
        CheckpointReadError,
        CheckpointWriteError,
        DamagedCheckpointError,
        ForeignCheckpointError,
        UnsupportedStateError,
    )
    from elastic_launch.snapshot.location import Url
    from elastic_launch.snapshot.storage.background import WriteOutcome
    from elastic_launch.snapshot.storage.listing import CheckpointInfo
    from elastic_launch.training import dist
    from elastic_launch.training.callbacks import (
        Callback,
        CheckpointEnd,
        Evaluation,
        Incident,
        Progress,
        RoundStart,
        StepEnd,
    )
    from elastic_launch.training.checkpoints.checkpoint import Checkpoint
    from elastic_launch.training.checkpoints.loading import export, load_checkpoint
    from elastic_launch.training.checkpoints.manager import weights_sha256
    from elastic_launch.training.checkpoints.parts import Stateful
    from elastic_launch.training.data import samplers
    from elastic_launch.training.data.epochs import Position
    from elastic_launch.training.data.loader import ElasticLoader, FunctionLoader, Loader
    from elastic_launch.training.data.streams import ShardedStream, count_shards
    from elastic_launch.training.evaluations import Evaluator
    from elastic_launch.training.plain import report_step, should_stop
    from elastic_launch.training.ranks.replicas import ReplicasDifferError
    from elastic_launch.training.ranks.world import World
    from elastic_launch.training.schedule import Schedule
    from elastic_launch.training.session import Run, session
    from elastic_launch.training.steps import Step
    from elastic_launch.training.trainer import Trainer
    from elastic_launch.training.transaction import NonFiniteLossError

_HOMES = {
    name: module
    for module, names in {
        "elastic_launch.batch": "BatchError BatchPlan GlobalBatch MicroBatch",
        "elastic_launch.contract": "Best",
        "elastic_launch.error_file": "do_not_retry",
        "elastic_launch.errors": "ElasticLaunchError UsageError",
        "elastic_launch.snapshot.errors": (
            "CheckpointError CheckpointGoneError CheckpointReadError CheckpointWriteError "
            "DamagedCheckpointError ForeignCheckpointError UnsupportedStateError"
        ),
        "elastic_launch.snapshot.location": "Url",
        "elastic_launch.snapshot.storage.background": "WriteOutcome",
        "elastic_launch.snapshot.storage.listing": "CheckpointInfo",
        "elastic_launch.training.callbacks": "Callback CheckpointEnd Evaluation Incident Progress RoundStart StepEnd",
        "elastic_launch.training.checkpoints.checkpoint": "Checkpoint",
        "elastic_launch.training.checkpoints.manager": "weights_sha256",
        "elastic_launch.training.checkpoints.loading": "export load_checkpoint",
        "elastic_launch.training.checkpoints.parts": "Stateful",
        "elastic_launch.training.data.epochs": "Position",
        "elastic_launch.training.data.loader": "ElasticLoader FunctionLoader Loader",
        "elastic_launch.training.data.streams": "ShardedStream count_shards",
        "elastic_launch.training.evaluations": "Evaluator",
        "elastic_launch.training.plain": "report_step should_stop",
        "elastic_launch.training.ranks.replicas": "ReplicasDifferError",
        "elastic_launch.training.ranks.world": "World",
        "elastic_launch.training.schedule": "Schedule",
        "elastic_launch.training.session": "Run session",
        "elastic_launch.training.steps": "Step",
        "elastic_launch.training.transaction": "NonFiniteLossError",
        "elastic_launch.training.trainer": "Trainer",
    }.items()
    for name in names.split()
}

_MODULES = {
    "dist": "elastic_launch.training.dist",
    "integrations": "elastic_launch.integrations",
    "samplers": "elastic_launch.training.data.samplers",
}

__all__ = [  # type checkers read a literal only
    "BatchError",
    "BatchPlan",
    "Best",
    "Callback",
    "Checkpoint",
    "CheckpointEnd",
    "CheckpointError",
    "CheckpointGoneError",
    "CheckpointInfo",
    "CheckpointReadError",
    "CheckpointWriteError",
    "DamagedCheckpointError",
    "ElasticLaunchError",
    "ElasticLoader",
    "Evaluation",
    "Evaluator",
    "ForeignCheckpointError",
    "FunctionLoader",
    "GlobalBatch",
    "Incident",
    "Loader",
    "MicroBatch",
    "NonFiniteLossError",
    "Position",
    "Progress",
    "ReplicasDifferError",
    "RoundStart",
    "Run",
    "Schedule",
    "ShardedStream",
    "Stateful",
    "Step",
    "StepEnd",
    "Trainer",
    "UnsupportedStateError",
    "Url",
    "UsageError",
    "World",
    "WriteOutcome",
    "__version__",
    "count_shards",
    "dist",
    "do_not_retry",
    "export",
    "integrations",
    "load_checkpoint",
    "report_step",
    "samplers",
    "session",
    "should_stop",
    "weights_sha256",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

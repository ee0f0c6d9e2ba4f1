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
``codec``            bounded JSON for messages and records; ``values`` has the base class of messages
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

    from elastic_launch import integrations as integrations
    from elastic_launch.batch import BatchError as BatchError
    from elastic_launch.batch import BatchPlan as BatchPlan
    from elastic_launch.batch import GlobalBatch as GlobalBatch
    from elastic_launch.batch import MicroBatch as MicroBatch
    from elastic_launch.contract import Best as Best
    from elastic_launch.error_file import do_not_retry as do_not_retry
    from elastic_launch.errors import ElasticLaunchError as ElasticLaunchError
    from elastic_launch.errors import UsageError as UsageError
    from elastic_launch.snapshot.errors import CheckpointError as CheckpointError
    from elastic_launch.snapshot.errors import CheckpointGoneError as CheckpointGoneError
    from elastic_launch.snapshot.errors import CheckpointReadError as CheckpointReadError
    from elastic_launch.snapshot.errors import CheckpointWriteError as CheckpointWriteError
    from elastic_launch.snapshot.errors import DamagedCheckpointError as DamagedCheckpointError
    from elastic_launch.snapshot.errors import ForeignCheckpointError as ForeignCheckpointError
    from elastic_launch.snapshot.errors import UnsupportedStateError as UnsupportedStateError
    from elastic_launch.snapshot.location import Url as Url
    from elastic_launch.snapshot.storage.background import WriteOutcome as WriteOutcome
    from elastic_launch.snapshot.storage.listing import CheckpointInfo as CheckpointInfo
    from elastic_launch.training import dist as dist
    from elastic_launch.training.callbacks import Callback as Callback
    from elastic_launch.training.callbacks import CheckpointEnd as CheckpointEnd
    from elastic_launch.training.callbacks import Evaluation as Evaluation
    from elastic_launch.training.callbacks import Incident as Incident
    from elastic_launch.training.callbacks import Progress as Progress
    from elastic_launch.training.callbacks import RoundStart as RoundStart
    from elastic_launch.training.callbacks import StepEnd as StepEnd
    from elastic_launch.training.checkpoints.checkpoint import Checkpoint as Checkpoint
    from elastic_launch.training.checkpoints.loading import export as export
    from elastic_launch.training.checkpoints.loading import load_checkpoint as load_checkpoint
    from elastic_launch.training.checkpoints.manager import weights_sha256 as weights_sha256
    from elastic_launch.training.checkpoints.parts import Stateful as Stateful
    from elastic_launch.training.children import clean_environment as clean_environment
    from elastic_launch.training.data import samplers as samplers
    from elastic_launch.training.data.epochs import Position as Position
    from elastic_launch.training.data.loader import ElasticLoader as ElasticLoader
    from elastic_launch.training.data.loader import FunctionLoader as FunctionLoader
    from elastic_launch.training.data.loader import Loader as Loader
    from elastic_launch.training.data.stateful import StatefulLoader as StatefulLoader
    from elastic_launch.training.data.streams import ShardedStream as ShardedStream
    from elastic_launch.training.data.streams import count_shards as count_shards
    from elastic_launch.training.evaluations import Evaluator as Evaluator
    from elastic_launch.training.plain import report_step as report_step
    from elastic_launch.training.plain import should_stop as should_stop
    from elastic_launch.training.ranks.replicas import ReplicasDifferError as ReplicasDifferError
    from elastic_launch.training.ranks.world import World as World
    from elastic_launch.training.schedule import Schedule as Schedule
    from elastic_launch.training.session import Run as Run
    from elastic_launch.training.session import session as session
    from elastic_launch.training.steps import Step as Step
    from elastic_launch.training.trainer import Trainer as Trainer
    from elastic_launch.training.transaction import NonFiniteLossError as NonFiniteLossError

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
        "elastic_launch.training.children": "clean_environment",
        "elastic_launch.training.data.epochs": "Position",
        "elastic_launch.training.data.loader": "ElasticLoader FunctionLoader Loader",
        "elastic_launch.training.data.stateful": "StatefulLoader",
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


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_MODULES, "__version__"])


if not TYPE_CHECKING:  # which take the imports above, and read only literal lists
    __all__ = __dir__()

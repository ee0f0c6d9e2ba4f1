"""How a node's part of a run ended: in this project's terms, and in torch's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic_agents.policy_types import WorkerExit
from elastic_launch.error_file import read_error_file
from elastic_launch.errors import ExitCode
from elastic_launch.events.facts import LastSaved
from elastic_launch.failure import Failure


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """How this node's part of the run ended.

    Attributes:
        failure: the run's root cause, if a worker's failure ended the run.
        restarts: restarts charged to the run's budget, as far as this node knows.
        unsaved: why the last copy to durable storage failed, if it did.
        where: where the latest training state is, if this node was responsible for saving it.
    """

    code: int
    cause: str
    restarts: int = 0
    failure: Failure | None = None
    unsaved: str = ""
    where: LastSaved | None = None


def result_of(code: int, failed: Mapping[int, WorkerExit], error_files: Mapping[int, Path]) -> RunResult:
    """Return torch's result for an exit code of the run.

    Args:
        failed: by rank, the workers of this node that failed in its last round.
        error_files: by local rank, where they may have left an exception.
    """
    if code == ExitCode.DONE:
        return RunResult(WorkerState.SUCCEEDED)
    if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
        return RunResult(WorkerState.STOPPED)
    failures = {rank: _failure(exited, str(error_files[exited.local_rank])) for rank, exited in failed.items()}
    return RunResult(WorkerState.FAILED, failures=failures)


def _failure(exited: WorkerExit, error_file: str) -> ProcessFailure:
    local_rank, pid, code = exited.local_rank, exited.pid, exited.exit_code
    if read_error_file(Path(error_file)) is None:
        error_file = ""  # torch would read whatever the worker has written there
    try:
        return ProcessFailure(local_rank=local_rank, pid=pid, exitcode=code, error_file=error_file)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        # torch reads the file immediately; it may be incomplete if the worker had no room for it
        return ProcessFailure(local_rank=local_rank, pid=pid, exitcode=code, error_file="")

"""Runs from Python: the API of ``torch.distributed.launcher.api``, with this project's agent.

::

    from elastic_launch.api import LaunchConfig, elastic_launch

    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d")
    results = elastic_launch(config, train)(0.1)  # {0: ..., 1: ...}
    elastic_launch(config, "train.py")("--lr", "0.1")

``LaunchConfig`` is torch's own class. docs/reference/python.md lists the differences from torch's launcher.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from inspect import signature
from typing import Any

from torch.distributed.elastic import metrics
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    ElasticAgent,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.health_check_server import HealthCheckServer
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.launcher.api import launch_agent as launch_torchs_agent

from elastic_agents.calls.caller import AgentEnd, run_agent
from elastic_agents.calls.function import ForkedCall, FunctionCall, Results, name_of
from elastic_agents.calls.metrics import put_results, timed_run
from elastic_launch.api_config import Entrypoint, from_torch, of_strings, own, with_logs
from elastic_launch.cli.command import check_directory
from elastic_launch.cli.output_flags import make_run_directory
from elastic_launch.config.launch_config import LaunchConfig as OwnConfig
from elastic_launch.config.launch_config import Limits
from elastic_launch.config.torch_options import TorchOptions
from elastic_launch.errors import ExitCode, UsageError
from elastic_launch.events.types import listed
from elastic_launch.rendezvous.torch_handler import TorchrunHandler
from elastic_launch.secret import Token
from elastic_launch.system.descriptors import standard_numbers_taken
from elastic_launch.system.program import check_kernel

__all__ = ["LaunchConfig", "LocalElasticAgent", "elastic_launch", "launch_agent"]

log = logging.getLogger(__name__)

AnyConfig = LaunchConfig | OwnConfig

EXIT_BARRIER = 300
"""torch's default, which does not count as the user's choice."""


class elastic_launch:
    """Launches a function or a program on this node's workers, as part of a run.

    Called with the entry point's arguments, it waits for the end of the run and returns the results of this node's
    workers by global rank; nothing for a program. Unlike with torch's, these may be fewer than nproc: a worker without
    a place in the last round has none, as one that replaces a failed one while the others finish. A warning names its
    local rank.

    Args:
        config: torch's ``LaunchConfig``, or :class:`elastic_launch.config.launch_config.LaunchConfig`, whose command is
            not used.
        entrypoint: a function, a program, or a Python script.
        health_check_server: torch's health check server; stopped at the end.
    """

    def __init__(
        self,
        config: AnyConfig,
        entrypoint: Entrypoint | None,
        health_check_server: HealthCheckServer | None = None,
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: object) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, list(args), self._health_check_server)


def launch_agent(
    config: AnyConfig,
    entrypoint: Entrypoint | None,
    args: list[Any],
    health_check_server: HealthCheckServer | None = None,
) -> dict[int, Any]:
    """Run this node's part of a run, and return its workers' results by global rank, see :class:`elastic_launch`.

    Raises:
        ValueError: if the configuration or the entry point is not a valid launch.
        ChildFailedError: if workers failed and no restart was left.
        SignalException: if a signal ended it, or this node left the run because of a notice or on request.
        RendezvousTimeoutError: if too few nodes joined or remained.
        RendezvousConnectionError: if the rendezvous was lost, or refuses this node.
    """
    if entrypoint is None:
        raise ValueError("There is no entry point. Give a function or the path of a program.")
    try:
        found = own(config) if isinstance(config, OwnConfig) else from_torch(config)
    except UsageError as error:
        raise ValueError(str(error)) from error
    if found.foreign is not None:
        return _run_foreign(config, entrypoint, args, health_check_server)
    if isinstance(config, LaunchConfig):
        metrics.initialize_metrics(MetricsConfig(config.metrics_cfg))
    result = _run(found, entrypoint, args, health_check_server)
    if result.is_failed():
        raise ChildFailedError(name=_name(entrypoint), failures=result.failures)
    return result.return_values


class LocalElasticAgent(ElasticAgent):
    """torch's ``LocalElasticAgent``, with this project's agent behind it.

    Args:
        spec: the worker spec. Its ``rdzv_handler`` must be this project's, as created by
            ``rdzv_registry.get_rendezvous_handler`` for the backends ``elastic-c10d`` and ``elastic-etcd``.
        logs_specs: where the workers' output goes.
        start_method: how a function is started: ``spawn`` or ``forkserver``, both in a new interpreter, or ``fork``.
        exit_barrier_timeout: not used: the run ends when all its workers have ended.
        log_line_prefix_template: prefix of the lines of streams that are shown beside their file.
        shutdown_timeout: seconds from SIGTERM to SIGKILL.
        health_check_server: stopped at the end.
        uninterruptible_state_timeout: not used.

    Raises:
        ValueError: if the spec is not a valid launch.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: int = 30,
        health_check_server: HealthCheckServer | None = None,
        uninterruptible_state_timeout: float | None = None,
    ) -> None:
        handler = spec.rdzv_handler
        if not isinstance(handler, TorchrunHandler):
            raise ValueError(
                f"spec.rdzv_handler is a {type(handler).__name__}, whose rounds only torch's own LocalElasticAgent can "
                "run. Have rdzv_registry make one for the backend elastic-c10d or elastic-etcd."
            )
        if exit_barrier_timeout != EXIT_BARRIER:
            log.warning(
                "exit_barrier_timeout=%g is not used: a node whose workers have finished waits for those of all others",
                exit_barrier_timeout,
            )
        if uninterruptible_state_timeout is not None:
            log.warning("uninterruptible_state_timeout=%g is not used", uninterruptible_state_timeout)
        self._group = WorkerGroup(spec)
        self._health_check_server = health_check_server
        self._began = time.monotonic()
        limits = handler.config.limits
        try:
            config = replace(
                handler.config,
                limits=Limits(limits.min_nodes, limits.max_nodes, spec.max_restarts),
                nproc=spec.local_world_size,
                role=spec.role,
                local_addr=spec.local_addr or handler.config.local_addr,
                shutdown_timeout=float(shutdown_timeout),
                options=TorchOptions(
                    event_log_handler=spec.event_log_handler,
                    numa_binding=spec.numa_options.affinity_mode.value if spec.numa_options else None,
                    virtual_local_rank=spec.virtual_local_rank,
                    monitor_interval=spec.monitor_interval,
                    start_method=start_method,
                    master_addr=spec.master_addr,
                    master_port=spec.master_port,
                ),
                output=replace(
                    handler.config.output,
                    stdout_filters=tuple(spec.duplicate_stdout_filters or ()),
                    stderr_filters=tuple(spec.duplicate_stderr_filters or ()),
                    header=log_line_prefix_template or handler.config.output.header,
                ),
            )
            self._config = with_logs(own(config), logs_specs)
        except UsageError as error:
            raise ValueError(str(error)) from error

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return this node's workers; their pids and ranks are those of the last round, after :meth:`run`."""
        return self._group

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Take part in the run until it ends.

        Returns:
            The workers' results or failures, by global rank.

        Raises:
            The exceptions of :func:`launch_agent`, except ChildFailedError.
        """
        spec = self._group.spec
        assert spec.entrypoint is not None
        self._group.state = WorkerState.HEALTHY
        try:
            result = _run(self._config, spec.entrypoint, spec.args, self._health_check_server, self._group)
        except BaseException as error:
            self._group.state = WorkerState.STOPPED if isinstance(error, SignalException) else WorkerState.FAILED
            raise
        self._group.state = result.state
        return result

    def get_event_succeeded(self) -> Event:
        """Return torch's event for an agent that ended successfully."""
        return self._event("SUCCEEDED", None)

    def get_event_failed(self) -> Event:
        """Return torch's event for an agent that ends with the exception being handled."""
        import traceback

        return self._event("FAILED", traceback.format_exc())

    def _event(self, state: str, error: str | None) -> Event:
        spec = self._group.spec
        metadata: dict[str, Any] = {
            "run_id": self._config.run_id,
            "global_rank": None,
            "group_rank": self._group.group_rank,
            "worker_id": None,
            "role": spec.role,
            "hostname": socket.getfqdn(),
            "state": state,
            "total_run_time": int(time.monotonic() - self._began),
            "rdzv_backend": spec.rdzv_handler.get_backend(),
            "raw_error": error,
            "metadata": json.dumps({"entry_point": _name(spec.entrypoint or "")}),
        }
        return Event(f"torchelastic.worker.status.{state}", source=EventSource.AGENT, metadata=metadata)


def _run_foreign(
    config: AnyConfig, entrypoint: Entrypoint, args: list[Any], health_check_server: HealthCheckServer | None
) -> dict[int, Any]:
    """Run under another package's rendezvous, with torch's own agent in this process."""
    if isinstance(config, OwnConfig):
        from elastic_agents.torch_agent import torch_config

        config = torch_config(config)
    log.warning(
        "rdzv_backend %s is torch's, not this project's: torch's own agent runs the workers, without drains, memory "
        "snapshots, elasticctl and a restart budget of the run",
        config.rdzv_backend,
    )
    if health_check_server is not None and "health_check_server" not in signature(launch_torchs_agent).parameters:
        raise ValueError(
            f"health_check_server: torch's own launcher runs rdzv_backend {config.rdzv_backend}, and has this "
            "argument only since torch 2.13. Install a newer torch, or leave it out."
        )
    more = () if health_check_server is None else (health_check_server,)
    try:
        found: dict[int, Any] = launch_torchs_agent(config, entrypoint, args, *more)
    except ImportError as error:
        raise ValueError(f"rdzv_backend {config.rdzv_backend} cannot be used: {error}") from error
    return found


def _run(
    config: OwnConfig,
    entrypoint: Entrypoint,
    args: Sequence[Any],
    health_check_server: HealthCheckServer | None,
    group: WorkerGroup | None = None,
) -> RunResult:
    call: FunctionCall | ForkedCall | None = None
    taken = ExitStack()
    try:
        try:
            taken.enter_context(standard_numbers_taken())
            check_kernel()
            check_directory()
            if isinstance(entrypoint, str):
                command = of_strings(entrypoint, args)
            elif not callable(entrypoint):
                raise UsageError(
                    f"entrypoint {entrypoint!r} is neither a function nor a str.", "Give a function, or str(path)."
                )
            else:
                forked = config.options.start_method == "fork"
                if forked and config.options.numa_binding is not None:
                    raise UsageError(
                        "numa_options: a worker that is forked from this process cannot be bound before it starts.",
                        "Use start_method='spawn', or no numa_options.",
                    )
                call = (ForkedCall if forked else FunctionCall)(entrypoint, args, config.nproc)
                command = call.command
            config = make_run_directory(replace(config, command=command, announce=False))
        except UsageError as error:
            raise ValueError(str(error)) from error
        if config.alone and config.token is None:
            config = replace(config, token=Token.made(), own_token=True)
        with timed_run():
            ended = run_agent(config, call if isinstance(call, ForkedCall) else None)
            result = _result(ended, call, group)
            put_results(config.role, result, ended.report["restarts"], ended.report["max_restarts"])
            return result
    finally:
        taken.close()
        if call is not None:
            call.close()
        if health_check_server is not None:
            health_check_server.stop()


def _name(entrypoint: Entrypoint) -> str:
    return entrypoint if isinstance(entrypoint, str) else name_of(entrypoint)


def _result(ended: AgentEnd, call: Results | None, group: WorkerGroup | None) -> RunResult:
    """Return the result, or raise the exception, that torch's agent would."""
    report = ended.report
    if ended.signal:
        number = signal.Signals(ended.signal)
        raise SignalException(f"The process got {number.name}, and this node has left the run.", sigval=number)
    if not report:
        how = "cannot be reaped" if ended.exit_code is None else f"ended with {ended.exit_code}"
        raise RuntimeError(f"The agent's process, pid {ended.pid}, {how}, and has left no report.")
    if group is not None and "group" in report:
        told = zip((group, *group.workers), (report["group"], *report["workers"]), strict=True)
        for one, values in told:
            for name, value in values.items():
                setattr(one, name, value)
    code, cause = int(report["code"]), str(report["cause"])
    if code == ExitCode.DONE:
        return RunResult(WorkerState.SUCCEEDED, return_values=_returned(report, call))
    if failures := _failures(report):
        return RunResult(WorkerState.FAILED, failures=failures)
    if code == ExitCode.TOO_FEW_NODES:
        raise RendezvousTimeoutError(cause)
    if code == ExitCode.RENDEZVOUS:
        raise RendezvousConnectionError(cause)
    if code == ExitCode.USAGE:
        raise ValueError(cause)
    if code > 128:
        raise SignalException(f"This node has left the run: {cause}", sigval=signal.Signals(code - 128))
    raise RuntimeError(f"The run has ended with exit code {code}: {cause}")


def _returned(report: dict[str, Any], call: Results | None) -> dict[int, Any]:
    """Return the results of this node's workers in the last round; none if it was not in it, as a spare."""
    number = int(report["round"])
    if not number or call is None:
        return {}
    ranks = [worker["global_rank"] for worker in report["workers"]]
    if without := [local_rank for local_rank, rank in enumerate(ranks) if rank < 0]:
        which = ("ranks " if len(without) > 1 else "rank ") + listed(without)
        log.warning("no result of local %s of this node: no place in round %d, which finished the run", which, number)
    return {rank: call.result(local_rank, number) for local_rank, rank in enumerate(ranks) if rank >= 0}


def _failures(report: dict[str, Any]) -> dict[int, ProcessFailure]:
    """Return the workers' failures by rank; the run's root cause comes first and has the earliest time.

    If the root cause is on another node, its message contains what that node reported.
    """
    found = {
        int(failed.pop("rank")): ProcessFailure(**failed)
        for failed in [dict(failed) for failed in report.get("failures", ())]
    }
    root = report.get("root")
    if root is None:
        return found
    rank = -1 if root["rank"] is None else int(root["rank"])  # as of torch's workers without one
    failure = found.pop(rank, None)
    if failure is None:
        failure = ProcessFailure(root["local_rank"], root["pid"], root["exitcode"], error_file="")
        extra = {"py_callstack": "\n".join(root["detail"]) or root["message"], "timestamp": str(root["at"])}
        message: Any = {"message": root["message"], "extraInfo": extra}
        failure.message = message
        failure.timestamp = root["at"]
    failure.timestamp = min([failure.timestamp, *(other.timestamp for other in found.values())])
    return {rank: failure, **found}

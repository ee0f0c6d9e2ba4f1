"""The agent's process of a run that another Python process has started."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from elastic_agents.calls.metrics import Meter, MetricPipe
from elastic_agents.child import Child
from elastic_agents.prctl import signal_at_parents_death
from elastic_agents.warm.fork_bootstrap import SERVER, Bootstrap, ServerLink
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import ElasticLaunchError
from elastic_launch.events.sentences import how_failed
from elastic_launch.events.types import Event
from elastic_launch.secret import Token
from elastic_launch.system.program import exiting

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult

    from elastic_agents.agent import NodeAgent

OF_GROUP = ("group_rank", "group_world_size", "master_addr", "master_port")
OF_WORKER = ("id", "global_rank", "world_size", "role_rank", "role_world_size")
"""What torch's agent enters in its ``WorkerGroup`` and in each ``Worker`` of it."""

OF_FAILURE = ("local_rank", "pid", "exitcode", "error_file")
"""The arguments of a ``ProcessFailure``."""


@dataclass(frozen=True, slots=True)
class Order:
    """The caller's order.

    Attributes:
        config: without its token, which is never pickled.
        level: level of the agent's own console lines; None: as LOGLEVEL says.
        metrics: descriptor of a pipe for metrics, if the caller wants any.
    """

    config: LaunchConfig
    token: str | None
    caller: int
    level: int | None
    metrics: int | None = None


def main(order: int, report: int, server: int = 0, orders: int = -1, source: int = -1) -> None:
    """Run the agent and report how it ended.

    Args:
        order: descriptor of a pickled Order, written by the caller.
        report: descriptor that receives the report, as JSON.
        server, orders, source: pid of the process that forks the workers, and the descriptors of the socket to it
            and of the pipe from it; 0 for none.
    """
    for descriptor in (order, report):
        os.set_inheritable(descriptor, False)
    with open(order, "rb") as file:
        file.seek(0)
        ordered: Order = pickle.load(file)
    # When the thread that started this process ends, as when its process is killed.
    signal_at_parents_death(signal.SIGTERM)
    if os.getppid() != ordered.caller:
        os._exit(128 + signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    config = ordered.config
    if ordered.token is not None:
        config = replace(config, token=Token(ordered.token, "the caller's"))
    begun = None
    if server:
        for descriptor in (orders, source):
            os.set_inheritable(descriptor, False)
        begun = Bootstrap([], server=ServerLink(Child(server, SERVER), socket.socket(fileno=orders), source))
    pipe = None
    if ordered.metrics is not None:
        os.set_inheritable(ordered.metrics, False)
        pipe = MetricPipe(ordered.metrics)
    exiting(lambda: _run(config, ordered.level, report, begun, pipe))


class Watcher:
    """Observes the agent's start and end, and its events, which may come from several threads, for the caller."""

    def __init__(self, config: LaunchConfig, pipe: MetricPipe | None) -> None:
        self._config = config
        self._pipe = pipe
        self._meter: Meter | None = None
        self.told: dict[str, Any] = {}

    def begun(self, agent: NodeAgent) -> None:
        if (pipe := self._pipe) is not None:
            self._meter = Meter(
                time.monotonic,
                pipe.put,
                lambda state: pipe.put(state, agent.state.max_restarts - agent.state.restarts),
            )

    def emit(self, event: Event) -> None:
        if self._meter is not None:
            self._meter.hear(event)

    def ended(self, agent: NodeAgent, result: RunResult) -> None:
        self.told.update(_ended(self._config, agent, result))


def _run(config: LaunchConfig, level: int | None, report: int, begun: Bootstrap | None, pipe: MetricPipe | None) -> int:
    from elastic_agents.main import run

    watcher = Watcher(config, pipe)
    told = watcher.told
    try:
        code = run(config, begun, level=level, watcher=watcher)
    except ElasticLaunchError as error:
        code = type(error).exit_code  # one of this project's own codes, whatever exit code the process returns
        told = {"code": code, "cause": str(error)}
    with open(report, "w") as file:
        json.dump(told, file)
    return code


def _ended(config: LaunchConfig, agent: NodeAgent, result: RunResult) -> dict[str, Any]:
    outcome, failure, group = agent.outcome, agent.outcome.failure, agent.get_worker_group()
    told: dict[str, Any] = {
        "code": int(outcome.code),
        "cause": outcome.cause,
        "restarts": outcome.restarts,
        "max_restarts": agent.state.max_restarts,
        "round": agent.state.finished_round,
        "group": {name: getattr(group, name) for name in OF_GROUP},
        "workers": [{name: getattr(worker, name) for name in OF_WORKER} for worker in group.workers],
        "failures": [
            {"rank": rank, **{name: getattr(failed, name) for name in OF_FAILURE}}
            for rank, failed in result.failures.items()
        ],
    }
    if failure is not None:
        told["root"] = {
            "rank": failure.rank,
            "local_rank": failure.local_rank,
            "pid": failure.pid,
            "exitcode": failure.exit_code,
            "message": how_failed(failure),
            "detail": failure.detail,
            "at": int(time.time() - failure.ago),
            "here": failure.node_id == config.node_id,
        }
    return told

"""Events in torch's format, for ``--event-log-handler``."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import Event as TorchEvent
from torch.distributed.elastic.events.api import EventSource
from torch.distributed.elastic.events.handlers import get_logging_handler

from elastic_agents.console import Consoles
from elastic_launch.clock import Clock
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import UsageError
from elastic_launch.events.types import CheckpointSaved, Event, EventSink, OrderReceived, WorkerExited, event_name
from elastic_launch.observe.ledger import RoundIncident
from elastic_launch.rendezvous.wire.addresses import full_host_name
from elastic_launch.system.writer_thread import OVERHEAD, Writer

_log = logging.getLogger("elastic_launch.agent")

MOST = 1000
"""Events that may wait for the handler."""

PATIENCE = 5.0
"""Seconds after which a handler that has not returned counts as stuck."""


def check_handler(name: str) -> None:
    """Check whether torch has a handler of that name.

    Raises:
        UsageError: if it has none.
    """
    try:
        get_logging_handler(name)
    except KeyError:
        raise UsageError(
            f"--event-log-handler {name} is not one that torch knows.",
            "Give null or console, or add it to torch.distributed.elastic.events before elastic_launch.cli.main.main.",
        ) from None


class TorchEvents:
    """A sink that passes events on, and reports some to a handler of torch's.

    The ends of workers and agent have the names and the metadata of those that torch's agent records
    (https://docs.pytorch.org/docs/stable/elastic/events.html), but for every end of a worker, not just the last. This
    node's orders about rounds, checkpoints and incidents are ``elastic_launch.<event>``, with their fields as metadata.

    The handler is called in a thread of its own, one event after the other: one that is slow holds up nothing. If it
    falls behind by more than :data:`MOST` events, further events are left out and counted in a warning.

    Args:
        consoles: write what a handler would otherwise write to stderr itself, blocking.

    Attributes:
        group: this node's workers, once there is an agent.
    """

    def __init__(self, config: LaunchConfig, sink: EventSink, clock: Clock, consoles: Consoles) -> None:
        self._name = config.options.event_log_handler
        handler = get_logging_handler(self._name)
        if type(handler) is logging.StreamHandler and (handler.stream is sys.stderr or type(handler.stream) is _Stream):
            handler.setStream(_Stream(consoles.put_to(2, wait=False)))
        self._config = config
        self._sink = sink
        self._clock = clock
        self._began = clock.now()
        self._host = ""
        self.group: WorkerGroup | None = None
        # To look up this host's name may take long without a network.
        self._writer: Writer | None = None
        if self._name != "null":
            limit = MOST * (OVERHEAD + 1) // 2  # of bytes; twice that for callers that do not wait
            self._writer = Writer("event handler", limit=limit, patience=PATIENCE, lost=self._lost)

    def emit(self, event: Event) -> None:
        self._sink.emit(event)
        match event:
            case WorkerExited():
                self._worker(event)
            case OrderReceived() | CheckpointSaved():
                self._report(event_name(type(event)), asdict(event))

    def over(self, incident: RoundIncident) -> None:
        """Report an incident that is over; only on the node that leads."""
        self._report("incident", asdict(incident))

    def ended(self, code: int, cause: str, restarts: int) -> None:
        """Report how the agent ended."""
        error = json.dumps({"message": cause, "exit_code": code}) if code else None
        self._record("FAILED" if code else "SUCCEEDED", EventSource.AGENT, {"agent_restarts": restarts}, error)

    def close(self) -> None:
        """Wait for the handler, as long as it takes events."""
        if self._writer is not None and not self._writer.close():
            _log.warning("the event handler %s does not return: it did not get the last events", self._name)

    def _worker(self, exited: WorkerExited) -> None:
        state = "SUCCEEDED" if exited.exit_code == 0 else "TERMINATED" if exited.stopped else "FAILED"
        more = {
            "global_rank": exited.rank,
            "worker_id": str(exited.pid),
            "duration_ms": round(1000 * exited.ran_s),
        }
        error = None if state != "FAILED" else json.dumps({"exit_code": exited.exit_code})
        about = {"local_rank": exited.local_rank, "exit_code": exited.exit_code, "worker_pid": exited.pid}
        self._record(state, EventSource.WORKER, more, error, about)

    def _report(self, name: str, about: dict[str, Any]) -> None:
        self._record(name.upper(), EventSource.AGENT, {}, None, about, name=f"elastic_launch.{name}")

    def _record(
        self,
        state: str,
        source: EventSource,
        more: dict[str, Any],
        error: str | None,
        about: dict[str, Any] | None = None,
        name: str = "",
    ) -> None:
        config, group, writer = self._config, self.group, self._writer
        if writer is None:
            return
        about = {
            "group_world_size": group.group_world_size if group else None,
            "entry_point": os.path.basename(config.command.argv[0]),
            **(about or {}),
        }
        metadata = {
            "run_id": config.run_id,
            "global_rank": None,
            "group_rank": group.group_rank if group else None,
            "worker_id": None,
            "role": config.role,
            "state": state,
            "total_run_time": int(self._clock.now() - self._began),
            "rdzv_backend": config.backend,
            "raw_error": error,
            "metadata": json.dumps(about),
            **more,
        }
        event = TorchEvent(name or f"torchelastic.worker.status.{state}", source=source, metadata=metadata)
        writer.put(partial(self._hand_over, event), b"\n")  # a line, as what is lost is counted in lines

    def _hand_over(self, event: TorchEvent, data: bytes) -> None:
        self._host = self._host or full_host_name()
        event.metadata["hostname"] = self._host
        try:
            record(event, self._name)
        except Exception as raised:  # noqa: BLE001 - a handler may raise anything, and must not end the agent
            _log.warning("the event handler %s has failed: %s: %s", self._name, type(raised).__name__, raised)

    def _lost(self, events: int, seconds: float) -> None:
        text = "the event handler %s was too slow: %d events within %.0f s are left out"
        _log.warning(text, self._name, events, seconds)


class _Stream:
    """The part of a stream that a handler of the logging module needs."""

    def __init__(self, put: Callable[[bytes], object]) -> None:
        self._put = put

    def write(self, text: str) -> None:
        self._put(text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        """Do nothing: the console's thread flushes."""

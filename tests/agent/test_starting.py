"""Workers of a round are started one after the other, and a round may be over before all have started."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from elastic_agents.agent import NodeAgent
from elastic_agents.console import Consoles
from elastic_agents.inbox import Inbox
from elastic_agents.parts import AgentParts
from elastic_agents.workers.placement import shared_environment
from elastic_agents.workers.processes import ExecProcesses
from elastic_launch.clock import MonotonicClock
from elastic_launch.config.launch_config import Command, LaunchConfig, Limits
from elastic_launch.errors import ExitCode
from elastic_launch.events.types import Event, WorkerExited, WorkerStarted
from elastic_launch.rendezvous.backends.registry import backend_of
from elastic_launch.rendezvous.worker_store import WorkerStore
from elastic_launch.system.writer_thread import Writer


@pytest.fixture(scope="module", autouse=True)
def first_store() -> None:
    """The first store of a process opens a pipe of libuv's that stays open."""
    store = WorkerStore("127.0.0.1")
    store.serve(10)
    store.close()


def test_a_store_that_lacks_descriptors_can_be_served_later() -> None:
    """In torch's store itself the lack is an error without a number, after which the port is lost."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = WorkerStore("127.0.0.1")
    port = store.reserve()
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 3, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            store.serve(10)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert store.serve(10).port == port
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        store.close()


class OneAtFirst(ExecProcesses):
    """Has a process for the first round's first worker, and none for its second."""

    rounds = 0

    def prepare(self, count: int, call: Callable[[], None]) -> None:
        self.rounds += 1
        super().prepare(1 if self.rounds == 1 else count, call)


class Events:
    def __init__(self) -> None:
        self.all: list[Event] = []

    def emit(self, event: Event) -> None:
        self.all.append(event)


def test_a_round_that_breaks_before_all_its_workers_have_started_is_over_without_them(tmp_path: Path) -> None:
    code = "import os, sys; sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)"
    command = Command((sys.executable, "-c", code), ("-c", code))
    config = LaunchConfig(command=command, limits=Limits(1, 1, 1), nproc=2, log_dir=tmp_path, warm=False)
    clock, events = MonotonicClock(), Events()
    files = Writer("files", limit=1 << 20, patience=3.0)
    with closing(files), closing(Consoles()) as consoles:
        backend = backend_of(config, clock, events)
        parts = AgentParts(
            config,
            backend,
            events,
            files,
            consoles,
            clock=clock,
            inbox=Inbox(clock),
            processes=OneAtFirst,
            env=shared_environment(config),
        )
        agent = NodeAgent(parts)
        agent.run()
    assert agent.outcome.code == ExitCode.DONE
    started = [(event.round, event.local_rank) for event in events.all if isinstance(event, WorkerStarted)]
    assert started == [(1, 0), (2, 0), (2, 1)]
    exits = [
        (event.round, event.local_rank, event.exit_code) for event in events.all if isinstance(event, WorkerExited)
    ]
    assert sorted(exits) == [(1, 0, 3), (2, 0, 0), (2, 1, 0)]

"""Workers of a round are started one after the other, and a round may be over before all have started."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from harness import wait_for
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from elastic_agents import host_watch
from elastic_agents.agent import NodeAgent
from elastic_agents.console import Consoles
from elastic_agents.inbox import Inbox
from elastic_agents.parts import AgentParts
from elastic_agents.policy_types import StartFailed, StartWorkers, WorkerExit
from elastic_agents.workers import failures, start
from elastic_agents.workers.placement import group_of, place, shared_environment
from elastic_agents.workers.processes import ExecProcesses, OnExit, StartRequest
from elastic_launch.clock import MonotonicClock
from elastic_launch.config.launch_config import Command, LaunchConfig, Limits
from elastic_launch.config.output import Output
from elastic_launch.errors import ExitCode
from elastic_launch.events.types import Event, WorkerExited, WorkerStarted
from elastic_launch.rendezvous.backends.registry import backend_of
from elastic_launch.rendezvous.record import Member, Round
from elastic_launch.rendezvous.torch_handler import MembershipHandler
from elastic_launch.rendezvous.wire import messages as m
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


@contextmanager
def agent_of(
    config: LaunchConfig, processes: Callable[[OnExit], ExecProcesses], events: Events
) -> Iterator[tuple[NodeAgent, AgentParts]]:
    clock = MonotonicClock()
    with closing(Writer("files", limit=1 << 20, patience=3.0)) as files, closing(Consoles()) as consoles:
        parts = AgentParts(
            config,
            backend_of(config, clock, events),
            events,
            files,
            consoles,
            clock=clock,
            inbox=Inbox(clock),
            processes=processes,
            env=shared_environment(config),
        )
        yield NodeAgent(parts), parts


@contextmanager
def started_ahead(config: LaunchConfig, processes: Callable[[OnExit], ExecProcesses]) -> Iterator[AgentParts]:
    """The parts of an agent that does not run, and is to start its first worker ahead."""
    with agent_of(config, processes, Events()) as (_, parts), ExitStack() as stack:
        for end in reversed(parts.ends):
            stack.callback(end)
        parts.starts.start_ahead({0}, 0)
        yield parts


def taken(inbox: Inbox[object]) -> object:
    item = inbox.take()
    return item() if callable(item) else item


def begin(parts: AgentParts, *local_ranks: int, coming: bool) -> object:
    """Form a round with workers of this node, which were started ahead or start anew."""
    config = parts.config
    formed = Round(2, (Member(config.node_id, "i", len(local_ranks), "127.0.0.1", 29500, slots=local_ranks),))
    form = m.Form(1, formed, 1, "a cause", max_restarts=3)
    order = StartWorkers(form, coming=frozenset(local_ranks) if coming else frozenset())
    placed = place(group_of(config, MembershipHandler(config, parts.membership)), formed, config)
    return parts.starts.begin(order, placed, parts.starts.prepare(order, placed))


def test_a_round_that_breaks_before_all_its_workers_have_started_is_over_without_them(tmp_path: Path) -> None:
    code = "import os, sys; sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)"
    command = Command((sys.executable, "-c", code), ("-c", code))
    config = LaunchConfig(command=command, limits=Limits(1, 1, 1), nproc=2, log_dir=tmp_path, warm=False)
    events = Events()
    with agent_of(config, OneAtFirst, events) as (agent, _):
        agent.run()
    assert agent.outcome.code == ExitCode.DONE
    started = [(event.round, event.local_rank) for event in events.all if isinstance(event, WorkerStarted)]
    assert started == [(1, 0), (2, 0), (2, 1)]
    exits = [
        (event.round, event.local_rank, event.exit_code) for event in events.all if isinstance(event, WorkerExited)
    ]
    assert sorted(exits) == [(1, 0, 3), (2, 0, 0), (2, 1, 0)]


class NoRoom(ExecProcesses):
    def start(self, request: StartRequest) -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


def test_a_worker_that_cannot_start_ahead_has_ended_before_a_round_is_formed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "SCARCE", 0.2)
    config = LaunchConfig(Command(("true",), ("true",)), limits=Limits(1, 2, 1), log_dir=tmp_path, warm=False)
    with started_ahead(config, NoRoom) as parts:
        parts.inbox.put("an order that came while the start was retried")
        assert taken(parts.inbox) == WorkerExit(0, 0, ExitCode.STARTUP_FAILURE)


class NoPlaces(DefaultLogsSpecs):
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        raise ValueError("no places")


@pytest.mark.parametrize("formed", [True, False])
def test_a_worker_whose_logs_have_no_place_fails_ahead_or_in_the_round_that_is_formed_before(
    tmp_path: Path, formed: bool
) -> None:
    output = Output(specs=NoPlaces())
    command = Command(("true",), ("true",))
    config = LaunchConfig(command, limits=Limits(1, 2, 1), log_dir=tmp_path, warm=False, output=output)
    with started_ahead(config, ExecProcesses) as parts:
        if formed:
            failed = begin(parts, 0, coming=True)
            assert isinstance(failed, StartFailed)
            assert "no places" in failed.cause
        assert taken(parts.inbox) == (None if formed else WorkerExit(0, 0, ExitCode.STARTUP_FAILURE))


class WhenTold(ExecProcesses):
    """Has a process once the test says so."""

    def prepare(self, count: int, call: Callable[[], None]) -> None:
        self.call = call


def test_a_worker_that_is_about_to_start_ahead_keeps_its_directory_as_a_round_is_formed_of_others(
    tmp_path: Path,
) -> None:
    limits = Limits(1, 2, 1)
    config = LaunchConfig(Command(("true",), ("true",)), limits=limits, nproc=2, log_dir=tmp_path, warm=False)
    with started_ahead(config, WhenTold) as parts:
        assert isinstance(parts.processes, WhenTold)
        process_is_there = parts.processes.call
        begin(parts, 1, coming=False)
        assert parts.files.flush()
        process_is_there()
        assert taken(parts.inbox) is None
        assert parts.workers.logs()[0].error_file.parent.is_dir()


def test_out_of_memory_kills_are_dated_while_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 0\n")
    monkeypatch.setattr(failures, "_event_files", lambda: [counter])
    monkeypatch.setattr(failures, "ENDS", 0.0)
    monkeypatch.setattr(host_watch, "EVERY", 0.05)
    config = LaunchConfig(Command(("true",), ("true",)), log_dir=tmp_path, warm=False)
    with started_ahead(config, WhenTold) as parts:
        parts.host.start()
        counter.write_text("oom_kill 1\n")
        for _ in range(2):
            wait_for("a sample", parts.host.news)
        assert not parts.workers.kills.explain_one()

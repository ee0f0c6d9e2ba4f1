"""What a node's agent works with: made here, in the order in which one needs the other, before the agent itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from elastic_agents import status
from elastic_agents.console import Consoles
from elastic_agents.departure import Departure
from elastic_agents.drill import NodeDrill
from elastic_agents.exits import Exits
from elastic_agents.final_save import FinalSave
from elastic_agents.hangs.hanging import Hanging
from elastic_agents.host_watch import HostWatch
from elastic_agents.inbox import Inbox
from elastic_agents.lease_keeper import LeaseKeeper, StoppedByGuard
from elastic_agents.node_state import NodeState
from elastic_agents.policy_types import AheadWorkers, View
from elastic_agents.snapshots.durable_state import DurableState
from elastic_agents.snapshots.snapshot_store import SnapshotStore
from elastic_agents.timers import StartTimer
from elastic_agents.workers.control import Control
from elastic_agents.workers.guard import Guard
from elastic_agents.workers.logs import LogPlaces
from elastic_agents.workers.output import OutputPump
from elastic_agents.workers.processes import ExecProcesses, OnExit
from elastic_agents.workers.round_workers import RoundWorkers
from elastic_agents.workers.start import WorkerStarts
from elastic_launch.clock import Clock
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.contract import Copied, Copying, Save
from elastic_launch.events.types import EventSink
from elastic_launch.rendezvous.backends.c10d import Backend
from elastic_launch.rendezvous.node.failure_detector import CUT_OFF
from elastic_launch.rendezvous.node.membership import Membership
from elastic_launch.rendezvous.run_file import RunFile
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.worker_store import WorkerStore
from elastic_launch.system.writer_thread import Writer

ORDER_TIMEOUT = 2.0
"""Seconds beyond ``dead_after`` within which a worker that lost its connection to another rank gets an order."""


@dataclass(frozen=True)
class AgentParts:
    """The parts of an agent.

    Attributes:
        ends: what ends them, in order.
    """

    config: LaunchConfig
    clock: Clock
    inbox: Inbox[object]
    events: EventSink
    files: Writer
    state: NodeState
    membership: Membership
    run_file: RunFile
    worker_store: WorkerStore
    pump: OutputPump
    processes: ExecProcesses
    workers: RoundWorkers
    exits: Exits
    starts: WorkerStarts
    start_timer: StartTimer
    control: Control
    snapshot_store: SnapshotStore
    durable: DurableState
    final_save: FinalSave
    lease: LeaseKeeper
    departure: Departure
    drill: NodeDrill
    hanging: Hanging
    host: HostWatch
    ends: tuple[Callable[[], object], ...]

    def write_run_file(self, act: Callable[[], None]) -> None:
        """Have the one thread that writes the run's file do something to it."""
        self.files.put(lambda data: act())


def make_parts(
    config: LaunchConfig,
    backend: Backend,
    events: EventSink,
    files: Writer,
    consoles: Consoles,
    *,
    clock: Clock,
    inbox: Inbox[object],
    processes: Callable[[OnExit], ExecProcesses],
    env: Mapping[str, str],
) -> AgentParts:
    """Make the parts of an agent, and start some; the agent ends them.

    Args:
        backend: the connection to the leader; closed with the agent.
        consoles: show the workers' output.
        inbox: shared with the code that feeds signals in.
        processes: makes the object that starts the workers.
        env: the variables that all workers share.
    """
    # What these functions use is made below, before anything calls them.

    def reserve(address: str) -> int:
        """Called once from the membership's thread, before this agent learns of its address."""
        worker_store.address = address
        return worker_store.reserve()

    def beat() -> m.Beat | m.ProgressBeat:
        return status.beat(control, snapshot_store.newest_step, host.news())

    def on_exit(pid: int, exit_code: int) -> None:
        inbox.put(partial(exits.reaped, pid, exit_code))

    def copied(copied: Copied | Copying | Save | None) -> bool:
        return final_save.copied(copied)

    timing, post = config.timing, inbox.put
    host = HostWatch(clock)
    state = NodeState(config)
    start_timer = StartTimer(timing.start_wait if config.keeps_workers else math.inf)
    state.view = View(ahead=AheadWorkers(slow=start_timer.slow))
    worker_store = WorkerStore("")
    run_file = RunFile(config.run_directory, config.token if config.own_token else None)
    membership = Membership(config, backend, clock, post, reserve, beat)
    guard = Guard(lambda at, pids: post(StoppedByGuard(at, pids)))
    places = LogPlaces(config, files)
    places.made = guard.add_directory
    pump = OutputPump(consoles)
    made = processes(on_exit)
    snapshot_store = SnapshotStore(
        lambda: final_save.may_commit(),
        copied,
        pump.open_log,
        may_add=lambda: final_save.may_add(),
        writes=config.snapshots,
        split=config.split_snapshots,
    )
    durable = DurableState(snapshot_store)
    patience = timing.dead_after + ORDER_TIMEOUT if config.keeps_workers else 0.0
    control = Control(clock, snapshot_store, durable, post, events, config.nproc, patience)
    departure = Departure(config, state, clock, control.step_timer, events, inbox.put_later)
    final_save = FinalSave(config, state, membership, snapshot_store, durable, control, departure, events, inbox)
    workers = RoundWorkers(config, made, pump, guard, clock, files)
    exits = Exits(state, workers, control.step_timer, snapshot_store, events, membership)
    hanging = Hanging(config, state, workers, control.progress, membership.report, inbox.put_later, files)
    starts = WorkerStarts(config, env, clock, events, made, workers, places, control, start_timer, inbox)
    drill = NodeDrill(config, state, inbox.put_later, membership, snapshot_store)
    lease = LeaseKeeper(CUT_OFF * timing.dead_after, guard, workers, membership, state, events, inbox)
    ends = (
        inbox.close,
        workers.close,
        hanging.close,
        made.close,
        control.close,
        snapshot_store.close,
        pump.close,
        membership.close,
        host.close,
        worker_store.close,
        places.close,
        guard.close,
        lambda: files.put(lambda data: run_file.close()),
    )
    return AgentParts(
        config,
        clock,
        inbox,
        events,
        files,
        state,
        membership,
        run_file,
        worker_store,
        pump,
        made,
        workers,
        exits,
        starts,
        start_timer,
        control,
        snapshot_store,
        durable,
        final_save,
        lease,
        departure,
        drill,
        hanging,
        host,
        ends,
    )

"""What a node's agent works with: made here, in the order in which one needs the other, before the agent itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
from elastic_agents.workers.lease import Renewal
from elastic_agents.workers.logs import LogPlaces
from elastic_agents.workers.output import OutputPump
from elastic_agents.workers.processes import ExecProcesses, OnExit
from elastic_agents.workers.round_workers import RoundWorkers
from elastic_agents.workers.start import WorkerStarts
from elastic_launch.clock import Clock
from elastic_launch.config.launch_config import LaunchConfig
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


class AgentParts:
    """The parts of an agent, some of them started; the agent ends them.

    Args:
        backend: the connection to the leader; closed with the agent.
        consoles: show the workers' output.
        inbox: shared with the code that feeds signals in.
        processes: makes the object that starts the workers.
        env: the variables that all workers share.

    Attributes:
        ends: what ends them, in order.
    """

    def __init__(
        self,
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
    ) -> None:
        timing, post, later = config.timing, inbox.put, inbox.put_later
        self.config, self.clock, self.inbox, self.events, self.files = config, clock, inbox, events, files
        self.host = HostWatch(clock, also=lambda: self.workers.kills.look())
        self.state = state = NodeState(config)
        self.start_timer = StartTimer(timing.start_wait if config.keeps_workers else math.inf)
        state.view = View(ahead=AheadWorkers(slow=self.start_timer.slow))
        self.worker_store = WorkerStore("")
        self.run_file = RunFile(config.run_directory, config.token if config.own_token else None)
        self.membership = member = Membership(config, backend, clock, post, self._reserve, self._beat)
        guard = Guard(lambda at, pids: post(StoppedByGuard(at, pids)))
        places = LogPlaces(config, files)
        places.made = guard.add_directory
        self.pump = OutputPump(consoles)
        self.processes = processes(
            lambda pid, code: self.control.after_reading(partial(post, partial(self.exits.reaped, pid, code)))
        )
        self.snapshot_store = snapshots = SnapshotStore(
            lambda: self.final_save.may_commit(),
            lambda copied: self.final_save.copied(copied),
            self.pump.open_log,
            may_add=lambda: self.final_save.may_add(),
            writes=config.snapshots,
            split=config.split_snapshots,
        )
        self.durable = durable = DurableState(snapshots)
        patience = timing.dead_after + ORDER_TIMEOUT if config.keeps_workers else 0.0
        self.control = control = Control(clock, snapshots, durable, post, events, config.nproc, patience)
        self.departure = Departure(config, state, clock, control.step_timer, events, later)
        self.final_save = FinalSave(config, state, member, snapshots, durable, control, self.departure, events, inbox)
        self.workers = workers = RoundWorkers(config, self.processes, self.pump, guard, clock, files)
        self.exits = Exits(state, workers, control.step_timer, snapshots, events, member)
        self.hanging = Hanging(config, state, workers, control.progress, member.report, later, files)
        self.starts = WorkerStarts(
            config, env, clock, events, self.processes, workers, places, control, self.start_timer, inbox
        )
        self.drill = NodeDrill(config, state, later, member, snapshots)
        self.lease = LeaseKeeper(Renewal(CUT_OFF * timing.dead_after), guard, workers, member, state, events, inbox)
        self.ends: tuple[Callable[[], object], ...] = (
            inbox.close,
            workers.close,
            self.hanging.close,
            self.processes.close,
            control.close,
            snapshots.close,
            self.pump.close,
            member.close,
            self.host.close,
            self.worker_store.close,
            places.close,
            guard.close,
            lambda: self.write_run_file(self.run_file.close),
        )

    def _reserve(self, address: str) -> int:
        """Called once from the membership's thread, before this agent learns of its address."""
        self.worker_store.address = address
        return self.worker_store.reserve()

    def _beat(self) -> m.Beat | m.ProgressBeat:
        return status.beat(self.control, self.snapshot_store.newest_position, self.host.news())

    def write_run_file(self, act: Callable[[], None]) -> None:
        """Have the one thread that writes the run's file do something to it."""
        self.files.put(lambda data: act())

"""NodeAgent: one node's part of a run. Takes events from the inbox, asks the policy, acts."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, ElasticAgent, RunResult, WorkerGroup, WorkerState

from elastic_agents import policy_types as v
from elastic_agents import reporting, status
from elastic_agents.console import Consoles
from elastic_agents.departure import Departure
from elastic_agents.drill import FaultReached, NodeDrill
from elastic_agents.exits import Exits
from elastic_agents.hangs.hanging import Hanging
from elastic_agents.inbox import Exited, HowAreYou, Inbox, SignalCaught
from elastic_agents.notices import Notice
from elastic_agents.outcome import NodeOutcome, result_of
from elastic_agents.output_sinks import Kept
from elastic_agents.policy import decide
from elastic_agents.snapshots.durable_state import DurableState
from elastic_agents.snapshots.snapshot_store import SnapshotStore
from elastic_agents.start_timer import StartTimer
from elastic_agents.workers.control import Control, HungUp, ScriptEnded, Straggles, WhyFailing, WorkerRestored
from elastic_agents.workers.guard import Guard
from elastic_agents.workers.lease import Renewal
from elastic_agents.workers.logs import LogPlaces
from elastic_agents.workers.output import OutputPump
from elastic_agents.workers.placement import group_of, place
from elastic_agents.workers.processes import ExecProcesses, OnExit
from elastic_agents.workers.round_workers import RoundWorkers
from elastic_agents.workers.start import WorkerStarts, while_scarce
from elastic_agents.workers.watchdog import TimerExpired
from elastic_launch.clock import Clock
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.contract import Copied, Copying, Save, SlowRank
from elastic_launch.errors import EndpointError, ExitCode
from elastic_launch.events import types as ev
from elastic_launch.events.sentences import sentence
from elastic_launch.failure import Failure
from elastic_launch.observe.present import Present
from elastic_launch.rendezvous.backends.c10d import Backend
from elastic_launch.rendezvous.node.failure_detector import CUT_OFF, CutOff
from elastic_launch.rendezvous.node.membership import Membership
from elastic_launch.rendezvous.node.membership_events import LinkDown, LinkUp, Opened
from elastic_launch.rendezvous.record import Round
from elastic_launch.rendezvous.run_file import RunAddress, RunFile
from elastic_launch.rendezvous.torch_handler import MembershipHandler
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.addresses import listen
from elastic_launch.rendezvous.worker_store import WorkerStore
from elastic_launch.system.descriptors import explained, lacks_processes, scarce
from elastic_launch.system.threads import ThreadDied
from elastic_launch.system.writer_thread import IDLE, Writer

_log = logging.getLogger("elastic_launch.agent")

ORDER_TIMEOUT = 2.0
"""Seconds beyond ``dead_after`` within which a worker that lost its connection to another rank gets an order."""

DISCONNECTED = 0.1
"""Seconds for which a worker's report on a broken connection waits for its cause."""

ESTIMATE_EVERY = 5.0
"""Seconds between two estimates of how long the round still needs."""


class NodeAgent(ElasticAgent):
    """Supervises the workers of one node through all rounds of a run.

    Args:
        backend: the connection to the leader; closed with the agent.
        consoles: the agent's consoles, which show the workers' output.
        inbox: shared with the code that feeds signals in.
        processes: makes the object that starts the workers.
        env: the variables that all workers share.

    Attributes:
        restarts: restarts charged to the run's budget so far, as far as this node knows.
        max_restarts: the run's limit, as far as this node knows.
        finished_round: the round that this node's workers have finished, 0 if it was in none that counts.
        error_file: where the worker whose failure ended the run may have left its exception; None: on another node.
        leader: where the run's leader was when this node last reached it; other threads may read it.
    """

    def __init__(
        self,
        config: LaunchConfig,
        backend: Backend,
        events: ev.EventSink,
        files: Writer,
        consoles: Consoles,
        *,
        clock: Clock,
        inbox: Inbox[object],
        processes: Callable[[OnExit], ExecProcesses],
        env: Mapping[str, str],
    ) -> None:
        self._config = config
        self._env = env
        self._clock = clock
        self._inbox = inbox
        self._events = events
        self._files = files
        self._consoles = consoles
        self._make_processes = processes
        self._store: WorkerStore | None = None
        self._run_file = RunFile(config.run_directory, config.token if config.own_token else None)
        self._membership = Membership(config, backend, self._clock, self._inbox.put, self._reserve, self._beat)
        self._group = group_of(config, MembershipHandler(config, self._membership))
        self._start_timer = StartTimer(config.timing.start_wait if config.keeps_workers else math.inf)
        self._view = v.View(ahead=v.AheadWorkers(slow=self._start_timer.slow))
        self._outcome: NodeOutcome | None = None
        self.restarts, self.max_restarts = 0, config.limits.max_restarts
        self.finished_round = 0
        self.error_file: Path | None = None
        self.leader = ""
        self._failure: Failure | None = None
        self._places = LogPlaces(config, files)
        self._run_address: RunAddress | None = None
        self._hosting = False
        self._member = False
        self._held_since = 0.0  # when the guard has stopped the workers
        self._run_over = False  # the leader has said that the run is over
        self._saver = ""  # the node that the leader has named then
        self._replaced = False  # another agent has taken this node's place
        self._stands_in = False  # this node saves at its end, whichever node saves usually
        self._saving_at_the_end = False  # what is in memory is copied before this node ends or leaves
        self._formed = Round()
        self._rank = 0  # among the members of the current round
        self._restored: dict[int, int] = {}  # the training that workers of the round have restored, by local rank

    @property
    def outcome(self) -> NodeOutcome:
        """How this node's part ended; only after :meth:`run`."""
        assert self._outcome is not None
        return self._outcome

    @property
    def notice(self) -> Notice | None:
        """The notice that made this node leave; only after :meth:`run`."""
        return self._departure.notice

    @property
    def kept(self) -> Kept:
        """What happened to the workers' log files; only after :meth:`run`."""
        return self._pump.kept

    def output(self, rank: int) -> list[str]:
        """Return the last lines that a rank of this node has printed; thread-safe, and empty before :meth:`run`."""
        workers = getattr(self, "_workers", None)
        return [] if workers is None else workers.output(rank)

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._group

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Take part in the run until it ends or this node leaves it.

        Returns:
            SUCCEEDED, FAILED with the failures of this node's workers in its last round, or STOPPED on request.
        """
        with ExitStack() as stack:
            for end in reversed(self._build()):
                stack.callback(end)
            self._membership.importing()
            self._processes.when_ready(partial(self._membership.report, m.Imported()))
            # Now rather than as workers start, which would wait for its imports.
            self._processes.when_lost(lambda: self._inbox.put(self._processes.replace_lost))
            self._membership.start()
            self._wake()
            while self._outcome is None:
                self._react(self._inbox.take())
                self._renew()
                self._hanging.follow()
        return self._result(self._outcome)

    def _build(self) -> list[Callable[[], object]]:
        """Make the agent's parts, and start some; return what ends them, in order. Each runs even if another fails."""
        guard = self._guard = Guard(lambda at, pids: self._inbox.put(partial(self._stopped, at, pids)))
        self._renewal = Renewal(CUT_OFF * self._config.timing.dead_after)
        self._places.made = guard.add_directory
        pump = self._pump = OutputPump(self._consoles)
        processes = self._processes = self._make_processes(lambda pid, code: self._inbox.put(Exited(pid, code)))
        snapshot_store = self._snapshot_store = SnapshotStore(
            lambda: self._member and not self._membership.cut_off,
            self._copied,
            pump.open_log,
            may_add=self._may_add,
            writes=self._config.snapshots,
            split=self._config.split_snapshots,
        )
        snapshot_store.start()
        patience = self._config.timing.dead_after + ORDER_TIMEOUT if self._config.keeps_workers else 0.0
        self._control = Control(
            self._clock, snapshot_store, self._inbox.put, self._events, self._config.nproc, patience
        )
        self._saves = DurableState(
            snapshot_store,
            self._control.step_timer,
            lambda: self._control.saves,
            lambda: self._control.checkpoints,
            lambda: self._control.base,
            lambda: None if self._membership.checkpoint is None else self._membership.checkpoint[0],
        )
        cut_link, fail_copies = self._membership.cut_link, snapshot_store.fail_copies
        self._drill = NodeDrill(self._config.drill, self._config.node_id, self._inbox.put_later, cut_link, fail_copies)
        self._departure = Departure(
            self._config, self._clock, self._control.step_timer, self._events, self._inbox.put_later
        )
        self._workers = RoundWorkers(self._config, processes, pump, guard, self._clock, self._files)
        self._hanging = Hanging(
            self._config,
            lambda: self._view,
            self._workers,
            self._control.progress,
            self._membership.report,
            self._inbox.put_later,
            self._files,
        )
        self._exits = Exits(self._workers, self._control.step_timer, snapshot_store, self._events, self._report_failure)
        self._starts = WorkerStarts(
            self._config,
            self._env,
            self._clock,
            self._events,
            processes,
            self._workers,
            self._places,
            self._control,
            self._start_timer,
            self._inbox,
            self._cannot_start,
            self._all_started,
        )
        return [
            self._inbox.close,
            self._workers.close,
            self._hanging.close,
            processes.close,
            self._control.close,
            snapshot_store.close,
            pump.close,
            self._membership.close,
            self._close_store,
            self._places.close,
            guard.close,
            partial(self._of_run_file, self._run_file.close),
        ]

    def _result(self, outcome: NodeOutcome) -> RunResult:
        self._events.emit(ev.NodeEnded(outcome.code, outcome.cause))
        self._of_run_file(partial(self._run_file.end, outcome.code, outcome.cause))
        error_files = {rank: logs.kept_error or logs.error_file for rank, logs in self._starts.logs.items()}
        failure = outcome.failure
        if failure is not None and failure.node_id == self._config.node_id:
            self.error_file = error_files.get(failure.local_rank)
        try:
            return self._files.ask(partial(result_of, outcome.code, self._exits.failed, error_files), IDLE)
        except TimeoutError:
            return result_of(outcome.code, {}, {})

    def _of_run_file(self, act: Callable[[], None]) -> None:
        """Have the one thread that writes the run's file do something to it."""
        self._files.put(lambda data: act())

    def _copied(self, copied: Copied | Copying | Save | None) -> bool:
        """Called from the snapshot store's thread."""
        error = ""
        if isinstance(copied, Copied):
            number, error = self._view.round, f"{copied.error} {copied.hint}".strip()
            if copied.path:
                self._saves.copied(copied)
                self._events.emit(ev.CheckpointSaved(number, copied.step, copied.path))
            asked = self._control.answers(copied.step)
            self._membership.report(m.NodeSaved(number, copied.step, "" if copied.path else error, asked))
        told = copied is not None and self._control.tell_copied(copied)
        if isinstance(copied, Copied) and error:
            text = "checkpoint of step %d is saved, but removing old ones failed: %s%s"
            text = text if copied.path else "checkpoint of step %d: %s%s"
            _log.error(text, copied.step, error, " Training goes on." if told else "")
        if self._snapshot_store.idle:
            self._inbox.put(v.CopiesDone())
        return told

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()

    def _reserve(self, address: str) -> int:
        """Called once from the membership's thread, before this agent learns of its address."""
        self._store = WorkerStore(address)
        return self._store.reserve()

    # The guard's lease.

    def _wake(self) -> None:
        """Have the main loop turn often enough to renew the lease."""
        self._inbox.put_later(self._renewal.wait, self._wake)

    def _renew(self) -> None:
        """Renew the guard's lease, unless the others may have continued without this node."""
        renewal, membership, now = self._renewal, self._membership, self._clock.now()
        until = renewal.turn(now, replaceable=membership.replaceable, heard=membership.belongs_since)
        if until is not None:
            self._guard.lease(until)
            if self._workers.resume():
                event = ev.WorkersHeld(self._view.round, round(now - self._held_since, 3))
                self._events.emit(event)
                _log.info("%s", sentence(event))

    def _stopped(self, at: float, pids: Collection[int]) -> None:
        """The guard has stopped processes of the workers."""
        if not self._workers.held:
            self._held_since = at
            text = "this agent did not run for %g s, and the others may have continued without this node: %s"
            _log.warning(text, self._renewal.term, "its guard has stopped the workers until the leader answers")
        self._workers.hold(pids)
        self._renewal.doubt(self._clock.now())

    # From the inbox to the policy.

    def _react(self, item: object) -> None:
        event = self._understand(item)
        if event is not None:
            self._follow(event)
        self._workers.end_failed()

    def _follow(self, event: v.Event) -> None:
        self._view, actions = decide(self._view, event, self._config.nproc, self._config.node_id)
        for action in actions:
            self._carry_out(action)
        if isinstance(event, m.Break) and event.kind == "hang" and event.round == self._view.round:
            self._hanging.end(event)

    def _understand(self, item: object) -> v.Event | None:
        """Translate an inbox item into a policy event, and record it."""
        match item:
            case Callable():
                event: v.Event | None = item()
                return event
            case Exited(pid=pid, exit_code=exit_code):
                return self._exited(pid, exit_code)
            case Opened(place=place):
                self._opened(place.hosting, str(place.endpoint), place.address)
            case LinkUp(leader=leader):
                self._member, self.leader = True, leader
                self._hanging.linked()
                assert self._run_address is not None
                self._of_run_file(partial(self._run_file.write, replace(self._run_address, leader=leader)))
                self._events.emit(ev.LinkChanged(up=True, cause="hello accepted"))
            case LinkDown(reason=reason) | CutOff(reason=reason):
                self._member = self._member and isinstance(item, CutOff)
                if isinstance(item, LinkDown) and self._saving_at_the_end:
                    self._secure()  # the leader is gone while this node saves: now none can tell it who does
                if isinstance(item, CutOff) and self._membership.unconfirmed is not None and self._view.nodes > 1:
                    text = "%s: training goes on, and checkpoints are added, but none is removed until it does"
                    _log.warning(text, item.reason)
                self._events.emit(ev.LinkChanged(up=False, cause=reason))
                return replace(item, held=self._workers.held) if isinstance(item, LinkDown) else item
            case FaultReached(due=due):
                if self._drill.reached(item):
                    self._membership.report(m.StrikeDue(self._view.round, due.fault, due.step))
            case m.Strike():
                self._drill.ordered(item)
            case Straggles(round=number, slow=slow):
                self._straggles(number, slow)
            case WorkerRestored(round=number):
                if number == self._view.round and self._view.phase is v.Phase.RUNNING:
                    self._restored[item.local_rank] = item.training
                    if self._restored.keys() == self._view.slots:
                        self._snapshot_store.restored(min(self._restored.values()))
            case WhyFailing():
                self._workers.failing(item.round, item.local_rank, alike=item.alike, restoring=item.restoring)
            case m.PeerDone(round=number):
                self._hanging.watch_exits(number)
            case ThreadDied(name=name, error=error):
                cause = f"internal error: the agent's thread {name!r} ended by {error}"
                self._outcome = self._outcome or NodeOutcome(ExitCode.TRAINING_FAILED, cause, self.restarts)
            case HowAreYou(answer=answer, every=every):
                answer(self._present())
                if every is not None:
                    self._inbox.put_later(every, item)
            case v.WorkerReady():
                if item.round == self._view.round and item.local_rank in self._view.alive - self._view.ready:
                    self._starts.trains(item)
                    self._learned_start()
                return item
            case v.AheadWaiting(local_rank=local_rank):
                self._starts.came(local_rank)
                self._learned_start()
                return item
            case TimerExpired():
                self._workers.end_late(item)
            case m.UserMessage(text=text):
                if not self._hosting:
                    _log.info("%s", text)
            case m.Form() | m.DrainRound() | m.Break() | m.Evicted() | m.LeftOut() | m.RunEnd():
                self._run_over = isinstance(item, m.RunEnd)
                self._member = not isinstance(item, m.Evicted | m.LeftOut)
                self._replaced = isinstance(item, m.LeftOut) or (isinstance(item, m.Evicted) and item.final)
                self._ordered(item)
                return item
            case m.Depart():
                return self._departure.by_order(item, self._view)
            case Notice():
                return self._departure.by_notice(item, self._view)
            case ScriptEnded(pid=pid, exit_code=exit_code):
                return self._workers.script_ended(pid, exit_code)
            case HungUp(round=number, local_rank=local_rank):
                waits = self._view.suspended if number else self._view.ahead.waiting
                if number in (0, self._view.round) and local_rank in waits:
                    self._workers.kill({local_rank}, ending=True)
            case m.TakeStacks(round=number):
                self._hanging.tell_stacks(number)
            case m.SaveNow(round=number):
                self._control.ask_save(number)
            case m.NodeSaved(round=number, step=step, error=error):
                if number == self._view.round:
                    self._saves.reported(step, error)
                    if not error:
                        self._events.emit(ev.CheckpointSaved(number, step, ""))
                self._membership.report(item)
            case SignalCaught(number=number) if number in self._config.signals.forward:
                reporting.forwarded(number, self._workers.forward(number))
            case SignalCaught(number=number, at=at):
                return self._departure.by_signal(number, self._view, at)
            case v.WorkerDrained(step=step):
                # The host of a c10d run serves no snapshot: the other nodes cannot continue without it.
                return replace(item, keeps=not self._hosting and self._newest_snapshot == step)
            case v.CopiesDone(given_up=given_up):
                # Otherwise it belongs to an earlier copy.
                return item if given_up or self._snapshot_store.idle else None
            case v.WorkerDisconnected():
                # The exit of the worker that it has lost, or the leader's break, says more.
                self._inbox.put_later(DISCONNECTED, lambda: item)
            case _ if isinstance(item, v.Event):
                return item
            case _:
                raise TypeError(f"the inbox holds a {type(item).__name__}")
        return None

    def _straggles(self, number: int, slow: SlowRank) -> None:
        if number == self._formed.number and (node := self._formed.node_of(slow.rank)):
            event = ev.StragglerFound(number, slow.rank, node, slow.phase, slow.ratio)
            self._events.emit(event)
            _log.warning("%s", sentence(event))

    def _present(self) -> Present:
        view, saved = self._view, self._membership.checkpoint
        return status.present(
            view,
            self._formed,
            self._rank,
            self._control,
            held=self._workers.held,
            snapshot=self._newest_snapshot,
            # What the leader has said; until then others may have used up what this node's own flags allow.
            # Since the round formed, restarts may have been given back.
            budget=(self.restarts, max(self.max_restarts, self._membership.max_restarts or 0))
            if view.round > 0
            else None,
            outlook=self._membership.outlook if self._member else "",
            checkpoint=(saved[0], self._clock.now() - saved[1]) if saved else None,
            unconfirmed=self._membership.unconfirmed,
        )

    def _beat(self) -> m.Beat | m.ProgressBeat:
        """Called from the membership's thread."""
        return status.beat(self._control, self._newest_snapshot)

    @property
    def _newest_snapshot(self) -> int | None:
        newest = self._snapshot_store.newest
        return None if newest is None else newest.step

    def _opened(self, hosting: bool, endpoint: str, address: str) -> None:
        config = self._config
        self._hosting = hosting
        where = ",".join(map(str, config.endpoints)) or endpoint
        # Written only once the run has accepted this node: before, the file may belong to other nodes.
        self._run_address = RunAddress(config.run_id, config.backend, where, config.node_id)
        reporting.opened(config, hosting=hosting, endpoint=endpoint, address=address)

    def _ordered(self, order: reporting.MemberOrder) -> None:
        event = reporting.received(order, self._view.round, self._config.node_id)
        self._events.emit(event)
        if isinstance(order, m.RunEnd):
            self.restarts, self._failure = max(self.restarts, order.restarts), order.failure
            self._saver = order.saver
        if isinstance(order, m.LeftOut):
            self._failure = order.failure
        if isinstance(order, m.Break | m.Evicted):
            self.finished_round = 0
        if isinstance(order, m.Form):
            self._saving_at_the_end = False
            self.restarts, self.max_restarts = order.restarts, order.max_restarts
        if not self._hosting:  # on the host, the leader's own events already report it
            reporting.ordered(order, event.round, event.cause)

    def _exited(self, pid: int, exit_code: int) -> v.Event | None:
        reaped = self._workers.reap(pid, exit_code)
        if reaped is None:
            return None
        if not reaped.round:
            return self._exits.ended_ahead(reaped, self._view)
        self._learn_first_step()
        event = self._exits.ended(reaped, self._view)
        if reaped.exit_code == 0 and self._view.alive == self._view.slots:
            self._hanging.watch_exits(reaped.round)  # the first to finish
        return event

    def _learn_first_step(self) -> None:
        if self._starts.first_step_done(self._view.round):
            self._learned_start()

    def _learned_start(self) -> None:
        if self._start_timer.slow != self._view.ahead.slow:
            self._react(v.StartsTake(self._start_timer.slow))

    # From the policy to the world.

    def _carry_out(self, action: v.Action) -> None:
        match action:
            case v.StartWorkers():
                self._start(action)
            case v.GivePlace(local_rank=local_rank):
                self._starts.give(local_rank)
            case v.StartWorkersAhead(local_ranks=local_ranks, yields=yields):
                reporting.ahead(local_ranks, self._start_timer.seen)
                self._starts.start_ahead(local_ranks, self.restarts, yields=yields)
            case v.KillAhead(local_ranks=local_ranks):
                self._starts.kill_ahead(local_ranks)
            case v.ReportAheadGone(local_rank=local_rank, next=following):
                if reaped := self._workers.reaped(local_rank):
                    reporting.lost_ahead(reaped, self._exits.failure_of(local_rank, self._view), following)
            case v.SuspendWorkers(round=number, cause=cause, local_ranks=local_ranks):
                self._workers.resume()  # they have to leave their round
                self._workers.suspends(local_ranks)
                self._control.suspend(number, local_ranks, cause)
                self._inbox.put_later(self._suspension(), v.SuspendOver(number))
            case v.SendExit(local_ranks=local_ranks):
                self._workers.resume()
                self._control.dismiss(local_ranks)
            case v.AskStop(round=number, cause=cause, seconds=seconds):
                self._control.ask_stop(number, self._view.alive, cause)
                if seconds is not None:
                    self._inbox.put_later(seconds, v.DrainOver(number))
            case v.AwaitCopies(bounded=bounded):
                self._await_copies(bounded=bounded)
            case v.Later(seconds=seconds, event=event):
                self._inbox.put_later(seconds, event)
            case v.Terminate(local_ranks=local_ranks):
                self._start_no_more(local_ranks)
                self._workers.resume()
                self._workers.terminate(local_ranks, action.number)
                self._inbox.put_later(self._departure.grace, v.GraceOver(action.round))
            case v.Kill(local_ranks=local_ranks):
                self._start_no_more(local_ranks)
                self._workers.kill(local_ranks)
            case v.ReportFailed(local_rank=local_rank):
                if failure := self._exits.failure_of(local_rank, self._view):
                    self._report_failure(failure)
            case v.ReportUnfit(local_rank=local_rank):
                if failure := self._exits.failure_of(local_rank, self._view):
                    self._membership.report(m.Unfit(failure))
            case v.ReportDisconnected(local_rank=local_rank, error=error):
                self._report_failure(self._workers.disconnected(local_rank, error, self._control.step_timer))
            case v.ReportReady(round=number):
                self._ready(number)
                self._processes.training()
                self._starts.training()
                if self._rank == 0:  # one member's estimate is enough
                    self._inbox.put_later(ESTIMATE_EVERY, partial(self._estimate, number))
            case v.ReportStopped():
                self._end_round(action)
            case m.Done(round=number):
                self._group.state = WorkerState.SUCCEEDED
                self.finished_round = number
                self._membership.report(action)
            case m.Leaving() | m.RankOffer() | m.Imported():
                self._membership.report(action)
            case v.Warn(text=text):
                _log.warning("%s", text)
            case v.Finish(code=code, cause=cause):
                failure = self._failure if code else None
                where = ""
                speaks = self._stands_in or (self._rank == 0 and self._view.round > 0)
                if speaks and code != ExitCode.DONE and not self._replaced:
                    others = self._view.nodes > 1 and not self._run_over and not self._stands_in
                    where = self._saves.where(others=others)
                self._outcome = NodeOutcome(code, cause, self.restarts, failure, self._snapshot_store.failed, where)

    def _report_failure(self, failure: Failure) -> None:
        self._membership.report(m.Failed(failure.round, failure))

    def _suspension(self) -> float:
        """Seconds that workers have to leave a round: less than the leader waits for this node."""
        most = self._config.shutdown_timeout + self._config.timing.return_after / 2
        return min(self._control.step_timer.suspend_seconds(), most)

    def _estimate(self, number: int) -> None:
        if number == self._view.round and self._view.phase is v.Phase.RUNNING:
            self._ready(number, round(self._control.step_timer.remaining(), 3))
            self._inbox.put_later(ESTIMATE_EVERY, partial(self._estimate, number))

    def _ready(self, number: int, remaining: float = -1.0) -> None:
        begun = self._control.step_timer.of_round(number)
        live = self._view.alive <= self._view.live
        arguments = self._control.arguments if live else ""
        self._membership.report(m.NodeReady(number, remaining, begun[0] if begun is not None else -1, live, arguments))

    def _await_copies(self, *, bounded: bool) -> None:
        """Copy to durable storage what is in memory only, if this node is responsible for it or no other can."""
        left = 0.0 if self._replaced else self._departure.left
        self._saving_at_the_end = self._saving_at_the_end or bounded or self._view.leaving is not None
        self._secure()
        if self._snapshot_store.idle or (bounded and left <= 0):
            self._inbox.put(v.CopiesDone(given_up=not self._snapshot_store.idle))
        elif bounded:
            self._inbox.put_later(left, v.DrainOver(self._view.round))

    def _secure(self) -> None:
        self._stands_in = self._saving_at_the_end and self._is_left()
        if self._member or self._stands_in:
            self._snapshot_store.secure(stands_in=self._stands_in)

    def _is_left(self) -> bool:
        """Whether no other node is known to save, or to go on with, the state in this node's memory."""
        if self._replaced:
            return False
        if self._run_over:
            return self._saver in ("", self._config.node_id)
        return not self._member or (self._view.parked and self._membership.round <= self._view.round)

    def _may_add(self) -> bool:
        """Whether this node may add a checkpoint although its membership is not confirmed; called from any thread."""
        return self._stands_in or self._membership.unconfirmed is not None

    def _end_round(self, end: v.ReportStopped) -> None:
        number, drained = end.round, end.drained
        stay = self._view.suspended | self._view.alive  # those of a node that leaves may still have to exit
        self._learn_first_step()
        stuck = self._workers.end_round(stay)
        if stuck:
            _log.error("processes %s of round %d cannot be killed; they may hold a device", stuck, number)
        assert self._store is not None
        self._store.stop()
        self._group.state = WorkerState.STOPPED
        if not stay:  # such a worker may write a last snapshot, if no round follows
            self._snapshot_store.between_rounds()
        port = self._serve(self._store.address) if end.serve else 0
        newest = self._snapshot_store.newest
        held = m.HeldSnapshot(newest.round, newest.step, port) if newest is not None else None
        saved = drained is not None and self._saves.has(drained)
        unsaved = self._saves.why_not(writes=self._rank == 0) if end.secured and not saved else ""
        store_port = while_scarce(self._store.reserve, self._clock)
        trained = self._control.step_timer.trained[0] > 0
        stopped = m.Stopped(number, store_port, drained, held, saved, unsaved, end.importing, end.slots, trained)
        self._membership.report(stopped)

    def _serve(self, address: str) -> int:
        """Serve this node's snapshot to the nodes that continue; return the port, 0 if it is not served."""
        self._inbox.put_later(v.SERVES, m.Released(0))
        try:
            return self._snapshot_store.serve(listen(address), self._transfer_key())
        except (OSError, EndpointError) as error:
            _log.warning("this node's snapshot cannot be served to others: %s", error)
            self._inbox.put(m.Released(0))
            return 0

    def _transfer_key(self) -> bytes | None:
        token = self._config.token
        return None if token is None else token.key("snapshot", self._config.run_id)

    def _start(self, start: v.StartWorkers) -> None:
        """Prepare what a round's workers need; each that does not run yet starts once a process is available for it."""
        assert self._store is not None
        form = start.form
        self._formed = form.round
        placed = place(self._group, form.round, self._config)
        self._rank = placed[0].group_rank
        new = self._starts.prepare(start, placed)
        self._exits.failed.clear()
        self._restored.clear()
        self._snapshot_store.between_rounds()  # also of a node that has left the last one without an order
        self._saves.begin()
        if self._rank == 0 and not self._config.kind.fixed_ranks:  # its workers meet at the endpoint
            try:
                while_scarce(partial(self._store.serve, self._config.timing.read_timeout), self._clock)
            except (OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
                cause = f"the workers' store cannot be served: {explained(error)}"
                self._cannot_start(cause, {placement.local_rank for placement in new}, error)
                return
        # The first member shares it with the others as its workers restore.
        sources = form.sources if self._rank == 0 else ()
        self._snapshot_store.fetch(sources, self._transfer_key(), self._control.tell_fetched)
        self._control.writer = placed[0].local_rank
        reporting.kept(start, len(new), self._config.nproc - len(placed))
        self._starts.begin(start, placed, new)

    def _cannot_start(self, cause: str, left: Collection[int], error: Exception) -> None:
        """The round cannot begin here, for want of the workers with the local ranks in ``left``."""
        lacking = lacks_processes(error) or (
            isinstance(error, OSError) and scarce(error)
        )  # which is not the script's failure
        code = ExitCode.TRAINING_FAILED if lacking else ExitCode.STARTUP_FAILURE
        self._react(v.StartFailed(cause, self._view.alive.difference(left), code))

    def _all_started(self, number: int, pids: Mapping[int, int]) -> None:
        for local_rank, pid in pids.items():
            self._group.workers[local_rank].id = pid
        self._group.state = WorkerState.HEALTHY
        self._membership.report(m.Joined(number))

    def _start_no_more(self, local_ranks: frozenset[int] | None) -> None:
        """Workers (None: all) are to end: those that have not started yet never will."""
        for local_rank in self._starts.no_more(local_ranks):
            self._inbox.put(v.WorkerGone(self._view.round, local_rank, -signal.SIGKILL))

"""NodeAgent: one node's part of a run. Takes events from the inbox, asks the policy, acts."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, ElasticAgent, RunResult, WorkerGroup, WorkerState

from elastic_agents import policy_types as v
from elastic_agents import reporting, status
from elastic_agents.drill import FaultReached
from elastic_agents.inbox import FirstStepDone, HowAreYou, ProcessEnding, SignalCaught
from elastic_agents.lease_keeper import StoppedByGuard
from elastic_agents.node_state import MemberOrder
from elastic_agents.notices import Notice
from elastic_agents.outcome import NodeOutcome, result_of
from elastic_agents.output_sinks import Kept
from elastic_agents.parts import AgentParts
from elastic_agents.policy import decide
from elastic_agents.summary import root_cause
from elastic_agents.workers.placement import group_of, place
from elastic_agents.workers.sessions import session_members
from elastic_agents.workers.start import WorkersStarted, start_failed, while_scarce
from elastic_agents.workers.watchdog import TimerExpired
from elastic_launch import contract as c
from elastic_launch.errors import EndpointError, ExitCode
from elastic_launch.events import types as ev
from elastic_launch.events.sentences import after_ahead, last_saved, sentence, warning, why
from elastic_launch.observe.present import Present
from elastic_launch.rendezvous.node.failure_detector import CutOff
from elastic_launch.rendezvous.node.membership_events import LinkDown, LinkUp, Opened
from elastic_launch.rendezvous.run_file import RunAddress
from elastic_launch.rendezvous.torch_handler import MembershipHandler
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.addresses import listen
from elastic_launch.system.allowance import LOOK, Allowance
from elastic_launch.system.descriptors import explained
from elastic_launch.system.threads import ThreadDied
from elastic_launch.system.writer_thread import IDLE

_log = logging.getLogger("elastic_launch.agent")

_LOOK_EVERY = 0.1
"""Seconds between two looks whether what workers have left behind has ended."""

ESTIMATE_EVERY = 5.0
"""Seconds between two estimates of how long the round still needs."""


class NodeAgent(ElasticAgent):
    """Supervises the workers of one node through all rounds of a run.

    Args:
        parts: what the agent works with; it starts them, and ends them with itself.

    Attributes:
        state: what the node knows of itself and its run.
        error_file: where the worker whose failure ended the run may have left its exception; None: on another node.
        last_present: how the node was once it had ended.
    """

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts
        self._config, self._clock, self._inbox, self._events = parts.config, parts.clock, parts.inbox, parts.events
        self._membership, self._control, self._workers = parts.membership, parts.control, parts.workers
        self._starts, self._start_timer = parts.starts, parts.start_timer
        self._snapshot_store = parts.snapshot_store
        self.state = parts.state
        self._group = group_of(self._config, MembershipHandler(self._config, self._membership))
        self._outcome: NodeOutcome | None = None
        self.error_file: Path | None = None
        self.last_present = Present("leaving")
        self._run_address: RunAddress | None = None
        self._restored: dict[int, int] = {}  # the training that workers of the round have restored, by local rank
        self._handlers = self._handled()

    @property
    def outcome(self) -> NodeOutcome:
        """How this node's part ended; only after :meth:`run`."""
        assert self._outcome is not None
        return self._outcome

    @property
    def notice(self) -> Notice | None:
        """The notice that made this node leave."""
        return self._parts.departure.notice

    @property
    def kept(self) -> Kept:
        """What happened to the workers' log files."""
        return self._parts.pump.kept

    def output(self, rank: int) -> list[str]:
        """Return the last lines that a rank of this node has printed; thread-safe."""
        return self._workers.output(rank)

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._group

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Take part in the run until it ends or this node leaves it.

        Returns:
            SUCCEEDED, FAILED with the failures of this node's workers in its last round, or STOPPED on request.
        """
        parts = self._parts
        with ExitStack() as stack:
            for end in reversed(parts.ends):  # each runs even if another fails
                stack.callback(end)
            self._membership.importing()
            parts.processes.when_ready(partial(self._membership.report, m.Imported()))
            # Now rather than as workers start, which would wait for its imports.
            parts.processes.when_lost(lambda: self._inbox.put(parts.processes.replace_lost))
            self._snapshot_store.start()
            parts.host.start()
            self._membership.start()
            parts.lease.wake()
            while self._outcome is None:
                self._react(self._inbox.take())
                parts.lease.renew()
                parts.hanging.follow()
            if self._outcome.code == ExitCode.DONE:
                self._await_children()
            self.last_present = self._present()
        return self._result(self._outcome)

    def _await_children(self) -> None:
        """Wait until what the workers have left behind has ended, for as long as the user wants; then leave it alone.

        The streams that it writes to end with this agent, as may everything in a container.
        """
        sids, limit = self._workers.release(), self._config.wait_for_children
        self._workers.close()  # those ahead, which may hold devices, and which nobody leases any more
        with suppress(OSError):  # no descriptor is left to read what there is
            if not (left := session_members(sids)):
                return
            if limit:
                reporting.children(left, f"waiting for up to {limit:g} s (--wait-for-children)")
            deadline, look = self._clock.now() + limit, object()
            while (left := session_members(sids)) and self._clock.now() < deadline:
                self._inbox.put_later(_LOOK_EVERY, look)
                while (item := self._inbox.take()) is not look and not isinstance(item, SignalCaught):
                    self._react(item)
                if item is not look:
                    break
            if left:
                reporting.children(left, "they go on")

    def _result(self, outcome: NodeOutcome) -> RunResult:
        cause = root_cause(outcome.failure) if outcome.failure is not None else ""
        self._events.emit(ev.NodeEnded(outcome.code, outcome.cause, last_saved(outcome.where), cause))
        self._parts.write_run_file(partial(self._parts.run_file.end, outcome.code, outcome.cause))
        error_files = {rank: logs.kept_error or logs.error_file for rank, logs in self._starts.logs.items()}
        failure = outcome.failure
        if failure is not None and failure.node_id == self._config.node_id:
            self.error_file = error_files.get(failure.local_rank)
        try:
            return self._parts.files.ask(partial(result_of, outcome.code, self._parts.exits.failed, error_files), IDLE)
        except TimeoutError:
            return result_of(outcome.code, {}, {})

    # From the inbox to the policy.

    def _react(self, item: Any) -> None:
        if callable(item):
            item = item()
        handler = self._handlers.get(type(item))
        event = item if handler is None else handler(item)
        if event is not None:
            self._follow(event)
        self._workers.end_failed()

    def _follow(self, event: v.Event) -> None:
        assert isinstance(event, v.Event), f"the inbox holds a {type(event).__name__}"
        snapshot_store = self._snapshot_store
        facts = v.NodeFacts(
            self._config.nproc,
            self._config.node_id,
            hosts=self.state.hosting,
            snapshot=snapshot_store.newest_step,
            idle=snapshot_store.idle,
            held=self._workers.held,
            replica_size=self._config.replica_size,
        )
        self.state.view, actions = decide(self.state.view, event, facts)
        for action in actions:
            self._carry_out(action)
        if isinstance(event, m.Break) and event.kind == "hang" and event.round == self.state.view.round:
            self._parts.hanging.end(event)

    def _handled(self) -> dict[type, Callable[[Any], v.Event | None]]:
        """What the inbox holds that is not for the policy, or that has an effect before the policy decides.

        Each function returns the event for the policy; None if there is none.
        """
        parts = self._parts
        return {
            Opened: self._opened,
            LinkUp: self._link_up,
            LinkDown: self._link_down,
            CutOff: self._cut_off,
            **dict.fromkeys((m.Form, m.DrainRound, m.Break, m.Evicted, m.LeftOut, m.RunEnd), self._ordered),
            m.Depart: parts.departure.by_order,
            Notice: parts.departure.by_notice,
            SignalCaught: self._signalled,
            v.Reported: self._reported,
            v.WorkerExit: self._exited,
            FirstStepDone: lambda _: self._membership.beat(),  # it decides what becomes of newcomers that cannot begin
            ProcessEnding: self._workers.ending,
            WorkersStarted: self._all_started,
            FaultReached: parts.drill.reached,
            m.Strike: parts.drill.ordered,
            m.PeerDone: lambda done: parts.hanging.watch_exits(done.round),
            m.TakeStacks: lambda order: parts.hanging.tell_stacks(order.round),
            m.SaveNow: lambda order: self._control.ask_save(order.round),
            m.NodeSaved: parts.final_save.reported,
            m.UserMessage: self._tell_user,
            StoppedByGuard: parts.lease.stopped,
            TimerExpired: self._workers.end_late,
            HowAreYou: self._answer,
            ThreadDied: self._thread_died,
        }

    def _opened(self, opened: Opened) -> None:
        config, where = self._config, opened.place
        self.state.hosting, endpoint = where.hosting, str(where.endpoint)
        # Written only once the run has accepted this node: before, the file may belong to other nodes.
        known = ",".join(map(str, config.endpoints)) or endpoint
        self._run_address = RunAddress(config.run_id, config.backend, known, config.node_id)
        reporting.opened(config, hosting=where.hosting, endpoint=endpoint, address=where.address)

    def _link_up(self, link: LinkUp) -> None:
        self.state.member, self.state.leader = True, link.leader
        self._parts.hanging.linked()
        assert self._run_address is not None
        address = replace(self._run_address, leader=link.leader)
        self._parts.write_run_file(partial(self._parts.run_file.write, address))
        self._events.emit(ev.LinkChanged(up=True, cause="hello accepted"))

    def _link_down(self, link: LinkDown) -> LinkDown:
        self.state.member = False
        self._parts.final_save.link_down()
        self._events.emit(ev.LinkChanged(up=False, cause=link.reason))
        return link

    def _cut_off(self, cut_off: CutOff) -> CutOff:
        reason = why(cut_off.reason)
        if self._membership.unconfirmed is not None and len(self.state.view.members) > 1:
            _log.warning("%s: training goes on, and checkpoints are added, but none is removed until it does", reason)
        self._events.emit(ev.LinkChanged(up=False, cause=reason))
        return cut_off

    def _ordered(self, order: MemberOrder) -> MemberOrder:
        self.state.ordered(order)
        event = reporting.received(order, self.state.view.round, self._config.node_id)
        self._events.emit(event)
        if not self.state.hosting:  # on the host, the leader's own events already report it
            reporting.ordered(order, event.round, event.cause)
        return order

    def _signalled(self, caught: SignalCaught) -> v.Leave | None:
        if caught.number in self._config.signals.forward:
            reporting.forwarded(caught.number, self._workers.forward(caught.number))
            return None
        return self._parts.departure.by_signal(caught.number, caught.at)

    def _exited(self, exited: v.WorkerExit) -> v.WorkerExit:
        self._learn_first_step()  # before it is decided which workers start ahead of the next round
        view = self.state.view
        if exited.round == view.round and exited.exit_code == 0 and view.alive == view.slots:
            self._parts.hanging.watch_exits(exited.round)  # the first to finish
        return exited

    def _reported(self, said: v.Reported) -> v.Reported:
        view = self.state.view
        match said.report:
            case c.Ready(drains=True) as ready:
                if said.round == view.round and said.local_rank in view.alive - view.ready:
                    self._starts.trains(said.round, said.local_rank, ready)
                    self._learned_start()
            case c.Ahead():
                self._starts.came(said.local_rank)
                self._learned_start()
            case c.Differs(alike=alike):
                self._workers.failing(said.round, said.local_rank, alike=alike)
            case c.RestoreFailed():
                self._workers.failing(said.round, said.local_rank, restoring=True)
            case c.Corrupt():
                self._workers.failing(said.round, said.local_rank, corrupt=self._config.exclude_corrupt)
            case c.Differing(step=step, ranks=ranks, suspect=suspect):
                if said.round == (formed := self.state.formed).number:
                    nodes = tuple(sorted({formed.node_of(rank) or "" for rank in ranks}))
                    found = ev.CorruptionFound(said.round, step, ranks, nodes, suspect)
                    self._events.emit(found)
                    _log.warning("%s", sentence(found))
            case c.SlowRank(rank=rank, phase=phase, ratio=ratio, load=load, pressure=pressure):
                if said.round == self.state.formed.number and (node := self.state.formed.node_of(rank)):
                    event = ev.StragglerFound(said.round, rank, node, phase, ratio, load, pressure)
                    self._events.emit(event)
                    _log.warning("%s", sentence(event))
            case c.Restored(training=training):
                if said.round == view.round and view.phase is v.Phase.RUNNING:
                    self._restored[said.local_rank] = training
                    if self._restored.keys() == view.slots:
                        self._snapshot_store.restored(min(self._restored.values()))
        return said

    def _tell_user(self, message: m.UserMessage) -> None:
        if not self.state.hosting:
            _log.info("%s", message.text)

    def _thread_died(self, died: ThreadDied) -> None:
        cause = f"internal error: the agent's thread {died.name!r} failed: {died.error}"
        self._outcome = self._outcome or NodeOutcome(ExitCode.TRAINING_FAILED, cause, self.state.restarts)

    def _present(self) -> Present:
        parts = self._control, self._membership, self._snapshot_store, self._workers, self._parts.host
        return status.present(self.state, *parts)

    def _answer(self, asked: HowAreYou) -> None:
        asked.answer(self._present())
        if asked.every is not None:
            self._inbox.put_later(asked.every, asked)

    def _learn_first_step(self) -> None:
        if self._starts.first_step_done(self.state.view.round):
            self._learned_start()

    def _learned_start(self) -> None:
        if self._start_timer.slow != self.state.view.ahead.slow:
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
                self._starts.start_ahead(local_ranks, self.state.restarts, yields=yields)
            case v.ForgetSnapshots():
                self._snapshot_store.forget()
            case v.KillAhead(local_ranks=local_ranks):
                self._starts.kill_ahead(local_ranks)
            case v.ReportAheadExit(local_rank=local_rank, next=following):
                if exited := self._workers.reaped(local_rank):
                    reporting.lost_ahead(exited, self._parts.exits.failure_of(local_rank), after_ahead(following))
            case v.SuspendWorkers(round=number, cause=cause, local_ranks=local_ranks):
                self._workers.resume()  # they have to leave their round
                self._workers.suspends(local_ranks)
                self._control.suspend(number, local_ranks, why(cause))
                pids = (pid for where, pid, _ in self._workers.running(number) if where.local_rank in local_ranks)
                self._await_suspended(number, Allowance(self._suspension(), *pids, most=self._longest_suspension))
            case v.SendExit(local_ranks=local_ranks):
                self._workers.resume()
                # Those that are being suspended follow.
                self._control.dismiss(local_ranks, min(local_ranks | self.state.view.live))
            case v.AskStop(round=number, cause=cause, seconds=seconds):
                view = self.state.view
                self._control.ask_stop(number, view.alive, why(cause), ends=view.leaving is not None or view.final)
                if seconds is not None:
                    self._inbox.put_later(seconds, v.DrainOver(number))
            case v.AwaitCopies(bounded=bounded, begun=begun):
                self._parts.final_save.begin(bounded=bounded, begun=begun)
            case v.Later(seconds=seconds, event=event):
                self._inbox.put_later(seconds, event)
            case v.Terminate(local_ranks=local_ranks):
                self._start_no_more(local_ranks)
                self._workers.resume()
                self._workers.terminate(local_ranks, action.number)
                self._inbox.put_later(self._parts.departure.grace, v.GraceOver(action.round))
            case v.Kill(local_ranks=local_ranks, ending=ending):
                if not ending:
                    self._start_no_more(local_ranks)
                self._workers.kill(local_ranks, ending=ending)
            case v.ReportFailure(local_rank=local_rank):
                if failure := self._parts.exits.failure_of(local_rank):
                    self._membership.report(failure)
            case v.ReportUnfit(local_rank=local_rank):
                if failure := self._parts.exits.failure_of(local_rank):
                    self._membership.report(m.Unfit(failure))
            case v.ReportDisconnected(local_rank=local_rank, error=error):
                self._membership.report(self._workers.disconnected(local_rank, error, self._control.step_timer))
            case v.ReportReady(round=number):
                self._ready(number)
                self._parts.processes.training()
                self._starts.training()
                if self.state.rank == 0:  # one member's estimate is enough
                    self._inbox.put_later(ESTIMATE_EVERY, partial(self._estimate, number))
            case v.ReportStopped():
                self._end_round(action)
            case m.Done(round=number):
                self._group.state = WorkerState.SUCCEEDED
                self.state.finished_round = number
                self._membership.report(action)
            case m.Leaving() | m.RankOffer() | m.Imported():
                self._membership.report(action)
            case v.Warn(of=fact):
                _log.warning("%s", warning(fact))
            case v.Finish(code=code, cause=cause):
                failure, where = self.state.failure if code else None, self._parts.final_save.where(code)
                unsaved = self._snapshot_store.failed
                self._outcome = NodeOutcome(code, why(cause), self.state.restarts, failure, unsaved, where)

    def _suspension(self) -> float:
        """Seconds that workers have to leave a round: less than the leader waits for this node."""
        return min(self._control.step_timer.suspend_seconds(), self._longest_suspension)

    @property
    def _longest_suspension(self) -> float:
        return self._config.shutdown_timeout + self._config.timing.return_after / 2

    def _await_suspended(self, number: int, allowance: Allowance) -> v.SuspendOver | None:
        """Return once the time is over that workers have to leave a round; those that wait for a CPU do not hang."""
        if (left := allowance.left()) <= 0 or number != self.state.view.round:
            return v.SuspendOver(number)
        self._inbox.put_later(min(left, LOOK), partial(self._await_suspended, number, allowance))
        return None

    def _estimate(self, number: int) -> None:
        if number == self.state.view.round and self.state.view.phase is v.Phase.RUNNING:
            self._ready(number, self._control.step_timer.remaining())
            self._inbox.put_later(ESTIMATE_EVERY, partial(self._estimate, number))

    def _ready(self, number: int, remaining: float | None = None) -> None:
        begun = self._control.step_timer.of_round(number)
        live = self.state.view.alive <= self.state.view.live
        arguments = self._control.arguments if live else ""
        remaining = None if remaining is None else round(remaining, 3)
        step = None if begun is None else begun[0]
        self._membership.report(m.NodeReady(number, remaining, step, live, arguments))

    def _end_round(self, end: v.ReportStopped) -> None:
        number, drained, store = end.round, end.drained, self._parts.worker_store
        stay = self.state.view.suspended | self.state.view.alive  # those of a node that leaves may still have to exit
        self._learn_first_step()
        stuck = self._workers.end_round(stay)
        if stuck:
            _log.error("processes %s of round %d cannot be killed; they may hold a device", stuck, number)
        store.stop()
        self._group.state = WorkerState.STOPPED
        if not stay:  # such a worker may write a last snapshot, if no round follows
            self._snapshot_store.between_rounds()
        port = self._serve(store.address) if end.serve else 0
        newest, durable = self._snapshot_store.newest, self._parts.durable
        kept = bool(self.state.view.suspended)
        held = m.HeldSnapshot(newest.round, newest.step, port, kept) if newest is not None else None
        training, _ = self._control.step_timer.position
        saved = drained is not None and durable.has(training, drained)
        unsaved = why(durable.why_not(writes=self.state.rank == 0)) if end.secured and not saved else ""
        store_port = while_scarce(store.reserve, self._clock)
        trained = self._control.step_timer.trained[0] > 0
        how = saved, unsaved, end.importing, end.slots, trained, training
        stopped = m.Stopped(number, store_port, drained, held, *how)
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
        form, state, store = start.form, self.state, self._parts.worker_store
        state.formed = form.round
        placed = place(self._group, form.round, self._config)
        state.rank = placed[0].group_rank
        new = self._starts.prepare(start, placed)
        self._parts.exits.failed.clear()
        self._restored.clear()
        self._snapshot_store.between_rounds()  # also of a node that has left the last one without an order
        self._parts.durable.begin()
        if state.rank == 0 and not self._config.kind.fixed_ranks:  # its workers meet at the endpoint
            try:
                while_scarce(partial(store.serve, self._config.timing.read_timeout), self._clock)
            except (OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
                self._react(start_failed(f"the workers' store cannot be served: {explained(error)}", new, error))
                return
        # The first member shares it with the others as its workers restore.
        sources = form.sources if state.rank == 0 else ()
        self._snapshot_store.fetch(sources, self._transfer_key(), self._control.tell_fetched)
        self._control.writer = placed[0].local_rank
        reporting.kept(start, len(new), self._config.nproc - len(placed))
        if (begun := self._starts.begin(start, placed, new)) is not None:
            self._react(begun)

    def _all_started(self, started: WorkersStarted) -> None:
        for local_rank, pid in started.pids.items():
            self._group.workers[local_rank].id = pid
        self._group.state = WorkerState.HEALTHY
        self._membership.report(m.Joined(started.round))

    def _start_no_more(self, local_ranks: frozenset[int] | None) -> None:
        """Workers (None: all) are to end: those that have not started yet never will."""
        for local_rank in self._starts.no_more(local_ranks):
            self._inbox.put(v.WorkerExit(self.state.view.round, local_rank, -signal.SIGKILL))

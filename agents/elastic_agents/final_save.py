"""What this node saves of the state in its memory when it or the run ends, and who is told of what is saved."""

from __future__ import annotations

import logging

from elastic_agents import policy_types as v
from elastic_agents.departure import Departure
from elastic_agents.inbox import Inbox
from elastic_agents.node_state import NodeState
from elastic_agents.snapshots.durable_state import DurableState
from elastic_agents.snapshots.snapshot_store import SnapshotStore
from elastic_agents.workers.control import Control
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.contract import Copied, Copying, Save
from elastic_launch.errors import ExitCode
from elastic_launch.events import types as ev
from elastic_launch.events.facts import LastSaved
from elastic_launch.rendezvous.node.membership import Membership
from elastic_launch.rendezvous.wire import messages as m

_log = logging.getLogger("elastic_launch.agent")


class FinalSave:
    """Decides whether this node saves what others do not; the newest state is never left in memory only."""

    def __init__(
        self,
        config: LaunchConfig,
        state: NodeState,
        membership: Membership,
        snapshot_store: SnapshotStore,
        durable: DurableState,
        control: Control,
        departure: Departure,
        events: ev.EventSink,
        inbox: Inbox[object],
    ) -> None:
        self._config = config
        self._state = state
        self._membership = membership
        self._snapshot_store = snapshot_store
        self._durable = durable
        self._control = control
        self._departure = departure
        self._events = events
        self._inbox = inbox
        self._begun_in: int | None = None  # the round whose state is copied before this node ends or leaves
        self._stands_in = False  # this node saves at its end, whichever node saves usually

    def link_down(self) -> None:
        """The leader is gone: if this node saves meanwhile, none can tell it now who does."""
        if self._begun_in == self._state.view.round:
            self._secure()

    def begin(self, *, bounded: bool, begun: bool = False) -> None:
        """Copy to durable storage what is in memory only, if this node is responsible for it or no other can.

        Args:
            bounded: for the time that this node has left at most.
            begun: only end the copies that have begun.
        """
        view = self._state.view
        left = 0.0 if self._state.replaced else self._departure.left
        if begun:
            self._stands_in = self._is_left()  # the leader may end before the copies
        else:
            if bounded or view.leaving is not None:
                self._begun_in = view.round
            self._secure()
        if self._snapshot_store.idle or (bounded and left <= 0):
            self._inbox.put(v.CopiesDone(given_up=not self._snapshot_store.idle))
        elif bounded:
            self._inbox.put_later(left, v.DrainOver(view.round))

    def _secure(self) -> None:
        self._stands_in = self._begun_in == self._state.view.round and self._is_left()
        if self._state.member or self._stands_in:
            self._snapshot_store.secure(stands_in=self._stands_in)

    def _is_left(self) -> bool:
        """Whether no other node is known to save, or to go on with, the state in this node's memory."""
        state = self._state
        if state.replaced:
            return False
        if state.run_over:
            return state.saver in ("", self._config.node_id)
        return not state.member or (state.view.parked and self._membership.round <= state.view.round)

    def may_commit(self) -> bool:
        """Whether this node is still a member of the run; called from any thread."""
        return self._state.member and not self._membership.cut_off

    def may_add(self) -> bool:
        """Whether this node may add a checkpoint although its membership is not confirmed; called from any thread."""
        return self._stands_in or self._membership.unconfirmed is not None

    def copied(self, copied: Copied | Copying | Save | None) -> bool:
        """Tell the leader and the workers of a copy. Called from the snapshot store's thread.

        Returns:
            whether it reached any worker.
        """
        error = ""
        if isinstance(copied, Copied):
            number, error = self._state.view.round, f"{copied.error} {copied.hint}".strip()
            if copied.path:
                self._durable.copied(copied)
                self._events.emit(ev.CheckpointSaved(number, copied.step, copied.path, copied.training))
            asked = self._control.answers((copied.training, copied.step))
            why = "" if copied.path else error
            self._membership.report(m.NodeSaved(number, copied.step, why, asked, copied.training))
        told = copied is not None and self._control.tell_copied(copied)
        if isinstance(copied, Copied) and error:
            text = "checkpoint of step %d is saved, but removing old ones failed: %s%s"
            text = text if copied.path else "checkpoint of step %d: %s%s"
            _log.error(text, copied.step, error, " Training goes on." if told else "")
        if self._snapshot_store.idle:
            self._inbox.put(v.CopiesDone())
        return told

    def reported(self, saved: m.NodeSaved) -> None:
        """A worker has written or removed checkpoints itself, or could not, or the script saves its state itself."""
        if saved.round == self._state.view.round:
            if saved.withdrew:
                self._durable.withdrew(saved.step, saved.training)
                self._membership.checkpoint = None  # the leader tells of the one that is left
            else:
                self._durable.reported(saved.step, saved.error, saved.training)
            if not saved.error and not saved.withdrew:
                self._events.emit(ev.CheckpointSaved(saved.round, saved.step, "", saved.training))
        self._membership.report(saved)

    def where(self, code: int) -> LastSaved | None:
        """Return where the final state is saved; None if another node says so, or if that is not known."""
        state = self._state
        speaks = self._stands_in or (state.rank == 0 and state.view.round > 0)
        if not speaks or code == ExitCode.DONE or state.replaced:
            return None
        others = len(state.view.members) > 1 and not state.run_over and not self._stands_in
        told = self._membership.checkpoint
        timer = self._control.step_timer
        number, _ = timer.reached
        # A record that outlives the run refuses another one of its name.
        continues = code == ExitCode.INTERRUPTED and not self._config.kind.elected and not others
        reached = timer.position if number else None
        return self._durable.where(reached, others=others, told=told and told[:2], continues=continues)

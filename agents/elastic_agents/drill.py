"""This node's part in a drill: has workers wait at their planned faults, and carries out what the leader decides."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from elastic_agents.inbox import SignalCaught
from elastic_agents.node_state import NodeState
from elastic_agents.snapshots.snapshot_store import SnapshotStore
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.contract import FaultDue
from elastic_launch.faults import WAYS
from elastic_launch.rendezvous.node.membership import Membership
from elastic_launch.rendezvous.wire.messages import Strike, StrikeDue

_log = logging.getLogger("elastic_launch.agent")


@dataclass(frozen=True, slots=True)
class FaultReached:
    """A worker has come to a planned fault, and waits.

    Attributes:
        answer: tells the worker whether to carry it out itself; to be called once.
    """

    pid: int
    due: FaultDue
    answer: Callable[[bool], None]


@dataclass(eq=False, repr=False)
class NodeDrill:
    """Carries out planned faults; used by the agent's thread.

    Args:
        later: puts an item into the agent's inbox after a number of seconds.
    """

    _config: LaunchConfig
    _state: NodeState
    _later: Callable[[float, object], None]
    _membership: Membership
    _snapshot_store: SnapshotStore
    _waiting: dict[int, FaultReached] = field(default_factory=dict, init=False)

    def reached(self, reached: FaultReached) -> None:
        """Note that a worker waits, and ask the leader, if the fault is in this node's plan, and possible."""
        number = reached.due.fault
        possible = number < len(self._config.drill.faults)
        if possible and (reason := self._impossible(self._config.drill.faults[number].do)):
            _log.warning("drill: fault %d does not happen: %s", number, reason)
            possible = False
        if possible:
            self._waiting[number] = reached
            self._membership.report(StrikeDue(self._state.view.round, number, reached.due.step))
        else:
            reached.answer(False)

    def _impossible(self, do: str) -> str:
        if do == "cut_link" and not self._membership.cut_link(0.0):
            return "this node leads the run, so its link stays within it"
        if do == "fail_copies" and not self._snapshot_store.fail_copies(0.0):
            return "so far, this node saves no checkpoints in a directory"
        return ""

    def ordered(self, strike: Strike) -> None:
        """Carry out a fault, or have its worker continue."""
        if strike.node_id not in ("", self._config.node_id):
            return
        reached = self._waiting.pop(strike.fault, None)
        if reached is None:
            return
        fault = self._config.drill.faults[strike.fault]
        if not strike.node_id:
            reached.answer(False)
            return
        _log.warning("drill: %s", fault.told(reached.due.step, reached.due.rank))
        match fault.do:
            case "freeze":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(reached.pid, signal.SIGSTOP)
                    self._later(fault.seconds, partial(_go_on, reached.pid))
            case "sigterm":
                self._later(0.0, SignalCaught(signal.SIGTERM))
            case "cut_link":
                self._membership.cut_link(fault.seconds)
            case "fail_copies":
                self._snapshot_store.fail_copies(fault.seconds)
            case "lose":
                os.kill(os.getpid(), signal.SIGKILL)  # the guard kills the workers
        reached.answer(fault.do in WAYS)


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)

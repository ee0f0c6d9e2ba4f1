"""Which incident of a run an event belongs to, as one node sees it.

An incident begins when a round ends before the work is done, and ends when the next round has its workers. Its id is
the number of the round that it ends: each node knows that without being told, and it is the same on all of them.
"""

from __future__ import annotations

import threading

from elastic_launch.events import types as ev

_ENDING_ORDERS = ("drain", "break", "evicted", "left_out")


class Incidents:
    """Follows the events of one node, and of the leader if it is there; thread-safe.

    Args:
        node_id: the node's.

    Attributes:
        now: id of the incident that is under way; None if there is none.
    """

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self.now: int | None = None
        self._lock = threading.Lock()
        self._last = 0  # the newest incident
        self._next = 0  # the round that ended it; 0 if none has
        self._missing = 0  # workers of this node that have no process in that round yet
        self._known: set[int] = set()

    def add(self, event: ev.Event) -> int | None:
        """Follow an event; return the id of the incident that it belongs to, None if it belongs to none."""
        with self._lock:
            number = _ends(event)
            if number > self._last:
                self.now, self._last, self._next = number, number, 0
                self._known.add(number)
            found = self._of(event)
            self._close(event)
            return found

    def _of(self, event: ev.Event) -> int | None:
        if self.now is not None:
            return self.now
        number = getattr(event, "round", 0)
        if number in self._known:
            return int(number)
        # The first step shows what the incident has cost.
        late = isinstance(event, ev.TrainingBegun | ev.FirstStep | ev.WorkerPlaced)
        if not late or number != self._next or not self._last:
            return None
        if isinstance(event, ev.FirstStep):
            self._next = 0  # a further training of the round costs nothing more
        return self._last

    def _close(self, event: ev.Event) -> None:
        match event:
            case ev.NodeEnded() | ev.RunEnded():
                self.now = None
            case ev.RoundFormed(round=number, nodes=nodes) if number > self._last and self._node_id not in nodes:
                self._next, self._missing = number, 0
            case ev.OrderReceived(order="form", round=number, workers=workers) if number > self._last:
                self._next, self._missing = number, workers
            case ev.WorkerStarted(round=number) | ev.WorkerKept(round=number) | ev.WorkerPlaced(round=number):
                self._missing -= number == self._next and number > 0
            case _:
                return
        if self._next > self._last and self._missing <= 0:
            self.now = None


def _ends(event: ev.Event) -> int:
    """Return the number of the round that an event shows to end before the work is done; 0 if it shows none."""
    match event:
        case ev.WorkerExited(round=number, exit_code=code, stopped=stopped) if code or stopped:
            return number
        case ev.NodeLost(broke=number) | ev.HangFound(round=number):
            return number
        case ev.RoundBroken(round=number) | ev.RoundDraining(round=number):
            return number
        case ev.OrderReceived(order=order, round=number) if order in _ENDING_ORDERS:
            return number
    return 0

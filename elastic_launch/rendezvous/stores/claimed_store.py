"""The leader's view of the control record in a store."""

from __future__ import annotations

import logging
import threading
import time

from elastic_launch.clock import Clock
from elastic_launch.rendezvous.continuity import Claim, Sight
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.stores.control_store import ControlStore
from elastic_launch.rendezvous.wire.log_once import LogOnce

ATTEMPTS = 5
"""Times that one write may find the record of another run before it is given up."""


class ClaimedStore:
    """The leader's view of its record; values are records without their seal. Used by two threads, writer and watcher.

    Attributes:
        claim: the leader's claim to the record as written for its term.
    """

    def __init__(self, store: ControlStore, claim: Claim, clock: Clock, log: logging.Logger) -> None:
        self._store = store
        self.claim = claim
        self._clock = clock
        self._once = LogOnce(log)
        self._writing = threading.Lock()

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        """Replace the last record, or that of another run, unless other clients have put anything else there."""
        with self._writing:
            return self._write(self.claim.stored, ControlRecord.parse(value), timeout)

    def repair(self, spoiled: bytes | None, timeout: float) -> None:
        """Write the last record again in place of the value found, unless a record is being written anyway.

        Only if the run has ended, or the value is the record of another run: see ``continuity``.

        Raises:
            StoreError: if the store does not answer.
        """
        self._tell()
        if self._writing.acquire(blocking=False):
            try:
                self._write(spoiled, self.claim.record.renewed(), timeout)
            finally:
                self._writing.release()

    def resign(self) -> None:
        self._store.resign()

    def _write(self, expected: bytes | None, record: ControlRecord, timeout: float) -> bool:
        began = self._clock.now()
        deadline = time.monotonic() + timeout
        value = self.claim.propose(record)
        for _ in range(ATTEMPTS):
            if self._store.compare_and_set(expected, value, max(0.1, deadline - time.monotonic())):
                self.claim.wrote(record, began)
                return True
            expected = self._store.load(max(0.1, deadline - time.monotonic()))
            if expected == value:
                self.claim.wrote(record, began)
                return True
            sight = self.claim.look(expected)
            leaves = self.claim.record.end is None or self.claim.has_followed(expected)
            if sight is Sight.SUCCEEDED or (sight is Sight.SPOILED and leaves):
                return False
            if expected != self.claim.stored:
                self._tell()
        return False

    def _tell(self) -> None:
        text = "the control record was changed or deleted by something that is not of this run; it is repaired"
        self._once.warn("spoiled", text)

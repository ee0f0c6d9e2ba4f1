"""Writes checkpoints in a background thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from elastic_launch.contract import Best
from elastic_launch.snapshot.errors import CheckpointError, CheckpointWriteError
from elastic_launch.snapshot.format.manifest import check_numbers
from elastic_launch.snapshot.storage.listing import CheckpointInfo
from elastic_launch.snapshot.storage.saving import check_keep, prune, write, write_own
from elastic_launch.snapshot.storage.shares import OwnShare

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """The outcome of one write.

    Attributes:
        step, round: step and round of the state to be written.
        info: the checkpoint; None if it was not written.
        error: why it was not written or, if ``info`` is set, why old checkpoints could not be removed.
    """

    step: int
    round: int
    seconds: float
    info: CheckpointInfo | None = None
    error: CheckpointError | None = None


class BackgroundWriter:
    """Writes checkpoints in a thread, one at a time. The caller must close it.

    The newest state wins: a state waiting for a write in progress is replaced by the next one submitted, unless it is
    to stay. Errors do not
    end the thread; ``poll`` returns them or, if ``poll`` is not called, ``close`` raises the last one.

    Args:
        directory: directory or URL of the checkpoints; made by the first write.
        keep: number of newest checkpoints to keep after each write, see ``prune``; None: remove nothing.
        keep_every, keep_best: which others to keep, see ``prune``.
        owner, may_commit: as for ``write``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = None,
        keep_every: int = 0,
        keep_best: Best | None = None,
        owner: str = "",
        may_commit: Callable[[], bool] = lambda: True,
    ) -> None:
        if keep is not None:
            check_keep(keep)
        self._directory = directory
        self._commits: dict[str, Any] = {"owner": owner, "may_commit": may_commit}
        self._prune = None if keep is None else partial(prune, directory, keep, every=keep_every, best=keep_best)
        self._changed = threading.Condition()
        self._waiting: list[tuple[bool, dict[str, Any]]] = []  # whether it stays, and arguments of `write`
        self._busy = False
        self._closing = False
        self._ended = False
        self._outcomes: list[WriteOutcome] = []
        # A daemon thread, so that a hanging file system does not keep the process alive after `close` gave up.
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def submit(
        self, state: Any, *, step: int, round: int, meta: dict[str, Any] | None = None, stays: bool = False
    ) -> None:
        """Queue a state for writing, and return at once; if it ``stays``, it is written even if a newer one follows.

        It is as for ``write`` or ``write_own``, and is not changed any more, since it is read later in another thread.
        """
        check_numbers(step, round)
        with self._changed:
            if self._closing or self._ended:
                raise CheckpointError("A checkpoint was submitted to a writer that has ended.")
            self._drop()
            self._waiting.append((stays, {"state": state, "step": step, "round": round, "meta": meta}))
            self._changed.notify_all()

    def drop_waiting(self) -> bool:
        """Drop the state that waits for a write in progress, since a newer one is about to be submitted.

        Return whether one is left that is to stay.
        """
        with self._changed:
            self._drop()
            return bool(self._waiting)

    def _drop(self) -> None:
        self._waiting = [each for each in self._waiting if each[0]]

    def poll(self) -> list[WriteOutcome]:
        """Return the outcomes not yet returned, oldest first; does not wait."""
        with self._changed:
            outcomes, self._outcomes = self._outcomes, []
            return outcomes

    def flush(self, timeout: float) -> bool:
        """Wait until all submitted states are written or have failed; return False after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle() or self._ended, timeout) and self._idle()

    def close(self, timeout: float = 600.0) -> None:
        """Write the waiting state, end the thread, and raise the last error that ``poll`` has not returned.

        Only the first call has an effect. It also raises an error if the thread has not ended after so many seconds; a
        checkpoint still being written then appears only if the process lives long enough.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise CheckpointWriteError(
                f"A checkpoint in {os.fspath(self._directory)} was still being written after {timeout:g} s.",
                "Check the file system that holds it.",
            )
        if not self._idle():
            raise CheckpointError("The thread that writes checkpoints failed; its traceback is above.")
        errors = [outcome.error for outcome in self.poll() if outcome.error is not None]
        if errors:
            raise errors[-1]

    def _idle(self) -> bool:
        return not self._waiting and not self._busy

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._closing)
                    if not self._waiting:
                        return
                    request = self._waiting.pop(0)[1]
                    self._busy = True
                outcome = self._outcome(**request)
                # Free it before waiting for the next one: a state may be as large as the model.
                del request
                with self._changed:
                    self._outcomes += [] if outcome is None else [outcome]
                    self._busy = False
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _outcome(self, *, state: Any, step: int, round: int, meta: dict[str, Any] | None) -> WriteOutcome | None:
        """Write a state; return None if another node commits it."""
        started = time.monotonic()
        info: CheckpointInfo | None = None
        failure: CheckpointError | None = None
        own = isinstance(state, OwnShare)
        try:
            info = (write_own if own else write)(
                self._directory, state, step=step, round=round, meta=meta, **self._commits
            )
            if info is not None and self._prune is not None:
                self._prune(up_to_round=round, meta=info.meta)
        except CheckpointError as error:
            failure = error
        except Exception as error:  # noqa: BLE001
            # From torch, for example if a device is lost or out of memory; or an object in the state has raised it.
            why = f"{error}" if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
            failure = CheckpointError(f"A checkpoint of step {step} could not be written: {why}.")
            failure.__cause__ = error
        if own and state.index:
            if failure is not None:
                _log.warning("a share of the checkpoint of step %d: %s", step, failure)
            return None
        return WriteOutcome(step, round, time.monotonic() - started, info, failure)

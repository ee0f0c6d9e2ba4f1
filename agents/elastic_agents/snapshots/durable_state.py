"""Where a node's training state is: what its workers and its copier have reported about durable storage."""

from __future__ import annotations

from elastic_agents.snapshots.snapshot_store import SnapshotStore
from elastic_launch.contract import Copied
from elastic_launch.events.facts import LastSaved, NotSaved


class DurableState:
    """What is in durable storage, as far as this node knows.

    Args:
        snapshot_store: copies what is in memory.

    Attributes:
        library_saves: whether the library saves the workers' state; else their script does, if anything does.
        checkpoints: whether it is to save checkpoints of any of their trainings.
        base: step and place of the durable state that the run last resumed from; None if it is not known.
    """

    def __init__(self, snapshot_store: SnapshotStore) -> None:
        self._snapshot_store = snapshot_store
        self.library_saves, self.checkpoints = True, False
        self.base: tuple[int, str] | None = None
        self._saved: int | None = None  # step of the round's last checkpoint
        self._unsaved = ""  # why the workers' last checkpoint could not be written
        self._kept: Copied | None = None  # the last checkpoint in durable storage; without a path if a worker wrote it

    def begin(self) -> None:
        """Workers of a new round begin."""
        self._saved, self._unsaved = None, ""

    def copied(self, copied: Copied) -> None:
        """A copy is in durable storage. Called from the snapshot store's thread."""
        self._kept, self._saved, self._unsaved = copied, copied.step, ""

    def reported(self, step: int, error: str) -> None:
        """A worker of the round has written a checkpoint itself, or could not."""
        self._unsaved = error
        if not error:
            self._kept, self._saved = Copied(step, 0), step

    def has(self, step: int) -> bool:
        """Whether the state after a step of the current round is in durable storage."""
        return self._saved == step or self._snapshot_store.has_saved(step)

    def why_not(self, *, writes: bool) -> str | NotSaved:
        """Return why this node's state is not saved; empty if nothing went wrong.

        ``writes``: whether this node has the round's first worker, the one that saves if any does.
        """
        if not self.library_saves:
            return NotSaved("itself")
        if self._snapshot_store.failed or self._unsaved:
            return self._snapshot_store.failed or self._unsaved
        if not self._snapshot_store.idle:
            return NotSaved("no time")
        saves = self.checkpoints or self._snapshot_store.saves
        return NotSaved("none") if writes and not saves else ""

    def where(
        self, reached: tuple[int, int], *, others: bool, told: int | None = None, continues: bool = False
    ) -> LastSaved | None:
        """Return where the final state is saved, on the node of the round's first worker; None if that is not known.

        Args:
            reached: the round and the step that the workers have come to; round 0 if they have not trained.
            others: whether other nodes continue, and may save.
            told: step of the newest checkpoint that the leader has told of; None if it has not.
            continues: whether the same command would go on from there.
        """
        number, step = reached
        if not number or not self.library_saves:
            return None
        own = [] if self._saved is None else [(self._saved, "")]
        own += [(self._kept.step, self._kept.path)] if self._kept is not None else []
        if not own and others:
            return None
        known = [*own, *([self.base] if self.base is not None else []), *([(told, "")] if told is not None else [])]
        saved, path = max(known, default=(None, ""))
        lost = 0 if others else max(0, step - (saved or 0))
        why = "" if own or not (lost or saved is None) else self.why_not(writes=True) or NotSaved("incomplete")
        failed = bool(self._snapshot_store.failed or self._unsaved)
        return LastSaved(saved, path, lost, why, failed, continues)

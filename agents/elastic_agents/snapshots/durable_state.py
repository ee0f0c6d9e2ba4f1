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
        base: training, step and place of the durable state that the run last resumed from; None if it is not known.

    A script may train several times, one after the other. States are those of a training, numbered from 0, and only
    those of the last one that is known of matter.
    """

    def __init__(self, snapshot_store: SnapshotStore) -> None:
        self._snapshot_store = snapshot_store
        self.library_saves, self.checkpoints = True, False
        self.base: tuple[int, int, str] | None = None
        self._saved: tuple[int, int] | None = None  # training and step of the round's last checkpoint
        self._unsaved = ""  # why the workers' last checkpoint could not be written
        self._kept: Copied | None = None  # the last checkpoint in durable storage; without a path if a worker wrote it

    def begin(self) -> None:
        """Workers of a new round begin."""
        self._saved, self._unsaved = None, ""

    def copied(self, copied: Copied) -> None:
        """A copy is in durable storage. Called from the snapshot store's thread."""
        self._kept, self._saved, self._unsaved = copied, (copied.training, copied.step), ""

    def reported(self, step: int, error: str, training: int = 0) -> None:
        """A worker of the round has written a checkpoint itself, or could not."""
        self._unsaved = error
        if not error:
            self._kept, self._saved = Copied(step, 0, training=training), (training, step)

    def withdrew(self, left: int, training: int = 0) -> None:
        """A worker has removed checkpoints that may be wrong; ``left``: step of the newest that is left, or 0."""
        self._saved = None
        self._kept = Copied(left, 0, training=training) if left else None
        if self.base is not None and self.base[:2] > (training, left):
            self.base = None

    def has(self, training: int, step: int) -> bool:
        """Whether the state of a training after a step of the current round is in durable storage."""
        return self._saved == (training, step) or self._snapshot_store.has_saved(training, step)

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
        self,
        reached: tuple[int, int] | None,
        *,
        others: bool,
        told: tuple[int, int] | None = None,
        continues: bool = False,
    ) -> LastSaved | None:
        """Return where the final state is saved, on the node of the round's first worker; None if that is not known.

        Args:
            reached: the training and the step that the workers have come to; None if they have not trained.
            others: whether other nodes continue, and may save.
            told: training and step of the newest checkpoint that the leader has told of; None if it has not.
            continues: whether the same command would go on from there.
        """
        if reached is None or not self.library_saves:
            return None
        own = [] if self._saved is None else [(*self._saved, "")]
        own += [(self._kept.training, self._kept.step, self._kept.path)] if self._kept is not None else []
        known = [*own, *([self.base] if self.base is not None else []), *([(*told, "")] if told is not None else [])]
        # A new round's workers may not have come to the training again of which a state is saved.
        training, step = max([reached, *((training, 0) for training, _, _ in known)])
        own, known = ([each for each in states if each[0] == training] for states in (own, known))
        if not own and others:
            return None
        _, saved, path = max(known, default=(training, None, ""))
        lost = 0 if others else max(0, step - (saved or 0))
        why = "" if own or not (lost or saved is None) else self.why_not(writes=True) or NotSaved("incomplete")
        failed = bool(self._snapshot_store.failed or self._unsaved)
        return LastSaved(saved, path, lost, why, failed, continues, training)

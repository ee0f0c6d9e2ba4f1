"""Where a node's training state is: what its workers and its copier have reported about durable storage."""

from __future__ import annotations

from elastic_agents.snapshots.snapshot_store import SnapshotStore
from elastic_launch.contract import Copied
from elastic_launch.events.types import counted

SAVES_ITSELF = "the script saves its state itself"
"""Why this project has saved nothing of a training with a loop of its own."""


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

    def why_not(self, *, writes: bool) -> str:
        """Return why this node's state is not saved; empty if nothing went wrong.

        ``writes``: whether this node has the round's first worker, the one that saves if any does.
        """
        if not self.library_saves:
            return SAVES_ITSELF
        if self._snapshot_store.failed or self._unsaved:
            return self._snapshot_store.failed or self._unsaved
        if not self._snapshot_store.idle:
            return "there was no time left"
        saves = self.checkpoints or self._snapshot_store.saves
        return "the script saves no checkpoints" if writes and not saves else ""

    def where(self, reached: tuple[int, int], *, others: bool, told: int | None = None, continues: bool = False) -> str:
        """Return where the final state is saved, on the node of the round's first worker; empty if that is not known.

        Args:
            reached: the round and the step that the workers have come to; round 0 if they have not trained.
            others: whether other nodes continue, and may save.
            told: step of the newest checkpoint that the leader has told of; None if it has not.
            continues: whether the same command would go on from there.
        """
        number, step = reached
        if not number or not self.library_saves:
            return ""
        own = [] if self._saved is None else [(self._saved, "")]
        own += [(self._kept.step, self._kept.path)] if self._kept is not None else []
        if not own and others:
            return ""
        why = "" if own else self.why_not(writes=True) or "no checkpoint was complete"
        known = [*own, *([self.base] if self.base is not None else []), *([(told, "")] if told is not None else [])]
        if not known:
            return f"nothing is saved, {counted(step, 'step')} lost: {why}"
        saved, path = max(known)
        place = f" in {path}" if path else ""
        lost = f"; {counted(step - saved, 'step')} since then lost" if step > saved and not others else ""
        lost += f": {why}" if lost and why else ""
        if self._snapshot_store.failed or self._unsaved:  # another run may have taken over the location, and removed it
            return f"step {saved} was the last to be saved{place}{lost}"
        return f"step {saved} is saved{place}{lost}{'; run the same command to continue' if continues else ''}"

"""Durable checkpoints: which one all ranks resume from, and when to save the next.

The directory may be shared between the nodes or be each node's own: the ranks say what they have, the newest complete
one by (round, step) is chosen, and who has it gives it to those who have not. A URL is always shared: the first rank
reads and writes there, see ``urls``. Large states are written by all nodes together where the place is shared.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_launch import snapshot
from elastic_launch.contract import Copied
from elastic_launch.errors import UsageError
from elastic_launch.snapshot.owner import claim, owned_by
from elastic_launch.snapshot.place import Url, place
from elastic_launch.snapshot.storage import check_driver
from elastic_launch.training.directories import Writers, behind_url, in_directory
from elastic_launch.training.durations import Interval
from elastic_launch.training.exchange import broadcast_state
from elastic_launch.training.link import AgentLink
from elastic_launch.training.memory import Target
from elastic_launch.training.urls import open_url
from elastic_launch.training.world import World

__all__ = ["Checkpoint", "Resumed", "check_identity", "meta_of", "weights_sha256"]

_log = logging.getLogger(__name__)

SPLIT = 2**30
"""Bytes of tensors from which nodes copy a state together."""

FINAL_TIMEOUT = 600.0
"""Seconds for which the end of training waits until the last checkpoint is written."""

RESCUE_TIMEOUT = 5.0
"""Seconds for which a process that fails waits for a checkpoint that is being written."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a training goes on.

    Attributes:
        step: optimizer steps done.
        state: by part; None at the very beginning.
        identity: what must not change, as it was when the checkpoint was made.
        worlds: world sizes of the rounds so far.
    """

    step: int = 0
    state: dict[str, Any] | None = None
    identity: dict[str, int] = field(default_factory=dict)
    worlds: list[int] = field(default_factory=list)


class Checkpoint:
    """Saves to a directory or a URL, and resumes from it.

    Args:
        directory: shared by all nodes, or each node's own: then each keeps a copy; or a URL that fsspec opens, such as
            ``s3://bucket/runs/a``.
        every: interval between checkpoints: steps (50 or ``"50ba"``) or a duration (``"5min"``).
        keep: so many of the newest stay.
        split: bytes of tensors from which the nodes write a checkpoint together, each a share; under an agent of this
            project, and where the directory is shared.

    Raises:
        UsageError: if every is no interval, keep or split less than 1, or nothing that is installed opens the URL.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, every: int | str = "10min", keep: int = 3, split: int = SPLIT
    ) -> None:
        self.directory = place(directory)
        if isinstance(self.directory, Url):
            check_driver(self.directory)
        self._interval = Interval.parse(every)
        if keep < 1:
            raise UsageError(f"Checkpoint(keep={keep}): at least 1 checkpoint is kept.")
        if split < 1:
            raise UsageError(f"Checkpoint(split={split}): it is a number of bytes, 1 or more.")
        self.keep = keep
        self.split = split
        self.round = 0
        """Number under which it saves, higher than those of all that it was resumed from."""
        self._owner = ""
        self._link: AgentLink | None = None
        self._awaited = 0
        self._lost: list[snapshot.Outcome] = []
        self._last_step = 0
        self._last_time = 0.0
        self._writer: snapshot.BackgroundWriter | None = None
        self._something_saved = False
        self._error: snapshot.CheckpointError | None = None
        self._writers = Writers(True)

    def open(self, world: World, identity: dict[str, int]) -> Resumed:
        """Agree with all ranks on what to resume from, and read it.

        Args:
            identity: what must be equal in the checkpoint and in this training, by the names that errors use.

        Raises:
            UsageError: if the checkpoint belongs to another training; it names what differs.
            CheckpointError: if the directory cannot be read, or what a URL names not be used.
        """
        if isinstance(self.directory, Url):
            return self._open_url(self.directory, world, identity)
        self._writers = in_directory(self.directory, world)
        damaged: list[snapshot.CheckpointReadError] = []
        loaded = snapshot.newest(self.directory, on_damaged=lambda error: _skip(error, damaged))
        newest, holder, complete = _agree(world, loaded)
        if holder is None and damaged:
            # To begin anew would overwrite, by and by, what may still be mended.
            raise damaged[0]
        self._begin(world, newest[0])
        if holder is None:
            self._take(self.directory, world)
            return Resumed()
        state = None if loaded is None else {"parts": loaded.state, "meta": loaded.meta}
        if not complete:
            state = broadcast_state(state if world.rank == holder else None, holder, world.rank)
        assert state is not None
        meta = state["meta"]
        check_identity(identity, meta, newest[1])
        # Last: a training that does not belong here takes nothing from one that does.
        self._take(self.directory, world)
        return self._resumed(newest[1], state["parts"], meta)

    def standing(self, step: int, *, now: bool) -> tuple[int, float]:
        """Return the step of the last save, and how many seconds ago it was; or, if this is one, its own."""
        return (step, 0.0) if now else (self._last_step, time.monotonic() - self._last_time)

    def go_on(self, world: World, round_number: int, standing: tuple[int, float]) -> None:
        """Save from now on, in a training that was resumed from memory.

        Args:
            standing: as it was when that was written: faults that come more often than saves must not put these off.
        """
        # This run took it when it began: so that another one is noticed, it is not taken again.
        self._owner = owned_by(_run_id())
        url = isinstance(self.directory, Url)
        self._writers = behind_url(world) if url else in_directory(Path(self.directory), world)
        self.round = round_number
        self._last_step, self._last_time = standing[0], time.monotonic() - standing[1]
        self._something_saved = True

    @property
    def writes(self) -> bool:
        """Whether this rank writes: the first one, and the first of each node that has a directory of its own."""
        return self._writers.me

    def target(self, world: World, *, now: bool) -> Target:
        """Return what the agent is to know to copy a snapshot here, or a share of it."""
        directory, drawn = str(self.directory.absolute()), self._writers.drawn
        if drawn and world.nodes > 1:
            return Target(directory, self.keep, now, self._owner, world.nodes, world.node_rank, self.split, drawn)
        return Target(directory, self.keep, now, self._owner) if self.writes else Target()

    def due(self, step: int) -> bool:
        """Whether it is time to save after a step: by steps the same on all ranks, by the clock this rank's view."""
        return self._interval.due(step - self._last_step, time.monotonic() - self._last_time)

    @property
    def by_clock(self) -> bool:
        """Whether ranks may differ on what is due, because clocks do."""
        return self._interval.seconds is not None

    def needs(self, step: int) -> bool:
        """Whether the state after a step is not saved yet."""
        return step != self._last_step

    def doubt(self) -> None:
        """Take the state for one that is not saved yet."""
        self._last_step = -1

    def requested(self, step: int, link: AgentLink | None) -> None:
        """The agent copies the state after a step once it is in memory."""
        self._last_step, self._last_time = step, time.monotonic()
        self._link, self._awaited = link, step

    def lost(self, step: int, reason: str) -> None:
        """The state after a step is not in memory after all, and is not copied."""
        if step == self._awaited:
            self._awaited = 0
            error = snapshot.CheckpointWriteError(f"its snapshot could not be taken: {reason}")
            self._lost.append(snapshot.Outcome(step, self.round, 0.0, None, error))

    def save(self, state: dict[str, Any], step: int, meta: dict[str, Any]) -> None:
        """Copy a state and have it written beside the training; to be called on all ranks, for they count the interval.

        Args:
            state, meta: only those of ranks that write count.
        """
        self._last_step, self._last_time = step, time.monotonic()
        if not self.writes:
            return
        if self._writer is None:
            self._writer = snapshot.BackgroundWriter(self.directory, keep=self.keep, owner=self._owner)
        self._writer.submit(_copied(state), step=step, round=self.round, meta=meta)

    def outcomes(self) -> list[snapshot.Outcome]:
        """Return the writes that have ended since the last call, having told of their errors; does not wait."""
        ended, self._lost = self._lost, []
        ended += self._writer.poll() if self._writer is not None else []
        if self._link is not None:
            ended += [self._outcome(copied) for copied in self._link.copies()]
        for outcome in ended:
            self._something_saved |= outcome.info is not None
            if outcome.error is not None:
                self._failed(outcome.step, outcome.error)
        return ended

    def _failed(self, step: int, error: snapshot.CheckpointError) -> None:
        self._error = error
        _log.error("checkpoint of step %d: %s Training goes on.", step, error)

    def finish(self, *, wait: bool = True) -> list[snapshot.Outcome]:
        """Wait until what was saved is written, and return the outcomes not yet seen.

        Args:
            wait: also for what the agent copies.
        """
        if self._writer is not None:
            self._writer.flush(FINAL_TIMEOUT)
        ended = self.outcomes()
        deadline = time.monotonic() + FINAL_TIMEOUT
        while wait and self._awaited and self._link is not None and self._link.alive and time.monotonic() < deadline:
            self._link.wait_copied(deadline - time.monotonic())
            ended += self.outcomes()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if self._error is not None and self._something_saved:
            _log.error("not all checkpoints could be saved; the last error: %s", self._error)
        return ended

    def rescue(self) -> None:
        """Wait, for a few seconds at most, until what is being written is written."""
        if self._writer is not None:
            self._writer.flush(RESCUE_TIMEOUT)

    @property
    def failure(self) -> snapshot.CheckpointError | None:
        """Why nothing at all could be saved, if so."""
        return None if self._something_saved else self._error

    def _open_url(self, url: Url, world: World, identity: dict[str, int]) -> Resumed:
        self._writers = behind_url(world)

        def check(meta: dict[str, Any], step: int) -> None:
            check_identity(identity, meta, step)

        found = open_url(url, world, _run_id(), check, _warn)
        self._owner = found.owner
        self._begin(world, found.round)
        return Resumed() if found.state is None else self._resumed(found.step, found.state, found.meta)

    def _take(self, directory: Path, world: World) -> None:
        """Take a directory that this rank writes to, so that a run that did before writes no more."""
        if not self.writes:
            return
        try:
            self._owner = claim(directory, _run_id())
        except snapshot.CheckpointError:
            # The first save says so, and may find that there is room again.
            self._owner = owned_by(_run_id()) if world.round else ""

    def _begin(self, world: World, newest: int) -> None:
        # Every start writes under a higher round than all before, also where no agent of this project counts them.
        self.round = max(world.round, newest + 1)
        self._last_time = time.monotonic()

    def _resumed(self, step: int, state: dict[str, Any], meta: dict[str, Any]) -> Resumed:
        self._last_step, self._something_saved = step, True
        return Resumed(step, state, dict(meta["identity"]), [int(size) for size in meta["worlds"]])

    def _outcome(self, copied: Copied) -> snapshot.Outcome:
        if copied.step >= self._awaited:
            self._awaited = 0
        info = error = None
        if copied.path:
            path = place(copied.path)
            info = snapshot.CheckpointInfo(path, copied.step, copied.round, copied.digest, copied.bytes, {})
        if copied.error:
            error = snapshot.CheckpointWriteError(copied.error, copied.hint)
        return snapshot.Outcome(copied.step, copied.round, copied.seconds, info, error)


def _skip(error: snapshot.CheckpointReadError, damaged: list[snapshot.CheckpointReadError]) -> None:
    damaged.append(error)
    _warn(error)


def _warn(error: Exception) -> None:
    _log.warning("a checkpoint is skipped: %s", error)


def _run_id() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def _agree(world: World, loaded: snapshot.LoadedCheckpoint | None) -> tuple[tuple[int, int], int | None, bool]:
    """Return the newest (round, step) of all ranks, the first rank that has it, and whether all have the very same."""
    mine = [0, 0, 0] if loaded is None else [loaded.round, loaded.step, int(loaded.info.digest[:15], 16)]
    if world.world_size == 1:
        return (mine[0], mine[1]), None if loaded is None else 0, True
    all_of_them = [torch.zeros(3, dtype=torch.int64) for _ in range(world.world_size)]
    dist.all_gather(all_of_them, torch.tensor(mine, dtype=torch.int64))
    found = [(int(entry[0]), int(entry[1]), int(entry[2])) for entry in all_of_them]
    best = max(found)
    if best == (0, 0, 0):
        return (0, 0), None, True
    return best[:2], found.index(best), all(entry == best for entry in found)


def meta_of(identity: dict[str, int], worlds: list[int]) -> dict[str, Any]:
    """Return what is to be known of a state before it is read."""
    return {"identity": identity, "worlds": worlds, "fingerprint": fingerprint()}


def check_identity(identity: dict[str, int], meta: dict[str, Any], step: int) -> None:
    """Refuse a state that another training saved.

    Raises:
        UsageError: naming what differs.
    """
    saved = meta.get("identity", {})
    for name, value in identity.items():
        if saved.get(name) != value:
            raise UsageError(
                f"The checkpoint of step {step} was made with {name} {saved.get(name)}, this training has {value}.",
                "Use the same, or another directory: the samples of the steps to come would not be those left over.",
            )
    differing = [name for name, value in fingerprint().items() if meta.get("fingerprint", {}).get(name) != value]
    if differing:
        _log.warning(
            "the checkpoint of step %d was made with another %s: the weights will not be the same to the bit",
            step,
            ", ".join(differing),
        )


def fingerprint() -> dict[str, str]:
    """Return what the bits of a result depend on beside the program."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return {"torch": str(torch.__version__), "device": device, "threads": str(torch.get_num_threads())}


def _copied(value: Any) -> Any:
    """Copy a state so that training may go on."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copied = {key: _copied(item) for key, item in value.items()}
        return copied if type(value) is dict else type(value)(copied)
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value


def weights_sha256(model: nn.Module) -> str:
    """Return the SHA-256 over all tensors of a model's ``state_dict``, by name, dtype, shape and bytes."""
    return snapshot.state_sha256(model.state_dict())

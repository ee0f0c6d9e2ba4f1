"""Durable checkpoints: which one all ranks resume from, and when to save the next.

The directory may be shared between the nodes or be each node's own: the ranks say what they have, the newest complete
one by (round, step) is chosen, and who has it gives it to those who have not. A URL is always shared: the first rank
reads and writes there, see ``urls``. Large states are written by all nodes together where the place is shared.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_launch import snapshot
from elastic_launch.contract import Copied
from elastic_launch.errors import UsageError
from elastic_launch.snapshot.format.arrays import is_array
from elastic_launch.snapshot.location import Place, Url, place
from elastic_launch.snapshot.storage.listing import positions
from elastic_launch.snapshot.storage.owner import claim, other_owner, owned_by
from elastic_launch.snapshot.storage.shared_copies import Copies
from elastic_launch.snapshot.storage.url_storage import check_driver
from elastic_launch.training.checkpoints.branches import Branch, following, within
from elastic_launch.training.checkpoints.memory import Target
from elastic_launch.training.checkpoints.node_reads import Read, read_on_node
from elastic_launch.training.checkpoints.shared_directory import Writers, behind_url, in_directory
from elastic_launch.training.checkpoints.urls import open_url
from elastic_launch.training.data.samplers import SAMPLE_ORDER
from elastic_launch.training.durations import Interval
from elastic_launch.training.kinds import check_kind
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks.exchange import broadcast_state
from elastic_launch.training.ranks.world import World

__all__ = ["Checkpoint", "Resumed", "check_checkpoint", "check_identity", "meta_of", "run_id", "weights_sha256"]

_log = logging.getLogger(__name__)

SPLIT = 2**30
"""Bytes of tensors from which nodes copy a state together."""

FINAL_TIMEOUT = 600.0
"""Seconds for which the end of training waits until the last checkpoint is written."""

LOOK_TIMEOUT = 10.0
"""Seconds within which storage has to list what is there, where a training can go on from memory without it."""

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
        origin: which checkpoint it was, for errors.
        classes: of those parts that need the same one.
        compared: False if the ranks were compared, but not in this state.
        equal: step after which they were last the same then.
        orders: names of the parameters of optimizers.
    """

    step: int = 0
    state: dict[str, Any] | None = None
    identity: dict[str, int] = field(default_factory=dict)
    worlds: list[int] = field(default_factory=list)
    origin: str = ""
    classes: dict[str, str] = field(default_factory=dict)
    compared: bool = True
    equal: int = 0
    orders: dict[str, list[list[str]]] = field(default_factory=dict)

    @staticmethod
    def of(step: int, state: dict[str, Any], meta: dict[str, Any], origin: str) -> Resumed:
        """Take what is to be known of a state from its meta."""
        worlds, classes = [int(size) for size in meta["worlds"]], meta.get("classes", {})
        compared, (_, equal) = meta.get("compared", True) is not False, meta.get("equal", (0, 0))
        identity, orders = dict(meta["identity"]), dict(meta.get("orders", {}))
        return Resumed(step, state, identity, worlds, origin, dict(classes), compared, int(equal), orders)


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
        # Each node may have a directory of its own; a URL is one for all.
        where = str(directory) if isinstance(self.directory, Url) else "a directory"
        self.arguments = f"{where}, every={every}, keep={keep}, split={split}"
        """What must be the same on all ranks."""
        if keep < 1:
            raise UsageError(f"Checkpoint(keep={keep}): at least 1 checkpoint is kept.")
        if split < 1:
            raise UsageError(f"Checkpoint(split={split}): it is a number of bytes, 1 or more.")
        self.keep = keep
        self.split = split
        self.branch = Branch()
        """What it saves under."""
        self._owner = ""
        self._link: AgentLink | None = None
        self._highest = 0
        self._awaited = 0
        self._owed = 0  # step of a checkpoint that was put off
        self._lost: list[snapshot.WriteOutcome] = []
        self._last_step = 0
        self._last_time = 0.0
        self._writer: snapshot.BackgroundWriter | None = None
        self._something_saved = False
        self._error: snapshot.CheckpointError | None = None
        self._writers = Writers(True)

    def has_newer(self, world: World, position: tuple[int, int]) -> bool:
        """Whether something newer than a state in memory is there, by its name; called by all ranks.

        Args:
            position: round and step of that state.
        """
        mine: list[tuple[int, int]] = []
        if world.rank == 0 or not isinstance(self.directory, Url):
            try:
                mine = within(LOOK_TIMEOUT, f"to list {self.directory}", lambda: positions(self.directory))
            except (snapshot.CheckpointError, TimeoutError) as error:
                _log.warning(
                    "it is not known whether there is a newer checkpoint; training goes on from memory: %s", error
                )
        newest = max(_from_all(world, list(max(mine, default=(0, 0)))))
        self._highest = max(self._highest, position[0], newest[0])
        return (newest[0], newest[1]) > position

    def open(self, world: World, identity: dict[str, int], *, above: tuple[int, int] | None = None) -> Resumed | None:
        """Agree with all ranks on what to resume from, and read it.

        Args:
            identity: what must be equal in the checkpoint and in this training, by the names that errors use.
            above: round and step of a state in memory: only what is newer counts, and is this run's own.

        Returns:
            None if nothing is newer than that state, and sound.

        Raises:
            UsageError: if the checkpoint belongs to another training; it names what differs.
            CheckpointError: if the directory cannot be read or does not respond, or what a URL names not be used.
        """
        if isinstance(self.directory, Url):
            return self._open_url(self.directory, world, identity, above)
        self._writers = in_directory(self.directory, world)
        # An older state, in memory or in another checkpoint, is not taken for one that may only be late.
        read = read_on_node(world, self.directory, partial(_read, self.directory, above))
        loaded, known, damaged = read.loaded, read.known, read.damaged
        newest, holder, complete = _agree(world, loaded)
        self._highest = max(
            self._highest, newest[0], *(entry[0] for entry in _from_all(world, [known])), *(above or (0,))[:1]
        )
        if holder is None and above is not None:
            return None
        if holder is None and damaged:
            # To begin anew would overwrite, by and by, what may still be mended.
            raise damaged
        if holder is None:
            self._begin(world, {})
            self._take(self.directory, world)
            return Resumed()
        state = None if loaded is None else {"parts": loaded.state, "meta": loaded.meta}
        if not complete:
            state = broadcast_state(state if world.rank == holder else None, holder, world.rank)
        assert state is not None
        meta = state["meta"]
        where = loaded.info.path if loaded is not None and (complete or world.rank == holder) else self.directory
        origin = f"The checkpoint of step {newest[1]} in {where}"
        check_identity(identity, meta, origin)
        self._begin(world, meta)
        # Last: a training that does not belong here takes nothing from one that does.
        self._take(self.directory, world)
        return self._resumed(newest[1], state["parts"], meta, origin)

    def standing(self, step: int, *, now: bool) -> tuple[int, float]:
        """Return the step of the last save, and how many seconds ago it was; or, if this is one, its own."""
        return (step, 0.0) if now else (self._last_step, time.monotonic() - self._last_time)

    def go_on(self, world: World, meta: dict[str, Any], standing: tuple[int, float]) -> None:
        """Save from now on, in a training that was resumed from memory, after :meth:`has_newer`.

        Args:
            meta: of that state.
            standing: as it was when that was written: faults that come more often than saves must not put these off.
        """
        # This run took it when it began: so that another one is noticed, it is not taken again.
        self._owner = owned_by(run_id())
        url = isinstance(self.directory, Url)
        self._writers = behind_url(world) if url else in_directory(Path(self.directory), world)
        self._begin(world, meta)
        self._last_step, self._last_time = standing[0], time.monotonic() - standing[1]

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
        self._link, self._awaited, self._owed = link, step, 0

    @property
    def owes(self) -> bool:
        """Whether a checkpoint was put off, and none was made since."""
        return self._owed > 0

    def lost(self, step: int, reason: str) -> None:
        """The state after a step is not in memory after all, and is not copied."""
        if step in (self._awaited, self._owed):
            self._awaited = self._owed = 0
            error = snapshot.CheckpointWriteError(f"its snapshot is lost: {reason}")
            self._lost.append(snapshot.WriteOutcome(step, self.branch.round, 0.0, None, error))

    def torn(self, step: int) -> None:
        """The state after a step, which was to be copied, is given up; a later one is to be saved."""
        if step == self._awaited:
            self._awaited, self._owed = 0, step

    def put_off(self, step: int) -> None:
        """The state after a step is not saved, a later one is to be; the interval begins anew, as on other ranks."""
        self._last_step, self._last_time = step, time.monotonic()
        self._owed = step

    def save(
        self,
        state: dict[str, Any],
        step: int,
        meta: dict[str, Any],
        may_commit: Callable[[], bool] = lambda: True,
    ) -> None:
        """Copy a state and have it written beside the training; to be called on all ranks, for they count the interval.

        Args:
            state, meta: only those of ranks that write count.
            may_commit: asked, from another thread, before a checkpoint appears; the first call's counts.
        """
        self._last_step, self._last_time, self._owed = step, time.monotonic(), 0
        if not self.writes:
            return
        if self._writer is None:
            self._writer = snapshot.BackgroundWriter(
                self.directory, keep=self.keep, owner=self._owner, may_commit=may_commit
            )
        self._writer.submit(_copied(state), step=step, round=self.branch.round, meta=meta)

    def outcomes(self) -> list[snapshot.WriteOutcome]:
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
        if isinstance(error, snapshot.UnsupportedStateError):
            # It would be the same at each checkpoint, and at the end all would be lost.
            raise error
        _log.error("checkpoint of step %d: %s Training goes on.", step, error)

    def finish(self, *, wait: bool = True) -> list[snapshot.WriteOutcome]:
        """Wait until what was saved is written, and return the outcomes not yet seen.

        Args:
            wait: also for what the agent copies.
        """
        if self._writer is not None:
            self._writer.flush(FINAL_TIMEOUT)
        if self._owed:
            self.lost(self._owed, "the agent did not answer")
        ended = self.outcomes()
        while wait and self._awaited and self._link is not None:
            if not self._link.wait_copied(FINAL_TIMEOUT):
                self.lost(self._awaited, "the agent, which copies it, does not answer")
            ended += self.outcomes()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        return ended

    def rescue(self) -> None:
        """Wait, for a few seconds at most, until what is being written is written."""
        writer, self._writer = self._writer, None
        if writer is not None and writer.flush(RESCUE_TIMEOUT):
            with suppress(snapshot.CheckpointError):  # of a write; the process fails by another error
                writer.close()

    def failed(self) -> snapshot.CheckpointError | None:
        """Return why nothing at all could be saved since the run began, if so; to be asked at the end."""
        if self._error is None:
            return None
        if not self._something_saved and not self._saved_before():
            cause, hint = self._error.message, self._error.hint
            return snapshot.CheckpointError(
                f"No checkpoint of this run could be saved in {self.directory}: {cause}", hint
            )
        _log.error("not all checkpoints could be saved; the last error: %s", self._error)
        return None

    def _saved_before(self) -> bool:
        """Whether workers of an earlier round have saved something: not in memory, but where it was to be saved."""
        try:
            found = within(LOOK_TIMEOUT, f"to list {self.directory}", lambda: snapshot.find(self.directory))
        except (snapshot.CheckpointError, TimeoutError):
            return False
        return any(info.round >= self.branch.since for info in found)

    def _open_url(
        self, url: Url, world: World, identity: dict[str, int], above: tuple[int, int] | None
    ) -> Resumed | None:
        self._writers = behind_url(world)

        def origin(step: int) -> str:
            return f"The checkpoint of step {step} in {url}"

        def check(meta: dict[str, Any], step: int) -> None:
            check_identity(identity, meta, origin(step))

        found = open_url(url, world, run_id(), check, _warn, above)
        self._owner = found.owner
        self._highest = max(self._highest, found.highest, above[0] if above else 0)
        if found.state is None and above is not None:
            return None
        self._begin(world, found.meta)
        if found.state is None:
            return Resumed()
        return self._resumed(found.step, found.state, found.meta, origin(found.step))

    def _take(self, directory: Path, world: World) -> None:
        """Take a directory that this rank writes to, so that a run that did before writes no more."""
        if not self.writes:
            return
        try:
            self._owner = claim(directory, run_id())
        except snapshot.CheckpointError:
            # The first save says so, and may find that there is room again.
            self._owner = owned_by(run_id()) if world.round else ""

    def _begin(self, world: World, meta: dict[str, Any]) -> None:
        self.branch = following(world.round, run_id(), meta, self._highest)
        self._last_time = time.monotonic()

    def _resumed(self, step: int, state: dict[str, Any], meta: dict[str, Any], origin: str) -> Resumed:
        self._last_step = step
        return Resumed.of(step, state, meta, origin)

    def _outcome(self, copied: Copied) -> snapshot.WriteOutcome:
        if copied.step >= self._awaited:
            self._awaited = 0
        info = error = None
        if copied.path:
            path = place(copied.path)
            info = snapshot.CheckpointInfo(path, copied.step, copied.round, copied.digest, copied.bytes, {})
        if copied.error:
            error = snapshot.CheckpointWriteError(copied.error, copied.hint)
        return snapshot.WriteOutcome(copied.step, copied.round, copied.seconds, info, error)


def _read(directory: Path, above: tuple[int, int] | None, copies: Copies | None) -> Read:
    """Return the newest sound checkpoint above a position, and the highest round in any checkpoint's name.

    Args:
        copies: keeps it for the node's other workers.

    Raises:
        CheckpointError: if that cannot be known; without a position.
    """
    damaged: list[snapshot.CheckpointReadError] = []
    loaded = None
    known = 0
    try:
        if above is None or not _of_another_run(directory):
            skip = partial(_skip, damaged=damaged)
            loaded = snapshot.newest(directory, on_damaged=skip, above=above, copies=copies)
        known = max((number for number, _ in positions(directory)), default=0)
    except snapshot.CheckpointError as error:
        if above is None:
            raise
        _warn(error)
    return Read(loaded, known, damaged[0] if damaged else None)


def _skip(error: snapshot.CheckpointReadError, damaged: list[snapshot.CheckpointReadError]) -> None:
    damaged.append(error)
    _warn(error)


def _warn(error: Exception) -> None:
    _log.warning("a checkpoint is skipped: %s", error)


def _of_another_run(where: Place) -> bool:
    """Whether another run has taken the place: what is newer there is no state of this one."""
    other = other_owner(where, run_id())
    if other:
        _log.warning("training goes on from memory: %s was taken by run %s", where, other)
    return bool(other)


def run_id() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def _from_all(world: World, numbers: list[int]) -> list[list[int]]:
    """Return the numbers of all ranks, by rank."""
    if world.world_size == 1:
        return [numbers]
    gathered = [torch.zeros(len(numbers), dtype=torch.int64) for _ in range(world.world_size)]
    dist.all_gather(gathered, torch.tensor(numbers, dtype=torch.int64))
    return [[int(x) for x in entry] for entry in gathered]


def _agree(world: World, loaded: snapshot.LoadedCheckpoint | None) -> tuple[tuple[int, int], int | None, bool]:
    """Return the newest (round, step) of all ranks, the first rank that has it, and whether all have the very same."""
    mine = [0, 0, 0] if loaded is None else [loaded.round, loaded.step, int(loaded.info.digest[:15], 16)]
    if world.world_size == 1:
        return (mine[0], mine[1]), None if loaded is None else 0, True
    found = [(entry[0], entry[1], entry[2]) for entry in _from_all(world, mine)]
    best = max(found)
    if best == (0, 0, 0):
        return (0, 0), None, True
    return best[:2], found.index(best), all(entry == best for entry in found)


def meta_of(identity: dict[str, int], worlds: list[int]) -> dict[str, Any]:
    """Return what is to be known of a state before it is read."""
    return {"identity": identity, "worlds": worlds, "fingerprint": fingerprint()}


def check_identity(identity: dict[str, int], meta: dict[str, Any], origin: str) -> None:
    """Refuse a state that another training saved.

    Args:
        origin: which checkpoint it is, for errors.

    Raises:
        UsageError: naming what differs.
    """
    saved = meta.get("identity", {})
    for name, value in identity.items():
        if name == SAMPLE_ORDER and name not in saved:
            continue  # made before it was kept: the loader goes on with the order that samples had then
        if saved.get(name) != value:
            raise UsageError(
                f"{origin} was made with {name} {saved.get(name)}, this training has {value}.",
                "Use the same, or another directory: the samples of the steps to come would not be those left over.",
            )
    differing = [name for name, value in fingerprint().items() if meta.get("fingerprint", {}).get(name) != value]
    if differing and torch.are_deterministic_algorithms_enabled():
        _log.warning(
            "%s was made with another %s: the weights will not be the same to the bit",
            origin,
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
    if isinstance(value, dict | list | deque):
        copied: Any = copy(value)  # with what a state_dict has beside its items
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            copied[key] = _copied(item)
        return copied
    if isinstance(value, tuple):
        items = [_copied(item) for item in value]
        return getattr(type(value), "_make", type(value))(items)
    return copy(value) if isinstance(value, set) or is_array(value) else value


def weights_sha256(model: nn.Module) -> str:
    """Return the SHA-256 over all tensors of a model's ``state_dict``, by name, dtype, shape and bytes."""
    return snapshot.state_sha256(model.state_dict())


def check_checkpoint(where: str, checkpoint: object) -> None:
    """Refuse what is no :class:`Checkpoint`, such as its directory.

    Raises:
        UsageError: naming the argument.
    """
    check_kind(where, checkpoint, Checkpoint, "Give el.Checkpoint(directory, every=...).")

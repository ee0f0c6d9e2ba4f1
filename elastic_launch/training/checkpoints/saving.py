"""Saves a training's state: to the node's memory every few steps, and to durable storage from time to time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from elastic_launch import faults, snapshot
from elastic_launch.contract import Agreed, CopyJob
from elastic_launch.shared_progress import Activity
from elastic_launch.snapshot.format.manifest import DISTRIBUTED
from elastic_launch.snapshot.memory.slot import EVALUATED, PART, STEPPED, Header
from elastic_launch.snapshot.room import forget_peak, remedy_of
from elastic_launch.snapshot.storage.shares import OwnShare
from elastic_launch.training.checkpoints import split
from elastic_launch.training.checkpoints.branches import Branch, following
from elastic_launch.training.checkpoints.kept_shards import KEPT, KeptShards, keep_shards
from elastic_launch.training.checkpoints.manager import FINAL_TIMEOUT, CheckpointManager
from elastic_launch.training.checkpoints.memory import MemorySnapshots, Newest, newest, restore
from elastic_launch.training.checkpoints.options import Difference, report
from elastic_launch.training.checkpoints.resumed import Outcome, Resumed, check_identity, meta_of
from elastic_launch.training.checkpoints.sharded import StateGatherer
from elastic_launch.training.checkpoints.split import Layouts
from elastic_launch.training.checkpoints.state import TrainingState
from elastic_launch.training.checkpoints.step_start import Start, StepStart, copied
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks.agreement import NOTHING, Wishes
from elastic_launch.training.ranks.exchange import broadcast_state, numbers_of_all
from elastic_launch.training.ranks.mesh import ALL, ReplicaMesh
from elastic_launch.training.ranks.same_arguments import check_same
from elastic_launch.training.ranks.spreading import Box
from elastic_launch.training.ranks.world import World

_log = logging.getLogger(__name__)

Stays = Callable[[Tensor], bool]

IDLE_LOOK = 1.0
"""Seconds between two exchanges of whether all nodes have written an older checkpoint, before the last one."""


@dataclass(frozen=True, slots=True)
class Live:
    """A training that continues in another round, in the same process."""

    step: int  # optimizer steps done
    worlds: list[int]  # world sizes of the rounds that it has been through
    last: Outcome  # loss of the last step, and its metrics by name
    passes: tuple[Outcome, ...] = ()  # the same of each updated pass of the next step
    trained: dict[str, bool] = field(default_factory=dict)  # whether each parameter needs a gradient, by name
    received: Resumed | None = None  # the state, if it came from another process and was not taken over yet
    in_doubt: bool = False  # the state that this process has may be wrong: it is to get another one


@dataclass(frozen=True, slots=True)
class Trained:
    """A training after a step, of which a checkpoint or a snapshot is made."""

    step: int  # optimizer steps done
    checkpoint: CheckpointManager | None  # where it is saved durably, if anywhere
    identity: Mapping[str, int]  # what must be equal in the saved state and in the training that goes on from it
    state: TrainingState  # what the script trains and has registered
    worlds: list[int]  # world sizes of the rounds that it has been through
    evaluated: bool = True  # whether no evaluation of this state is to come
    trained: Callable[[], dict[str, bool]] = dict  # returns whether each parameter needs a gradient, by name

    @property
    def phase(self) -> int:
        """The phase of its snapshot."""
        return EVALUATED if self.evaluated else STEPPED


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a rank has of a state that is kept in memory, or saved durably."""

    state: dict[str, Any]  # as its slot has it
    parts: dict[str, Any] = field(default_factory=dict)  # what is in it, for the slot's meta, if it is split
    made: frozenset[int] = frozenset()  # addresses of the tensors that were made for it then
    fits: bool = False  # whether there is known to be room for it
    own: OwnShare | None = None  # what is written to durable storage, if the nodes divide that

    @staticmethod
    def split_among(
        tree: dict[str, Any], gatherer: StateGatherer, boxes: list[list[Box]], kept_by: list[list[int]], world: World
    ) -> _Taken:
        """Exchange the shards, and return what this rank keeps; called by all ranks."""
        state = split.taken(tree, gatherer, boxes, kept_by, world.rank)
        pieces = state.get("pieces", {}).values()
        made = frozenset(piece.data_ptr() for each in pieces for piece in each.values())
        ranks = [rank for rank, writers in enumerate(kept_by) if world.rank in writers]
        return _Taken(state, {PART: {"ranks": ranks, "world_size": world.world_size}}, made)


class Saver:
    """Restores and saves the training of this process.

    The link's agent keeps snapshots in memory and copies them. Without one, there are only durable checkpoints, written
    by a thread of this process.

    Args:
        confirm: confirms, together with all ranks, that the current state is right, and so is what was gathered of it
            if it is called with ``gathered=True``; raises a RuntimeError otherwise.
    """

    def __init__(self, world: World, link: AgentLink, confirm: Callable[..., None] = lambda **_: None) -> None:
        self.failure: snapshot.CheckpointError | None = None  # why the last checkpoint could not be saved
        self.seconds = 0.0  # duration of the last save
        self.compares = False  # whether the ranks' states are compared in the current training, see `replicas`
        self.joins_live = False  # whether the state that this process began with came from a process that was kept
        self._world = world
        self._link = link
        self._confirm = confirm
        self._memory = MemorySnapshots(link, world)
        self._checkpoint: CheckpointManager | None = None
        self._training = -1
        self._branch = Branch()
        self._posted = NOTHING
        self._agreed = NOTHING
        self._kept = False
        self._keeping = 0  # step of the last snapshot
        self._uncertain: Trained | None = None  # a state restored from memory, as long as no step has begun
        self._restored: StepStart | None = None  # the same, to notice that a script's own loop has changed it
        self._listeners: list[Callable[[snapshot.WriteOutcome], None]] = []
        self._layouts = Layouts()
        self._equal = (0, 0)  # round and step of the last state found equal on all ranks
        self.agreed: int | None = None  # the last step in which all ranks agreed; None: steps are not verified
        self._suspect = False  # whether later states were dropped, and what storage has of them is not to be restored

    @property
    def training(self) -> int:
        """Number of the script's training that was restored last, from 0."""
        return max(0, self._training)

    def listen(self, function: Callable[[snapshot.WriteOutcome], None]) -> None:
        """Call a function with the outcome of each checkpoint that was written or failed."""
        self._listeners.append(function)

    @contextmanager
    def telling(self, function: Callable[[snapshot.WriteOutcome], None]) -> Iterator[None]:
        """Within this context, call the function as by :meth:`listen`."""
        self._listeners.append(function)
        try:
            yield
        finally:
            self._listeners.remove(function)

    def restore(
        self,
        checkpoint: CheckpointManager | None,
        identity: dict[str, int],
        state: TrainingState,
        live: Live | None = None,
        mesh: ReplicaMesh | None = None,
    ) -> Resumed:
        """Restore the script's next training from its newest state, in memory or storage; called by all ranks.

        The newest state is usually in memory, and durable storage has copies. It is not if the node that continued
        alone is gone and another node comes back with an older state.

        Args:
            live: this process continues its training in another round, and its state may be the newest; None: it begins
                one.
            mesh: that of this rank's replica: each rank has the state of its coordinate.

        Returns:
            The state restored. Its ``state`` is None if this process has the newest state already.
        """
        before = self._branch, self._training
        if live is None:
            self.finish(wait=True)
            self._training += 1
            self.compares, self._equal = False, (0, 0)
            state.skip_frozen(checkpoint is not None and checkpoint.settings.skip_frozen)
            state.given.begin(state.members(), () if checkpoint is None else checkpoint.settings.override)
        self._checkpoint = checkpoint
        try:
            resumed = self._newest(checkpoint, identity, state, live, mesh)
        except RuntimeError:
            self._branch, self._training = before  # those of the state which this process still has
            raise
        self.agreed = resumed.step if resumed.agreed is None else resumed.agreed
        self._suspect = False
        if resumed.state is not None:
            with self._options_judged(checkpoint, resumed, state) if live is None else nullcontext():
                # A process that goes on takes it over later, see Loop, but exchanges parameters with others now.
                state.load(resumed, again=live is not None or bool(resumed.passes))
        self._memory.rhythm.begin(resumed.step, resumed.snapshot)
        self._memory.restored(self._training)
        forget_peak()
        return resumed

    def _newest(
        self,
        checkpoint: CheckpointManager | None,
        identity: dict[str, int],
        state: TrainingState,
        live: Live | None,
        mesh: ReplicaMesh | None,
    ) -> Resumed:
        """Return the newest state, and continue its branch; called by all ranks."""
        mine: list[tuple[int, int, int]] = []
        if live is not None and not live.in_doubt:
            mine = [(self._branch.round, live.step, len(live.passes))]
            if mesh is not None:
                mine = self._of_part(mine[0]) if state.captured_here() is not None else []
        kept: Newest | None = None
        if self._world.round:
            size = 1 if mesh is None else mesh.inner.size()
            kept = newest(self._memory, self._world, self._training, mine, self._suspect, size)
        resumed: Resumed | None = None
        newer = checkpoint is not None and kept is not None and checkpoint.has_newer(self._world, kept.position)
        if checkpoint is not None and (kept is None or (newer and not kept.suspect)):
            above = None if kept is None else kept.position
            resumed = checkpoint.open(self._world, identity, above=above, parts=state)
            self._branch = checkpoint.branch
            if resumed is not None:
                # The script may have been changed since.
                resumed = replace(resumed, trained={}, agreed=None)
            if kept is None and resumed is not None and resumed.state is not None:
                resumed = replace(resumed, stored=True)
                if checkpoint.settings.override:
                    check_same(self._world, state.given.chosen(checkpoint.settings.override))
        if resumed is not None and resumed.state is not None:
            self._judge(resumed)
        if resumed is None and kept is not None:
            own = live if (*kept.position, kept.passes) in mine else None
            resumed = self._from_memory(kept, checkpoint, identity, state, own, mesh)
        elif resumed is None:
            resumed = Resumed()
            self._branch = following(self._world.round, self._world.run, {}, 0)
        return resumed

    def _of_part(self, position: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """Return the positions whose state this process has, which is a part: that of which others have parts counts.

        They may not have entered the round in which this process has taken no step since it went on from their state.
        """
        _, step, passes = position
        before = takewhile(lambda state: state[1] == step, reversed(self._branch.line))
        return [position, *((number, step, passes) for number, _ in before)]

    @contextmanager
    def _options_judged(
        self, checkpoint: CheckpointManager | None, resumed: Resumed, state: TrainingState
    ) -> Iterator[None]:
        """The context in which a training that begins loads a state; the options that the script overrides follow."""
        given, override = state.given, () if checkpoint is None else checkpoint.settings.override
        keeps: list[Difference] = []
        replaces: list[Difference] = []
        # What this run has saved itself belongs to its branch, under an agent.
        first = self._branch.begins if self._world.round else self._world.restarts == 0
        if resumed.stored and resumed.state is not None:
            taken = {name: part for name, part in resumed.state.items() if name not in resumed.anew}
            keeps, replaces = given.differences(taken, resumed.given, override, first=first)
        yield
        given.loaded(resumed.given, replaces, resumed.anew)
        given.replace(keeps, replaces)
        if first and self._world.rank == 0 and checkpoint is not None and not checkpoint.opened_before:
            report(resumed.origin, keeps, replaces)

    def move(self, world: World, link: AgentLink) -> None:
        """Begin or continue in a round, in which nothing is agreed on yet."""
        self._posted = self._agreed = NOTHING
        if link is self._link:
            self._memory.move(world)
        else:
            self._memory = MemorySnapshots(link, world)
        self._world, self._link, self._layouts = world, link, Layouts()

    def _from_memory(
        self,
        kept: Newest,
        checkpoint: CheckpointManager | None,
        identity: dict[str, int],
        state: TrainingState,
        live: Live | None,
        mesh: ReplicaMesh | None,
    ) -> Resumed:
        number, step = kept.position
        parts: Any = None
        starts: Sequence[Start] = ()
        self.joins_live = self.joins_live or (live is None and (kept.live or kept.phase == KEPT))
        if kept.live:
            origin = f"The state of step {step} in the memory of rank {kept.holders[0]}"
            own: dict[str, Any] | None = None
            if live is not None:
                own = self._meta(identity, live.worlds, state)
                own |= {"last": live.last, "passes": list(live.passes), "trained": live.trained}
                if checkpoint is not None:
                    own["saved"] = checkpoint.standing(live.step, now=False)
            parts, meta, starts = self._from_process(kept, state, own, live, mesh)
        else:
            origin = f"The {'state' if kept.phase == KEPT else 'snapshot'} of step {step} in memory"
            parts, meta = restore(kept, self._world, state.taking)
        check_identity(identity, meta, origin)
        if not kept.live:
            # Newer snapshots are incomplete; the next one is to replace them, and not the one that was restored.
            self._memory.drop_above((*kept.position, kept.phase), self._training)
        number_equal, step_equal = meta["equal"]
        self._equal = int(number_equal), int(step_equal)
        self._branch = following(self._world.round, self._world.run, meta, number, parent=kept.position)
        resumed = Resumed.of(step, parts, meta, origin)
        resumed = replace(resumed, everywhere=kept.live and kept.everywhere, starts=starts)
        if kept.phase == KEPT:
            resumed = replace(resumed, snapshot=kept.snapshot)
        if checkpoint is not None:
            saved, ago = meta.get("saved", (step, 0.0))
            checkpoint.go_on(self._world, meta, (int(saved), float(ago)), kept.position)
            self._branch = checkpoint.branch
        if self._equal == kept.position:
            self.equal_after(step)  # in this branch, too
        elif not resumed.compared and not kept.live and self._world.rank == 0:
            # Usual after a fault, and no reason to act: the event training_begun has it, too.
            _log.info(
                "training resumes from the snapshot of step %d in memory; the ranks were last compared after step %d, "
                "and a difference that began later would not be detected",
                step,
                resumed.equal,
            )
        if checkpoint is not None:
            worlds = [*resumed.worlds, self._world.world_size]
            self._uncertain = Trained(step, checkpoint, identity, state, worlds)
        return resumed

    def _from_process(
        self,
        kept: Newest,
        state: TrainingState,
        own: dict[str, Any] | None,
        live: Live | None,
        mesh: ReplicaMesh | None,
    ) -> tuple[dict[str, Any] | None, dict[str, Any], Sequence[Start]]:
        """Return the state of a process that was suspended with the newest one, its meta, and its step's starts.

        Called by all ranks. ``own`` is this process' meta if it is such a one, and ``live`` its training; no state is
        returned then.
        """
        if own is None:
            faults.reached("restore", kept.position[1])
        starts: Sequence[Start] = ()
        if live is not None and live.received is not None and live.received.passes:
            starts = live.received.starts
        elif live is not None and live.passes and mesh is None and state.start is not None:
            starts = [*state.start.starts]
        sent: dict[str, Any] = {}
        among, place, holders = ALL, self._world.rank, kept.holders
        if mesh is not None:
            among, place, holders = mesh.across, mesh.across.place, mesh.across_with(kept.holders)
        if not kept.everywhere and len(holders) != among.size:
            mine: dict[str, Any] | None = None
            if place == holders[0]:
                assert live is not None
                assert own is not None
                if live.received is not None and live.received.passes:
                    # The parts are as at the step's start, see TrainingState.load.
                    received = live.received
                    states = received.state
                    own |= {"classes": received.classes, "orders": received.orders, "late": received.late}
                elif mesh is not None:
                    states = state.captured_here() or {}
                else:
                    states = state.capture()
                mine = {"state": states, "meta": own, "starts": [*starts]}
            sent = broadcast_state(mine, holders[0], place, among)
        if own is not None:
            return None, own, starts  # of the state that this process has, as the others get it
        meta = dict(sent["meta"])
        cut = None if mesh is None else state.taking(meta)
        return sent["state"] if cut is None else cut.as_received(sent["state"]), meta, sent["starts"]

    def own(self, live: Live, identity: Mapping[str, int], state: TrainingState) -> Resumed:
        """Return a copy of the state of the current position, which this process has, to load it later."""
        meta = self._meta(identity, live.worlds, state) | {"last": live.last, "trained": live.trained}
        return Resumed.of(live.step, copied(state.own()), meta, f"The state of step {live.step} in this process")

    def _meta(self, identity: Mapping[str, int], worlds: list[int], state: TrainingState) -> dict[str, Any]:
        """Return the meta of the current state, without when it was last saved."""
        meta = meta_of(dict(identity), worlds)
        meta |= {"branch": self._branch.meta(), **state.noted()}
        if self._checkpoint is not None and self._checkpoint.distributed:
            meta["format"] = DISTRIBUTED  # also of a snapshot that only the agent copies
        meta |= {"weights": state.weights, "frozen": state.frozen()}
        return meta | {"equal": self._equal, "agreed": self.agreed, "given": state.given.in_effect}

    def _judge(self, resumed: Resumed) -> None:
        """Warn if a checkpoint was not compared among the ranks, so that their states may have differed."""
        if resumed.compared:
            self.equal_after(resumed.step)
        elif self._world.rank == 0:
            _log.warning(
                "%s was not compared among the ranks before it was saved, as its run failed; the ranks last agreed "
                "after step %d. If the memory of a rank has failed since then, the state may be wrong",
                resumed.origin,
                resumed.equal,
            )

    def wishes(self, step: int, checkpoint: CheckpointManager | None) -> Wishes:
        """Return what this rank wants, each wish once; rank 0's clock and one rank's costs decide for all ranks."""
        save = self._asked(step, checkpoint) or (checkpoint is not None and checkpoint.wanted(step))
        memory = self._memory
        keep = memory.writes and memory.decides and memory.rhythm.due(step)
        choose = memory.decides and not memory.writes
        first = self._world.rank == 0
        # One that was postponed can be made when the agent answers again.
        owes = checkpoint is not None and checkpoint.owes and not self._posted.save and not self._link.silent
        save = (first and save and not self._posted.save) or owes
        keep = keep and not self._posted.keep
        choose = choose and not self._posted.choose
        if not save and not keep and not choose:
            return NOTHING
        wishes = Wishes(save=save, keep=keep, choose=choose)
        self._posted |= wishes
        return wishes

    def agree(self, agreed: Wishes) -> None:
        """Record what all ranks agreed on; it is done at the next boundary with a step."""
        if agreed.save or agreed.keep or agreed.choose:
            self._agreed |= Wishes(save=agreed.save, keep=agreed.keep, choose=agreed.choose)

    def step_begins(self) -> None:
        """Note that a step changes the state from now on: it is no longer the state that was restored."""
        self._uncertain = self._restored = None

    def watch_restored(self) -> None:
        """Watch the restored state for a script's own loop, whose steps begin without :meth:`step_begins`."""
        if self._uncertain is not None:
            # Others may exchange data in state_dict(), which the ranks would not call equally often.
            trained = nn.Module | torch.optim.Optimizer
            parts = {name: part for name, part in self._uncertain.state.members() if isinstance(part, trained)}
            self._restored = StepStart(parts)
            self._restored.take({})

    def poll(self, step: int, checkpoint: CheckpointManager | None) -> None:
        """Record that a step is done, and report checkpoints that were written or failed."""
        self.step_begins()
        self._memory.shards = None
        self._memory.rhythm.step_done(step, time.monotonic())
        if checkpoint is not None:
            self._checkpoint = checkpoint  # for the end, even if a second training continues without restoring
            for outcome in checkpoint.outcomes(self._report):
                self._tell(outcome)

    def save(
        self,
        after: Trained,
        *,
        last: bool,
        draining: bool,
        stays: Stays | None,
        keep: bool = False,
        goes_on: bool | None = None,
    ) -> None:
        """Save the state after a step if a save is due; called by all ranks.

        Args:
            last: whether this is the last step in this process.
            draining: whether another process continues the training.
            stays: whether a tensor keeps its values until :meth:`settle`; None: :meth:`settle` is not called.
            keep: whether to take a snapshot in memory even if none is due; the same on all ranks.
            goes_on: in a drain, whether this process goes on in the next round; None: it keeps no shards for that.
        """
        agreed, self._agreed = self._agreed, NOTHING
        if agreed is not NOTHING:
            posted = self._posted
            saves, keeps = posted.save and not agreed.save, posted.keep and not agreed.keep
            self._posted = Wishes(save=saves, keep=keeps, choose=posted.choose and not agreed.choose)
            if agreed.choose:
                self._memory.choose()
        going_on: list[bool] = []
        if goes_on is not None and self._divisible(after.state):
            going_on = [bool(each) for (each,) in numbers_of_all(self._world, [int(goes_on)])]
        durable = False
        if (checkpoint := after.checkpoint) is not None:
            due = agreed.save or checkpoint.due_everywhere(after.step)
            leaves = last and not (going_on and all(going_on))
            durable = (due or leaves) and checkpoint.needs(after.step)
            if durable and self._divisible(after.state) and checkpoint.divides(after.state.whole_bytes()):
                durable = self._idle_everywhere(checkpoint, after.step, last=last)
        if not durable and not agreed.keep and not ((draining or keep) and self._world.round):
            return
        with self._link.doing(Activity.CHECKPOINT):
            self._confirm()
            if any(going_on) and not durable:
                self._keep_shards(after, going_on)
                return
            # Several nodes may leave, and no checkpoint has the shards that these alone have then.
            whole = draining and checkpoint is None
            self._save(after, durable=durable, last=last, stays=stays, whole=whole)

    def _confirm_gathered(self, state: TrainingState) -> None:
        """Before what was gathered of a state counts, confirm that, too: an exchange that broke may raise no error.

        If it did, the state itself is confirmed all the same, and need not be given up.
        """
        if state.sharded:
            self._confirm(gathered=True)

    def _divisible(self, state: TrainingState) -> bool:
        """Whether the nodes may divide a state, under an agent; the same on all ranks."""
        return state.divisible and self._world.round > 0

    def _keep_shards(self, after: Trained, going_on: Sequence[bool]) -> None:
        """Have the processes that go on, by rank, keep the state after a step; called by all ranks."""
        state, rank = after.state, self._world.rank
        self.settle()
        state.collect(after.step, self._world)
        state.begin_capture(keep=True)
        tree, gatherer = state.captured_split(keep=True)
        boxes = self._layouts.of_all(gatherer, self._world)
        found, part = keep_shards(tree, gatherer, boxes, going_on, rank)
        self._confirm_gathered(state)
        meta = self._meta_after(after, now=False)
        if going_on[rank]:
            self._memory.shards = KeptShards(self._branch.round, after.step, self._training, part, found, meta)

    def _idle_everywhere(self, checkpoint: CheckpointManager, step: int, *, last: bool) -> bool:
        """Whether no node still writes an older checkpoint; called by all ranks.

        Each would replace the older ones that it has not begun by newer ones, but not the same as others.
        """
        deadline = time.monotonic() + FINAL_TIMEOUT
        with self._link.doing(Activity.CHECKPOINT):
            while True:
                # No rank waits for long in an exchange, which would fail.
                mine = checkpoint.idle(IDLE_LOOK if last else 0.0)
                late = not last or (self._world.rank == 0 and time.monotonic() > deadline)
                told = numbers_of_all(self._world, [int(mine), int(late)])
                if all(idle for idle, _ in told):
                    return True
                if any(late for _, late in told):
                    break
        checkpoint.busy(step, last=last)
        return False

    def _save(self, after: Trained, *, durable: bool, last: bool, stays: Stays | None, whole: bool) -> None:
        began = time.monotonic()
        step, checkpoint, state = after.step, after.checkpoint, after.state
        self._kept = False
        durably = checkpoint if checkpoint is not None and checkpoint.writes else None
        taken = self._take(state, step, checkpoint if durable else None, whole=whole)
        self._confirm_gathered(state)
        in_memory = self._memory.writes
        meta = self._meta_after(after, now=durable)
        if in_memory:
            self._kept = self._keep(taken, meta, after, stays, began, durable=durable, last=last)
        # Torch's format needs torch, which a process that copies would have to import first, at its low priority.
        here = taken.own is not None or taken.parts or (checkpoint is not None and checkpoint.distributed)
        if durable and checkpoint is not None and here:
            everything: dict[str, Any] | OwnShare = taken.state if taken.own is None else taken.own
            if taken.own is None and taken.parts:
                everything = state.captured(keep=durably is not None)
                self._confirm_gathered(state)
            checkpoint.save(everything, step, meta, self._link.may_commit, state.gathered)
        elif durable and self._kept and durably:
            durably.requested(step, self._link)
        elif durable and durably and in_memory and self._memory.writes and self._link.alive and not last:
            # Memory must not fall behind durable storage: all ranks save again once the agent answers.
            if not durably.owes:
                _log.warning("checkpoint of step %d: postponed until the agent answers", step)
            durably.put_off(step)
        elif durable and checkpoint is not None:
            checkpoint.save(taken.state, step, meta, self._link.may_commit, state.gathered)
        self.seconds = time.monotonic() - began

    def _take(
        self, state: TrainingState, step: int, checkpoint: CheckpointManager | None, *, whole: bool = False
    ) -> _Taken:
        """Return what this rank keeps of the state after a step, or saves of it; called by all ranks.

        ``checkpoint`` is where all ranks save it durably now, if at all; ``whole`` is as for
        :meth:`MemorySnapshots.vote`.
        """
        divisible = self._divisible(state)
        if divisible:
            # A split snapshot is complete only with the others' parts: before this one replaces an older one, the one
            # before it must be complete everywhere.
            self.settle()
        keep = self._memory.writes or (checkpoint is not None and checkpoint.writes)
        first = self._world.first_on_node
        state.collect(step, self._world)
        state.begin_capture(keep=keep or (divisible and first))
        if not divisible:
            return _Taken(state.captured(keep=keep))
        size = state.whole_bytes()
        votes = self._memory.vote(size, whole=whole)
        # Whole snapshots are copied by the agents.
        divides = checkpoint is not None and checkpoint.divides(size) and (votes.split or not votes.kept)
        if not votes.split and not divides:
            return _Taken(state.captured(keep=keep), fits=whole and not votes.asked)
        tree, gatherer = state.captured_split(keep=self._memory.writes or first)
        boxes = self._layouts.of_all(gatherer, self._world)
        taken = _Taken({})
        if votes.split:
            taken = _Taken.split_among(tree, gatherer, boxes, votes.keepers, self._world)
        if checkpoint is not None and divides:
            nonce = checkpoint.nonce(checkpoint.branch.round, step)
            own = split.own_tensors(tree, gatherer, boxes, votes.firsts, self._world.rank, nonce)
            taken = replace(taken, own=own)
        if not votes.split and taken.own is None:
            return _Taken(state.captured(keep=keep))
        return taken

    def keep(self, after: Trained, stays: Stays) -> None:
        """Take a snapshot of the state after a step in memory; called by all ranks.

        Only if the run ends with it, it is saved durably. :meth:`save` replaces it, if it is called for the same step.
        """
        if not self._world.round:
            return
        began = time.monotonic()
        with self._link.doing(Activity.CHECKPOINT):
            self._confirm()
            taken = self._take(after.state, after.step, None)
            self._confirm_gathered(after.state)
            meta = self._meta_after(after, now=False)
            if self._memory.writes:
                self._keep(taken, meta, after, stays, began)

    def keep_newer(self, after: Trained) -> None:
        """Take a snapshot of the state after a step in memory, unless there is one; called by one rank alone."""
        if not self._memory.writes_last:
            return
        began = time.monotonic()
        found = self._memory.newest(self._training)
        if found is not None and found[1].position >= (self._branch.round, after.step, after.phase):
            return
        taken = _Taken(after.state.capture())
        self._kept = self._keep(taken, self._meta_after(after, now=False), after, None, began)
        self.seconds = time.monotonic() - began

    def _meta_after(self, after: Trained, *, now: bool) -> dict[str, Any]:
        """Return the meta of the state after a step; ``now``: it is also saved durably."""
        step, checkpoint = after.step, after.checkpoint
        if self._world.world_size == 1:
            self.equal_after(step)
        meta = self._meta(after.identity, after.worlds, after.state)
        if trained := after.trained():
            meta["trained"] = trained
        if self.compares or self._world.world_size == 1:
            meta["compared"] = self._equal == (self._branch.round, step)
        if checkpoint is not None:
            meta["saved"] = checkpoint.standing(step, now=now)
            if now and (results := checkpoint.take_results()):
                meta["metrics"] = results
        return meta

    def is_durable(self, step: int, checkpoint: CheckpointManager | None) -> bool:
        """Whether :meth:`save` will save durably even without a stop or the training's end; the same on all ranks."""
        return checkpoint is not None and (self._agreed.save or checkpoint.due_everywhere(step))

    def equal_after(self, step: int) -> None:
        """Record that the state after a step was found equal on all ranks."""
        self._equal = self._branch.round, step

    def drop_unequal(self) -> None:
        """Drop the snapshots in memory that are newer than the last state that was equal on all ranks."""
        self.settle()
        self._memory.drop_above((*self._equal, EVALUATED), self._training)

    def agree_after(self, step: int) -> None:
        """Record that all ranks agree in a verified step; the newest snapshot up to it is kept until the next one."""
        self.agreed = step
        if self._memory.writes:
            self._link.say(Agreed(step))

    def drop_after(self, step: int) -> None:
        """Drop the states of later steps, in memory and in durable storage."""
        self.settle()
        self._memory.drop_after(step, self._training)
        if self._checkpoint is not None:
            left = self._checkpoint.withdraw_after(step)
            if left is not None:
                self._link.withdrew(left)
        self._suspect = True

    def settle(self) -> None:
        """Wait until parameters and the optimizer's state may change."""
        try:
            self._memory.settle()
        except snapshot.UnsupportedStateError:
            self._memory.writes = False
            raise
        except snapshot.TornSnapshotError as error:
            _log.warning(
                "%s. That snapshot is given up. From now on the next step begins only when a snapshot is copied; to "
                "avoid the wait, change parameters right after step.update()",
                error.message,
            )
            self._kept = False
            if self._checkpoint is not None:
                self._checkpoint.torn(self._keeping)
        except (snapshot.CheckpointError, OSError, torch.OutOfMemoryError) as error:
            reason = self._give_up_memory(error)
            if self._checkpoint is not None:  # it was told that the snapshot is on its way to the agent
                self._checkpoint.lost(self._memory.rhythm.last, reason)

    def finish(self, *, wait: bool) -> None:
        """End a training; ``wait`` for copies to durable storage, or let the agent complete them."""
        self.settle()
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is None:
            return
        uncertain, restored = self._uncertain, self._restored
        self._uncertain = self._restored = None
        if wait and uncertain is not None and not self._changed_since(restored):
            # The previous processes may have been waiting for its copy when a fault ended their round.
            checkpoint.doubted = True
            self.save(uncertain, last=True, draining=False, stays=None)
        began = time.monotonic()
        for outcome in checkpoint.finish(self._report, wait=wait or not self._kept):
            self._tell(outcome)
        self.seconds += time.monotonic() - began
        if wait:
            self.failure = self.failure or checkpoint.failed()

    def _changed_since(self, restored: StepStart | None) -> bool:
        """Whether a script's own loop has changed what :meth:`watch_restored` watches; called by all ranks."""
        if restored is None:
            return False
        return any(changed for (changed,) in numbers_of_all(self._world, [int(bool(restored.pass_begins()))]))

    def abandon(self) -> None:
        """After an error: let a checkpoint in progress finish, without communicating with other ranks."""
        with suppress(snapshot.UnsupportedStateError):  # may be that same error
            self.settle()
        if self._checkpoint is not None:
            self._checkpoint.rescue()

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()

    def _keep(
        self,
        taken: _Taken,
        meta: dict[str, Any],
        after: Trained,
        stays: Stays | None,
        began: float,
        *,
        durable: bool = False,
        last: bool = False,
    ) -> bool:
        """Have a snapshot taken of what was captured since ``began``, and copied if ``durable``; whether it is."""
        self._memory.rhythm.taken(after.step)
        self._keeping = after.step
        own, route = after.state.gathered | taken.made, _nowhere
        if after.checkpoint is not None and not taken.parts:
            route = partial(after.checkpoint.route, self._world, durable and not after.checkpoint.distributed)
        try:
            return self._memory.store(
                taken.state,
                meta | taken.parts,
                Header(0, self._branch.round, after.step, after.phase, self._training),
                stays=lambda tensor: stays is None or tensor.data_ptr() in own or stays(tensor),
                route=route,
                wait=last or stays is None,
                patient=last,
                spent=time.monotonic() - began,
                fits=taken.fits,
            )
        except snapshot.UnsupportedStateError:
            raise
        except (snapshot.CheckpointError, OSError, torch.OutOfMemoryError) as error:
            self._give_up_memory(error)
        return False

    def _give_up_memory(self, error: snapshot.CheckpointError | OSError | torch.OutOfMemoryError) -> str:
        """Take no more snapshots; return why."""
        if isinstance(error, torch.OutOfMemoryError):
            reason, remedy = str(error).partition("\n")[0], ""
        elif isinstance(error, OSError):
            reason, remedy = f"not enough memory: {error.strerror or error}", remedy_of(error)
        else:
            reason, remedy = error.message, ""
        self._memory.give_up(reason.removesuffix("."), remedy)
        self._kept = False
        return reason

    def _asked(self, step: int, checkpoint: CheckpointManager | None) -> bool:
        """Whether the agent requests a checkpoint; reports an error to it if the script saves none."""
        if not self._link.save_asked():
            return False
        if checkpoint is None:
            self._link.saved(step, "the script saves no checkpoints")
        return checkpoint is not None

    def _report(self, outcome: snapshot.WriteOutcome) -> None:
        self._link.saved(outcome.step, "" if outcome.info is not None else str(outcome.error))

    def _tell(self, outcome: snapshot.WriteOutcome) -> None:
        for listener in self._listeners:
            listener(outcome)


def _nowhere(job: CopyJob, size: int) -> CopyJob:
    return job

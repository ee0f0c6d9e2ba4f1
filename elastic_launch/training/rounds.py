"""The rounds of a run as one worker takes part in them: it joins, leaves when one ends, and may go on in the next."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist

from elastic_launch.contract import Differing, Ready, SlowRank
from elastic_launch.errors import UsageError
from elastic_launch.symptoms import symptom_in
from elastic_launch.training.link import AgentLink
from elastic_launch.training.live.groups import GroupsRemainError, RoundGroups
from elastic_launch.training.live.peerless import PeerlessGroups
from elastic_launch.training.live.timeout_watch import TimeoutWatch
from elastic_launch.training.live.waits import Waits, on_host
from elastic_launch.training.ranks.exchange import is_of_exchange, numbers_of_all
from elastic_launch.training.ranks.mesh import ReplicaMesh, check_shape, own_ranks
from elastic_launch.training.ranks.pace import Straggler
from elastic_launch.training.ranks.place import take, wait_for_place
from elastic_launch.training.ranks.same_arguments import OthersDifferError, check_same
from elastic_launch.training.ranks.world import World, can_abort, environment, join, replica_ahead
from elastic_launch.training.verification import NotAgreedError

_log = logging.getLogger(__name__)


CONFIRMED = "confirmed"
"""What ``session(live=)`` gets if each step on GPUs is to be confirmed, so that none is repeated."""

AskedLive = bool | Literal["confirmed"] | None
"""What ``session(live=)`` gets."""


class RoundOverError(RuntimeError):
    """The round that this process trained in is over."""


def may_end_wrong(device: torch.device) -> bool:
    """Whether an exchange that another rank aborts may end with wrong values and without an error, as NCCL's may."""
    return device.type == "cuda"


class WorkerRounds:
    """The round that this worker is in, and whether it can go on in another one.

    Args:
        world: this process' ranks and the world's sizes; None: it was started ahead of its place in a round.
        timeout: that of the process groups, in seconds.
        live: whether it may go on in another round, see :func:`elastic_launch.session`; None: it may.

    Attributes:
        link: to the agent.
        groups: the process groups of this round.
        step: optimizer steps done, as the agent is told.
        begun: whether the training has begun in this round.
        lives: whether this process can go on in another round.
        barred: whether it never can, because a process that joins would begin with another state.
        confirms: whether the exchange of each step is confirmed in this round.
        doubts: whether it is not, and may have ended with wrong values, so that only confirmed states count.
        in_doubt: whether this process' state follows from an exchange that is not confirmed.
        mesh: that of this rank's replica, once the script has asked for it.
        shards: whether each process has only a part of the state. Those of the next round all begin with a snapshot if
            they divide it in another way, or no intact replica is left.
    """

    def __init__(
        self,
        world: World | None,
        device: torch.device,
        link: AgentLink,
        groups: RoundGroups,
        *,
        timeout: float,
        live: AskedLive,
    ) -> None:
        self.device = device
        self.link = link
        self.groups = groups
        self.timeout = timeout
        self.asked_live = live
        self.step = 0
        self.begun = self.lives = self.barred = self.confirms = self.doubts = self.in_doubt = self.shards = False
        self.mesh: ReplicaMesh | None = None
        self._own_ranks = ExitStack()  # what is to be put back of torch's functions of meshes
        self._gpus: set[torch.device] = set()  # those of the last exchange
        self._world = world
        self._noted = 0  # the library's own exchanges
        self._began_at = 0  # exchanges until run.mesh() had formed its groups, if there were no others before
        self._timeouts: TimeoutWatch | None = None
        self._waits: Waits | None = None
        self._peerless: PeerlessGroups | None = None
        self._has_begun = False  # in any round
        self._watch_timeouts()

    @property
    def world(self) -> World:
        """This process' ranks and the world's sizes; it must have a place."""
        assert self._world is not None
        return self._world

    @property
    def is_ahead(self) -> bool:
        """Whether this process was started ahead, and has no place in a round yet."""
        return self._world is None

    @property
    def is_built_ahead(self) -> bool:
        """Whether the script has built its model before this process had a place, and this one has not trained yet."""
        return self._peerless is not None and not self._has_begun

    def form_mesh(self, shard: int, tensor: int) -> ReplicaMesh:
        """Return the mesh of this rank's replica, see :meth:`elastic_launch.Run.mesh`; called by all ranks."""
        if self.mesh is None:
            self._own_ranks.enter_context(own_ranks(lambda: self.mesh and self.mesh.inner))
            return self._form_mesh(shard, tensor)
        if self.mesh.shape != (shard, tensor):
            had = "run.mesh(shard={}, tensor={})".format(*self.mesh.shape)
            raise UsageError(
                f"run.mesh(shard={shard}, tensor={tensor}) came after {had}.",
                "All models of a run have replicas of one shape: call it once, and use what it returns.",
            )
        return self.mesh

    def form_mesh_ahead(self, shard: int, tensor: int, find_place: Callable[[], object]) -> ReplicaMesh | None:
        """Return the mesh of this process' replica before it has a place; None if its replica is not known yet.

        Args:
            find_place: see :class:`PeerlessGroups`.
        """
        if self.mesh is not None:
            return self.form_mesh(shard, tensor)
        replica = replica_ahead()
        fits = {type(shard), type(tensor)} == {int} and 1 < replica.world_size == shard * tensor
        if not fits or self.asked_live is False or self.device.type != "cpu":
            return None
        self._own_ranks.enter_context(own_ranks(lambda: self.mesh and self.mesh.inner))
        self._peerless = PeerlessGroups(replica.rank, replica.world_size, find_place)
        self.mesh = ReplicaMesh.formed(
            replica, self.device.type, shard, tensor, self.timeout, forming=lambda **_: nullcontext(), outlives=True
        )
        return self.mesh

    def rehearsing(self) -> AbstractContextManager[None]:
        """The context of a rehearsal, in which a process that has no place exchanges with no other."""
        return nullcontext() if self._peerless is None else self._peerless.rehearsing()

    def _form_mesh(self, shard: int, tensor: int) -> ReplicaMesh:
        check_shape(self.world, shard, tensor)
        untouched, kept = self.untouched, self.mesh is not None
        given = {"run.mesh(shard=, tensor=)": (shard, tensor)}
        check_same(self.world, given, self.link, goes_on=kept and not self.is_built_ahead)
        exchanges, builds, built = range(3)  # what the script does next in a process of the replica
        own = exchanges if self._peerless is not None and self._peerless.exchanged else built if kept else builds
        first, size = self.world.rank // (shard * tensor) * shard * tensor, shard * tensor
        found = [each for (each,) in numbers_of_all(self.world, [own])[first : first + size]]
        # parallelize_module exchanges between tensor ranks, which this process would leave out.
        if own == built and min(found) < (built if tensor > 1 else builds):
            self.start_again("its replica has a new process")
        with self.link.forming():
            how = self.timeout, self.mesh
            outlives = self.asked_live is not False and self.link.patience > 0 and not self.groups.foreign
            self.mesh = ReplicaMesh.formed(
                self.world, self.device.type, shard, tensor, *how, forming=self.forming, outlives=outlives
            )
        self._world = replace(self.world, tensor=tensor)
        if untouched:
            self._began_at = self.groups.used()
        return self.mesh

    def find_place(self, arguments: str) -> None:
        """Wait for the place of a process that was started ahead; see :meth:`Engine.meet`."""
        if "torch.distributed.fsdp" in sys.modules:
            # fully_shard() imports it, but can be called only once there is a place, while the others wait.
            importlib.import_module("torch._dynamo")
        self.link = wait_for_place(arguments)
        self._world = environment()
        self._live(self._may_live)

    def join(self) -> None:
        """Join the round in which this process has got a place."""
        if self.is_over:  # the order came before there was anything to disconnect
            self.groups.disconnect()
        if self._peerless is not None:
            self._peerless.leave()
        with self.link.forming(), self.groups.forming():
            join(self.world, self.timeout, abortable=self.asked_live is not False and self.link.patience > 0)
        self._watch_timeouts()
        if self.mesh is not None:  # at the place where a process that begins has run.mesh()
            self._form_mesh(*self.mesh.shape)

    def _watch_timeouts(self) -> None:
        """Do what torch's watchdog does not where communicators may be aborted: end collectives that take too long."""
        joined = self.device.type == "cuda" and dist.is_initialized()
        wanted = self.asked_live is not False and self.link.patience > 0 and can_abort()
        if joined and wanted and self._timeouts is None:
            self._timeouts = TimeoutWatch(RoundGroups.of_gpus)

    def close(self) -> None:
        """End the thread that looks for timeouts, drop the mesh's groups, and put torch's functions back."""
        if self._peerless is not None:
            self._peerless.close()
        self._own_ranks.close()
        if self.mesh is not None:
            self.mesh.leave()
        if self._waits is not None:
            self._waits.close()
            self._waits = None
        if self._timeouts is not None:
            self._timeouts.close()
            self._timeouts = None

    @contextmanager
    def forming(self, *, inner: bool = False) -> Iterator[None]:
        """The context in which a further process group is formed; ``inner``: of the ranks of a replica alone."""
        with self.groups.forming(inner=inner):
            yield
        if self.begun and not self.groups.breakable:
            self.end_with_round()

    def begin(self, step: int, *, live: bool) -> None:
        """The training begins; ``live`` says whether it can go on in another round."""
        self.begun, self._has_begun, self.step = True, True, step
        if self._peerless is not None:
            self._peerless.built()  # from now on, its exchanges are those of its round
        live = live and self._may_live
        if live and self.groups.unbreakable:
            _log.warning(
                "this process ends with its round: nothing ends a collective of the backend %s when a worker is lost",
                ", ".join(self.groups.unbreakable),
            )
        self._live(live and self.groups.breakable and not self.groups.foreign)
        if not self.lives and self.asked_live and self.device.type == "cuda" and self.link.patience > 0:
            _log.warning(
                "session(live=%r): this process ends with its round all the same, see docs/training/gpus.md",
                self.asked_live,
            )

    def _live(self, lives: bool) -> None:
        self.lives = lives
        if lives:
            self.link.listen(lambda: self.groups.disconnect())
            if self._waits is None:
                # A wait for a work of NCCL's only has the GPU wait.
                self._waits = Waits(lambda: self.groups.lost(), all_works=self.device.type == "cpu")

    @property
    def _may_live(self) -> bool:
        wanted = self.asked_live is not False and self.link.patience > 0 and not self.barred
        if self.shards:
            wanted = wanted and self.link.keeps
        if not wanted or not may_end_wrong(self.device):
            return wanted
        return can_abort() and (self.asked_live == CONFIRMED or self.link.keeps)

    @property
    def may_abort(self) -> bool:
        """Whether this process may abort exchanges of GPUs and go on, if the training can."""
        return may_end_wrong(self.device) and self._may_live

    def agreed(self, *, aborts: bool) -> None:
        """Take note, as a round begins, whether exchanges may be aborted on any rank."""
        self.confirms, self.doubts = aborts and self.asked_live == CONFIRMED, aborts and self.asked_live != CONFIRMED

    @property
    def goes_back(self) -> bool:
        """Whether this process may go on from a snapshot when this round breaks, and not from the state that it has."""
        return self.doubts or self.shards

    @property
    def by_host(self) -> bool:
        """Whether what ranks send each other as they enter this round goes through the hosts' memory."""
        return self.confirms or self.doubts

    def confirm(self, gpus: set[torch.device]) -> None:
        """Confirm an exchange of all ranks if each is confirmed, see :meth:`RoundGroups.confirm`."""
        self._gpus = gpus
        if self.confirms:
            self.groups.confirm(gpus, self.timeout)

    def in_pass(self) -> AbstractContextManager[None]:
        """The context of a pass over micro-batches, which :meth:`check_over` ends.

        Ranks that compute a micro-batch together, within the script's code, remain connected until then.
        """
        return nullcontext() if self._together is None else self.groups.held()

    def check_over(self) -> None:
        """Called before each micro-batch, by all ranks that compute it together: none of them begins it alone.

        Raises:
            RoundOverError: if the round is over, as far as one of them knows.
        """
        over = self.is_over
        if self._together is not None:
            found = torch.tensor(int(over), device="cpu")
            with self.exchanging():
                on_host(dist.all_reduce, found, op=dist.ReduceOp.MAX, group=self._together)
            over = bool(found)
        if over:
            raise RoundOverError("the round is over")

    @property
    def _together(self) -> dist.ProcessGroup | None:
        return self.mesh.tensor.group if self.shards and self.mesh is not None and self.mesh.tensor.size > 1 else None

    def meet_replica(self) -> None:
        """Before an update, wait for all ranks of this replica: either all of them make it, or none.

        Each may go on from its own part of the state; those of two steps would be of no use together.

        Raises:
            RuntimeError: if one of them has left the round.
        """
        if not self.shards or self.mesh is None or self.mesh.inner.size() == 1:
            return
        with self.exchanging(), self.groups.held():
            for group in self.mesh.inner.get_all_groups():
                on_host(dist.all_reduce, torch.zeros(1, device="cpu"), group=group)

    def updates(self) -> None:
        """The state is about to change by what was exchanged."""
        self.in_doubt = self.doubts

    def confirm_state(self, *, gathered: bool = False) -> None:
        """Confirm the exchanges that the current state follows from, unless each was; called by all ranks.

        Args:
            gathered: whether the state was also gathered from all ranks, which no step confirms.

        Raises:
            RuntimeError: see :meth:`RoundGroups.confirm`.
        """
        if self.doubts or (self.confirms and gathered):
            self.groups.confirm(self._gpus, self.timeout)
            self.in_doubt = False

    def report_straggler(self, found: Straggler) -> None:
        """Report a rank that is slower than the others."""
        if self.link.present:
            self.link.say(SlowRank(found.rank, found.phase, found.ratio, found.load, found.pressure))
        else:
            _log.warning("rank %d is slow in %s: %.1f times the others' time", found.rank, found.phase, found.ratio)

    def report_corruption(self, step: int, ranks: Sequence[int], suspect: int) -> None:
        """Report that ranks have computed wrong in a step, or that it is not known which ones have.

        Args:
            suspect: see :class:`Differing`.
        """
        if self.link.present:
            self.link.say_noted(Differing(step, tuple(ranks), suspect))
        else:
            _log.warning("step %d: ranks computed different results for a micro-batch", step)

    def count_exchange(self) -> None:
        """Record that the script has exchanged with other ranks by a call of this library."""
        self._noted -= 1

    def note_exchanges(self) -> None:
        """Record that the exchanges with other ranks so far are the library's own."""
        self._noted = self._used() if self.lives else 0

    def _used(self) -> int:
        inner = self.mesh.inner.get_all_groups() if self.mesh is not None else []
        return self.groups.used(*inner)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Count what is exchanged with other ranks meanwhile as the library's own, not as the script's."""
        before = self._used() if self.lives else 0
        yield
        if self.lives:
            self._noted += self._used() - before

    def check_exchanges(self) -> None:
        """End this process with its round if the script has exchanged with other ranks since they were noted.

        After a fault, a rank may end a step that others have ended already; it would wait for them in that exchange.
        """
        if self.lives and self._used() != self._noted:
            _log.info(
                "the script exchanges data between its micro-batches and steps by itself, or its optimizer does: this "
                "process ends with its round"
            )
            self.end_with_round()

    @property
    def untouched(self) -> bool:
        """Whether nothing was sent to other ranks so far, so that a process that begins is at the same place."""
        return dist.is_initialized() and self.groups.used() == self._began_at

    def end_with_round(self) -> None:
        """From now on, this process ends with its round, as one does whose loop is its own."""
        if self.lives:
            self.lives = False
            if self.begun:
                self.link.say(Ready(self.step, live=False, training=self.link.training))

    @property
    def is_over(self) -> bool:
        """Whether the current round is over, and this process is to continue in another one."""
        return self.lives and self.link.suspending

    def caused(self, error: RuntimeError) -> bool:
        """Whether an error that was just caught may be due to the round's end."""
        if not self.lives or not is_of_exchange(error):
            return False
        return (
            self.is_over
            or isinstance(error, RoundOverError | OthersDifferError | NotAgreedError)
            or bool(symptom_in(f"RuntimeError: {error}"))
        )

    def attempt(self, part: Callable[[], object]) -> RuntimeError | None:
        """Do a part of a round; return the error by which the round's end has broken it off, None if it is done."""
        try:
            part()
        except RuntimeError as error:
            if not self.caused(error):
                raise
            return error
        return None

    def break_off(self, error: RuntimeError) -> None:
        """Report that an exchange has failed; raise the error if the agent does not have this worker suspended."""
        if not self.link.disconnected(self.step, str(error)):
            raise error
        error.__traceback__ = error.__context__ = error.__cause__ = None

    def leave(self) -> None:
        """Leave the process groups of the current round."""
        if self.mesh is not None:
            self.mesh.leave()
        try:
            self.groups.leave()
        except GroupsRemainError as remain:
            self.start_again(str(remain))

    def enter_next(self, ends: Callable[[], bool]) -> bool:
        """Wait for a place in another round; return whether there is one.

        Args:
            ends: whether the wait is to end without one; called from time to time.
        """
        place = self.link.suspended(self.step, ends)
        if place is None:
            return False
        take(place)
        self._world, self.groups = environment(), RoundGroups(last=self.groups)
        self.begun, self._began_at = False, 0
        return True

    def start_again(self, why: str) -> None:
        """End this process, so that a new one takes its place; its agent expects it to end."""
        _log.warning("this worker cannot continue in another round, and ends: %s", why)
        with suppress(ValueError):  # not the main thread, where alone handlers are set
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

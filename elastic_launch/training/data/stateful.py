"""Loaders that have a state: the place of each data shard is saved, and found again by any rank.

A loader's ``state_dict`` is the place after the micro-batch that it gave last. All ranks hold the places of all shards
as they were at one step, which is that of the last snapshot or checkpoint. The place at a later step is found by giving
up the micro-batches in between. So a step needs no exchange, and what a lost rank has read since is known.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, Self

from torch.utils.data import DataLoader, Dataset

from elastic_launch.batch import GlobalBatch, MicroBatch
from elastic_launch.errors import UsageError
from elastic_launch.training.data.batches import BatchSource, Drawn, NotedBatch
from elastic_launch.training.data.epochs import FunctionEpochs
from elastic_launch.training.data.loader import Loader, checked_batch, steps_in_epoch
from elastic_launch.training.data.loader_processes import LoaderProcesses
from elastic_launch.training.data.samplers import SAMPLE_ORDER
from elastic_launch.training.randomness import derive, seeded
from elastic_launch.training.ranks.exchange import broadcast_state, numbers_of_all, states_of_all
from elastic_launch.training.ranks.world import World

_log = logging.getLogger(__name__)

Reshard = Callable[[list[Any], int], list[Any]]
"""``(states, world_size) -> states``: the loaders' states for that number of ranks, from those for another number."""

_GLOBAL = ("streaming",)
"""Packages whose loaders' state is one place in the data of all ranks, which holds at any world size."""

_END = object()


class StatefulLoader(Loader):
    """Takes micro-batches from loaders that have ``state_dict`` and ``load_state_dict``, with or without a length.

    ::

        def make(shard, shards):
            return StatefulDataLoader(split_dataset_by_node(dataset, shard, shards), batch_size=8)


        loader = el.StatefulLoader(make, el.GlobalBatch(64, micro=8))
        for step in run.steps(loader, model, optimizer, until="10000ba"):
            ...

    Each shard begins its next pass over its data when it has given all of them, in the middle of a step if need be, and
    does not wait for the others: make the shards equally long if all are to be in the same pass. What has the method
    ``set_epoch``, the loader, its ``sampler`` or its ``dataset``, is told the number of the pass before.

    ``state_dict`` is called after a micro-batch was given, and must be the place after it, also if the loader has read
    ahead. From a place a loader must read the same again: the ranks exchange the places of all shards with each
    snapshot and checkpoint only, and a rank that takes over a shard begins at its last known place, and drops what is
    done. The states are a part of the checkpoint, see :class:`elastic_launch.Stateful`.

    Args:
        loader: a function ``(shard, shards) -> loader``, or the loader of this rank. A loader yields collated
            micro-batches of ``batch.micro`` samples. If it has no state, but its dataset has, it is a torch
            ``DataLoader`` with ``num_workers=0``.

            With the function, the data have as many shards as a global batch has micro-batches, at every world size;
            micro-batch i of each step comes from shard i, and a rank makes the loaders of its micro-batches. Each
            sample is used once in a pass, whatever happens to the world. It must return the same data for a shard in
            any process.

            With a loader, each rank has one shard, or those ranks together that share micro-batches
            (``run.world.data_rank`` of ``run.world.data_size``). A process then ends with its round, and the script
            makes the loader for the new rank.
        batch: the global batch; ``size`` is a multiple of ``micro``.
        seed: seed of the random numbers that a loader draws from the global generators: in this process, and in those
            of a torch ``DataLoader``. There the numbers of a map-style dataset derive from the seed, the shard, the
            pass and the batch's indices. With ``exact=True`` a dataset there that is iterable and has a state must draw
            none, but at the beginning of a pass.
        steps_per_epoch: number of optimizer steps that count as an epoch; None: there are no epochs, and lengths are
            given in steps (``"1000ba"``).
        reshard: with a loader, gives the states for another world size: a function ``(states, world_size) -> states``,
            lists by rank; or ``"any"`` if all ranks have the same state, and it holds at any world size, so that their
            number divides that of the micro-batches in a global batch. None: ``"any"`` for mosaicml-streaming; else
            they cannot be given.
        on_resize: what happens then at another world size. ``"hold"``: the run ends with an error, and can be resumed
            at the world size that it had; with ``--nnodes`` of one number the launcher waits for nodes instead.
            ``"repeat"``: the unfinished pass of each shard begins anew, and a warning says how many samples are
            repeated. A pass is known to have ended if the loader has a length.

    Raises:
        UsageError: if an argument does not fit. In a training, if a loader has no state, yields nothing or yields
            micro-batches of another size, or the world size changes and ``on_resize`` is ``"hold"``.
    """

    def __init__(
        self,
        loader: Any,
        batch: GlobalBatch,
        *,
        seed: int = 0,
        steps_per_epoch: int | None = None,
        reshard: Reshard | Literal["any"] | None = None,
        on_resize: Literal["hold", "repeat"] = "hold",
    ) -> None:
        checked_batch("StatefulLoader(batch=...)", batch)
        if batch.micro == "auto" or batch.size % batch.micro:
            raise UsageError(
                f"StatefulLoader(batch={batch}): the loader decides the size of the micro-batches, and all have it.",
                "Give micro the loader's batch_size, and size a multiple of it.",
            )
        steps = steps_in_epoch("StatefulLoader", steps_per_epoch)
        if on_resize not in ("hold", "repeat"):
            raise UsageError(f"StatefulLoader(on_resize={on_resize!r}) is not known.", 'Give "hold" or "repeat".')
        if reshard not in (None, "any") and not callable(reshard):
            raise UsageError(f"StatefulLoader(reshard={reshard!r}) is not known.", 'Give "any" or a function.')
        shards: Shards
        if isinstance(loader, type) or (callable(loader) and not hasattr(loader, "state_dict")):
            if reshard is not None or on_resize != "hold":
                raise UsageError(
                    "StatefulLoader(reshard=..., on_resize=...) is for the loader of a rank.",
                    "Leave them out: the shards of a function are the same at every world size.",
                )
            shards = Shards(loader, batch, seed)
        else:
            _stateful(loader)
            if reshard is None and type(loader).__module__.partition(".")[0] in _GLOBAL:
                reshard = "any"
            shards = RankShards(loader, batch, seed, reshard, on_resize)
        super().__init__(_StatefulEpochs(shards, batch, seed, steps))


class _Reader:
    """Reads one shard from a place on.

    Attributes:
        position: number of micro-batches that the shard has given in the whole training.
    """

    def __init__(self, loader: Any, place: Sequence[Any], position: int, name: str, seed: int, *, exact: bool) -> None:
        self._loader, self._stateful = loader, _stateful(loader)
        self._name, self._seed = name, seed
        self._processes: LoaderProcesses | None = None
        if isinstance(loader, DataLoader) and loader.num_workers:
            self._processes = LoaderProcesses.of(loader, f"{seed}/{name}", exact=exact)
        self.position = position
        # Number of the pass, micro-batches given in it, the loader's state, whether the pass is known to have ended.
        self._pass, self._given, state, _ = place
        self._last: NotedBatch | None = None
        with self._seeded("open"):
            if state is None:
                self._batches = self._begun()
            else:
                self._tell_pass()
                self._stateful.load_state_dict(copy.deepcopy(state))
                self._batches = self._iterated()

    def reaches(self, position: int) -> bool:
        """Whether it can give the micro-batch of a position: a later one, or the last one as it was."""
        if position != self.position - 1:
            return position >= self.position
        return self._last is not None and self._last.is_as_it_was()

    def draw(self, position: int) -> Any:
        """Return the micro-batch of a position that it reaches."""
        self.advance(position + 1)
        assert self._last is not None
        batch = self._last.batch
        # Another container, which the script may change.
        return copy.copy(batch) if isinstance(batch, MutableMapping | list) else batch

    def advance(self, position: int) -> None:
        """Give up the micro-batches before a position."""
        while self.position < position:
            with self._seeded(self.position):
                self._last = NotedBatch(self._next())
            self.position += 1
            self._given += 1

    def place(self) -> list[Any]:
        """Return the current place, which a checkpoint can hold."""
        try:
            ended = self._given == len(self._loader)
        except (NotImplementedError, TypeError):  # it has no length
            ended = False
        return [self._pass, self._given, self._stateful.state_dict() if self._given else None, ended]

    def _next(self) -> Any:
        batch, before = next(self._batches, _END), self._given
        if batch is _END and before:
            self._pass, self._given = self._pass + 1, 0
            self._batches = self._begun()
            batch = next(self._batches, _END)
        if batch is _END and before:
            raise UsageError(
                f"StatefulLoader: the loader of {self._name} has ended after {before} micro-batches of its pass "
                f"{self._pass - 1}, and then iter(loader) gave none: it does not begin anew.",
                "Have its __iter__ start with the first sample again, not return an iterator that has ended; or have "
                "until= end the training with that pass.",
            )
        if batch is _END:
            raise UsageError(
                f"StatefulLoader: the loader of {self._name} gave no micro-batch in its pass {self._pass}.",
                "Does it drop all of them, or have fewer samples than a micro-batch?",
            )
        return batch

    def _begun(self) -> Iterator[Any]:
        self._tell_pass()
        return self._iterated()

    def _iterated(self) -> Iterator[Any]:
        with nullcontext() if self._processes is None else self._processes.attached(self._loader):
            return iter(self._loader)

    def _tell_pass(self) -> None:
        if self._processes is not None:
            self._processes.begin_pass(self._pass)
        for one in (self._loader, getattr(self._loader, "sampler", None), getattr(self._loader, "dataset", None)):
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(self._pass)

    def _seeded(self, what: int | str) -> Any:
        return seeded(derive("shard", self._seed, self._name, what), devices=True)


class Shards:
    """The shards of a function: micro-batch i of a step is the next one of shard i. A part of the training's state."""

    bound = ""

    def __init__(self, make: Any, batch: GlobalBatch, seed: int) -> None:
        self._make, self._batch, self._seed = make, batch, seed
        self._step, self._places = 0, list[list[Any]]()  # of all shards, at this step; none: at the beginning
        self._own: list[int] = []
        self.exact = False  # whether what their processes draw must be the same after a restart
        self._readers: dict[int, _Reader] = {}

    def anew(self) -> Shards:
        """Return the same shards at their beginning, of which only a function makes several."""
        other = Shards(self._make, self._batch, self._seed)
        other.exact = self.exact
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return the places of all shards; they hold for the step that is noted, and any later one."""
        return {"step": self._step, "shards": self._places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step, self._places = int(state["step"]), list(state["shards"])

    def draw(self, step: int, micro: MicroBatch) -> Any:
        """Return a micro-batch of a step, counted from 0."""
        shard, position = self._where(step, micro)
        reader = self._readers.get(shard)
        # One that is behind the places would give up all micro-batches in between.
        if reader is None or not reader.reaches(position) or reader.position < self._position(self._step):
            reader = self._opened(shard)
            assert reader.reaches(position)
        return reader.draw(position)

    def enter(self, world: World, step: int) -> None:
        """Take part in a round that begins after so many steps; called by all ranks."""
        if step < self._step:  # another training from the beginning
            self._step, self._places = 0, []
        steps = [known for (known,) in numbers_of_all(world, [self._step])]
        if len({*steps}) > 1:
            # The round before has ended as places were collected.
            newest = steps.index(max(steps))
            self.load_state_dict(broadcast_state(self.state_dict(), newest, world.rank))
        self._own = self._owned(world)
        self._readers = {shard: reader for shard, reader in self._readers.items() if shard in self._own}

    def collect(self, step: int, world: World) -> None:
        """Note the places of all shards after so many steps; called by all ranks."""
        if step == self._step:
            return
        mine = {}
        for shard in self._own:
            reader, position = self._readers.get(shard), self._position(step)
            if reader is None or not self._position(self._step) <= reader.position <= position:
                reader = self._opened(shard)
            reader.advance(position)
            mine[str(shard)] = reader.place()
        found: dict[str, Any] = {}
        for each in states_of_all(world, mine):
            found |= each
        self._step, self._places = step, [found[str(shard)] for shard in range(len(found))]
        # Others were read to verify what another rank has computed.
        self._readers = {shard: reader for shard, reader in self._readers.items() if shard in self._own}

    def _owned(self, world: World) -> list[int]:
        return [micro.index for micro in self._batch.plan(world.data_size, world.data_rank).micro_batches]

    def _where(self, step: int, micro: MicroBatch) -> tuple[int, int]:
        return micro.index, step

    def _position(self, step: int) -> int:
        """Return how many micro-batches each of the own shards has given in so many steps."""
        return step

    def _loader(self, shard: int) -> Any:
        return self._make(shard, self._batch.size // len(self._batch.micro_batches()[0]))

    def _opened(self, shard: int) -> _Reader:
        self._readers.pop(shard, None)  # and with it the processes of its loader
        place = self._places[shard] if self._places else (0, 0, None, False)
        name = f"shard {shard}"
        with seeded(derive("shard", self._seed, name, "make"), devices=True):
            loader = self._loader(shard)
        reader = _Reader(loader, place, self._position(self._step), name, self._seed, exact=self.exact)
        self._readers[shard] = reader
        return reader


class RankShards(Shards):
    """Shards of which each rank has one, with a loader that the script has made for the rank."""

    bound = "its el.StatefulLoader has the loader of one rank, and not a function that makes one"

    def __init__(self, loader: Any, batch: GlobalBatch, seed: int, reshard: Any, on_resize: str) -> None:
        super().__init__(loader, batch, seed)
        self._reshard, self._on_resize = reshard, on_resize
        self._micros = range(0)  # of a step that are this rank's

    def enter(self, world: World, step: int) -> None:
        super().enter(world, step)
        if self._batch.idle_ranks(world.data_size):
            raise UsageError(
                f"StatefulLoader: a global batch has fewer micro-batches than there are ranks to take them, "
                f"{world.data_size}: the loader of some would never be read.",
                "Make micro smaller, or give a function (shard, shards) -> loader.",
            )
        if self._places and len(self._places) != world.data_size:
            self._resize(world)
        elif world.rank == 0 and self._reshard is None:
            _log.warning(
                "the loader's places hold at world size %d only: at another one %s",
                world.data_size,
                "the run ends; with --nnodes of one number it waits for nodes instead"
                if self._on_resize == "hold"
                else "the unfinished pass of each rank's loader begins anew",
            )

    def _resize(self, world: World) -> None:
        """Give this number of ranks the places of another one."""
        before, now, states = len(self._places), world.data_size, [state for *_, state, _ in self._places]
        passes = [number + ended for number, *_, ended in self._places]
        given = sum(0 if ended else given for _, given, _, ended in self._places)
        each = max(1, given // now)
        if self._reshard == "any":
            if len({*map(str, states)}) > 1:  # they may have tensors
                raise UsageError(
                    'StatefulLoader(reshard="any"): the ranks had different states.',
                    "Its state must be that of all ranks together, and the number of ranks must divide that of the "
                    "micro-batches in a global batch.",
                )
            states = states[:1] * now
        elif self._reshard is not None:
            states = list(self._reshard(copy.deepcopy(states), now))
            if len(states) != now:
                raise UsageError(f"StatefulLoader(reshard=...) returned {len(states)} states for {now} ranks.")
        elif not given:
            each, states = 0, [None] * now
        elif self._on_resize == "hold":
            raise UsageError(
                f"StatefulLoader: the loader's places are those of {before} ranks, and here are {now}.",
                f"Resume with {before}; or give a function (shard, shards) -> loader, or reshard=; or "
                'on_resize="repeat", which repeats samples.',
            )
        else:
            each, states = 0, [None] * now
            if world.rank == 0:
                _log.warning(
                    "the loader's places are those of %d ranks, and here are %d: each begins its pass %d anew, and "
                    "%s%d samples are repeated",
                    before,
                    now,
                    min(passes),
                    "at least " if len({*passes}) > 1 else "",
                    given * len(self._batch.micro_batches()[0]),
                )
        self._places = [[min(passes), each, state, False] for state in states]

    def _where(self, step: int, micro: MicroBatch) -> tuple[int, int]:
        if micro.index not in self._micros:
            raise UsageError(
                f"StatefulLoader: micro-batch {micro.index} is read on a rank that has no loader for it.",
                "Give a function (shard, shards) -> loader, so that any rank can read it.",
            )
        return self._own[0], self._position(step) + self._micros.index(micro.index)

    def _position(self, step: int) -> int:
        return step * len(self._micros)

    def _owned(self, world: World) -> list[int]:
        own = super()._owned(world)
        self._micros = range(own[0], own[-1] + 1) if own else range(0)
        return [world.data_rank]

    def _loader(self, shard: int) -> Any:
        return self._make


class _StatefulEpochs(FunctionEpochs):
    loader = "StatefulLoader"

    def __init__(self, shards: Shards, batch: GlobalBatch, seed: int, steps_per_epoch: int) -> None:
        self.part, self.bound = shards, shards.bound
        super().__init__(shards.draw, batch, seed, steps_per_epoch, {})

    def contents(self, step: int, micro: int) -> str:
        return f"what the loader of its shard gives for step {step} and micro-batch {micro}"

    def evaluated(self) -> Self:
        other = copy.copy(self)
        other.part = self.part.anew()
        return super(_StatefulEpochs, other).apart()

    def check_exact(self) -> None:
        """Accept generators: they belong to the loader's state. Its processes look at the global ones."""
        self.part.exact = True

    def _source(self) -> BatchSource:
        hint = "Give the loader batch_size=micro, and drop_last=True: all micro-batches have the same size."
        return Drawn(self.part.draw, self.seed, "The loader", hint, equal=True)

    def _hashes(self) -> dict[str, int]:
        return {SAMPLE_ORDER: derive("stateful", bool(self.bound)) >> 16}


def _stateful(loader: Any) -> Any:
    """Return what has the place of a loader: itself, or its dataset if it is read in this process."""
    name, dataset = type(loader).__name__, getattr(loader, "dataset", None)
    if isinstance(loader, Dataset):
        raise UsageError(f"StatefulLoader: {name} is a dataset.", "Give a loader of it, which collates micro-batches.")
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return loader
    if not isinstance(loader, DataLoader) or not hasattr(dataset, "state_dict"):
        raise UsageError(
            f"StatefulLoader: {name} has no state_dict and load_state_dict, and its dataset has none.",
            "Give a loader that has, such as torchdata's StatefulDataLoader; or use el.ElasticLoader.",
        )
    if loader.num_workers:
        raise UsageError(
            f"StatefulLoader: the positions of the {loader.num_workers} processes of this {name} are unknown.",
            "Use torchdata's StatefulDataLoader, which knows them, or num_workers=0.",
        )
    return dataset

"""Checks from time to time that all ranks have the same parameters, buffers and optimizer state, as they must.

A checksum of all of them is sent with the ranks' wishes at a step boundary, so that between checkpoints no rank waits.
Before a state is saved durably, it is compared at once.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_launch.errors import ElasticLaunchError
from elastic_launch.training.ranks.checksum import checksums, combined
from elastic_launch.training.ranks.exchange import are_same, numbers_of_all
from elastic_launch.training.ranks.mesh import ReplicaMesh
from elastic_launch.training.ranks.world import World
from elastic_launch.training.wrapped import is_sharded, is_zero, local

SHARE = 0.001
"""Fraction of the training's time that comparisons may cost, not counting those before checkpoints."""

MEMORY = 5
"""Number of comparisons whose median cost decides when the next one is due."""

Named = Callable[[], Iterable[tuple[str, Tensor]]]
"""Returns the tensors that must be the same on all ranks, with names for errors, in the same order on all ranks."""


class ReplicasDifferError(ElasticLaunchError):
    """Ranks do not have the same weights; the message names what differs, the step, and the ranks.

    The snapshots that are newer than the last state that was equal on all ranks are dropped, and a restart continues
    from the last checkpoint, or from the beginning if there is none. If it happens again at each start, the run ends
    when its restarts are spent. A difference that a later step has removed, as rounding may do, is not found. After a
    fault of another kind all ranks have the state of the first worker of their node, so that a difference is gone, or
    is on all of them.
    """


class ReplicaCheck:
    """Compares the ranks' copies of a training's state.

    All ranks call all methods at the same boundaries, so that their collectives come in one order. Rank 0's clock
    starts a comparison: ``wanted`` at one boundary, agreed at the next, a checksum sent with the wishes of the one
    after that (on a GPU, which is not waited for, one boundary later), the result one boundary later.

    Args:
        group: returns a process group of all ranks, for CPU tensors.
        mesh: that of this rank's replica; the parts of DTensors are compared among the ranks with the same coordinate.
    """

    def __init__(
        self, world: World, group: Callable[[], dist.ProcessGroup], named: Named, mesh: ReplicaMesh | None = None
    ) -> None:
        self.good: int | None = None  # the last step in this process after which nothing differed
        self._world = world
        self._group = group
        self._named = named
        self._mesh = mesh
        self._costs: deque[float] = deque(maxlen=MEMORY)
        self._at: float | None = None
        self._under_way = False  # on rank 0, from the wish on
        self._agreed = False
        self._taken: _Taken | None = None
        self._posting: _Taken | None = None  # at this boundary
        self._posted: _Taken | None = None  # at the previous one

    def wanted(self) -> bool:
        """Whether this rank wants a comparison; only rank 0 does, as often as the cost allows."""
        due = self._world.rank == 0 and not self._under_way and self._due()
        self._under_way |= due
        return due

    def _due(self) -> bool:
        # The first comparison costs more than later ones, and does not count.
        return not self._costs or (time.monotonic() - (self._at or 0.0)) * SHARE >= statistics.median(self._costs)

    def to_post(self, step: int) -> int | None:
        """Return the checksum to send with the wishes of this boundary; None if none is due."""
        if self._agreed:
            self._agreed = False
            self._taken = _Taken(step, self._named, self._mesh)
        if self._taken is None or not self._taken.ready(step):
            return None
        self._posting, self._taken = self._taken, None
        return self._posting.total()

    def heard(self, *, agreed: bool, differs: bool) -> None:
        """Handle the result of the previous boundary's wishes; called after this boundary's wishes are posted.

        Args:
            agreed: whether a comparison is to be made.
            differs: whether the posted checksums differed.
        """
        posted, self._posted, self._posting = self._posted, self._posting, None
        self._agreed |= agreed
        if posted is not None:
            self._under_way = False
            self._judge(posted, differs)

    def compare(self, step: int) -> None:
        """Compare the state after a step immediately."""
        taken = _Taken(step, self._named, self._mesh)
        self._judge(taken, not all(are_same([taken.total()], self._group())))

    def _judge(self, taken: _Taken, differs: bool) -> None:
        if self._at is not None:
            self._costs.append(taken.cost)
        self._at = time.monotonic()
        if not differs:
            self.good = taken.step
            return
        raise ReplicasDifferError(*self._explained(taken))

    def _explained(self, taken: _Taken) -> tuple[str, str]:
        """Find out, together with all ranks, what differs and on which ranks."""
        sums = taken.sums().tolist()
        counts = [count for (count,) in numbers_of_all(self._world, [len(sums)], self._group())]
        before = "" if self.good is None else f"After step {self.good} they were the same. "
        hint = (
            f"{before}Either the script itself changes something differently on some ranks, or the memory of a rank's "
            "host or device has failed. A restart resumes from the last state that was the same on all ranks."
        )
        if len(set(counts)) > 1:
            found = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts))
            return f"After step {taken.step} the ranks have different numbers of tensors: {found}.", hint
        columns = [*zip(*numbers_of_all(self._world, sums, self._group()), strict=True)]
        size = 1 if self._mesh is None else self._mesh.inner.size()
        differing = [
            (which, {rank: column[rank] for rank in ranks})
            for which, column in enumerate(columns)
            for ranks in _alike(len(column), size if which in taken.divided else 1)
            if len({column[rank] for rank in ranks}) > 1
        ]
        name, column = taken.names[differing[0][0]], differing[0][1]
        (common, most), *_ = Counter(column.values()).most_common()
        others = [rank for rank, value in column.items() if value != common]
        same = [rank for rank, value in column.items() if value == common]
        where = (
            f"{ranks_text(others)} differ{'s' if len(others) == 1 else ''} from {ranks_text(same)}"
            if 2 * most > len(column)
            else f"{ranks_text([*column])} differ"
        )
        others_too = len({which for which, _ in differing}) - 1
        more = f" {others_too} more tensor{'s differ' if others_too > 1 else ' differs'}, too." if others_too else ""
        return f"After step {taken.step} the ranks do not have the same {name}: {where}.{more}", hint


class _Taken:
    """The checksums of a state; on GPUs they may still be being computed."""

    def __init__(self, step: int, named: Named, mesh: ReplicaMesh | None = None) -> None:
        began = time.monotonic()
        found = list(named())
        self.step = step
        self.names = [name for name, _ in found]
        self._marks: list[torch.cuda.Event] = []
        device = found[0][1].device if found else torch.device("cpu")
        if device.type == "cuda":
            self._marks.append(_mark(device))
        self.divided = {which for which, (_, tensor) in enumerate(found) if is_sharded(tensor)}
        sums = checksums([local(tensor) for _, tensor in found])
        total = combined(sums)
        if mesh is not None and self.divided:
            # A replica's ranks have different parts, and add up to one number.
            copies = sums.clone()
            copies[[*self.divided]] = 0
            parts = combined(sums - copies)
            for dimension in range(mesh.inner.ndim):
                dist.all_reduce(parts, group=mesh.inner.get_group(dimension))
            total = combined(copies) + parts
        both = torch.cat([sums, total[None]])
        if device.type == "cuda":
            self._result = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            self._result.copy_(both, non_blocking=True)
            self._marks.append(_mark(device))
        else:
            self._result = both
        self._seconds = time.monotonic() - began

    def ready(self, step: int) -> bool:
        """Whether it can be read without a long wait; decided by the steps since, so the same on all ranks."""
        return not self._marks or step > self.step

    def total(self) -> int:
        """Return one checksum of all tensors."""
        return int(self._read()[-1])

    def sums(self) -> Tensor:
        """Return the checksum of each tensor."""
        return self._read()[:-1]

    @property
    def cost(self) -> float:
        """Seconds that computing it took."""
        if len(self._marks) < 2:
            return self._seconds
        return max(self._seconds, float(self._marks[0].elapsed_time(self._marks[1])) / 1000)

    def _read(self) -> Tensor:
        if self._marks:
            self._marks[-1].synchronize()
        return self._result


def _alike(world_size: int, size: int) -> list[range]:
    """Return the ranks that have the same coordinate in replicas of a size, for each coordinate."""
    return [range(first, world_size, size) for first in range(size)]


def _mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks, at most eight of them."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown}"


def replicated(
    model: nn.Module,
    optimizer: Any,
    ignored: Mapping[str, object] | Iterable[str] = (),
    *,
    divided: bool = False,
) -> Named:
    """Return a function that returns the tensors of a model and its optimizer to compare.

    Args:
        ignored: names of buffers and frozen parameters that may differ between ranks.
        divided: whether there are copies of DTensors, too: other replicas have them.
    """
    left_out = set(ignored)

    def named() -> Iterator[tuple[str, Tensor]]:
        names: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            names[id(parameter)] = name
            if name not in left_out:
                yield f"parameter {name!r}", parameter
        for name, buffer in model.named_buffers():
            if name not in left_out:
                yield f"buffer {name!r}", buffer
        places = enumerate(p for group in getattr(optimizer, "param_groups", []) for p in group["params"])
        numbers = {id(parameter): (number, parameter) for number, parameter in places}
        # In the model's order: if a script takes them from a set, their order differs between ranks.
        ordered = [numbers.pop(which) for which in names if which in numbers]
        for number, parameter in [*ordered, *numbers.values()]:
            name = repr(names[id(parameter)]) if id(parameter) in names else f"parameter {number} of the optimizer"
            if id(parameter) not in names:
                yield name, parameter
            state = {} if is_zero(optimizer) else getattr(optimizer, "state", {}).get(parameter, {})
            for key in sorted(state, key=str) if isinstance(state, dict) else []:
                if isinstance(state[key], Tensor):
                    yield f"optimizer's {key} of {name}", state[key]

    return lambda: ((name, each) for name, each in named() if _is_plain(each) or (divided and is_sharded(each)))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's bytes can be read; those of subclasses cannot, since each rank may have only a part."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta

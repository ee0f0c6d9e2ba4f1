"""The mesh within a replica: consecutive ranks of a node divide a model, and all replicas have copies of it.

Rank (replica * shard + s) * tensor + t has the coordinate (s, t) in its replica. Each pair (replica, s) has
micro-batches of its own; the tensor ranks of a pair share them. Each group is formed by its own ranks alone, kind after
kind, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group

from elastic_launch.errors import UsageError
from elastic_launch.training.ranks.world import World

SHARD, TENSOR = DIMENSIONS = "shard", "tensor"
"""The names of the mesh's dimensions."""


@dataclass(slots=True)
class RankGroup:
    """Ranks that exchange something among themselves.

    Attributes:
        size: how many they are.
        place: this rank's number among them, from 0.
        group: their process group; None: that of all ranks, or the round is over.
    """

    size: int
    place: int
    group: dist.ProcessGroup | None = None

    def rank(self, place: int) -> int:
        """Return the rank, among all, of one of them."""
        return place if self.group is None else dist.get_global_rank(self.group, place)


ALL = RankGroup(0, 0)
"""All ranks, where only their group is asked for."""


@dataclass(frozen=True, slots=True)
class ReplicaMesh:
    """The mesh of this rank's replica, and the ranks with which it shares something else.

    Attributes:
        inner: the ``DeviceMesh`` with the dimensions ``shard`` and ``tensor``.
        slices: its dimensions, each as a ``DeviceMesh``. Others that the script makes of it are equal to these, also
            in a later round, where this process may be another rank, see :func:`own_ranks`.
        tensor: the ranks of the replica with this rank's ``shard`` coordinate, which share micro-batches.
        data: the ranks of all replicas with this rank's ``tensor`` coordinate: each has micro-batches of its own.
        across: the ranks of all replicas with this rank's coordinate, which have the same shards.
    """

    inner: Any
    slices: tuple[Any, Any]
    tensor: RankGroup
    data: RankGroup
    across: RankGroup

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes of ``shard`` and ``tensor``."""
        shard, tensor = self.inner.shape
        return shard, tensor

    def has(self, mesh: Any) -> bool:
        """Whether a ``DeviceMesh`` is this one, or one of its dimensions."""
        return any(mesh == own for own in (self.inner, *self.slices))

    def across_with(self, ranks: Collection[int]) -> list[int]:
        """Return the places of those of some ranks that have this rank's coordinate."""
        return [place for place in range(self.across.size) if self.across.rank(place) in ranks]

    def leave(self) -> None:
        """Drop the groups, since the round is over. What FSDP's modules have of the last round has this object."""
        getattr(self.inner, "_pg_registry", {}).clear()
        for each in (self.tensor, self.data, self.across):
            each.group = None

    @staticmethod
    def formed(
        world: World,
        device_type: str,
        shard: int,
        tensor: int,
        timeout: float,
        kept: ReplicaMesh | None = None,
        *,
        forming: Callable[..., AbstractContextManager[None]],
        outlives: bool = False,
    ) -> ReplicaMesh:
        """Form the groups; called by all ranks. The shape must fit the world, see :func:`check_shape`.

        Args:
            kept: that of an earlier round, of the same shape. Its ``DeviceMesh`` gets the new groups: the hooks of
                ``parallelize_module`` and all DTensors have it. It goes on to name the ranks of the round in which it
                was made.
            forming: returns the context in which groups are formed, with ``inner=True`` those within the replica.
            outlives: whether the mesh is to be kept in another round.

        Raises:
            RuntimeError: if this process' coordinate in its replica is not the one that it had.
        """
        from torch.distributed.device_mesh import DeviceMesh  # slow to import

        ranks = torch.arange(world.world_size, device="cpu").view(-1, shard, tensor)
        at, s, t = (int(place) for place in (ranks == world.rank).nonzero()[0])

        if kept is not None and tuple(kept.inner.get_coordinate()) != (s, t):
            raise RuntimeError(f"This process has the coordinate {s, t} in its replica, and had another one.")

        def peers(among: torch.Tensor, *, inner: bool = False) -> RankGroup:
            members = among.flatten().tolist()
            group = None
            # The group of all ranks may be larger in the next round, and its name is always the same.
            if (inner and outlives) or len(members) < world.world_size:
                group = dist.new_group(members, timedelta(seconds=timeout), use_local_synchronization=True)
            return RankGroup(len(members), members.index(world.rank), group)

        with forming(inner=True):
            shards, tensors = peers(ranks[at, :, t], inner=True), peers(ranks[at, s], inner=True)
        groups: Any = [each.group or dist.group.WORLD for each in (shards, tensors)]
        if kept is None:
            inner = DeviceMesh.from_group(groups, device_type, mesh=ranks[at], mesh_dim_names=DIMENSIONS)
            slices = inner[SHARD], inner[TENSOR]
        else:
            inner, slices = kept.inner, kept.slices
            for name, group in zip(inner._dim_group_names, groups, strict=True):
                if name != group.group_name:  # by which meshes and DTensors find it
                    _register_process_group(name, group)
                getattr(inner, "_pg_registry", {})[name] = group
        with forming():
            return ReplicaMesh(inner, slices, tensors, data=peers(ranks[:, :, t]), across=peers(ranks[:, s, t]))


def check_shape(world: World, shard: int, tensor: int) -> None:
    """Check that replicas of a shape fit the world.

    Raises:
        UsageError: if the sizes are not whole numbers above 0, there is no process group, or the ranks of a replica
            would not be on one node, or not those of the launcher's replica.
    """
    call = f"run.mesh(shard={shard!r}, tensor={tensor!r})"
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in (shard, tensor)):
        raise UsageError(f"{call}: a dimension has a whole number of ranks, 1 or more.")
    if not dist.is_initialized():
        raise UsageError(f"{call} needs a process group.", "Run the script under elastic-launch or torchrun.")
    size, workers = shard * tensor, world.local_world_size
    if (given := world.replica_size) not in (1, size):
        raise UsageError(
            f"{call}: a replica has {size} ranks, and the launcher's replicas have {given}.",
            f"Give elastic-launch --replica-size {size}, or run.mesh() a shape of {given} ranks.",
        )
    if workers % size or world.world_size % size:
        raise UsageError(
            f"{call}: a replica has {size} ranks on one node, and the {workers} workers of this node are not a "
            "multiple of that.",
            f"Start {size} workers on each node, or a multiple (--nproc), or give run.mesh() another shape.",
        )


@contextmanager
def own_ranks(inner: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """Within this context, what torch makes of a mesh has the rank that this process had when the mesh was made.

    Torch looks in the mesh for the rank that this process has now among all. In another round that may be another one,
    and before this process has a place it has none: torch then fails, or takes it for a process outside of the mesh.

    Args:
        inner: returns the mesh whose copies share what it has of its groups: the compiler keeps some, which would keep
            the groups of a round that is over.
    """
    from torch.distributed.device_mesh import DeviceMesh  # slow to import

    before = []
    replaced: dict[str, Callable[[Any], Any]] = {
        "__init__": _slices,
        "_get_mesh_tensor_from_full_mesh": _looks_up,
        "__setstate__": partial(_copies, inner=inner),
    }
    for name, made in replaced.items():
        if name in vars(DeviceMesh):
            # As the class has it: what getattr() returns does not bind an instance when it is put back.
            before.append((name, vars(DeviceMesh)[name]))
            setattr(DeviceMesh, name, wraps(vars(DeviceMesh)[name])(made(getattr(DeviceMesh, name))))
    try:
        yield
    finally:
        for name, function in before:
            setattr(DeviceMesh, name, function)


def _slices(init: Callable[..., None]) -> Callable[..., None]:
    def call(mesh: Any, *args: Any, **kwargs: Any) -> None:
        if (root := kwargs.get("_root_mesh")) is not None:
            kwargs.setdefault("_rank", getattr(root, "_rank", None))
        init(mesh, *args, **kwargs)

    return call


def _looks_up(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        mesh, *rest = args
        if isinstance(mesh, torch.Tensor):  # called on the class
            return function(*args, **kwargs)
        root = getattr(mesh, "_root_mesh", None) or mesh
        return function(*rest, **{"current_rank": getattr(root, "_rank", None), **kwargs})

    return call


def _copies(set_state: Callable[..., None], inner: Callable[[], Any]) -> Callable[..., None]:
    def call(mesh: Any, state: Any) -> None:
        set_state(mesh, state)
        known = getattr(inner(), "_pg_registry", {})
        if known and known.keys() >= {*getattr(mesh, "_dim_group_names", ())}:
            mesh._pg_registry = known

    return call


def mesh_names(tensor: Any) -> Sequence[str]:
    """Return the names of the dimensions of the mesh that a DTensor is on; of a plain tensor none."""
    mesh = getattr(tensor, "device_mesh", None)
    return () if mesh is None else tuple(mesh.mesh_dim_names or ())


def is_cut(tensor: Any, dimension: str) -> bool:
    """Whether each rank of a dimension of a mesh has another part of a tensor."""
    names = mesh_names(tensor)
    return dimension in names and hasattr(tensor.placements[names.index(dimension)], "dim")

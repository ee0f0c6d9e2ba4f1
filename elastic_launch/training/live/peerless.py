"""Process groups without peers: a process that was started ahead builds a divided model before it has a place.

``parallelize_module`` and ``fully_shard`` need the groups of a replica's mesh, and the replica's other processes may
not have come so far. These groups know the rank and the size that the process will have in its replica, and exchange
nothing. ``distribute_tensor`` takes this rank's part of its own tensor, as with ``src_data_rank=None``: all ranks build
the same model. All other exchanges, and questions to the group of all ranks, wait for the place, and go on with the
round's groups. Only in a rehearsal what torch and the library exchange ends at once, with undefined results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup, distributed_c10d

from elastic_launch.training.ranks.collectives import FUNCTIONS, METHODS, called_by_script

_ASKS = ("rank", "size")


class PeerlessGroups:
    """Makes the default group one without peers, and those that are formed after it, until :meth:`leave`.

    Args:
        rank, size: those of this process in its replica.
        find_place: joins the round, if this process has not, and forms groups of the same names in it.

    Attributes:
        exchanged: whether the script, or what it has called, exchanges in its replica before the training.
    """

    def __init__(self, rank: int, size: int, find_place: Callable[[], object]) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        hook = sys.excepthook
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        sys.excepthook = hook  # torch's names the rank
        self._default = dist.group.WORLD
        self._find_place = find_place
        self._left: list[ProcessGroup] = []
        self._builds = True
        self._rehearses = False
        self.exchanged = False
        self._put_back: list[tuple[Any, str, Any]] = []
        self._replace_functions()

    def leave(self) -> None:
        """Destroy the groups, before those of the first round are formed; later it does nothing."""
        if self._left:
            return
        self._left = [*distributed_c10d._world.pg_map]  # what was built with them may still call them
        dist.destroy_process_group()

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Within this context, exchanges that the script does not call itself end at once, with undefined results."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def built(self) -> None:
        """The training begins: from now on, ``distribute_tensor`` exchanges."""
        self._builds = self.exchanged = False

    def close(self) -> None:
        """Put torch's functions back."""
        while self._put_back:
            setattr(*self._put_back.pop())

    def _replace_functions(self) -> None:
        from torch.distributed.tensor import placement_types  # slow to import

        local = {"mesh_scatter": self._scatters, "mesh_broadcast": self._broadcasts}
        replaced: list[tuple[Any, str, Callable[..., Any]]] = [
            *((ProcessGroup, name, self._redirects) for name in (*METHODS, *_ASKS)),
            *((functional, name, self._resolves) for name in FUNCTIONS),
            *((placement_types, name, made) for name, made in local.items()),
            (distributed_c10d, "_new_group_with_tag", self._forms),
        ]
        for holder, name, made in replaced:
            if name in vars(holder):
                # As a class has it: what getattr() returns does not bind an instance when it is put back.
                self._put_back.append((holder, name, vars(holder)[name]))
                setattr(holder, name, wraps(vars(holder)[name])(made(getattr(holder, name))))

    def _has(self, group: object) -> bool:
        return any(group is each for each in self._left or distributed_c10d._world.pg_map)

    def _is_inner(self, mesh: Any, mesh_dim: int) -> bool:
        """Whether a dimension of a mesh has one of these groups, or while the script builds what stands for it."""
        group = mesh.get_group(mesh_dim)
        if self._has(group):
            return True
        # Ranks of the replica that are kept are not at this place.
        inner = (each for each in self._left if each is not self._default)
        return self._builds and any(group is _resolve_process_group(each.group_name) for each in inner)

    def _of_round(self, group: ProcessGroup) -> ProcessGroup:
        """Return the round's group in place of one of these."""
        self.exchanged |= self._builds and group is not self._default
        self._find_place()
        if group is self._default:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        return _resolve_process_group(group.group_name)

    def _redirects(self, method: Callable[..., Any]) -> Callable[..., Any]:
        asks = method.__name__ in _ASKS

        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            rehearsed = self._rehearses and not called_by_script()
            if not torch.compiler.is_compiling() and not rehearsed and self._has(group):
                # Ranks in a replica stay as they are; get_rank(group) looks for its result with the rank among all.
                caller = sys._getframe(1)
                of = caller.f_locals.get("group") if caller.f_globals is vars(distributed_c10d) else None
                among_all = of is None or of is self._default
                if not asks or (group is self._default and among_all and called_by_script()):
                    group = self._of_round(group)
            return method(group, *args, **kwargs)

        return call

    def _resolves(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            rehearsed = self._rehearses and not called_by_script()
            if not torch.compiler.is_compiling() and not rehearsed:
                self.exchanged |= self._builds
                self._find_place()
            found = function(*args, **kwargs)
            return found if rehearsed or not self._has(found) else self._of_round(found)

        return call

    def _scatters(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(output: Tensor, parts: list[Tensor], mesh: Any, mesh_dim: int = 0, *args: Any, **kwargs: Any) -> Any:
            if not self._is_inner(mesh, mesh_dim):
                return function(output, parts, mesh, mesh_dim, *args, **kwargs)
            if not output.is_meta:
                output.copy_(parts[mesh.get_coordinate()[mesh_dim]])
            return None

        return call

    def _broadcasts(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, mesh: Any, mesh_dim: int = 0, *args: Any, **kwargs: Any) -> Any:
            if self._is_inner(mesh, mesh_dim):
                return None
            return function(tensor, mesh, mesh_dim, *args, **kwargs)

        return call

    def _forms(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._left and called_by_script():  # before it takes the default group's backend and store
                self._find_place()
            return function(*args, **kwargs)

        return call

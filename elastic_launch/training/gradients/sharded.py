"""The gradients of parameters that ``fully_shard`` has sharded: each rank gets its shard of the sums.

FSDP gathers a group of parameters for each forward and backward pass, and reduces the group's gradients at the end of
each backward pass, all in collectives: all ranks make the same number of passes, some of which count nothing. The
reduction is replaced here by one that adds and does not average. In exact mode it keeps the gradients in the fixed tree
of ``tree``; in the last pass each rank receives its shard of all nodes, and folds it in the tree's order. The tree
adds element by element, so it does not matter how a group's gradients are laid out.

Within replicas (``run.mesh()``) FSDP reduces each pass over the replica's ranks, and the sums of the step are added
over the replicas. In exact mode the nodes go to all ranks with the same tensor coordinate: each folds a piece of a
shard, and the ranks that have the same shard exchange their pieces.

A parameter that a micro-batch does not use, such as an expert's, is reduced as zeros, so that all ranks reduce the same
ones together. The ranks agree on those that no micro-batch of the step has used: these have no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_launch.batch import BatchPlan, slice_of
from elastic_launch.errors import UsageError
from elastic_launch.training.gradients.flat import together
from elastic_launch.training.gradients.parameters import Parameters
from elastic_launch.training.gradients.tree import Segment, fold, joins, segments
from elastic_launch.training.live.waits import on_host
from elastic_launch.training.ranks.mesh import TENSOR, RankGroup, ReplicaMesh, is_cut
from elastic_launch.training.wrapped import MESH_HINT, is_sharded, local, sharding_groups, sharding_modules, whole


class ShardSums:
    """Sums the gradients of sharded parameters over micro-batches and ranks, into each parameter's ``grad``.

    Args:
        model: the sharded model, whose modules get the reduction.
        exact: whether sums must be bitwise equal at every world size.
        outlives: whether this process goes on after an exchange that has failed, see :meth:`going_through`.
        mesh: that of this rank's replica; None: the model is sharded over all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Parameters,
        world_size: int,
        rank: int,
        *,
        exact: bool,
        outlives: bool = False,
        mesh: ReplicaMesh | None = None,
    ) -> None:
        self._parameters = parameters
        self._mesh = mesh
        self._data = RankGroup(world_size, rank) if mesh is None else mesh.data
        self._across = RankGroup(1, 0) if mesh is None else mesh.across
        self._shards = self._data.size // self._across.size  # of each parameter
        self.exact = exact
        self._modules = sharding_modules(model)
        self._scatters: list[_Scatter] = []
        self._index: int | None = None  # of the micro-batch; None: the pass counts nothing
        self._last = False
        self._signature = 0
        self._void = False  # whether the current pass counts nothing
        self._reduced = 0  # elements in the current pass
        self._used: set[int] = set()  # ids of the parameters that a micro-batch of this rank has used in the step
        self._sums: dict[int, Any] = {}  # of the passes before, by the parameters' ids: the script may clear ``grad``
        self._outlives = outlives
        self._going_through = False
        self._differentiating = False  # whether a backward pass of the step is under way
        self._goes_on_within = mesh is not None and mesh.tensor.size > 1
        self.failed: RuntimeError | None = None
        """The error by which an exchange of this round has failed. From then on all others count nothing."""
        self._plan = BatchPlan((), 1, ())
        for module in self._modules:
            scatter = _Scatter(self)
            try:
                if outlives:
                    module.set_custom_all_gather(_Gather(self))
                module.set_custom_reduce_scatter(scatter)
                module.set_all_reduce_hook(scatter.reduced)
            except ValueError as error:
                raise UsageError(
                    f"fully_shard(mesh=..., shard_placement_fn=...): {error}",
                    'Give all parameters one mesh of one dimension, such as run.mesh(shard=S)["shard"].',
                ) from error
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_requires_gradient_sync(True, recurse=False)
            self._scatters.append(scatter)
        for group in sharding_groups(model):
            group.post_backward = partial(self._after_backward, group)

    def passes(self, plan: BatchPlan) -> int:
        """Return the number of passes that every rank makes in a step."""
        return -(-plan.total // self._data.size)

    def begin(self, plan: BatchPlan) -> None:
        """Start a step."""
        self._plan = plan
        self._used.clear()
        self.reset()
        if self._signature != self._parameters.signature:  # some were frozen or unfrozen
            self._signature = self._parameters.signature
            for scatter in self._scatters:
                scatter.sizes.clear()
        self.reshard()

    def reshard(self) -> None:
        """Let each rank have only its shards: an evaluation leaves the outermost module's parameters gathered."""
        for module in self._modules:
            module.reshard()

    def _after_backward(self, group: Any, *unused: Any) -> None:
        """Note which parameters of a module have got a gradient, before FSDP reduces them."""
        used = set()
        for each in group.fsdp_params:
            gathered = getattr(each, "_unsharded_param", None)
            if each.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None):
                used.add(id(each.sharded_param))
        if used and not self._differentiating:
            raise UsageError(
                "The script has run a backward pass itself that reaches parameters of the sharded model, which FSDP "
                "would reduce over the ranks.",
                "Use torch.autograd.grad() for what is not trained, or add its loss to that of step.backward().",
            )
        if self._index is not None:
            self._used |= used
        # Older versions of torch do not know it, see _partial(). A module that is called several times in a pass gets
        # its gradients after the last one only.
        group.reduce_scatter_unused_params = bool(used)
        type(group).post_backward(group)

    @property
    def whole(self) -> bool:
        """Whether this rank's micro-batches have used each parameter, so that the others need not report which."""
        return all(id(p) in self._used for p in self._parameters.sharded.values() if p.requires_grad)

    def reset(self) -> None:
        """Drop the sums."""
        self._sums.clear()
        for scatter in self._scatters:
            scatter.stacks.clear()

    @contextmanager
    def going_through(self) -> Iterator[None]:
        """The context of a pass, within which an exchange that fails raises nothing.

        The script's code goes on with parameters of zeros; the error is raised by :meth:`end_pass`. If it came out of
        the script's call of the model, nothing could catch it, and it would leave FSDP in the middle of a pass.
        """
        self._going_through = self._outlives
        try:
            yield
        finally:
            self._going_through = False

    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """The context of a pass's backward pass; within others, which are the script's own, nothing can be reduced."""
        self._differentiating = True
        try:
            yield
        finally:
            self._differentiating = False

    def exchanged(self, output: Tensor, exchange: Callable[[], Any], *, inner: bool = True) -> Any:
        """Return what an exchange returns; if it has failed, None, with an output of zeros.

        Args:
            inner: whether it is one of this replica's ranks alone. Where the script's code has such exchanges, too,
                between ``tensor`` ranks, they are made also after others have failed: no rank may leave one out.
        """
        if self.failed is None or (inner and self._goes_on_within):
            try:
                return exchange()
            except RuntimeError as error:
                self.failed = self.failed or error
                self._goes_on_within &= not inner
                if not self._going_through:
                    raise
                error.__traceback__ = None  # it may keep a work alive, and thus the process group
        output.zero_()
        return None

    def begin_pass(self, number: int, *, void: bool = False) -> None:
        """Begin this rank's number-th pass; ``void``: its gradients count as 0."""
        micros = self._plan.micro_batches
        self._index = micros[number].index if number < len(micros) else None
        self._void = void or self._index is None
        self._last = number == self.passes(self._plan) - 1
        self._reduced = 0
        for scatter in self._scatters:
            scatter.calls = scatter.made = 0
        if self._index is not None and not self.exact:
            # Right before the backward pass, which adds to them in place. A pass without a micro-batch of this rank
            # has the script's code between.
            for parameter in self._parameters.sharded.values():
                parameter.grad = self._sums.pop(id(parameter), None)

    def end_pass(self) -> None:
        """End a pass, in which each parameter must have got its gradient.

        Raises:
            RuntimeError: the error by which an exchange in it has failed.
        """
        if self.failed is not None:
            raise self.failed
        trained = [(n, p) for n, p in self._parameters.sharded.items() if p.requires_grad]
        if self._reduced != sum(_padded(p, self._shards) for _, p in trained):
            without = ", ".join(name for name, p in trained if p.grad is None)
            raise _partial(f", such as {without}" if without else "")
        for _, parameter in trained:
            if not self.exact:
                self._add(parameter)
            elif not self._last:
                parameter.grad = None  # zeros: the sums are in the tree

    def _add(self, parameter: Any) -> None:
        """Add the gradient of a pass to those before, and after the last one set it to the sum."""
        gradient, before = parameter.grad, self._sums.pop(id(parameter), None)
        if before is not None and gradient is not None:
            local(before).add_(local(gradient))
        gradient = gradient if before is None else before
        if self._last:
            parameter.grad = gradient
        elif gradient is not None:
            parameter.grad, self._sums[id(parameter)] = None, gradient

    def reduce(self, scatter: _Scatter, output: Tensor, given: Tensor, group: dist.ProcessGroup | None) -> None:
        """Reduce a group's gradients; called within the backward pass, with one shard for each rank."""
        if self._void:
            given.zero_()
        if not self.exact:
            dist.reduce_scatter_tensor(output, given, group=group)
            return
        stack = scatter.stack()
        if self._index is not None:
            _used_here(given)
            stack.append(_joined(stack, self._index, given))
        if not self._last:
            output.zero_()
            return
        nodes, total = stack.copy(), self._plan.total
        stack.clear()
        if self._data.size == 1:
            output.copy_(fold(total, nodes, lambda left, right: left.add_(right)))
            return
        nodes = self._exchanged([flat for _, flat in nodes], output, group if self._mesh is None else self._data.group)
        piece = fold(total, nodes, lambda left, right: left.add_(right))
        if self._across.size > 1:
            pieces = [torch.empty_like(piece) for _ in range(self._across.size)]
            dist.all_gather(pieces, piece, group=self._across.group)
            piece = torch.cat(pieces)[: len(output)]
        output.copy_(piece)

    def _exchanged(
        self, mine: Sequence[Tensor], like: Tensor, group: dist.ProcessGroup | None
    ) -> list[tuple[Segment, Tensor]]:
        """Return this rank's piece of its shard, of all ranks' nodes; as many ranks have a shard as it has pieces."""
        ranks, pieces, size = self._data.size, self._across.size, -(-len(like) // self._across.size)
        theirs = [segments(*slice_of(self._plan.total, ranks, rank)) for rank in range(ranks)]
        padding = pieces * size - len(like)
        rows = [flat.view(self._shards, -1) for flat in mine]
        cut = [(nn.functional.pad(x, (0, padding)) if padding else x).view(-1, pieces, size) for x in rows]
        # Rank replica * shards + shard folds the piece of the replica's number.
        shards = [flat[rank % self._shards, rank // self._shards] for rank in range(ranks) for flat in cut]
        given = torch.cat(shards) if shards else like.new_empty(0)
        counts = [len(nodes) * size for nodes in theirs]
        received = like.new_empty(sum(counts))
        dist.all_to_all_single(received, given, counts, [len(mine) * size] * ranks, group=group)
        return list(zip([node for nodes in theirs for node in nodes], torch.split(received, size), strict=True))

    def finish(self, *, whole: bool) -> None:
        """After the last pass, add the sums of all replicas; called by all ranks.

        Args:
            whole: whether each parameter is known to have a gradient; the same on all ranks.
        """
        if not whole:
            trained = [p for p in self._parameters.sharded.values() if p.requires_grad]
            used = torch.tensor([id(p) in self._used for p in trained], dtype=torch.uint8, device="cpu")
            if self._data.size > 1:
                on_host(dist.all_reduce, used, op=dist.ReduceOp.MAX)
            for parameter, there in zip(trained, used.tolist(), strict=True):
                parameter.grad = parameter.grad if there else None
        if self._across.size > 1 and not self.exact:
            gradients = [local(p.grad) for p in self._parameters.sharded.values() if p.grad is not None]
            together(gradients, partial(dist.all_reduce, group=self._across.group))

    def count(self, scatter: _Scatter, output: Tensor) -> None:
        """Record that a group's gradients were reduced."""
        self._reduced += len(output) * self._shards
        # FSDP does not call the reduction for a single shard. The output is going to be the gradients' memory.
        if self._shards == 1 and self.exact:
            self.exchanged(output, partial(self.reduce, scatter, output, output.clone(), None), inner=False)
        elif self._shards == 1 and self._void:
            output.zero_()


class _Gather:
    """Gathers the parameters of one module, as torch's ``DefaultAllGather``, which is in a private module."""

    def __init__(self, sums: ShardSums) -> None:
        self._sums = sums

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        # It has another name from torch 2.13 on.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        # Without NCCL, a work raises in wait(), which FSDP calls within the script's code.
        later = async_op and output_tensor.is_cuda
        return self._sums.exchanged(output_tensor, lambda: gather(output_tensor, input_tensor, group, later))


class _Scatter:
    """Reduces the gradients of one module's parameters, instead of ``reduce_scatter_tensor``.

    It has the methods of torch's ``ReduceScatter``, which is in a private module.
    """

    def __init__(self, sums: ShardSums) -> None:
        self._sums = sums
        self.stacks: list[list[tuple[Segment, Tensor]]] = []  # nodes of the tree, for each reduction in a pass
        self.calls = 0  # number of reductions in the current pass that have a stack
        self.made = 0  # number of reductions in the current pass
        self.sizes: list[int] = []  # number of elements of each reduction, as in the first pass

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self.made += 1
        if len(self.sizes) < self.made:
            self.sizes.append(len(input_tensor))
        # A model may take another path through zeros, in a pass that counts nothing.
        if self.sizes[self.made - 1] != len(input_tensor) and self._sums.failed is None:
            raise _partial("")  # before the ranks exchange different sizes, which may end a process
        reduce = partial(self._sums.reduce, self, output_tensor, input_tensor, group)
        self._sums.exchanged(output_tensor, reduce, inner=not self._sums.exact)

    def reduced(self, output: Tensor) -> None:
        _used_here(output)
        self._sums.count(self, output)

    def stack(self) -> list[tuple[Segment, Tensor]]:
        """Return the nodes that belong to the present call."""
        if self.calls == len(self.stacks):
            self.stacks.append([])
        self.calls += 1
        return self.stacks[self.calls - 1]


def _used_here(tensor: Tensor) -> None:
    """Keep a GPU tensor's memory until the current stream is done with it.

    FSDP calls reductions and their hooks on streams of its own. The memory belongs to another stream, which would use
    it again as soon as the tensor is dropped, see
    https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _partial(names: str) -> UsageError:
    return UsageError(
        f"A backward pass of the sharded model did not compute one gradient for each parameter{names}: the ranks would "
        "reduce different parameters together.",
        "In each micro-batch call every module that fully_shard got, whose parameters need not all be used (torch 2.13 "
        "or newer), and backward() once; freeze what is not trained (requires_grad_(False)).",
    )


def _joined(stack: list[tuple[Segment, Tensor]], index: int, value: Tensor) -> tuple[Segment, Tensor]:
    """Add a leaf to all nodes that it completes; return the last of them."""
    level = joins([segment for segment, _ in stack], index)
    for _ in range(level):
        value = stack.pop()[1].add_(value)
    return (index + 1 - (1 << level), level), value


def _padded(parameter: Any, shards: int) -> int:
    """Return the number of elements that a parameter's gradient has when it is reduced: equal shards, with padding."""
    dimension = parameter.placements[0].dim
    length, rest = parameter.shape[dimension], [*parameter.to_local().shape]
    del rest[dimension]
    for placement in parameter.placements[1:]:  # of the tensor ranks, each of which has a part of what is sharded
        if placement.is_shard(dimension):
            length = _part(length, parameter.device_mesh.size(1), parameter.device_mesh.get_local_rank(1))
    return int(math.prod(rest) * -(-length // shards) * shards)


def check_meshes(parameters: Parameters, mesh: ReplicaMesh | None, world_size: int) -> None:
    """Refuse DTensors on meshes whose exchanges are not known here.

    Args:
        mesh: that of this rank's replica; None: the script has asked for none.
    """
    everywhere = [*range(world_size)]
    divided: list[tuple[str, Any]] = [*parameters.sharded.items(), *parameters.parallel.items()]
    for name, parameter in divided:
        on, first = parameter.device_mesh, parameter.placements[0]
        where = f"{name} is a DTensor with the placements {parameter.placements} on {on}"
        if name in parameters.sharded and on.ndim > 1 and not hasattr(first, "dim"):
            raise UsageError(
                f"{where}: fully_shard(mesh=...) got a mesh of two dimensions, whose replicas would be fixed.",
                f"{MESH_HINT} The library reduces over the replicas.",
            )
        if mesh is not None and not mesh.has(on):
            raise UsageError(f"{where}, which is not of run.mesh().", f"The script has made it itself. {MESH_HINT}")
        if mesh is None and (on.ndim != 1 or on.mesh.tolist() != everywhere or name in parameters.parallel):
            raise UsageError(f"{where}: the library does not know how to reduce its gradients.", MESH_HINT)
        if name in parameters.sharded and not hasattr(first, "dim"):
            raise UsageError(f"{where}, on which fully_shard has not sharded it.", MESH_HINT)
        cut = [placement.dim for placement in parameter.placements if hasattr(placement, "dim")]
        if len(cut) == 2 and cut[0] == cut[1] and not _fit(length := parameter.shape[cut[0]], *on.shape):
            raise UsageError(
                f"{where}. Both dimensions of the mesh cut its dimension {cut[0]}, and torch cannot put the parts of "
                f"{length} elements together again.",
                f"Make it a multiple of {on.size()}, or cut another dimension.",
            )


def _fit(length: int, shards: int, tensors: int) -> bool:
    """Whether what FSDP has cut, after tensor parallelism, is what the placements of the DTensor say.

    FSDP shards the part of each tensor rank; by the placements, the tensor ranks divide what a shard has in all.
    """
    for shard in range(shards):
        parts = [_part(_part(length, tensors, tensor), shards, shard) for tensor in range(tensors)]
        if parts != [_part(sum(parts), tensors, tensor) for tensor in range(tensors)]:
            return False
    return True


def _part(length: int, count: int, place: int) -> int:
    """Return the length of one of ``count`` parts, as ``torch.chunk`` makes them."""
    each = -(-length // count)
    return min(each, max(0, length - each * place))


def placed(parameter: Any, gradient: Any) -> Tensor:
    """Return this rank's part of a gradient, as that of its parameter; called by all its tensor ranks."""
    with torch.no_grad():
        whole = is_sharded(gradient) and gradient.placements != parameter.placements
        return local(gradient.redistribute(parameter.device_mesh, parameter.placements) if whole else gradient)


def as_placed(parameter: Any, part: Tensor) -> Tensor:
    """Return this rank's part of a gradient as a DTensor, if the parameter is one."""
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor  # slow to import

    how = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
    made: Tensor = DTensor.from_local(part, parameter.device_mesh, parameter.placements, **how)
    return made


def same_on_tensor_ranks(parameters: Iterable[Tensor], mesh: ReplicaMesh) -> None:
    """Give tensor ranks the first one's gradients of what they have copies of; kernels may not give all the same bits.

    Called by all ranks after the sums.
    """
    if mesh.tensor.size > 1:
        copies = (p.grad for p in parameters if p.grad is not None and not is_cut(p, TENSOR))
        parts = [local(x) for x in copies if x.layout is torch.strided]
        together(parts, partial(dist.broadcast, src=mesh.tensor.rank(0), group=mesh.tensor.group))


def total_norm(gradients: Sequence[Any], *, exact: bool, meshed: bool = False) -> Tensor:
    """Return the 2-norm of all gradients together; called by all ranks if some are sharded.

    Args:
        exact: whether it must be bitwise equal at every world size; then each gradient is gathered, one by one.
        meshed: whether they are divided within replicas, all of which must get the same.
    """
    sharded = [gradient for gradient in gradients if is_sharded(gradient)]
    if not sharded:
        total: Tensor = nn.utils.get_total_norm(gradients)
        return total
    if exact:
        norms = [nn.utils.get_total_norm([whole(x)]) for x in gradients]
        found: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return found
    # The squares of the parts on each mesh; of a copy, those of the first rank that has it.
    sums: dict[Any, Tensor] = {}
    for x in gradients:
        square = torch.linalg.vector_norm(local(x), dtype=torch.float64).square()
        mesh = x.device_mesh if is_sharded(x) else None
        if mesh is not None and any(
            not hasattr(placement, "dim") and place
            for placement, place in zip(x.placements, mesh.get_coordinate(), strict=True)
        ):
            square.zero_()
        sums[mesh] = sums[mesh] + square if mesh in sums else square
    for mesh, squares in sums.items():
        for dimension in range(0 if mesh is None else mesh.ndim):
            dist.all_reduce(squares, group=mesh.get_group(dimension))
    everywhere = torch.stack([*sums.values()]).sum()
    if meshed:
        dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
    return everywhere.sqrt().float()


def clip(parameters: Sequence[Tensor], most: float, *, exact: bool, meshed: bool = False) -> Tensor:
    """Limit the 2-norm of the gradients of parameters, and return it as it was; called by all ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(map(is_sharded, gradients)):
        found: Tensor = nn.utils.clip_grad_norm_(parameters, most)
        return found
    norm = total_norm(gradients, exact=exact, meshed=meshed)
    # On each rank's part: torch refuses to multiply sharded and other tensors by one tensor together.
    with torch.no_grad():
        factor = torch.clamp(most / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            local(gradient).mul_(factor)
    return norm

"""The parameters of a training: the model's, and those of the optimizer that are not in the model.

Every parameter that an optimizer changes must have the same gradient on all ranks, even if it is not in the model, such
as the weight of a loss or a temperature. Layers may be frozen and unfrozen, and groups added to the optimizer, between
any two steps.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from elastic_launch.errors import UsageError
from elastic_launch.snapshot.format.dtypes import bytes_of, dense
from elastic_launch.training.ranks.exchange import are_same, broadcast_state, broadcast_tensors
from elastic_launch.training.ranks.mesh import TENSOR, ReplicaMesh, is_cut, mesh_names
from elastic_launch.training.wrapped import is_sharded, local


class Parameters:
    """The parameters of a model and an optimizer, and which of them need gradients.

    Attributes:
        all: the model's by name, in its order, then those only in the optimizer, in its order.
        trained: those that need gradients.
        extra: those that are not in the model.
        sharded: those that ``fully_shard`` has sharded.
        parallel: those of which each tensor rank of a replica has a part, or a copy; DTensors, too.
        reduced: the trained ones that ``fully_shard`` has not sharded, whose gradients are reduced here.
        sparse: places, in ``reduced``, of those that get sparse gradients.
        signature: a number of 40 bits, equal on all ranks if their parameters are, and have changed equally often.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model = model
        self._optimizer = optimizer
        self._generation = 0
        self._find()

    def changed(self) -> bool:
        """Whether the set of parameters, or the dtype of one, has changed since it was last determined."""
        # The model is searched again only if the optimizer's parameters changed: others are not trained.
        return self._kinds_now() != self._kinds or self._ids() != self._in_optimizer

    def beside_optimizer(self) -> list[Tensor]:
        """Return the trained parameters that have a gradient and are not in the optimizer."""
        own = set(self._in_optimizer)
        return [p for p in self.trained.values() if p.grad is not None and id(p) not in own]

    def apart(self) -> bool:
        """Whether the optimizer has parameters, but none of the model's parameters that need gradients."""
        own = set(self._in_optimizer)
        models = [id(p) for p in self._model.parameters() if p.requires_grad]
        return bool(own and models) and own.isdisjoint(models)

    def follow(self) -> list[str]:
        """Determine the parameters again; return the names of those that are new, frozen, unfrozen or converted."""
        before = dict(zip(map(id, self.all.values()), self._kinds, strict=True))
        self._find()
        kinds = zip(self.all.items(), self._kinds, strict=True)
        return [name for (name, parameter), kind in kinds if before.get(id(parameter)) != kind]

    def _ids(self) -> list[int]:
        return [id(parameter) for group in self._groups() for parameter in group["params"]]

    def _kinds_now(self) -> list[tuple[bool, torch.dtype]]:
        return [(parameter.requires_grad, parameter.dtype) for parameter in self.all.values()]

    def _groups(self) -> list[dict[str, Any]]:
        return list(getattr(self._optimizer, "param_groups", []))

    def _find(self) -> None:
        found = dict(self._model.named_parameters())
        known, self.extra = set(map(id, found.values())), dict[str, Tensor]()
        for number, group in enumerate(self._groups()):
            # Optimizers keep names if they were given any.
            names = group.get("param_names") or [""] * len(group["params"])
            for place, (parameter, name) in enumerate(zip(group["params"], names, strict=True)):
                if id(parameter) not in known:
                    where = f"optimizer.param_groups[{number}]['params'][{place}]"
                    self.extra[f"{name} ({where})" if name else where] = parameter
                    known.add(id(parameter))
        self.all: dict[str, Tensor] = {**found, **self.extra}
        for name, parameter in self.all.items():
            _check(name, parameter)
        self._in_optimizer = self._ids()
        self._kinds = self._kinds_now()
        self.trained = {name: parameter for name, parameter in self.all.items() if parameter.requires_grad}
        divided = {name: parameter for name, parameter in self.all.items() if is_sharded(parameter)}
        self.parallel = {name: p for name, p in divided.items() if mesh_names(p) == (TENSOR,)}
        self.sharded = {name: p for name, p in divided.items() if name not in self.parallel}
        self.reduced = {name: p for name, p in self.trained.items() if name not in self.sharded}
        sparse = _sparse(self._model)
        if self.sharded and sparse:
            raise UsageError(
                f"The model is sharded, and {', '.join(sparse.values())}, of an embedding with sparse=True, gets a "
                "sparse gradient, which FSDP cannot reduce.",
                "Build it with sparse=False.",
            )
        self.sparse = frozenset(
            which for which, parameter in enumerate(self.reduced.values()) if id(parameter) in sparse
        )
        text = "\n".join(" ".join(map(str, line)) for line in [*self._description(), [self._generation]])
        self._generation += 1
        self.signature = int.from_bytes(hashlib.sha256(text.encode()).digest()[:5], "big")

    def _description(self) -> list[list[Any]]:
        kinds = ((name, str(p.dtype).removeprefix("torch."), list(p.shape), p) for name, p in self.all.items())
        return [[name, dtype, shape, p.requires_grad] for name, dtype, shape, p in kinds]

    def agree(self, rank: int, *, same: bool = False, by_host: bool = False, mesh: ReplicaMesh | None = None) -> None:
        """Set all ranks' parameters to rank 0's values, since a script without a seed builds different models.

        Args:
            same: whether all ranks are known to have the same values.
            by_host: see :func:`~elastic_launch.training.ranks.exchange.broadcast_tensors`.
        """
        if not self.same_everywhere():
            theirs = broadcast_state(self._description() if rank == 0 else None, 0, rank)
            raise UsageError(
                f"The ranks train different parameters: {_difference(self._description(), theirs, rank)}.",
                "Build the same model and optimizer, with the same layers frozen, on every rank.",
            )
        if same:
            return
        # Of a sharded parameter each rank has only a part, made by its own random numbers.
        whole = (p for p in self.all.values() if not is_sharded(p))
        broadcast_tensors([*whole, *self._model.buffers()], by_host=by_host)
        if mesh is not None:  # the replicas have copies of each part
            broadcast_tensors(map(local, self.sharded.values()), by_host=by_host, among=mesh.across)
            broadcast_tensors(map(local, self.parallel.values()), by_host=by_host, among=mesh.data)
            copies = (local(p) for p in self.all.values() if is_sharded(p) and not is_cut(p, TENSOR))
            broadcast_tensors(copies, by_host=by_host, among=mesh.tensor)

    def same_everywhere(self) -> bool:
        """Whether all ranks have the same signature; called by all ranks."""
        return all(are_same([self.signature]))

    def check_new(self, names: list[str]) -> None:
        """Compare parameters that were added during the training; called by all ranks."""
        whole = [name for name in names if not is_sharded(self.all[name])]
        same = are_same([_digest(self.all[name]) for name in whole])
        for name, alike in zip(whole, same, strict=True):
            if not alike:
                raise UsageError(
                    f"{name} is new in this training, and its values are not the same on all ranks.",
                    "Build it inside the loop over the steps, where all ranks have the same random state, or broadcast "
                    "it.",
                )

    def not_finite(self) -> str | None:
        """Return the name of the first parameter that holds NaN or an infinity, if any."""
        found = [(name, p.detach()) for name, p in self.all.items()]
        own = ((name, local(p)) for name, p in found)
        return next((name for name, values in own if not bool(torch.isfinite(values).all())), None)


class OwnParameters:
    """The values of an optimizer's parameters that are not in the model, as a part of a training's state."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Tensor]:
        """Return the values by their place in the optimizer."""
        return {name: value.detach() for name, value in Parameters(self._model, self._optimizer).extra.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        own = self.state_dict()
        for name in [*own, *(name for name in state if name not in own)]:
            mine, theirs = own.get(name), state.get(name)
            if mine is None or theirs is None or (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                there, here = (None if x is None else f"{list(x.shape)} of {x.dtype}" for x in (theirs, mine))
                raise UsageError(
                    f"{name}, which is not the model's, has the shape {there} in the checkpoint and {here} in "
                    "this script.",
                    "Give the optimizer the parameters that it had then, or start in another directory.",
                )
            with torch.no_grad():
                mine.copy_(theirs)


def _check(name: str, parameter: Tensor) -> None:
    if isinstance(parameter, nn.UninitializedParameter):
        raise UsageError(
            f"{name} has no shape yet: it belongs to a lazy module.", "Do one forward pass before the first step."
        )
    if parameter.is_meta:
        raise UsageError(f"{name} has no values: it is on the meta device.", "Move it to run.device first.")
    if parameter.requires_grad and parameter.layout is not torch.strided:
        raise UsageError(f"{name} has the layout {parameter.layout}.", "Only dense parameters can be trained.")


def _sparse(model: nn.Module) -> dict[int, str]:
    """Return the names of the parameters that get sparse gradients, by their ids."""
    return {
        id(module.weight): f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


def _digest(tensor: Tensor) -> int:
    return int.from_bytes(hashlib.sha256(bytes_of(dense(tensor))).digest()[:7], "big")


def _difference(mine: list[list[Any]], first: list[list[Any]], rank: int) -> str:
    """Describe how this rank's parameters differ from rank 0's."""

    def text(line: list[Any]) -> str:
        name, dtype, shape, trained = line
        return f"{name} ({dtype}{list(shape)}, requires_grad={trained})"

    for own, other in zip(mine, first, strict=False):
        if own != other:
            return f"rank {rank} has {text(own)} where rank 0 has {text(other)}"
    if len(mine) != len(first):
        longer, who = (mine, rank) if len(mine) > len(first) else (first, 0)
        return f"only rank {who} has {text(longer[min(len(mine), len(first))])}"
    return f"another rank's differ from those of rank {rank}"

"""Trains a ``Trainer``'s model with DeepSpeed's engine, and saves what ZeRO keeps in parts as whole tensors.

The loop, its steps and its checkpoints stay those of every training: micro-batches and their weights, the means, the
agreement among the ranks. DeepSpeed computes, exchanges and clips the gradients, and steps the optimizer. For a save,
each tensor that is spread over the ranks is put together on the ranks that write, one after the other. A checkpoint
therefore fits any world size, any ZeRO stage, and is read without DeepSpeed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from elastic_launch.batch import BatchPlan
from elastic_launch.errors import UsageError
from elastic_launch.training.gradients.accumulation import Gradients
from elastic_launch.training.gradients.buckets import LocalReduction
from elastic_launch.training.gradients.means import MeanTable
from elastic_launch.training.randomness import kept

_PER_ELEMENT = ("ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Classes in ``torch.optim`` that treat each element by itself, so that ZeRO may cut parameters into parts."""

_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DeepSpeed:
    """A model and its optimizer in a DeepSpeed engine.

    Args:
        optimizer: has parameters of the model only. DeepSpeed puts others in their place.
        config: complete, for the world of this process.
        world_size: size of the default process group, which is made if there is none.

    Attributes:
        engine: call it for the forward pass of a training step.
        optimizer: a part of the training's state; its ``step()`` is DeepSpeed's.

    Raises:
        UsageError: if DeepSpeed is not installed, or cannot train this.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any], world_size: int
    ) -> None:
        try:
            import deepspeed
        except ImportError as error:
            hint = "Run pip install deepspeed, or pip install 'elastic-launch[deepspeed]'."
            raise UsageError("Trainer(deepspeed_config=...): deepspeed is not installed.", hint) from error
        stage = int(config.get("zero_optimization", {}).get("stage", 0))
        names = _names(model, optimizer)
        config = dict(config)
        if stage and type(optimizer) in {getattr(torch.optim, name) for name in _PER_ELEMENT}:
            config.setdefault("zero_allow_untested_optimizer", True)
        if not dist.is_initialized():  # no launcher; DeepSpeed would look for MPI
            dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
        os.environ.setdefault("LOCAL_RANK", "0")
        try:
            self.engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                config=config,
                dist_init_required=False if deepspeed.comm.is_initialized() else None,
            )
        except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
            raise UsageError(
                f"DeepSpeed refuses this training: {error}", "See its configuration's documentation."
            ) from error
        half = config.get("bf16", config.get("fp16", {})).get("enabled", False)
        self._casts = next((p.dtype for p in model.parameters() if p.is_floating_point()), None) if half else None
        model.register_forward_pre_hook(self._cast, with_kwargs=True)
        self.engine.register_forward_hook(self._note_forward)
        self._called = False  # whether the engine was called since the last backward pass
        self.optimizer = PartitionedOptimizer(self.engine, optimizer, names, partitioned=stage > 0, half=half)
        self.optimizer.check()
        self.clips = half or stage > 0
        self._world_size = world_size

    @property
    def norm(self) -> Tensor | None:
        """The norm of the last step's gradients before clipping; None if DeepSpeed did not compute it."""
        found = self.engine.get_global_grad_norm()
        return None if found is None else torch.as_tensor(float(found))

    @property
    def skipped(self) -> bool:
        """Whether the last step was left out because gradients overflowed."""
        return not self.engine.was_step_applied()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Do the backward pass of a loss that is weighted by its share of the global batch."""
        if not self._called:
            raise UsageError(
                "Trainer(deepspeed_config=...): the forward pass did not call the model that it was given.",
                "In Trainer(forward=...) call model(...), and not its parts or another reference to it.",
            )
        self._called = False
        self.engine.set_gradient_accumulation_boundary(last)
        # It returns the mean over the ranks, of which the sum is needed.
        self.engine.backward(loss * self._world_size, scale_wrt_gas=False)

    def _cast(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self._casts is None:
            return args, kwargs
        return _cast(args, self._casts), _cast(kwargs, self._casts)

    def _note_forward(self, *_: Any) -> None:
        self._called = True


class PartitionedOptimizer:
    """An optimizer's state and its float32 parameters, of which ZeRO keeps a part on each rank.

    Args:
        client: the script's optimizer. In ZeRO each of its groups has one flat tensor, this rank's part of the group's
            parameters.
        half: whether the model's parameters are rounded from those in float32 that the optimizer has.
    """

    def __init__(
        self,
        engine: Any,
        client: torch.optim.Optimizer,
        names: Sequence[Sequence[str]],
        *,
        partitioned: bool,
        half: bool,
    ) -> None:
        self._engine = engine
        self._client = client
        self._names = names
        self._named: dict[str, Any] = dict(engine.module.named_parameters())
        self._partitioned = partitioned
        self._half = half
        self.state: dict[str, dict[str, Any]] = {}  # what was gathered last, until the next step
        self._has_masters = False
        if getattr(engine.optimizer, "optimizer", client) is not client:
            name = type(client).__name__
            raise UsageError(
                f"DeepSpeed replaces {name} by an optimizer of its own.", "Use Adam or AdamW, for example."
            )

    def step(self) -> None:
        self.state = {}
        self._has_masters = False
        self._engine.step()

    def check(self) -> None:
        """Check on all ranks that the parts are where they are looked for: in another version they may not be."""
        for name, parameter, own in self._each():
            if not torch.equal(self._gathered(parameter, own).to(parameter.dtype), parameter.detach()):
                raise UsageError(
                    f"This version of DeepSpeed keeps the optimizer's part of {name} in an unknown place.",
                    "Install the version that docs/how-to/deepspeed.md names.",
                )

    def gather(self, *, keep: bool) -> None:
        """Put all tensors together; called by all ranks.

        Args:
            keep: whether this rank needs them. The others hold one at a time.
        """
        whole: dict[str, dict[str, Any]] = {}
        for name, parameter, own in self._each():
            found = dict(self._client.state.get(own, {}))
            if self._half:
                found["parameter"] = own.detach()
            entry = whole.setdefault(name, {})
            for key, value in found.items():
                if not isinstance(value, Tensor) or value.dim() == 0:
                    entry[key] = copy.deepcopy(value)
                    continue
                gathered = self._gathered(parameter, value)
                if keep:
                    entry[key] = gathered.to("cpu")
        self.state = whole if keep else {}

    def state_dict(self) -> dict[str, Any]:
        """Return what was gathered."""
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            | {"names": list(names)}
            for group, names in zip(self._client.param_groups, self._names, strict=True)
        ]
        state: dict[str, Any] = {"class": type(self._client).__name__, "state": self.state, "groups": groups}
        if (scaler := self._scaler) is not None:
            state["scale"] = {key: getattr(scaler, key) for key in _SCALE if hasattr(scaler, key)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take this rank's parts of the tensors."""
        mine = self.state_dict()
        if "groups" not in state:
            raise ValueError("it was saved without DeepSpeed")
        if state["class"] != mine["class"]:
            raise ValueError(f"it was saved by {state['class']}, and here is {mine['class']}")
        if [group["names"] for group in state["groups"]] != [group["names"] for group in mine["groups"]]:
            raise ValueError("its groups have other parameters than here")
        for group, saved in zip(self._client.param_groups, state["groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "names"})
        for name, parameter, own in self._each():
            for key, value in state["state"].get(name, {}).items():
                if key == "parameter":
                    self._put(parameter, own, value)
                    self._has_masters = True
                    continue
                values = self._client.state[own]
                if not isinstance(value, Tensor) or value.dim() == 0:
                    values[key] = copy.deepcopy(value)
                else:
                    if key not in values:
                        values[key] = torch.zeros_like(own, dtype=value.dtype, requires_grad=False)
                    self._put(parameter, values[key], value)
        if (scaler := self._scaler) is not None:
            for key, value in state.get("scale", {}).items():
                setattr(scaler, key, value)

    def follow_model(self) -> None:
        """Take the optimizer's parameters from the model, unless they were loaded with the state."""
        if self._has_masters:
            return
        for _, parameter, own in self._each():
            self._put(parameter, own, parameter.detach())

    @property
    def _scaler(self) -> Any:
        return getattr(self._engine.optimizer, "loss_scaler", None) if self._engine.fp16_enabled() else None

    def _each(self) -> Iterator[tuple[str, Any, Tensor]]:
        """Yield each parameter with its name and the tensor that the optimizer has for it, which may be of several."""
        for group, names in zip(self._client.param_groups, self._names, strict=True):
            for place, name in enumerate(names):
                parameter = self._named[name]
                masters = self._partitioned or self._half
                yield name, parameter, group["params"][0 if self._partitioned else place] if masters else parameter

    def _gathered(self, parameter: Any, own: Tensor) -> Tensor:
        if not self._partitioned:
            return own.detach()
        whole = torch.zeros(parameter.numel(), dtype=own.dtype, device=own.device)
        for there, mine in self._parts(parameter, own):
            whole[there].copy_(mine)
        dist.all_reduce(whole, group=parameter._dp_group)
        return whole.view(parameter.shape)

    @torch.no_grad()
    def _put(self, parameter: Any, own: Tensor, whole: Tensor) -> None:
        if not self._partitioned and own is not whole:
            own.copy_(whole)
        for there, mine in self._parts(parameter, own) if self._partitioned else ():
            mine.copy_(whole.reshape(-1)[there])

    def _parts(self, parameter: Any, own: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield which elements of a parameter this rank has, and these, unless it has none."""
        if (place := parameter._hp_mapping) is not None:
            there, here = place.lp_fragment_address, place.hp_fragment_address
            yield slice(there.start, there.start + there.numel), own.detach().narrow(0, here.start, here.numel)


class EngineGradients(Gradients):
    """Gradients of a round that the engine accumulates, reduces and keeps, perhaps in parts.

    Args:
        spare: returns the loss of any micro-batch, by the model that it is given.
    """

    def __init__(
        self,
        backend: DeepSpeed,
        world_size: int,
        rank: int,
        buffers: Mapping[str, str],
        spare: Callable[[Callable[..., Any]], Tensor],
    ) -> None:
        super().__init__(backend.engine.module, backend.optimizer, world_size, rank, overlap=False, buffers=buffers)
        self.model = cast(nn.Module, backend.engine)
        self._backend = backend
        self._spare = spare

    def begin(self, plan: BatchPlan) -> None:
        if self.parameters.changed():
            names = ", ".join(self.parameters.follow())
            raise UsageError(
                f"These parameters were frozen, unfrozen or converted in the training: {names}.",
                "With deepspeed_config= that is only possible before the first step.",
            )
        super().begin(plan)
        # Each backward pass may exchange gradients: all ranks make as many.
        self._passes = -(-plan.total // self.world_size)

    @contextmanager
    def backward(self, number: int) -> Iterator[None]:
        self._last = number == self._passes - 1
        yield

    def differentiate(self, loss: Tensor, *, empty: bool = False) -> None:
        self._backend.backward(loss, last=self._last)

    def post(self, table: MeanTable) -> None:
        if self._plan.grad_accum < self._passes:
            with kept(devices=True):
                loss = self._spare(self.model)
                self._backend.backward(loss * 0, last=True)
            self._buffers.restore()
        super().post(table)

    def _reduce(self, whole: bool) -> list[Tensor]:
        return []

    def _follow(self) -> None:
        self.on_cpu = all(parameter.device.type == "cpu" for parameter in self.parameters.trained.values())
        self._reduction = LocalReduction(len(self.parameters.trained))


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters of each group that is trained; all must be the model's."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        if any(id(parameter) not in known for parameter in group["params"]):
            raise UsageError(
                f"optimizer.param_groups[{number}] has a parameter that is not the model's.",
                "With deepspeed_config= make it a parameter of the model.",
            )
        names = [known[id(parameter)] for parameter in group["params"] if parameter.requires_grad]
        if group["params"] and not names:
            raise UsageError(
                f"optimizer.param_groups[{number}] has only frozen parameters.", "Leave it out with deepspeed_config=."
            )
        groups.append(names)
    return [names for names in groups if names]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)

"""Detects hidden states that a script carries from one micro-batch to the next, which exact mode cannot repeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from elastic_launch.errors import UsageError
from elastic_launch.training.wrapped import tensors_in

STEPS = 2
"""Number of steps to watch, as each micro-batch of later steps would do the same."""


class CarriedStates:
    """Watches the calls of a model, and of the recurrent layers in it, during the first steps.

    The ranks go through the micro-batches at the same time, and a restart begins in the middle, so a state carried from
    one micro-batch to the next depends on the number of ranks and on restarts. It is found if a module is called with a
    tensor that it has computed itself in an earlier micro-batch, also with a detached one, but not with a copy.

    Args:
        model: the model; of several in a ``ModuleDict``, each is watched.
    """

    def __init__(self, model: nn.Module) -> None:
        self._steps = 0
        self._micro_batch = 0
        self._returned: dict[tuple[str, int], tuple[StorageWeakRef, int]] = {}
        self._handles: list[RemovableHandle] = []
        called = set(model.values() if isinstance(model, nn.ModuleDict) else [model])
        for path, module in model.named_modules():
            if module in called or isinstance(module, nn.RNNBase | nn.RNNCellBase):
                self._handles += [
                    module.register_forward_pre_hook(partial(self._called, path), with_kwargs=True),
                    module.register_forward_hook(partial(self._has_returned, path), with_kwargs=True),
                ]

    def __deepcopy__(self, memo: object) -> CarriedStates:
        """Return one that watches nothing: a copy of the model, such as its average, has copies of the hooks.

        Torch's weak references must not be copied: each copy would free the same memory.
        """
        copy = CarriedStates(nn.ModuleDict())
        copy._steps = STEPS + 1
        return copy

    def begin_step(self) -> None:
        self._steps += 1
        if self._steps > STEPS:
            self.close()

    def begin_micro_batch(self) -> None:
        self._micro_batch += 1

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._returned.clear()

    def _called(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not module.training or self._steps > STEPS:
            return
        for _, storage in _stored((args, kwargs)):
            _, when = self._returned.get((path, storage.cdata), (None, self._micro_batch))
            if when != self._micro_batch:
                called = f"the module {path!r}" if path else "the model"
                raise UsageError(
                    f"exact=True: {called} is called with a tensor that it has returned in an earlier micro-batch, "
                    "such as a hidden state. With another number of ranks, and after a restart, it would be a "
                    "different one.",
                    "Begin each micro-batch with a new state, keep it in a buffer with a rule (buffers=), or train "
                    "without exact=True.",
                )

    def _has_returned(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not module.training or self._steps > STEPS:
            return
        given = {storage.cdata for _, storage in _stored((args, kwargs))}
        for tensor, storage in _stored(output):
            if tensor.requires_grad and storage.cdata not in given:
                # The weak reference keeps the number from being used for another storage.
                self._returned[path, storage.cdata] = storage, self._micro_batch


def _stored(value: Any) -> Iterator[tuple[Tensor, StorageWeakRef]]:
    """Yield the dense tensors in tuples, lists and dicts, each with its memory; those of ``torch.func`` unwrapped."""
    for tensor in tensors_in(value):
        inner = get_unwrapped(tensor) if is_functorch_wrapped_tensor(tensor) else tensor
        if inner.layout is torch.strided:
            # A subclass may have no memory of its own.
            with suppress(NotImplementedError, RuntimeError):
                yield inner, StorageWeakRef(inner.untyped_storage())  # type: ignore[no-untyped-call]

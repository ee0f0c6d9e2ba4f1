"""What a rehearsal leaves behind: nothing but what is slow the first time, such as compiled graphs."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from elastic_launch.training.randomness import kept
from elastic_launch.training.wrapped import local

_CONTAINERS = (dict, OrderedDict, list, set, deque)


@contextmanager
def unchanged(*objects: object) -> Iterator[None]:
    """On exit, restore what a forward and backward pass of modules may change.

    That is: the attributes of all their modules, among them modes, buffers and hooks; the contents of tensors, of
    NumPy's arrays and of Python's containers in them; and the gradients of parameters. Values of parameters are not
    restored.

    Args:
        objects: modules, and further tensors, arrays and containers; others are ignored.
    """
    modules = dict.fromkeys(module for each in objects if isinstance(each, nn.Module) for module in each.modules())
    attributes = [(vars(module), dict(vars(module))) for module in modules]
    contents: dict[int, tuple[Any, Any]] = {}
    tensors = {id(each): each for each in objects if isinstance(each, Tensor)}
    arrays: dict[int, tuple[Any, Any]] = {}
    found: list[Any] = [each for each in objects if type(each) in _CONTAINERS or is_array(each)]
    found += [value for _, before in attributes for value in before.values()]
    while found:
        value = found.pop()
        if isinstance(value, Tensor):
            tensors[id(value)] = value
        elif is_array(value):
            arrays[id(value)] = value, value.copy()
        elif type(value) in _CONTAINERS and id(value) not in contents:
            contents[id(value)] = value, copy.copy(value)
            found += value.values() if isinstance(value, dict) else value
    gradients = [(each, each.grad, each.requires_grad) for each in tensors.values() if each.is_leaf]
    plain = [each for each in tensors.values() if not isinstance(each, nn.Parameter) and _is_plain(each)]
    values = [(each, each._version, each.detach().clone()) for each in plain]
    try:
        yield
    finally:
        for now, before in [*attributes, *contents.values()]:
            if _parts(now) != _parts(before):
                now.clear()
                now.extend(before) if isinstance(now, list | deque) else now.update(before)
        for array, elements in arrays.values():
            if array.flags.writeable:
                array[...] = elements
        for tensor, gradient, required in gradients:
            if not tensor.is_leaf:  # something that requires a gradient was added to a buffer
                tensor.detach_()
            tensor.grad = gradient
            if tensor.requires_grad is not required:
                tensor.requires_grad_(required)
        with torch.no_grad():
            for tensor, version, value in values:
                # Of a DTensor this rank's part: the comparison of whole ones would be an exchange.
                now, before = local(tensor), local(value)
                if tensor._version != version or not torch.equal(now, before):
                    now.copy_(before)


def _parts(container: Any) -> list[tuple[int, int]]:
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return [(0, id(value)) for value in container]


def is_array(value: object) -> bool:
    """Whether it is an array of NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_plain(tensor: Tensor) -> bool:
    # One that has escaped from a function of torch.func cannot be read.
    usual = tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)
    return usual and not tensor.is_inference() and not tensor.is_quantized


@contextmanager
def randomness_kept() -> Iterator[None]:
    """On exit, restore the state of all generators, and the normal deviate that NumPy keeps for the next call."""
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state(legacy=False)
    try:
        with kept(devices=True):
            yield
    finally:
        if numpy is not None:
            numpy.random.set_state(state)


class _Folded(dict[Any, None]):
    """The functions that torch's compiler calls itself, to put their results into its graphs as constants."""

    asked = False  # whether it has looked for one whose result depends on the process groups

    def __contains__(self, function: object) -> bool:
        self.asked = self.asked or any(function is each for each in _OF_THE_WORLD)
        return super().__contains__(function)


_OF_THE_WORLD = (dist.is_initialized, dist.get_rank, dist.get_world_size)


@contextmanager
def graphs_fit_any_world() -> Iterator[None]:
    """On exit, drop all compiled graphs if one may hold that there is no process group, or if an error has ended this.

    A frame that an error has ended is compiled in pieces, and would stay so.
    """
    compiler = sys.modules.get("torch._dynamo.variables.torch")
    known = getattr(compiler, "constant_fold_functions", None)
    folded, fit = _Folded(known or {}), False
    if known is not None:
        setattr(compiler, "constant_fold_functions", folded)  # noqa: B010
    try:
        yield
        fit = known is not None and not folded.asked
    finally:
        if known is not None:
            setattr(compiler, "constant_fold_functions", known)  # noqa: B010
        if not fit and "torch._dynamo" in sys.modules:
            torch.compiler.reset()

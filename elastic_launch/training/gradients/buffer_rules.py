"""Chooses the rule that combines the values that a step's micro-batches leave in a buffer.

The meaning of a buffer is not visible from outside. Its rule comes from the script (``buffers=``), from the module that
it belongs to (BatchNorm, torch's quantization observers, spectral norm), or from a name that marks it as an average. A
buffer without a rule may not change in a step with several micro-batches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from elastic_launch.errors import UsageError
from elastic_launch.training.wrapped import check_not_inference, is_sharded

RULES = ("mean", "sum", "last", "min", "max", "ignore", "error")

DEFAULT = "*"
"""The pattern whose rule applies only to buffers that no other rule applies to."""

_AVERAGES = {"mean", "var", "variance", "std", "avg", "average", "ema"}
_NO_AVERAGES = {"min", "max", "sum", "count", "num", "queue", "ptr", "hist", "histogram", "bank"}

_OBSERVED = {"min_val": "min", "max_val": "max"}
_QUANTIZER = {"scale": "last", "zero_point": "last", "fake_quant_enabled": "last", "observer_enabled": "last"}


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of a model, or a frozen parameter that has a rule as buffers have."""

    name: str
    tensor: Tensor
    homes: tuple[tuple[nn.Module, str], ...]  # the modules that have it, each with its name there
    rule: str | None  # the rule; None if there is none
    checked: bool  # whether its mean or sum may be invalid, for example infinite
    saved: bool  # whether checkpoints have it


def checked_rules(rules: Mapping[str, str] | None) -> dict[str, str]:
    """Check and return the rules given as ``buffers=``."""
    if not isinstance(rules, Mapping | None):
        raise UsageError(
            f"buffers={rules!r} is not a dict of patterns and rules.", 'For example: buffers={"*.queue": "last"}.'
        )
    for pattern, rule in (rules or {}).items():
        if rule not in RULES:
            raise UsageError(
                f"buffers={{{pattern!r}: {rule!r}}}: there is no such rule.", f"The rules are {', '.join(RULES)}."
            )
    return dict(rules or {})


def buffers_of(model: nn.Module, rules: Mapping[str, str]) -> list[Buffer]:
    """Return a model's buffers with their rules, and those of its frozen parameters that a pattern names.

    Args:
        rules: rules by pattern of the name; the first match counts.
    """
    homes: dict[int, list[tuple[str, nn.Module, str]]] = {}
    patterns = [pattern for pattern in rules if pattern != DEFAULT]
    for path, module in model.named_modules():
        within = f"{path}." if path else ""
        for name, tensor in module._buffers.items():
            if tensor is not None:
                homes.setdefault(id(tensor), []).append((within + name, module, name))
        for name, parameter in module._parameters.items() if patterns else ():
            if parameter is not None and not parameter.requires_grad and _matched(within + name, patterns):
                homes.setdefault(id(parameter), []).append((within + name, module, name))
    names = {found[0][0] for found in homes.values()}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            trained = next((name for name, _ in model.named_parameters() if fnmatchcase(name, pattern)), None)
            raise UsageError(
                f"buffers={{{pattern!r}: ...}}: no buffer of the model has such a name, and no frozen parameter.",
                f"{trained} is trained: freeze it by requires_grad_(False), or leave its rule out."
                if trained
                else f"Its buffers are {', '.join(sorted(names)[:10]) or 'none'}{', ...' if len(names) > 10 else ''}.",
            )
    return [_buffer(found, rules) for found in homes.values()]


def ruled_names(model: nn.Module, rules: Mapping[str, str]) -> set[str]:
    """Return the names of the buffers and frozen parameters that a rule lets change within a step."""
    return {buffer.name for buffer in buffers_of(model, rules) if buffer.rule not in (None, "error")}


def _matched(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def tensors_of(module: nn.Module, name: str) -> dict[str, Tensor | None]:
    """Return the dict in which a module has a buffer or parameter."""
    own: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
    return own


def _buffer(found: list[tuple[str, nn.Module, str]], rules: Mapping[str, str]) -> Buffer:
    full, module, name = found[0]
    tensor = tensors_of(module, name)[name]
    assert tensor is not None
    if is_lazy(tensor):
        raise UsageError(
            f"The buffer {full!r} has no shape yet.", "Call the model once, on any input, before its first step."
        )
    if is_sharded(tensor):
        raise UsageError(f"buffers=: {full} is sharded, and has no rule.", "Leave its module out of fully_shard.")
    saved = any(name not in owner._non_persistent_buffers_set for _, owner, name in found)
    pattern = next((p for p in rules if p != DEFAULT and fnmatchcase(full, p)), None)
    known = _of_module(module, name)
    if pattern is not None:
        rule: str | None = rules[pattern]
        _check(rules[pattern], full, tensor, saved=saved)
    elif known is not None:
        rule = known
    elif DEFAULT in rules and (rules[DEFAULT] in ("ignore", "error") or saved) and _fits(rules[DEFAULT], tensor):
        rule = rules[DEFAULT]
    else:
        rule = "mean" if saved and tensor.is_floating_point() and _is_average(name) else None
    if rule != "ignore":
        check_not_inference(full, tensor)
    by_batch_norm = pattern is None and isinstance(module, _NormBase)
    owners = tuple((owner, name) for _, owner, name in found)
    return Buffer(full, tensor, owners, rule, not by_batch_norm, saved)


def _fits(rule: str, tensor: Tensor) -> bool:
    if rule == "mean":
        return tensor.is_floating_point()
    return rule in ("last", "ignore", "error") or not (tensor.is_complex() or tensor.dtype is torch.bool)


def _check(rule: str, name: str, tensor: Tensor, *, saved: bool) -> None:
    if not _fits(rule, tensor):
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UsageError(
            f"buffers={{{name!r}: {rule!r}}}: the buffer has elements of type {kind}, which have no {rule}.",
            "The rules last, ignore and error take every type; mean takes floating-point numbers, sum and min any.",
        )
    if not saved and rule not in ("ignore", "error"):
        raise UsageError(
            f"buffers={{{name!r}: {rule!r}}}: the buffer is not saved with the model, so a restart would lose it.",
            'Register it with persistent=True; or, if it is a cache, give it the rule "ignore".',
        )


def _of_module(module: nn.Module, name: str) -> str | None:
    """Return the rule for a buffer of one of torch's own modules, if any."""
    if isinstance(module, _NormBase):
        # One update a step: the momentum is that of a step's, and with momentum=None so is the count.
        return {"running_mean": "mean", "running_var": "mean", "num_batches_tracked": "last"}.get(name)
    kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")}
    if "FakeQuantizeBase" in kinds:
        return _QUANTIZER.get(name)
    if any("MovingAverage" in kind for kind in kinds):
        return "mean" if name in _OBSERVED else None
    if any(kind.endswith("MinMaxObserver") for kind in kinds):
        return _OBSERVED.get(name)
    hooks = (type(hook).__name__ for hook in module._forward_pre_hooks.values())
    if "_SpectralNorm" in kinds or (name.endswith(("_u", "_v")) and "SpectralNorm" in hooks):
        # It depends only on the weights: every micro-batch leaves the same value.
        return "last"
    return None


def _is_average(name: str) -> bool:
    words = set(re.split(r"[\W_\d]+", name.lower()))
    return bool(words & _AVERAGES) and not words & _NO_AVERAGES


def advice(buffer: Buffer, start: Tensor) -> str:
    """Return advice for a buffer that changes without a rule."""
    rule = _guess(buffer.name, start) if buffer.saved else "ignore"
    argument = f'buffers={{"{buffer.name}": "{rule}"}}'
    if not buffer.saved:
        return (
            f'If it is a cache, whose content no result depends on, give it the rule "ignore": {argument}. '
            "Else register it with persistent=True, for a restart would lose it."
        )
    return (
        f"Give run.steps() or Trainer a rule for it: {argument}, for example. "
        "The rules are mean, sum (of what each adds), last, min and max: see docs/training/exactness.md, Buffers."
    )


def _guess(name: str, start: Tensor) -> str:
    words = set(re.split(r"[\W_\d]+", name.lower()))
    positive, negative = bool((start == float("inf")).any()), bool((start == float("-inf")).any())
    if "min" in words or (positive and not negative):
        return "min"
    if "max" in words or (negative and not positive):
        return "max"
    if words & {"count", "counts", "num", "seen", "sum", "total", "steps", "hist", "histogram", "counter"}:
        return "sum"
    return "last"

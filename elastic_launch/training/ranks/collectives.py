"""Finds what a script exchanges with other ranks while a micro-batch is computed.

The ranks compute other micro-batches at the same time, and need not have equally many: the result depends on the number
of ranks, or a rank waits for ever. The methods of torch's process groups, and the function by which all functional
collectives find their group, are wrapped, so it does not matter how a script has imported a collective. The caller's
module tells an exchange of the script from one of the library, of ``fully_shard`` or of SyncBatchNorm.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d

from elastic_launch.errors import UsageError

_log = logging.getLogger(__name__)

METHODS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("gather", "scatter", "alltoall", "alltoall_base", "send", "recv", "recv_anysource"),
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
)
"""The methods of ``ProcessGroup`` that exchange."""

FUNCTIONS = ("_resolve_group", "_resolve_group_name")
"""Functions by which functional collectives find their group."""

_COLLECTIVES = (
    *("contextlib", "torch.utils._contextlib", "torch._compile", "torch.autograd.function", "typing_extensions"),
    *("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "torch.distributed.nn.functional"),
    *("torch.distributed._functional_collectives", "elastic_launch.training.dist", __name__),
)
"""Modules in whose functions a script's call may be."""

_OWN = ("torch.", "elastic_launch.", "deepspeed.")
"""Beginnings of the names of modules that exchange for the library, or in a way that it knows."""

_DECORATORS = {"wrapper", "decorate_context", "inner", "wrapped"}

_watch: Callable[[str], None] | None = None  # what is called with the name of a function that the script has called


@contextmanager
def watched() -> Iterator[None]:
    """Within this context, what is called within a :class:`MicroBatchContext` is noticed."""
    holders: dict[Any, tuple[str, ...]] = {dist.ProcessGroup: METHODS, functional: FUNCTIONS}
    # As the class has them: what getattr() returns does not bind an instance when it is put back.
    found = ((holder, name) for holder, names in holders.items() for name in names if name in vars(holder))
    before = [(holder, name, vars(holder)[name]) for holder, name in found]
    for holder, name, _ in before:
        setattr(holder, name, _noticed(getattr(holder, name)))
    try:
        yield
    finally:
        for holder, name, function in before:
            setattr(holder, name, function)


def _noticed(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _watch is not None and (name := called_by_script()):
            _watch(name)
        return function(*args, **kwargs)

    return call


def called_by_script() -> str:
    """Return the name of the function of torch that the script has called; "" if the call is not the script's.

    It is called by what has taken that function's place.
    """
    frame, name = sys._getframe(2), ""
    while frame is not None and (module := str(frame.f_globals.get("__name__"))) in _COLLECTIVES:
        if frame.f_code.co_name not in _DECORATORS:
            name = frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None or module.startswith(_OWN) else name or "a collective"


class MicroBatchContext:
    """The context in which a micro-batch is computed.

    Args:
        called: called with the name of each collective that the script calls.
    """

    __slots__ = ("_called",)

    def __init__(self, called: Callable[[str], None]) -> None:
        self._called = called

    def __enter__(self) -> None:
        global _watch
        _watch = self._called

    def __exit__(self, *exc: object) -> None:
        global _watch
        _watch = None


def exchanges() -> int:
    """Return how many collectives this process has begun, on any group; those between two processes do not count."""
    groups: list[Any] = [*distributed_c10d._world.pg_map]
    return sum(group._get_sequence_number_for_group() for group in groups)


_HINT = (
    "Compute each micro-batch alone: take negatives or statistics from the micro-batch, make it larger, or keep a "
    "queue of earlier steps that is registered and updated after step.update(). See Exchanges within a micro-batch in "
    "docs/training/exactness.md."
)


def refuse(name: str) -> None:
    """Refuse a collective within a micro-batch in exact mode."""
    raise UsageError(
        f"exact=True: the script calls {name} while a micro-batch is computed. The result depends on the micro-batches "
        "that other ranks compute at the same time, and so on the number of ranks.",
        _HINT,
    )


_warned = False


def warn(name: str) -> None:
    """Warn once of a collective within a micro-batch."""
    global _warned
    if not _warned:
        _warned = True
        _log.warning(
            "the script calls %s while a micro-batch is computed: the result depends on the number of ranks, and if "
            "a rank has fewer micro-batches than others, these wait for it in vain. %s",
            name,
            _HINT,
        )

"""Binding workers to CPUs near their GPUs, by torch's own rules."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature

from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import UsageError


def check_binding(config: LaunchConfig) -> None:
    """Check, before anything is started, whether each worker can be bound.

    Raises:
        UsageError: if a worker cannot be bound.
    """
    if (mode := config.options.numa_binding) is None:
        return
    for local_rank in range(config.nproc):
        try:
            with _quiet("torch.numa.binding"):
                bound([], local_rank, mode)
        except Exception as error:  # torch does not document what it raises
            first = str(error).strip().split("\n")[0]
            raise UsageError(
                f"--numa-binding {mode} is not possible for local rank {local_rank}: {first}.",
                "It needs a GPU for each worker, and numactl on PATH. Correct that, or drop --numa-binding.",
            ) from error


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep a logger from printing a traceback of what is reported in one line."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def bound(argv: Sequence[str], local_rank: int, mode: str) -> list[str]:
    """Return a command that runs the given one on the CPUs of a local rank's GPU.

    Raises:
        Exception: torch's own (it does not document the types), if these CPUs cannot be determined.
    """
    # torch offers this only to its own agent. It is the only implementation of its four modes.
    from torch.numa.binding import AffinityMode, NumaOptions, _maybe_wrap_command_args_with_numa_binding

    wrap = _maybe_wrap_command_args_with_numa_binding
    index = "device_index" if "device_index" in signature(wrap).parameters else "gpu_index"  # until torch 2.13
    options = NumaOptions(affinity_mode=AffinityMode(mode))
    return list(wrap(tuple(argv), **{index: local_rank}, numa_options=options))

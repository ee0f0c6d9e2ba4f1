"""Torch's settings that bitwise results depend on: changed only for exactness, and restored afterwards."""

from __future__ import annotations

import os

import torch

from elastic_launch.errors import UsageError

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


class Determinism:
    """Sets torch's number of threads, and whether it uses deterministic algorithms.

    Args:
        threads: threads of each CPU operation, from the start; None: torch's setting, and 1 in exact mode.
        deterministic: whether algorithms are deterministic, from the start; None: only in exact mode.
    """

    def __init__(self, threads: int | None = None, deterministic: bool | None = None) -> None:
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise UsageError(f"session(threads={threads!r}): it must be a whole number, 1 or more.")
        self._threads = threads
        self._wanted = deterministic
        self._before = (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
        )
        # This affects only memory use. cuBLAS reads it before its first use, possibly before an exact training begins.
        self._set_cublas = deterministic is not False and _CUBLAS not in os.environ
        if self._set_cublas:
            os.environ[_CUBLAS] = ":4096:8"
        if threads is not None:
            torch.set_num_threads(threads)
        if deterministic:
            _be_deterministic()

    def exact(self, *, strict: bool = False) -> None:
        """Apply the settings for exact training.

        Args:
            strict: whether an operation without a deterministic implementation is an error.
        """
        torch.set_num_threads(self._threads or 1)
        if self._wanted is not False:
            _be_deterministic(strict=strict)

    def close(self) -> None:
        """Restore the previous settings."""
        threads, enabled, warn_only, benchmark = self._before
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        if self._set_cublas:
            os.environ.pop(_CUBLAS, None)


def _be_deterministic(*, strict: bool = False) -> None:
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    torch.backends.cudnn.benchmark = False

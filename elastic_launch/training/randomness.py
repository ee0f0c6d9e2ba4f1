"""Random state that depends on what is computed, never on which rank or loader process computes it."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["derive", "kept", "seed_all", "seed_torch", "seeded"]


def derive(*values: int | str) -> int:
    """Return a seed of 63 bits from values, by SHA-256: close values give unrelated seeds."""
    text = "/".join(map(str, values))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_torch(seed: int, *, devices: bool = True) -> None:
    """Seed torch's generators.

    ``torch.manual_seed`` takes milliseconds where devices are missing or not in use yet: it keeps a stack trace for
    each kind of them.
    """
    torch.default_generator.manual_seed(seed)
    if not devices:
        return
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    elif torch.accelerator.is_available():
        torch.manual_seed(seed)


def seed_all(seed: int, *, devices: bool) -> None:
    """Seed all generators that a script may use: torch's, Python's, and NumPy's if it is loaded.

    Args:
        devices: whether torch's generators of GPUs are seeded too.
    """
    seed_torch(seed, devices=devices)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextmanager
def kept(*, devices: bool) -> Iterator[None]:
    """Give all generators the state back that they have now; of devices, those of GPUs by CUDA or ROCm."""
    numpy = sys.modules.get("numpy")
    before = torch.random.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    on_gpus = torch.cuda.get_rng_state_all() if devices and torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.random.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy and before[2] is not None:
            numpy.random.set_state(before[2])
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)


@contextmanager
def seeded(seed: int, *, devices: bool) -> Iterator[None]:
    """Seed all generators as :func:`seed_all`, and restore them on leaving."""
    with kept(devices=devices):
        seed_all(seed, devices=devices)
        yield

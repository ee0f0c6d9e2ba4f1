"""Random state that depends on what is computed, never on which rank or loader process computes it."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["derive", "seeded"]


def derive(*values: int | str) -> int:
    """Return a seed of 63 bits from values, by SHA-256: close values give unrelated seeds."""
    text = "/".join(map(str, values))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded(seed: int, *, devices: bool) -> Iterator[None]:
    """Seed all generators that a script may use (torch, random, NumPy if it is loaded), and restore them on leaving.

    Args:
        devices: whether torch's generators of GPUs are seeded too.
    """
    numpy = sys.modules.get("numpy")
    before = torch.random.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    on_gpus = torch.cuda.get_rng_state_all() if devices and torch.cuda.is_available() else None
    try:
        torch.default_generator.manual_seed(seed)
        if devices and torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        yield
    finally:
        torch.random.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy and before[2] is not None:
            numpy.random.set_state(before[2])
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)

"""Random state that depends on what is computed, not on which rank or loader process computes it."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def derive(*values: int | str) -> int:
    """Derive a 63-bit seed from values with SHA-256; similar values give unrelated seeds."""
    text = "/".join(map(str, values))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_all(seed: int, *, devices: bool) -> None:
    """Seed all global generators that a script may use: torch's, Python's, and NumPy's if it is loaded.

    Args:
        devices: whether to seed torch's GPU generators too.
    """
    # torch.manual_seed takes milliseconds if no device is in use: it keeps a stack trace for each kind of device.
    torch.default_generator.manual_seed(seed)
    if devices and torch.accelerator.is_available():
        (torch.cuda.manual_seed_all if torch.cuda.is_available() else torch.manual_seed)(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def random_state() -> bytes:
    """Return the state of the generators that :func:`seed_all` seeds, but for those of devices."""
    numpy = sys.modules.get("numpy")
    numpys = numpy.random.get_state(legacy=False) if numpy else None
    return pickle.dumps((torch.default_generator.get_state().tolist(), random.getstate(), numpys))


@contextmanager
def seeded(seed: int, *, devices: bool) -> Iterator[None]:
    """Seed all generators as :func:`seed_all` does; on exit, restore their state as :func:`kept` does."""
    if _left_seeded:
        seed_all(seed, devices=devices)
        yield
        return
    with kept(devices=devices):
        seed_all(seed, devices=devices)
        yield


_left_seeded: list[None] = []  # one entry for each `left_seeded` that is open


@contextmanager
def left_seeded() -> Iterator[None]:
    """Within this context, :func:`seeded` does not restore the generators, because they are seeded again afterwards.

    Restoring the state of Python's generator takes longer than seeding all of them.
    """
    _left_seeded.append(None)
    try:
        yield
    finally:
        _left_seeded.pop()


@contextmanager
def kept(*, devices: bool) -> Iterator[None]:
    """Restore, on exit, the state that all generators had on entry.

    One thing is not restored: the second of two normal deviates that NumPy's legacy functions cache.
    """
    on_cpu, pythons = torch.default_generator.get_state(), random.getstate()
    on_gpus = torch.cuda.get_rng_state_all() if devices and torch.cuda.is_available() else None
    try:
        with _numpys_kept():
            yield
    finally:
        torch.default_generator.set_state(on_cpu)
        random.setstate(pythons)
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)


_spare: list[Any] = []  # unused NumPy bit generators that `_numpys_kept` has made


@contextmanager
def _numpys_kept() -> Iterator[None]:
    """Swap the bit generator of NumPy's global functions; copying its state twice would take 0.1 ms."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        yield
        return
    other = _spare.pop() if _spare else numpy.random.MT19937(0)
    own = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(other)
    try:
        yield
    finally:
        numpy.random.set_bit_generator(own)
        _spare.append(other)

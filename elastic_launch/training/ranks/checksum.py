"""A fast checksum of tensors, computed on their device.

It is a multilinear hash: the sum modulo 2**64 of a tensor's words of 32 bits or less, each multiplied by a random odd
64-bit number for its position. If one word has changed, by one or more bits, the sum has changed too: a nonzero number
below 2**32 times an odd number is not zero modulo 2**64. If several words have changed, the sum stays the same with a
probability of about 2**-32, provided that the changes do not depend on the random numbers. It does not protect against
an adversary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_CHUNK = 1 << 15
"""Words multiplied at a time on a CPU, so that they and their random numbers stay in the cache."""

_DEVICE_CHUNK = 1 << 18

_DEVICE_CHUNKS = 16
"""Chunks multiplied at a time on another device, which needs memory for the products."""


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the checksum of each tensor, on the device of the first one, without waiting for that device.

    Shape and dtype do not affect it.
    """
    with torch.no_grad():
        sums = [_checksum(tensor.detach()) for tensor in tensors]
        return (
            torch.stack([each.to(sums[0].device) for each in sums])
            if sums
            else torch.zeros(0, dtype=torch.int64, device="cpu")
        )


def combined(sums: Tensor) -> Tensor:
    """Combine several checksums, in their order, into one."""
    return (sums * _numbers(len(sums), 1, sums.device)).sum()


def _checksum(tensor: Tensor) -> Tensor:
    dense = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    words = dense.view(_word(dense))
    on_cpu = words.device.type == "cpu"
    chunk, at_a_time = (_CHUNK, 1) if on_cpu else (_DEVICE_CHUNK, _DEVICE_CHUNKS)
    numbers = _numbers(chunk, 0, words.device)
    whole = len(words) - len(words) % chunk
    rest = words[whole:].to(torch.int64)
    # On a CPU, dot takes half as long; other devices do not have it.
    last = torch.dot(rest, numbers[: len(rest)]) if on_cpu else (rest * numbers[: len(rest)]).sum()
    if not whole:
        return last
    parts = [
        torch.dot(part.to(torch.int64), numbers)[None]
        if on_cpu
        else (part.view(-1, chunk).to(torch.int64) * numbers).sum(1)
        for part in torch.split(words[:whole], chunk * at_a_time)
    ]
    return combined(torch.cat([*parts, last[None]]))


def _word(dense: Tensor) -> torch.dtype:
    size = dense.element_size()
    if all(count * size % 4 == 0 for count in (dense.numel(), dense.storage_offset())):
        return torch.int32
    return torch.uint8 if size == 1 else torch.int16


@cache
def _numbers(count: int, which: int, device: torch.device) -> Tensor:
    """Return random odd numbers, the same in every process."""
    generator = torch.Generator().manual_seed(which)
    numbers = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, dtype=torch.int64) | 1
    return numbers.to(device)

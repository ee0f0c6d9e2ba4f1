"""Random permutations and random numbers that are computed position by position, in constant memory.

The permutation is a Feistel network over pairs (left, right) with left < a and right < b, where a * b is the length or
just above it, after J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002): each round adds a
keyed function of one half to the other half, modulo the size of the other half. A result outside the length is permuted
again until it is inside ("cycle walking"). a is about the square root of the length, so that at most one in a positions
is outside. R. Mitchell et al., "Bandwidth-Optimal Random Shuffling for GPUs" (ACM TOPC 9(1), 2022), show that Feistel
networks of keyed hashes shuffle well enough for statistics. The round function is C. Wellons' integer hash of two
multiplications (https://nullprogram.com/blog/2018/07/31/, constants by T. Elliott): its products stay below 2^63, and
therefore fit into int64.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from elastic_launch.errors import UsageError

ROUNDS = 16
"""Rounds of the network. From 12 rounds on, no test distinguishes orders of 2 to 7 items from random ones. The number
is even, so that the two halves end in their original places."""

LONGEST = 2**62
"""Maximum length; above it, a product of the round function would not fit into int64."""

_LOW = 2**32 - 1


class Permutation:
    """A random order of the numbers from 0 to length - 1.

    ``Permutation(length, seed, epoch)[positions]`` returns the numbers at some positions; they depend only on the
    arguments. Making a permutation takes microseconds for any length. Computing a number takes about 0.2 microseconds
    if thousands are requested at once.

    Args:
        length: number of items, 1 to 2**62.
        key: any numbers and strings; each key gives a different order.

    Raises:
        UsageError: if the length is less than 1 or more than 2**62.
    """

    def __init__(self, length: int, *key: int | str) -> None:
        if not 1 <= length <= LONGEST:
            raise UsageError(f"Permutation(length={length}): it orders 1 to 2**62 numbers.")
        self._length = length
        self._left = math.isqrt(length - 1) + 1
        self._right = -(-length // self._left)
        self._keys = _words(ROUNDS, "permutation", *key)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, positions: Tensor) -> Tensor:
        """Return the numbers at the given positions.

        Args:
            positions: 0 to length - 1, an int64 CPU tensor of any shape.

        Returns:
            An int64 CPU tensor of the same shape.
        """
        numbers = self._permuted(positions)
        while (outside := numbers >= self._length).any():
            numbers[outside] = self._permuted(numbers[outside])
        return numbers

    def _permuted(self, numbers: Tensor) -> Tensor:
        left = numbers.div(self._right, rounding_mode="floor")
        right = numbers - left * self._right
        size, other = self._left, self._right
        added, work = torch.empty_like(left), torch.empty_like(left)
        for key in self._keys:
            _mix(added.copy_(right), key, work)
            # (the 32-bit hash scaled to the left half's size + the left half) modulo that size
            added.mul_(size).bitwise_right_shift_(32).add_(left).sub_(size)
            torch.bitwise_right_shift(added, 63, out=work)
            added.add_(work.bitwise_and_(size))
            left, right, added = right, added, left
            size, other = other, size
        return left.mul_(self._right).add_(right)


def uniform(positions: Tensor, *key: int | str) -> Tensor:
    """Return a random number in [0, 1) for each position; it depends only on the arguments.

    Args:
        positions: 0 to 2**62, an int64 CPU tensor of any shape.
        key: any numbers and strings, such as seed and epoch; each key gives different numbers.

    Returns:
        A float64 CPU tensor of the same shape.
    """
    low, high = positions & _LOW, positions >> 32
    words, work = _words(4, "uniform", *key), torch.empty_like(positions)
    halves = []
    for first, second in (words[:2], words[2:]):
        half = _mix(low.clone(), first, work)
        halves.append(_mix(half.bitwise_xor_(high), second, work))
    # 27 + 26 = 53 bits, the precision of float64.
    return ((halves[0] >> 5) * 2**26 + (halves[1] >> 6)).double() / 2**53


def _words(count: int, *key: int | str) -> list[int]:
    """Derive 32-bit words from a key with SHAKE-256."""
    digest = hashlib.shake_256("/".join(map(str, key)).encode()).digest(4 * count)
    return [int.from_bytes(digest[start : start + 4], "big") for start in range(0, 4 * count, 4)]


def _mix(x: Tensor, key: int, work: Tensor) -> Tensor:
    """Hash 32-bit words in place; ``work``, of the same shape, is overwritten."""
    x.bitwise_xor_(key)
    torch.bitwise_right_shift(x, 16, out=work)
    x.bitwise_xor_(work).mul_(0x21F0AAAD).bitwise_and_(_LOW)
    torch.bitwise_right_shift(x, 15, out=work)
    x.bitwise_xor_(work).mul_(0x735A2D97).bitwise_and_(_LOW)
    torch.bitwise_right_shift(x, 15, out=work)
    return x.bitwise_xor_(work)

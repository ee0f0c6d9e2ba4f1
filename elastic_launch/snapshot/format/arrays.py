"""Converts NumPy arrays and scalars to bytes and back; NumPy is needed only if a state has some."""

from __future__ import annotations

import math
import re
import sys
from contextlib import suppress
from typing import Any

from elastic_launch.snapshot.errors import MalformedError

_DTYPE = re.compile(r"[<>|][biufcSUMm][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")

_WIDEST = {"f": 8, "c": 16}
"""Bytes; wider types differ between machines."""


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array and not an instance of a subclass."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_scalar(value: Any) -> bool:
    """Whether a value is a NumPy scalar."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic) and type(value) is value.dtype.type


def dtype_of(value: Any) -> str | None:
    """Return the dtype of an array or scalar as text; None if its bytes are not portable."""
    dtype = value.dtype
    text = str(dtype.str)
    known = dtype.names is None and _DTYPE.fullmatch(text) and dtype.itemsize <= _WIDEST.get(dtype.kind, sys.maxsize)
    return text if known else None


def restored(text: Any, shape: tuple[int, ...], data: bytes | memoryview) -> Any:
    """Return an array, in its own memory, from its bytes in row-major order.

    Raises:
        MalformedError: if the dtype is not one that is saved, the number of bytes is wrong, or NumPy is missing.
    """
    try:
        import numpy
    except ImportError as error:
        raise MalformedError("it has an array, and NumPy is not installed") from error
    dtype = None
    if isinstance(text, str) and _DTYPE.fullmatch(text):
        with suppress(TypeError, ValueError):
            dtype = numpy.dtype(text)
    if dtype is None or dtype.str != text or dtype.itemsize > _WIDEST.get(dtype.kind, sys.maxsize):
        raise MalformedError(f"an unknown dtype {text!r:.40} of an array")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise MalformedError(f"{len(data)} bytes for an array of {text}{list(shape)}")
    made = numpy.zeros(shape, dtype)
    if len(data):
        made.reshape(-1).view(numpy.uint8)[:] = numpy.frombuffer(data, numpy.uint8)
    return made

"""The tensor dtypes that the format supports, and the bytes of tensors."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Mapping, Sequence

import torch

NATIVE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that safetensors has a name for, and that name."""

_AS_ELEMENTS = {
    torch.complex64: ("F32", 4),
    torch.complex128: ("F64", 8),
    torch.float8_e4m3fnuz: ("U8", 1),
    torch.float8_e5m2fnuz: ("U8", 1),
    torch.float8_e8m0fnu: ("U8", 1),
}
"""Types that safetensors, or its older versions, have no name for: stored as a flat tensor of these elements."""


def name_of(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


DTYPES = {name_of(dtype): dtype for dtype in (*NATIVE, *_AS_ELEMENTS)}
"""All dtypes that the format supports, by name."""


def safetensors_type(dtype: torch.dtype) -> str:
    """Return the element type under which a tensor is stored, for example "BF16"."""
    native = NATIVE.get(dtype)
    return native if native is not None else _AS_ELEMENTS[dtype][0]


def stored_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape under which a tensor is stored: its own, or (elements,) if its dtype has no name."""
    if dtype in NATIVE:
        return shape
    return (math.prod(shape) * dtype.itemsize // _AS_ELEMENTS[dtype][1],)


def is_possible(shape: Sequence[int]) -> bool:
    """Return whether torch can make a tensor of this shape; it multiplies the dimensions even of empty tensors."""
    elements: int = math.prod(max(size, 1) for size in shape)
    return elements < 2**48


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor contiguous in host memory and without autograd; the tensor itself if it already is."""
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in row-major order, on its device; in its own memory if it is contiguous."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor of one element is contiguous with any strides, and its bytes have none but 1.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def unexpanded(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return the first element along each dimension in which a tensor with these strides has one in memory."""
    for dimension, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense tensor without copying them; the caller must keep the tensor alive."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    # tensor.numpy() would need numpy, which is not a dependency and does not support bfloat16.
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def state_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of named tensors, in hex; it is equal exactly if names, dtypes, shapes and all bits are equal.

    It does not depend on the order of the names, on devices, strides or sharing. For each tensor, by sorted name, it
    covers the lengths of name and dtype, both as UTF-8, the number of dimensions, each dimension, and the elements in
    row-major order; all integers are 8 bytes, little-endian.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = dense(tensors[name])
        for text in (name.encode("utf-8", "surrogatepass"), name_of(tensor.dtype).encode()):
            digest.update(len(text).to_bytes(8, "little") + text)
        for size in (tensor.dim(), *tensor.shape):
            digest.update(size.to_bytes(8, "little"))
        digest.update(bytes_of(tensor))
    return digest.hexdigest()

"""A nested state as named tensors and JSON, and back.

Plain values are JSON as ``plain`` says, and a tensor is a reference to one.

Tensors come back in host memory, contiguous, without autograd, a Parameter as a plain tensor. Names for one and the
same tensor (tied weights) are stored once and come back as one tensor; tensors that overlap otherwise come back apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch

from elastic_launch.snapshot.dtypes import DTYPES, is_possible, name_of, safetensors_type, stored_shape
from elastic_launch.snapshot.errors import MalformedError
from elastic_launch.snapshot.plain import MAX_DEPTH, Decoder, Encoder, Path, show, type_name

__all__ = ["MAX_DEPTH", "decode", "encode"]


def encode(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Take a state apart.

    Returns:
        The tensors as they are, neither copied nor moved, by a readable name such as ``model/layer/weight``; and the
        JSON value in which references stand for them.

    Raises:
        UnsupportedStateError: with type and place of what the format does not hold.
    """
    encoder = _Encoder()
    tree = encoder.encode(state, ())
    return encoder.tensors, tree


def decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put a state together again.

    Args:
        tensors: by name, with the dtypes and shapes under which they are stored.

    Raises:
        MalformedError: if ``encode`` cannot have made this tree and these tensors, whoever did.
    """
    decoder = _Decoder(tensors)
    state = decoder.decode(tree, ())
    unused = tensors.keys() - decoder.made.keys()
    if unused:
        raise MalformedError(f"nothing refers to the tensor {min(unused)!r}")
    return state


class _Encoder(Encoder):
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def other(self, value: Any, path: Path) -> Any:
        return self._tensor(value, path) if isinstance(value, torch.Tensor) else super().other(value, path)

    def _tensor(self, tensor: torch.Tensor, path: Path) -> dict[str, Any]:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            self.refuse(type_name(tensor), path, "Sharded tensors and other subclasses are not replicated state.")
        if tensor.layout is not torch.strided or tensor.is_meta or name_of(tensor.dtype) not in DTYPES:
            self.refuse(f"a tensor ({tensor.dtype}, {tensor.layout}, on {tensor.device})", path)
        identity = _identity(tensor)
        name = self._names.get(identity) if tensor.numel() else None
        if name is None:
            name = self._names[identity] = self._new_name(path)
            self.tensors[name] = tensor
        return {"$tensor": name, "dtype": name_of(tensor.dtype), "shape": list(tensor.shape)}

    def _new_name(self, path: Path) -> str:
        # A name is UTF-8 in the file; a key may be a string that is not.
        plain = "/".join(str(key) for key in path).encode("utf-8", "backslashreplace").decode() or "state"
        name, count = plain, 1
        while name in self.tensors or name == "__metadata__":
            count += 1
            name = f"{plain}~{count}"
        return name


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    flags = (tensor.is_conj(), tensor.is_neg())
    return (str(tensor.device), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), flags)


class _Decoder(Decoder):
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.made: dict[str, torch.Tensor] = {}

    def tensor(self, tree: dict[str, Any], path: Path) -> torch.Tensor:
        name, dtype, shape = tree["$tensor"], tree.get("dtype"), tree.get("shape")
        stored = self._tensors.get(name) if isinstance(name, str) else None
        if stored is None:
            raise MalformedError(f"no tensor {name!r} for {show(path)}")
        if not isinstance(dtype, str) or dtype not in DTYPES or not _is_shape(shape):
            raise MalformedError(f"an unknown dtype or shape at {show(path)}")
        made = self.made.get(name)
        if made is None:
            made = self.made[name] = _restore(stored, DTYPES[dtype], tuple(shape), path)
        if made.dtype is not DTYPES[dtype] or list(made.shape) != shape:
            raise MalformedError(f"another dtype or shape of the tensor {name!r} at {show(path)}")
        return made


def _restore(stored: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], path: Path) -> torch.Tensor:
    same_type = safetensors_type(stored.dtype) == safetensors_type(dtype)
    if same_type and tuple(stored.shape) == stored_shape(dtype, shape):
        return stored if stored.dtype is dtype else stored.view(dtype).reshape(shape)
    raise MalformedError(f"a tensor of {name_of(stored.dtype)}{list(stored.shape)} for {show(path)}")


def _is_shape(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value) and is_possible(value)

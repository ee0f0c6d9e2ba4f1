"""Converts a nested state to named tensors and JSON, and back.

Plain values become JSON as described in ``plain``. In addition:

==========================================================  =========================================================
``{"$tensor": name, "dtype": .., "shape": ..}``              a tensor, by reference
``{"$array": {"$tensor": ..}, "dtype": "<f8", "shape": ..}``  a NumPy array; the tensor holds its bytes, and is of the
                                                            array's own dtype where torch has it
``{"$scalar": "AAA=", "dtype": "<i2"}``                      a NumPy scalar, in base64
``{"$dtype": "float32"}``                                    a torch.dtype
``{"$size": [2, 3]}``                                        a torch.Size
``{"$device": "cuda:0"}``                                    a torch.device
==========================================================  =========================================================

Tensors are restored contiguous in host memory and without autograd, a Parameter as a plain tensor. A tensor that occurs
several times (tied weights) is stored once and restored as one tensor; tensors that overlap in another way are restored
separately.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import torch

from elastic_launch.snapshot.errors import MalformedError
from elastic_launch.snapshot.format import arrays
from elastic_launch.snapshot.format.dtypes import DTYPES, bytes_of, is_possible, name_of, safetensors_type, stored_shape
from elastic_launch.snapshot.format.plain import Decoder, Encoder, Path, base64_bytes, show, type_name

Take = Callable[[Path, torch.Tensor], torch.Tensor]
"""Returns what is kept of a tensor at a place in the state; it has the tensor's shape and dtype.

If nothing is kept, that is a meta tensor; an array is then one of zeros.
"""


def encode(state: Any, *, stand_ins: bool = False) -> tuple[dict[str, torch.Tensor], Any]:
    """Split a state into tensors and JSON.

    Args:
        stand_ins: whether it may have meta tensors, which stand for tensors that are kept elsewhere.

    Returns:
        The tensors, neither copied nor moved, by a readable name such as ``model/layer/weight``; and the JSON value
        with references to them.

    Raises:
        UnsupportedStateError: if the format cannot hold a value, naming its type and place.
    """
    encoder = _Encoder(stand_ins)
    tree = encoder.encode(state, ())
    return encoder.tensors, tree


def decode(tree: Any, tensors: Mapping[str, torch.Tensor], take: Take | None = None) -> Any:
    """Rebuild a state.

    Args:
        tensors: tensors by name, with the dtypes and shapes under which they are stored. Each is looked up once, in the
            order of the JSON value.
        take: called for each tensor before the next one is looked up; None: all of each is kept.

    Raises:
        MalformedError: if ``encode`` cannot have made this tree and these tensors.
    """
    decoder = _Decoder(tensors, take or (lambda path, tensor: tensor))
    state = decoder.decode(tree, ())
    unused = tensors.keys() - decoder.made.keys()
    if unused:
        raise MalformedError(f"nothing refers to the tensor {min(unused)!r}")
    return state


def tensor_names(tree: Any) -> dict[str, None]:
    """Return the names of the tensors that a JSON value refers to, in its order."""
    names: dict[str, None] = {}
    left = [tree]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if isinstance(name := value.get("$tensor"), str):
                names[name] = None
            left += reversed(value.values())
        elif isinstance(value, list):
            left += reversed(value)
    return names


class _Encoder(Encoder):
    def __init__(self, stand_ins: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._stand_ins = stand_ins
        self._names: dict[tuple[Any, ...], str] = {}

    def other(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, torch.Size):
            return {"$size": list(value)}
        if isinstance(value, torch.dtype) and name_of(value) in DTYPES:
            return {"$dtype": name_of(value)}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        is_scalar = arrays.is_scalar(value)
        if not is_scalar and not arrays.is_array(value):
            return super().other(value, path)
        if (dtype := arrays.dtype_of(value)) is None:
            self.refuse(f"{type_name(value)} of dtype {value.dtype}", path)
        data = bytearray(value.tobytes())
        if is_scalar:  # an empty string has more bytes than its type
            return {"$scalar": base64.b64encode(data[: value.dtype.itemsize]).decode("ascii"), "dtype": dtype}
        # A flat tensor that owns the bytes, with the same element type if torch has it.
        kind = _ELEMENTS.get(dtype, torch.uint8)
        tensor = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
        return {"$array": self._tensor(tensor, path), "dtype": dtype, "shape": list(value.shape)}

    def _tensor(self, tensor: torch.Tensor, path: Path) -> dict[str, Any]:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            self.refuse(type_name(tensor), path, "Sharded tensors and other subclasses are not replicated state.")
        missing = tensor.is_meta and not self._stand_ins
        if tensor.layout is not torch.strided or missing or name_of(tensor.dtype) not in DTYPES:
            self.refuse(f"a tensor ({tensor.dtype}, {tensor.layout}, on {tensor.device})", path)
        identity = _identity(tensor)
        name = self._names.get(identity) if tensor.numel() and not tensor.is_meta else None
        if name is None:
            name = self._names[identity] = self._new_name(path)
            self.tensors[name] = tensor
        return {"$tensor": name, "dtype": name_of(tensor.dtype), "shape": list(tensor.shape)}

    def _new_name(self, path: Path) -> str:
        # A name in the file is UTF-8; a key may be a string that cannot be encoded.
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
    def __init__(self, tensors: Mapping[str, torch.Tensor], take: Take) -> None:
        self._tensors = tensors
        self._take = take
        self.made: dict[str, torch.Tensor] = {}

    def readers(self) -> dict[str, Callable[[dict[str, Any], Path], Any]]:
        return super().readers() | {
            "$tensor": self._tensor,
            "$array": self._array,
            "$scalar": self._scalar,
            "$dtype": lambda tree, path: _dtype(tree["$dtype"], path),
            "$size": lambda tree, path: torch.Size(_shape(tree["$size"], path)),
            "$device": lambda tree, path: _device(tree["$device"], path),
        }

    def _array(self, tree: dict[str, Any], path: Path) -> Any:
        tensor = tree["$array"]
        if not isinstance(tensor, dict) or "$tensor" not in tensor:
            raise MalformedError(f"no tensor for the array at {show(path)}")
        shape = _shape(tree.get("shape"), path)
        made = self.decode(tensor, path)
        # One that is not kept has no bytes.
        data = bytes(made.numel() * made.element_size()) if made.is_meta else bytes_of(made)
        return arrays.restored(tree.get("dtype"), shape, data)

    def _scalar(self, tree: dict[str, Any], path: Path) -> Any:
        return arrays.restored(tree.get("dtype"), (), base64_bytes(tree["$scalar"], path))[()]

    def _tensor(self, tree: dict[str, Any], path: Path) -> torch.Tensor:
        name, dtype, shape = tree["$tensor"], tree.get("dtype"), tree.get("shape")
        if not isinstance(name, str) or name not in self._tensors:
            raise MalformedError(f"no tensor {name!r} for {show(path)}")
        kind, sizes = _dtype(dtype, path), _shape(shape, path)
        made = self.made.get(name)
        if made is None:
            made = self.made[name] = self._take(path, _restore(self._tensors[name], kind, sizes, path))
        if made.dtype is not kind or tuple(made.shape) != sizes:
            raise MalformedError(f"another dtype or shape of the tensor {name!r} at {show(path)}")
        return made


def _restore(stored: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], path: Path) -> torch.Tensor:
    if stored.dtype is dtype and tuple(stored.shape) == shape:
        return stored  # sent by another rank, and not as it is stored
    same_type = safetensors_type(stored.dtype) == safetensors_type(dtype)
    if same_type and tuple(stored.shape) == stored_shape(dtype, shape):
        return stored if stored.dtype is dtype else stored.view(dtype).reshape(shape)
    raise MalformedError(f"a tensor of {name_of(stored.dtype)}{list(stored.shape)} for {show(path)}")


_ELEMENTS = {
    f"{'|' if dtype.itemsize == 1 else '<'}{letter}{dtype.itemsize}": dtype
    for letter, dtypes in {
        "f": (torch.float16, torch.float32, torch.float64),
        "i": (torch.int8, torch.int16, torch.int32, torch.int64),
        "u": (torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        "c": (torch.complex64, torch.complex128),
        "b": (torch.bool,),
    }.items()
    for dtype in dtypes
}


def _dtype(name: Any, path: Path) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise MalformedError(f"an unknown dtype at {show(path)}")
    return DTYPES[name]


def _shape(value: Any, path: Path) -> tuple[int, ...]:
    known = isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
    if not known or not is_possible(value):
        raise MalformedError(f"an unknown shape at {show(path)}")
    return tuple(value)


def _device(value: Any, path: Path) -> torch.device:
    try:
        return torch.device(value if isinstance(value, str) else "")
    except RuntimeError as error:
        raise MalformedError(f"an unknown device at {show(path)}") from error

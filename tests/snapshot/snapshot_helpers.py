"""Helpers for checkpoint tests: states that encode their step, bitwise comparison, forged checkpoints."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import threading
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec.asyn
import numpy as np
import torch

from elastic_launch.snapshot import CheckpointReadError
from elastic_launch.snapshot.format import tensor_file as tensorfile
from elastic_launch.snapshot.format import tree
from elastic_launch.snapshot.storage.saving import state_json, write_parts, write_share
from elastic_launch.snapshot.storage.shares import Division

NONCE = "0123456789abcdef"


def state_of(step: int, round: int = 0) -> dict[str, Any]:
    """A state in which every part encodes step and round."""
    value = float(step * 1000 + round)
    return {
        "model": {"weight": torch.full((8, 8), value), "bias": torch.full((3,), value, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(value)}}, "param_groups": [{"betas": (0.9, value)}]},
        "step": step,
    }


def same(left: Any, right: Any) -> bool:
    """Whether two values are bitwise equal, with equal types in all parts."""
    if isinstance(left, torch.Tensor):
        if not isinstance(right, torch.Tensor) or left.dtype is not right.dtype or left.shape != right.shape:
            return False
        return torch.equal(_bits(left), _bits(right))
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        attributes = [vars(side).get("_metadata") if isinstance(side, OrderedDict) else None for side in (left, right)]
        pairs = zip(left.items(), right.items(), strict=False)
        return len(left) == len(right) and same(*attributes) and all(same(list(a), list(b)) for a, b in pairs)
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, deque) and left.maxlen != right.maxlen:
        return False
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float):
        # All nans are equal; 0.0 and -0.0 differ.
        return (left != left and right != right) or struct.pack("d", left) == struct.pack("d", right)
    return bool(left == right)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).reshape(-1).view(torch.uint8)


def refuse(error: CheckpointReadError) -> None:
    """For on_damaged: fails, because nothing may be damaged here."""
    raise AssertionError(f"damaged: {error}")


def forge(path: Path, changes: dict[str, Any] | None = None) -> None:
    """Make manifest and checksums fit the files' current content, as an attacker would; changes go into the manifest.

    A change to ... removes the key.
    """
    body = json.loads((path / "manifest.json").read_text())
    del body["sha256"]
    for file in (*path.glob("tensors*.safetensors"), path / "state.json"):
        if file.is_file():
            data = file.read_bytes()
            body["files"][file.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    for key, value in (changes or {}).items():
        if value is ...:
            del body[key]
        else:
            body[key] = value
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    text = json.dumps({**body, "sha256": hashlib.sha256(canonical).hexdigest()})
    (path / "manifest.json").write_text(text)


def tensor_file(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with this header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def division_of(state: Any, count: int) -> tuple[Division, bytes]:
    """A state's tensors, divided; and the rest of the state, as the content of its file."""
    tensors, rest = tree.encode(state)
    data = b"".join(bytes(part) for part in tensorfile.parts(tensors))
    return Division(lambda begin, end: iter([data[begin:end]]), len(data), count), state_json(rest)


def commit(place: Any, state: Any, count: int, *, step: int, round: int = 0, nonce: str = NONCE, **options: Any) -> Any:
    """Write a checkpoint as the first of several nodes does."""
    division, rest = division_of(state, count)
    return write_parts(place, division, rest, {}, step=step, round=round, nonce=nonce, **options)


def share(place: Any, state: Any, count: int, index: int, *, step: int, round: int = 0, nonce: str = NONCE) -> None:
    """Write a share as another node does."""
    write_share(place, division_of(state, count)[0], index, step=step, round=round, nonce=nonce)


def together(place: Any, state: Any, count: int, *, step: int, round: int = 0, nonce: str = NONCE) -> Any:
    """Write a checkpoint as several nodes do."""
    for index in range(1, count):
        share(place, state, count, index, step=step, round=round, nonce=nonce)
    return commit(place, state, count, step=step, round=round, nonce=nonce)


def start_threads_of_fsspec() -> None:
    """Start all threads that fsspec will ever have: they never end, and must not count as a test's leak.

    For blocking calls, its loop has an executor, which starts one more thread whenever none is idle.
    """
    count = 4
    executor, all_there = ThreadPoolExecutor(count), threading.Barrier(count)

    async def use() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(executor)
        await asyncio.gather(*(loop.run_in_executor(None, all_there.wait, 60) for _ in range(count)))

    fsspec.asyn.sync(fsspec.asyn.get_loop(), use)

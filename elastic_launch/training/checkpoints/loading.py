"""Reads checkpoints in any program, without a run: for inference, fine-tuning and export."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastic_launch import snapshot
from elastic_launch.errors import UsageError
from elastic_launch.snapshot.errors import writing
from elastic_launch.snapshot.format import tensor_file
from elastic_launch.snapshot.format.dtypes import NATIVE
from elastic_launch.snapshot.format.files import create, sync_directory, write_all
from elastic_launch.snapshot.format.manifest import MANIFEST, new_nonce, parse_name
from elastic_launch.snapshot.location import Place, place
from elastic_launch.snapshot.stall import while_advancing
from elastic_launch.snapshot.storage.reading import Parts, Taking


def load_checkpoint(
    directory: str | os.PathLike[str], *, step: int | None = None, weights_only: bool = False
) -> dict[str, Any]:
    """Return the state that a training has saved, by the names of its parts.

    It needs no session and no launcher::

        model.load_state_dict(el.load_checkpoint("runs/a")["model"])

    Checksums are verified, nothing is unpickled, and all tensors are on the CPU.

    Args:
        directory: directory or URL of checkpoints, or of one checkpoint.
        step: step of the checkpoint; None: the newest one, or the newest intact one if some are damaged.
        weights_only: whether to return only the weights, such as ``"model"``, and not, for example, the optimizer.

    Raises:
        CheckpointReadError: if there is no such checkpoint, or it cannot be read; DamagedCheckpointError if it was
            altered, ForeignCheckpointError if it has another format, CheckpointGoneError if it was removed meanwhile.
    """
    return dict(_read(place(directory), step, weights_in if weights_only else None))


def export(
    directory: str | os.PathLike[str], file: str | os.PathLike[str], *, part: str = "model", step: int | None = None
) -> None:
    """Write a model's weights from a checkpoint to one file, for programs that do not use this library.

    A file named ``*.safetensors`` is read by ``safetensors.torch.load_file``. A file with any other name is read by
    ``torch.load(file, weights_only=True)``. Both return the model's ``state_dict``. An existing file is replaced.

    Args:
        directory, step: as for :func:`load_checkpoint`.
        file: path of the file.
        part: name of the model in the checkpoint.

    Raises:
        UsageError: if the checkpoint has no model of that name.
        UnsupportedStateError: if a safetensors file cannot hold a value, naming it.
        CheckpointReadError: as for :func:`load_checkpoint`.
        CheckpointWriteError: if the file cannot be written.
    """

    def wanted(info: snapshot.CheckpointInfo) -> list[str]:
        if part not in (known := weights_in(info)):
            has = ", ".join(map(repr, known)) or "no weights"
            raise UsageError(f"export(part={part!r}): {info.path} has {has}.", "Give the name of a model.")
        return [part]

    state = _read(place(directory), step, wanted)[part]
    target = Path(file)
    draft = target.with_name(f".{target.name}.{new_nonce()}")
    if target.suffix == ".safetensors":
        for name, value in state.items() if isinstance(state, Mapping) else [("state", state)]:
            if not isinstance(value, Tensor) or value.dtype not in NATIVE:
                kind = value.dtype if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise snapshot.UnsupportedStateError(
                    f"{target} cannot hold {name!r}: it is {kind}.",
                    "Export to a file with another suffix, such as .pt.",
                )
    with writing(target, "write"):
        try:
            with open(create(draft), "wb") as out:
                if target.suffix == ".safetensors":
                    # Readers such as transformers require this entry.
                    write_all(out.fileno(), tensor_file.parts(state, {"format": "pt"}))
                else:
                    torch.save(state, out)
                    out.flush()
                    os.fsync(out.fileno())
            os.replace(draft, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
        sync_directory(target.parent)


def weights_in(info: snapshot.CheckpointInfo) -> list[str]:
    """Return the names of a checkpoint's parts that hold weights."""
    return [str(name) for name in info.meta.get("weights", ["model"])]


def _read(where: Place, step: int | None, parts: Parts | None) -> Any:
    return while_advancing(where, lambda: find_and_load(where, step, parts)).state


def find_and_load(
    where: Place, step: int | None = None, parts: Parts | None = None, taking: Taking | None = None
) -> snapshot.LoadedCheckpoint:
    """Return one checkpoint.

    Args:
        where: a directory or URL of checkpoints, or of one checkpoint.
        step: its step; None: the newest intact one.
        parts, taking: as for ``snapshot.load``.

    Raises:
        CheckpointReadError: if there is none, or it cannot be read.
    """
    if parse_name(where.name) is not None or (isinstance(where, Path) and (where / MANIFEST).exists()):
        info = snapshot.inspect(where)
        if step in (None, info.step):
            return snapshot.load(info, parts=parts, taking=taking)
        raise snapshot.CheckpointReadError(
            where, f"{where} is the checkpoint of step {info.step}, not of step {step}.", "Leave out step=."
        )
    damaged: list[snapshot.CheckpointReadError] = []
    loaded = snapshot.newest(where, damaged.append, step=step, parts=parts, taking=taking)
    if loaded is not None:
        return loaded
    if damaged:
        raise damaged[0]
    steps = ", ".join(str(info.step) for info in snapshot.find(where, lambda error: None)[::-1])
    what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise snapshot.CheckpointReadError(
        where, f"There is {what} in {where}.", f"It has those of the steps {steps}." if steps else "Check the path."
    )

"""The manifest of a checkpoint, and the names in a directory of checkpoints. Pure.

::

    <directory>/
      step-<step>.r<round>.<nonce>/   a checkpoint
        tensors.safetensors
        state.json                    the rest of the state, see ``tree``
        manifest.json                 what the two must be; written last
      .writing-<nonce>/               one being written, or left by a writer that died; see ``draft``
      .removing-<nonce>/              one being removed
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from elastic_launch.errors import UsageError
from elastic_launch.snapshot.errors import MalformedError, UnknownFormatError, UnsupportedStateError
from elastic_launch.snapshot.files import FileSum
from elastic_launch.snapshot.plain import Decoder, Encoder

__all__ = [
    "MANIFEST",
    "MAX_MANIFEST_BYTES",
    "MAX_STATE_BYTES",
    "REMOVING",
    "STATE",
    "TENSORS",
    "WRITING",
    "Manifest",
    "assemble",
    "check_numbers",
    "directory_name",
    "encode_meta",
    "new_nonce",
    "parse_json",
    "parse_name",
]

SCHEMA = 1
FORMAT = "elastic-launch checkpoint"
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
WRITING, REMOVING = ".writing-", ".removing-"
MAX_MANIFEST_BYTES = 1024 * 1024
MAX_STATE_BYTES = 64 * 1024 * 1024

_NUMBER = r"(0|[1-9][0-9]{0,17})"
_NAME = re.compile(rf"step-{_NUMBER}\.r{_NUMBER}\.[0-9a-f]{{16}}")
_SHA256 = re.compile("[0-9a-f]{64}")
_MAX_NUMBER = 10**18  # What the pattern of a name admits.


def new_nonce() -> str:
    """Return 16 hex digits that tell apart checkpoints of the same step and round."""
    return secrets.token_hex(8)


def directory_name(step: int, round: int, nonce: str) -> str:
    """Return the name of a checkpoint's directory."""
    return f"step-{step}.r{round}.{nonce}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Return step and round from the name of a checkpoint's directory; None if it is no such name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete checkpoint consists of.

    Attributes:
        step: optimizer steps that the state has behind it.
        round: number of the round that saved it.
        tensors, state: what the two files must be.
        meta: whatever the writer wants known before the state is read.
    """

    step: int
    round: int
    tensors: FileSum
    state: FileSum
    meta: dict[str, Any]

    def dumps(self) -> tuple[bytes, str]:
        """Return the manifest as JSON, and its digest: the SHA-256, in hex, of all that it says.

        Raises:
            UnsupportedStateError: if ``meta`` is no dict of plain values, or too large.
        """
        return assemble(self.step, self.round, self.tensors, self.state, encode_meta(self.meta))

    @staticmethod
    def parse(data: bytes) -> tuple[Manifest, str]:
        """Return what ``dumps`` was made from, and its digest.

        Raises:
            UnknownFormatError: if it is a manifest of another format or version.
            MalformedError: if it is no manifest, or not what its writer wrote.
        """
        value = parse_json(data)
        if not isinstance(value, dict):
            raise MalformedError("the manifest is no JSON object")
        if value.get("format") != FORMAT or value.get("schema") != SCHEMA:
            raise UnknownFormatError(
                f"it has format {value.get('format')!r:.80}, schema {value.get('schema')!r:.20}; "
                f"this version reads {FORMAT!r}, schema {SCHEMA}"
            )
        digest = _sha256(value.pop("sha256", None))
        try:
            computed = _digest(value)
        except RecursionError as error:
            raise MalformedError("the manifest is nested too deeply") from error
        if computed != digest:
            raise MalformedError("the manifest does not have its checksum")
        files = _files(value.get("files"))
        try:
            meta = Decoder().decode(value.get("meta"))
        except MalformedError as error:
            raise MalformedError(f"in the manifest's meta, {error}") from error
        if type(meta) is not dict:
            raise MalformedError("the manifest's meta is no dict")
        step, round = _number(value.get("step"), "step"), _number(value.get("round"), "round")
        return Manifest(step, round, files[TENSORS], files[STATE], meta), digest


def encode_meta(meta: dict[str, Any]) -> Any:
    """Return a manifest's meta as JSON.

    Raises:
        UnsupportedStateError: if it is no dict of plain values.
    """
    if type(meta) is not dict:
        raise UnsupportedStateError("A checkpoint's meta is a dict.")
    try:
        return Encoder().encode(meta)
    except UnsupportedStateError as error:
        raise UnsupportedStateError(f"In its meta: {error.message}", "Put tensors into the state.") from error


def assemble(step: int, round: int, tensors: FileSum, state: FileSum, meta: Any) -> tuple[bytes, str]:
    """Return a manifest as JSON, and its digest.

    Args:
        meta: as ``encode_meta`` returns it.

    Raises:
        UnsupportedStateError: if ``meta`` is too large.
    """
    body = {
        "format": FORMAT,
        "schema": SCHEMA,
        "step": step,
        "round": round,
        "files": {
            TENSORS: {"bytes": tensors.bytes, "sha256": tensors.sha256},
            STATE: {"bytes": state.bytes, "sha256": state.sha256},
        },
        "meta": meta,
    }
    digest = _digest(body)
    data = json.dumps({**body, "sha256": digest}, indent=1, allow_nan=False).encode() + b"\n"
    if len(data) > MAX_MANIFEST_BYTES:
        raise UnsupportedStateError(
            f"A checkpoint's meta of {len(data)} bytes exceeds {MAX_MANIFEST_BYTES}.", "Put it into the state."
        )
    return data, digest


def check_numbers(step: int, round: int) -> None:
    """Refuse what cannot be in a name.

    Raises:
        UsageError: if a number is negative or no integer.
    """
    for name, value in (("step", step), ("round", round)):
        if type(value) is not int or not 0 <= value < _MAX_NUMBER:
            raise UsageError(f"{name}={value!r}: a checkpoint's {name} is an integer, 0 or more.")


def parse_json(data: bytes) -> Any:
    """Parse JSON as the standard has it.

    Raises:
        MalformedError: if it is none, or nested too deeply.
    """
    try:
        return json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"it is no JSON: {error}") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _files(value: Any) -> dict[str, FileSum]:
    # Names come from here, never from the manifest, so that it cannot lead elsewhere.
    if not isinstance(value, dict) or value.keys() != {TENSORS, STATE}:
        raise MalformedError(f"the manifest does not name exactly {TENSORS} and {STATE}")
    sums = {}
    for name, item in value.items():
        if not isinstance(item, dict) or item.keys() != {"bytes", "sha256"}:
            raise MalformedError(f"the manifest does not say what {name} must be")
        sums[name] = FileSum(_number(item["bytes"], f"size of {name}"), _sha256(item["sha256"]))
    return sums


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise MalformedError(f"the manifest's {what} is {value!r:.40}")
    return value


def _sha256(value: Any) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise MalformedError("a checksum in the manifest is no SHA-256")
    return value

"""The manifest of a checkpoint, and the names in a directory of checkpoints. Does no I/O.

::

    <directory>/
      step-<step>.r<round>.<nonce>/   a checkpoint
        tensors.safetensors           or tensors-<k>-of-<n>.safetensors if nodes shared the work; see ``shares``;
                                      or __0_0.distcp and .metadata, see ``distributed``
        state.json                    the rest of the state, see ``tree``
        manifest.json                 sizes and checksums of these files; written last
      .writing-<nonce>/               a checkpoint being written, or left by a dead writer; see ``directory``
      .share-<checkpoint>-<k>-of-<n>/ a share that a node has written, not yet taken into its checkpoint
      .removing-<nonce>/              a checkpoint being removed
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from dataclasses import asdict, dataclass
from typing import Any

from elastic_launch.errors import UsageError
from elastic_launch.snapshot.errors import MalformedError, UnknownFormatError, UnsupportedStateError
from elastic_launch.snapshot.format.files import FileSum
from elastic_launch.snapshot.format.plain import Decoder, Encoder

SCHEMA = 1
FORMAT = "elastic-launch checkpoint"
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
DATA, METADATA = "__0_0.distcp", ".metadata"
DISTRIBUTED = "dcp"  # the format of these two, in the meta of a state that is to be saved in it
WRITING, REMOVING, SHARE = ".writing-", ".removing-", ".share-"

MAX_SHARES = 256
"""Maximum number of tensor files, so that a manifest has room for them."""

MAX_MANIFEST_BYTES = 16 * 1024 * 1024  # it names each of an optimizer's parameters
MAX_STATE_BYTES = 64 * 1024 * 1024

_NUMBER = r"(0|[1-9][0-9]{0,17})"
_NAME = re.compile(rf"step-{_NUMBER}\.r{_NUMBER}\.[0-9a-f]{{16}}")
_SHARE = re.compile(rf"{re.escape(SHARE)}({_NAME.pattern})-[0-9]{{5}}-of-[0-9]{{5}}")
_SHA256 = re.compile("[0-9a-f]{64}")

_MAX_NUMBER = 10**18
"""Numbers are smaller than this, as the pattern of a name allows no larger ones."""


def new_nonce() -> str:
    """Return 16 hex digits that distinguish checkpoints of the same step and round."""
    return secrets.token_hex(8)


def directory_name(step: int, round: int, nonce: str) -> str:
    """Return the name of a checkpoint's directory."""
    return f"step-{step}.r{round}.{nonce}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Return step and round from the name of a checkpoint's directory; None for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def share_file(index: int, count: int, *, again: bool = False) -> str:
    """Return the name of a share's file, whose index counts from 0; names count from 1.

    ``again``: the first node writes it in place of another node, which may still be writing its own file.
    """
    return f"tensors-{index + 1:05}-of-{count:05}{'.again' if again else ''}.safetensors"


def share_directory(name: str, index: int, count: int) -> str:
    """Return the name of the directory in which a share waits to be taken into the checkpoint ``name``."""
    return f"{SHARE}{name}-{index + 1:05}-of-{count:05}"


def parse_share(name: str) -> tuple[int, int] | None:
    """Return step and round from a name that :func:`share_directory` returned; None for any other name."""
    match = _SHARE.fullmatch(name)
    return parse_name(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a complete checkpoint."""

    step: int  # optimizer steps done when the state was taken
    round: int  # number of the round that saved it
    tensors: dict[str, FileSum]  # size and checksum of each tensor file, by name, in order
    state: FileSum  # size and checksum of the state's file
    meta: dict[str, Any]  # the writer's metadata, which can be read without the state

    @property
    def files(self) -> dict[str, FileSum]:
        """Size and checksum of each file except the manifest, by name."""
        return {**self.tensors, STATE: self.state}

    @property
    def size(self) -> int:
        """Total size of these files in bytes."""
        return sum(file.bytes for file in self.files.values())

    def dumps(self) -> tuple[bytes, str]:
        """Return the manifest as JSON, and its digest: the SHA-256, in hex, of its content."""
        return assemble(self.step, self.round, self.tensors, self.state, encode_meta(self.meta))

    @staticmethod
    def parse(data: bytes) -> tuple[Manifest, str]:
        """Return the manifest that ``dumps`` has turned into JSON, and its digest.

        Raises:
            UnknownFormatError: if it is a manifest of another format or version.
            MalformedError: if it is not a manifest, or differs from what its writer wrote.
        """
        value = parse_json(data)
        if not isinstance(value, dict):
            raise MalformedError("the manifest is not a JSON object")
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
            raise MalformedError("the manifest does not match its checksum")
        tensors, state = _files(value.get("files"))
        try:
            meta = Decoder().decode(value.get("meta"))
        except MalformedError as error:
            raise MalformedError(f"in the manifest's meta, {error}") from error
        if type(meta) is not dict:
            raise MalformedError("the manifest's meta is not a dict")
        step, round = _number(value.get("step"), "step"), _number(value.get("round"), "round")
        return Manifest(step, round, tensors, state, meta), digest


def encode_meta(meta: dict[str, Any]) -> Any:
    """Return a manifest's meta, which is a dict of plain values, as JSON."""
    if type(meta) is not dict:
        raise UnsupportedStateError("A checkpoint's meta is a dict.")
    try:
        return Encoder().encode(meta)
    except UnsupportedStateError as error:
        raise UnsupportedStateError(f"In its meta: {error.message}", "Put tensors into the state.") from error


def assemble(step: int, round: int, tensors: dict[str, FileSum], state: FileSum, meta: Any) -> tuple[bytes, str]:
    """Return a manifest as JSON, and its digest."""
    body = {
        "format": FORMAT,
        "schema": SCHEMA,
        "step": step,
        "round": round,
        "files": {name: asdict(file) for name, file in {**tensors, STATE: state}.items()},
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
    """Check that step and round can be in a name: integers, 0 or more."""
    for name, value in (("step", step), ("round", round)):
        if type(value) is not int or not 0 <= value < _MAX_NUMBER:
            raise UsageError(f"{name}={value!r}: a checkpoint's {name} is an integer, 0 or more.")


def parse_json(data: bytes) -> Any:
    """Parse strict JSON; raise a MalformedError for anything else."""
    try:
        return json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"it is not JSON: {error}") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _files(value: Any) -> tuple[dict[str, FileSum], FileSum]:
    """Return size and checksum of the tensor files, in order, and of the state's file."""
    # Names are made here and never taken from the manifest, so that it cannot point elsewhere.
    if not isinstance(value, dict):
        raise MalformedError("the manifest does not name exactly its files")
    names, count = [TENSORS], len(value) - 1
    if DATA in value:
        names = [DATA, METADATA]
    elif TENSORS not in value:
        if not 2 <= count <= MAX_SHARES:
            raise MalformedError(f"the manifest names {count} tensor files")
        # Of each share, the variant that is listed.
        both = [(share_file(index, count), share_file(index, count, again=True)) for index in range(count)]
        names = [again if again in value else usual for usual, again in both]
    if value.keys() != {*names, STATE}:
        raise MalformedError(f"the manifest does not name exactly its tensor files and {STATE}")
    return {name: file_sum(name, value[name]) for name in names}, file_sum(STATE, value[STATE])


def file_sum(name: str, item: Any) -> FileSum:
    """Return the size and checksum that a JSON value has for a file; raise a MalformedError if it has not both."""
    if not isinstance(item, dict) or item.keys() != {"bytes", "sha256"}:
        raise MalformedError(f"the manifest does not say what {name} must be")
    return FileSum(_number(item["bytes"], f"size of {name}"), _sha256(item["sha256"]))


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise MalformedError(f"the manifest's {what} is {value!r:.40}")
    return value


def _sha256(value: Any) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise MalformedError("a checksum in the manifest is not a SHA-256 hash")
    return value

"""Arbitrary content in a checkpoint's directory: one clear error, nothing is executed, followed or waited for."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from snapshot_helpers import forge, same, state_of, tensor_file, together

from elastic_launch.snapshot import (
    CheckpointInfo,
    CheckpointReadError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    find,
    inspect,
    load,
    newest,
    write,
)
from elastic_launch.snapshot.format.manifest import share_file


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two valid checkpoints, of the steps 1 and 2, written once."""
    directory = tmp_path_factory.mktemp("template")
    write(directory, state_of(1), step=1, round=0)
    write(directory, state_of(2), step=2, round=0, meta={"G": 64})
    return directory


@pytest.fixture
def info(template: Path, tmp_path: Path) -> CheckpointInfo:
    """A separate copy of the newer one."""
    return find(shutil.copytree(template, tmp_path / "run"))[0]


def check_skipped(info: CheckpointInfo, message: str, kind: type[CheckpointReadError] = DamagedCheckpointError) -> None:
    """Reading reports what is wrong in which directory; the older one is loaded instead, with one warning."""
    with pytest.raises(kind, match=message) as raised:
        load(inspect(info.path))
    assert str(info.path) in str(raised.value)
    assert raised.value.hint
    told: list[CheckpointReadError] = []
    loaded = newest(info.path.parent, told.append)
    assert loaded is not None
    assert same(loaded.state, state_of(1))
    assert [type(error) for error in told] == [kind]
    assert told[0].path == info.path


class Trap:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("by", [pickle.dump, torch.save])
def test_a_pickle_is_never_unpickled(name: str, by: Callable[..., None], info: CheckpointInfo, tmp_path: Path) -> None:
    with open(info.path / name, "wb") as file:
        by(Trap(tmp_path / "trace"), file)
    if name != "manifest.json":
        forge(info.path)
    check_skipped(info, "is not (JSON|a safetensors file)")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
def test_any_flipped_bit_and_any_cut_is_seen(name: str, info: CheckpointInfo) -> None:
    path = info.path / name
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        altered = bytearray(whole)
        altered[position] ^= 1 << position % 8
        path.write_bytes(altered)
        with pytest.raises(CheckpointReadError):
            load(inspect(info.path))
        with pytest.raises(CheckpointReadError):
            load(info)
        path.write_bytes(whole[:position])
        with pytest.raises(DamagedCheckpointError):
            load(inspect(info.path))
    path.write_bytes(whole)
    assert same(load(info).state, state_of(2))


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_missing_file(name: str, info: CheckpointInfo) -> None:
    (info.path / name).unlink()
    assert [found.step for found in find(info.path.parent)] == [1]
    check_skipped(info, f"there is no {name} in it")


def test_a_copy_in_progress_is_not_complete(info: CheckpointInfo) -> None:
    """In any order of copying, only the complete one is found; a partial one counts as damaged, not as an error."""
    copy = info.path.with_name(info.path.name[:-16] + "0123456789abcdef")
    copy.mkdir()
    for name in ("manifest.json", "state.json"):
        shutil.copy(info.path / name, copy / name)
        assert len(find(info.path.parent)) == 2
    (copy / "tensors.safetensors").write_bytes((info.path / "tensors.safetensors").read_bytes()[:-1])
    assert len(find(info.path.parent)) == 2
    shutil.copy(info.path / "tensors.safetensors", copy)
    assert len(find(info.path.parent)) == 3


MANIFESTS: list[tuple[str, dict[str, Any], str]] = [
    ("dots", {"files": {"../../secret": {"bytes": 1, "sha256": "0" * 64}}}, "names 0 tensor files"),
    ("absolute", {"files": {"/etc/passwd": {"bytes": 1, "sha256": "0" * 64}}}, "names 0 tensor files"),
    ("no files", {"files": ...}, "does not name exactly"),
    ("list of files", {"files": ["state.json"]}, "does not name exactly"),
    ("no sums", {"files": {"tensors.safetensors": {}, "state.json": {}}}, "does not say what"),
    ("no step", {"step": ...}, "manifest's step is None"),
    ("negative", {"step": -1}, "manifest's step is -1"),
    ("no number", {"round": True}, "manifest's round is True"),
    ("float", {"step": 2.0}, "manifest's step is 2.0"),
    ("huge", {"step": 10**4000}, "manifest's step is 1000"),
    ("other step", {"step": 3}, "its manifest is of step 3, round 0"),
    ("other round", {"round": 1}, "its manifest is of step 2, round 1"),
    ("meta is not a dict", {"meta": [1]}, "meta is not a dict"),
    ("meta with a tensor", {"meta": {"a": {"$tensor": "model/weight"}}}, "in the manifest's meta, unknown keys"),
    ("no meta", {"meta": ...}, "meta is not a dict"),
]


@pytest.mark.parametrize(("changes", "message"), [case[1:] for case in MANIFESTS], ids=[case[0] for case in MANIFESTS])
def test_a_forged_manifest(changes: dict[str, Any], message: str, info: CheckpointInfo) -> None:
    forge(info.path, changes)
    check_skipped(info, message)


def shares(*names: str) -> dict[str, Any]:
    """A manifest with these files and the state's."""
    return {"files": {name: {"bytes": 1, "sha256": "0" * 64} for name in (*names, "state.json")}}


FIRST, SECOND = share_file(0, 2), share_file(1, 2)
SHARES: list[tuple[str, dict[str, Any], str]] = [
    ("one", shares(FIRST), "names 1 tensor files"),
    ("none", shares(), "names 0 tensor files"),
    ("too many", shares(*(share_file(index, 257) for index in range(257))), "names 257 tensor files"),
    ("one twice", shares(SECOND, share_file(1, 2, again=True)), "does not name exactly"),
    ("both of one and another", shares(FIRST, SECOND, share_file(1, 2, again=True)), "does not name exactly"),
    ("of another number", shares(FIRST, share_file(1, 3)), "does not name exactly"),
    ("elsewhere", shares(FIRST, f"../{SECOND}"), "does not name exactly"),
    ("absolute", shares(FIRST, "/etc/passwd"), "does not name exactly"),
    ("undivided and a share", shares("tensors.safetensors", SECOND), "does not name exactly"),
    ("no object", {"files": [FIRST, SECOND, "state.json"]}, "does not name exactly"),
    ("no sum", {"files": {FIRST: {}, SECOND: {}, "state.json": {}}}, "does not say what"),
    ("missing", shares(FIRST, SECOND), f"there is no {FIRST} in it"),
]


@pytest.mark.parametrize(("changes", "message"), [case[1:] for case in SHARES], ids=[case[0] for case in SHARES])
def test_a_forged_manifest_of_several_files(changes: dict[str, Any], message: str, info: CheckpointInfo) -> None:
    forge(info.path, changes)
    check_skipped(info, message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tensor_file({"model/weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1234"), "two files"),
        (tensor_file({"z": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1234"), "no tensor 'model/bias'"),
        (pickle.dumps([1]), "is not a safetensors file"),
        (b"", "is not a safetensors file"),
    ],
)
def test_a_forged_share(data: bytes, message: str, info: CheckpointInfo) -> None:
    shutil.rmtree(info.path)
    info = together(info.path.parent, state_of(2), 2, step=2)
    (info.path / SECOND).write_bytes(data)
    forge(info.path)
    check_skipped(info, message)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_a_share_that_is_not_a_file(kind: str, info: CheckpointInfo, tmp_path: Path) -> None:
    shutil.rmtree(info.path)
    info = together(info.path.parent, state_of(2), 2, step=2)
    moved = shutil.move(info.path / SECOND, tmp_path / SECOND)
    if kind == "link":
        (info.path / SECOND).symlink_to(moved)
    elif kind == "pipe":
        os.mkfifo(info.path / SECOND)
    else:
        (info.path / SECOND).mkdir()
    check_skipped(info, f"{SECOND} is not a regular file")


@pytest.mark.parametrize("key", ["bytes", "sha256"])
@pytest.mark.parametrize("value", [2**62, 10**30, -1, 1.5, None, "../x", "0" * 64, [], {}])
def test_a_forged_size_or_checksum(key: str, value: Any, info: CheckpointInfo) -> None:
    files = json.loads((info.path / "manifest.json").read_text())["files"]
    files["state.json"][key] = value
    (info.path / "state.json").rename(info.path / "kept")
    forge(info.path, {"files": files})
    (info.path / "kept").rename(info.path / "state.json")
    check_skipped(info, "size|bytes|SHA-256|does not match its checksum")


def test_a_manifest_or_state_too_large_to_read(info: CheckpointInfo) -> None:
    manifest = (info.path / "manifest.json").read_bytes()
    (info.path / "manifest.json").write_bytes(manifest + b" " * 2**24)
    check_skipped(info, "manifest.json exceeds 16777216 bytes")
    (info.path / "manifest.json").write_bytes(manifest)
    os.truncate(info.path / "state.json", 2**26 + 1)
    forge(info.path)
    check_skipped(info, "state.json exceeds 67108864 bytes")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[",
        b"\xff",
        b"NaN",
        b"[1e999]",
        b"[" * 100_000,
        b'{"a":' * 150_000 + b"1" + b"}" * 150_000,  # Python 3.14 reads a third of that
        b"1" * 5000,
        b"[1] 2",
    ],
)
@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_invalid_or_excessive_json(text: bytes, name: str, info: CheckpointInfo) -> None:
    (info.path / name).write_bytes(text)
    if name == "state.json":
        forge(info.path)
    check_skipped(info, "is not JSON|out of range|deeper than 64|not a JSON object|maximum|does not|nested")


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TENSOR_FILES = {
    "empty": b"",
    "short": b"\x01\x00",
    "giant header": (2**63).to_bytes(8, "little") + b"{}",
    "header beyond the end": (100).to_bytes(8, "little") + b"{}",
    "no object": tensor_file([]),
    "no JSON": tensor_file(b"{"),
    "deep": tensor_file(b'{"a":' * 5000),
    "beyond the data": tensor_file({"a": GOOD}, b"1234"),
    "less than the data": tensor_file({"a": GOOD}, b"123456789"),
    "giant shape": tensor_file({"a": {**GOOD, "shape": [2**62, 2**62]}}, b"12345678"),
    "giant empty shape": tensor_file({"a": {**GOOD, "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}),
    "giant dimension": tensor_file({"a": {**GOOD, "shape": [2**63, 0], "data_offsets": [0, 0]}}),
    "negative shape": tensor_file({"a": {**GOOD, "shape": [-2]}}, b"12345678"),
    "negative offset": tensor_file({"a": {**GOOD, "data_offsets": [-8, 0]}}, b"12345678"),
    "reversed": tensor_file({"a": {**GOOD, "data_offsets": [8, 0]}}, b"12345678"),
    "overlap": tensor_file({"a": GOOD, "b": GOOD}, b"12345678"),
    "hole": tensor_file({"a": {**GOOD, "data_offsets": [8, 16]}}, b"1234567812345678"),
    "unknown type": tensor_file({"a": {**GOOD, "dtype": "F99"}}, b"12345678"),
    "type that we never write": tensor_file({"a": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}, b"12345678"),
    "four bits": tensor_file({"a": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}}, b"12345678"),
    "nobody refers to it": tensor_file({"z": GOOD}, b"12345678"),
}


@pytest.mark.parametrize("data", TENSOR_FILES.values(), ids=TENSOR_FILES)
def test_an_invalid_tensor_file(data: bytes, info: CheckpointInfo) -> None:
    (info.path / "tensors.safetensors").write_bytes(data)
    (info.path / "state.json").write_text("{}")
    forge(info.path)
    check_skipped(info, "is not a safetensors file|elements of type|nothing refers|impossible")


OFFSETS = st.lists(st.one_of(st.integers(0, 16), st.sampled_from([-1, 2**63, 2**64])), min_size=2, max_size=2)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F64", "U8", "BOOL", "C64", "F8_E8M0", "F4", "I7", "", 3]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 4, 8, 2**31, 2**62, 2**63, 2**64, -1, 1.5]), max_size=3),
        "data_offsets": OFFSETS,
    }
)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRIES, max_size=2).map(tensor_file),
        st.binary(max_size=40),
        st.binary(max_size=40).map(tensor_file),
    ),
    st.binary(max_size=16),
)
@example(tensor_file({"a": GOOD}), b"12345678")
@example(tensor_file({"a": {**GOOD, "dtype": "F64", "shape": [1]}}), b"12345678")
def test_no_tensor_file_does_more_than_be_refused(
    forged_checkpoint: Callable[[bytes], Path], data: bytes, more: bytes
) -> None:
    try:
        found = load(inspect(forged_checkpoint(data + more))).state["a"]
    except DamagedCheckpointError:
        return
    assert (found.dtype, tuple(found.shape)) == (torch.float32, (2,))
    assert found.numpy().tobytes() == (data + more)[-8:]


@pytest.fixture(scope="module")
def forged_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], Path]:
    """Returns the directory of a checkpoint with this tensor file, which refers to one tensor."""
    info = write(tmp_path_factory.mktemp("forged"), {"a": torch.ones(2)}, step=1, round=0)

    def forged(data: bytes) -> Path:
        (info.path / "tensors.safetensors").write_bytes(data)
        forge(info.path)
        return info.path

    return forged


def test_links_are_not_followed(info: CheckpointInfo, tmp_path: Path) -> None:
    moved = shutil.move(info.path, tmp_path / info.path.name)
    info.path.symlink_to(moved)
    assert [found.step for found in find(info.path.parent)] == [1]
    told: list[CheckpointReadError] = []
    assert newest(info.path.parent, told.append) is not None
    assert "is a symbolic link" in str(told[0])


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["link", "broken link", "pipe", "directory", "device"])
def test_file_entries_that_are_not_regular_files(kind: str, name: str, info: CheckpointInfo, tmp_path: Path) -> None:
    path = info.path / name
    moved = Path(shutil.move(path, tmp_path / name))
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "broken link":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    check_skipped(info, f"{name} is not a regular file")


def test_a_file_with_the_name_of_a_checkpoint(info: CheckpointInfo) -> None:
    shutil.rmtree(info.path)
    info.path.write_text("")
    check_skipped(info, "there is no manifest.json in it")


@pytest.mark.parametrize(
    "changes", [{"schema": 2}, {"schema": "1"}, {"schema": ...}, {"format": "zip"}, {"format": ...}, {"format": [1]}]
)
def test_another_format_or_version_is_foreign(changes: dict[str, Any], info: CheckpointInfo) -> None:
    forge(info.path, changes)
    check_skipped(info, "this version reads 'elastic-launch checkpoint', schema 1", ForeignCheckpointError)


def test_a_checkpoint_replaced_after_it_was_found(info: CheckpointInfo) -> None:
    (info.path / "state.json").write_text("{}")
    forge(info.path)
    with pytest.raises(DamagedCheckpointError, match="not the one that was found"):
        load(info)


def test_what_is_skipped_is_logged(info: CheckpointInfo, caplog: pytest.LogCaptureFixture) -> None:
    (info.path / "tensors.safetensors").write_bytes(b"")
    assert newest(info.path.parent) is not None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(info.path) in record.getMessage()
    assert "tensors.safetensors has 0 bytes instead of" in record.getMessage()


def test_a_caller_may_refuse_to_skip(info: CheckpointInfo) -> None:
    def refuse(error: CheckpointReadError) -> None:
        raise error

    (info.path / "tensors.safetensors").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError):
        newest(info.path.parent, refuse)


def test_a_manifest_has_room_for_the_names_of_many_parameters(tmp_path: Path) -> None:
    orders = {"optimizer": [[f"model.layers.{number}.mlp.experts.gate_proj.weight" for number in range(50_000)]]}
    write(tmp_path, state_of(1), step=1, round=0, meta={"orders": orders})
    loaded = newest(tmp_path)
    assert loaded is not None
    assert loaded.info.meta == {"orders": orders}


@pytest.mark.parametrize("name", ["manifest.json", "tensors.safetensors"])
def test_no_older_state_takes_the_place_of_one_that_cannot_be_read(
    info: CheckpointInfo, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such an error may pass. One of an older checkpoint is skipped."""
    original = os.open
    failing = info.path

    def opens(path: Any, *args: Any, **options: Any) -> int:
        if os.path.basename(os.fspath(path)) == name and Path(path).parent.name == failing.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))
        return original(path, *args, **options)

    monkeypatch.setattr(os, "open", opens)
    with pytest.raises(CheckpointReadError, match=f"Could not read {info.path}: Input/output error") as raised:
        newest(info.path.parent)
    assert type(raised.value) is CheckpointReadError
    older = next(found.path for found in find(info.path.parent, lambda error: None) if found.path != info.path)
    kept = older.rename(info.path.parent / "kept")
    with pytest.raises(CheckpointReadError, match=f"Could not read {info.path}"):
        newest(info.path.parent)
    failing = kept.rename(older)
    loaded = newest(info.path.parent)
    assert loaded is not None
    assert loaded.info.path == info.path


def test_without_a_valid_checkpoint_none_is_found(info: CheckpointInfo) -> None:
    for found in find(info.path.parent):
        (found.path / "state.json").unlink()
    told: list[CheckpointReadError] = []
    assert newest(info.path.parent, told.append) is None
    assert len(told) == 2

"""Snapshots in slots: complete or absent, and bitwise identical when read back."""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_launch.snapshot.errors import TornSnapshotError, UnsupportedStateError
from elastic_launch.snapshot.memory.slot import EVALUATED, Header, Slot
from elastic_launch.snapshot.memory.slot_state import SlotDraft, SlotWriter, read_meta, read_state
from elastic_launch.snapshot.room import below_peak, forget_peak, room


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot.make("test")
    yield made
    made.close()


def a_state(scale: float = 1.0) -> dict[str, Any]:
    tensors = {"w": torch.arange(12.0).reshape(3, 4) * scale, "b": torch.tensor([], dtype=torch.bfloat16)}
    return {"model": tensors, "steps": (7, None, float("inf")), "flags": torch.tensor([True, False])}


def write(slot: Slot, state: Any, sequence: int = 1) -> bool:
    writer = SlotWriter(slot)
    draft = SlotDraft(state, {"identity": {"seed": 0}}, lambda tensor: False)
    first = writer.write(draft, Header(sequence, 2, 3, EVALUATED, 0))
    writer.close()
    return first


def test_a_tensor_of_one_element_is_written_whatever_its_stride(slot: Slot) -> None:
    matrix = torch.arange(6.0).view(3, 2)
    write(slot, {"column": matrix[1:2, 1], "corner": matrix[2:, 1:].t(), "every": matrix.view(-1)[4::2]})
    header = slot.header()
    assert header is not None
    found = read_state(slot, header)
    assert [found["column"].tolist(), found["corner"].tolist(), found["every"].tolist()] == [[3.0], [[5.0]], [4.0]]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 600), min_size=8, max_size=8),
    st.dictionaries(st.integers(0, 7), st.integers(0, 2**64 - 1), max_size=1),
)
def test_a_forged_header_is_none_or_can_be_read(numbers: list[int], other: dict[int, int]) -> None:
    """A worker runs the user's code, and has the slot's descriptors."""
    for place, number in other.items():
        numbers[place] = number
    sequence, *_, tensors, state, meta = numbers
    made = Slot.make("test")
    try:
        os.ftruncate(made.tensors, 1000)
        os.ftruncate(made.head, 5000)
        fields = struct.pack("<8s7Q", b"elsnap02", *numbers[1:])
        os.pwrite(made.head, struct.pack("<Q", sequence) + fields + struct.pack("<I", zlib.crc32(fields)), 0)
        header = made.header()
        fits = tensors <= 1000 and 4096 + state + meta <= 5000
        assert (header is not None) == (sequence > 0 and fits and max(numbers) < 2**53)
        if header is not None:
            assert header == Header(*numbers)
            assert len(b"".join(made.tensor_parts(header))) == tensors
            assert (len(made.state(header)), len(made.meta(header))) == (state, meta)
    finally:
        made.close()


def test_a_new_slot_is_empty(slot: Slot) -> None:
    assert slot.header() is None


def test_what_is_written_is_read_back(slot: Slot) -> None:
    write(slot, a_state(), sequence=9)
    header = slot.header()
    assert header is not None
    assert (header.sequence, header.round, header.step, header.training) == (9, 2, 3, 0)
    found = read_state(slot, header)
    assert torch.equal(found["model"]["w"], a_state()["model"]["w"])
    assert found["model"]["b"].dtype is torch.bfloat16
    assert found["steps"] == (7, None, float("inf"))
    assert found["flags"].tolist() == [True, False]
    assert read_meta(slot, header) == {"identity": {"seed": 0}}


def test_what_is_read_does_not_share_the_slots_memory(slot: Slot) -> None:
    """An optimizer keeps what it loads; the slot is written again."""
    write(slot, a_state())
    header = slot.header()
    assert header is not None
    found = read_state(slot, header)
    write(slot, a_state(scale=5.0))
    assert torch.equal(found["model"]["w"], a_state()["model"]["w"])


def test_memory_is_found_once_for_all_processes_that_write(slot: Slot) -> None:
    assert [write(slot, a_state(scale)) for scale in (1.0, 2.0)] == [True, False]


def test_a_slot_takes_states_of_other_sizes(slot: Slot) -> None:
    writer = SlotWriter(slot)
    for number, size in enumerate((10, 100_000, 3), start=1):
        state = {"x": torch.full((size,), float(number))}
        writer.write(SlotDraft(state, {}, lambda tensor: True), Header(number, 1, number, EVALUATED, 0))
        header = slot.header()
        assert header is not None
        assert torch.equal(read_state(slot, header)["x"], state["x"])
    writer.close()


def test_a_slot_that_is_being_written_holds_nothing(slot: Slot) -> None:
    write(slot, a_state())
    slot.begin()
    assert slot.header() is None


@pytest.mark.parametrize("place", range(8, 64, 7))
def test_a_header_that_was_altered_is_none(slot: Slot, place: int) -> None:
    write(slot, a_state())
    (byte,) = os.pread(slot.head, 1, place)
    os.pwrite(slot.head, bytes([byte ^ 0xFF]), place)
    assert slot.header() is None


def test_the_parts_are_the_tensor_file(slot: Slot) -> None:
    write(slot, {"x": torch.arange(3_000_000)})
    header = slot.header()
    assert header is not None
    assert b"".join(slot.tensor_parts(header)) == os.pread(slot.tensors, header.tensors, 0)
    assert len(list(slot.tensor_parts(header))) > 1


def test_only_the_first_that_is_written_into_a_slot_has_to_find_its_memory(slot: Slot) -> None:
    """However the sizes change: time after that counts as cost of a snapshot."""
    writer = SlotWriter(slot)
    found = []
    for number in (1, 2, 3):
        draft = SlotDraft({"x": torch.zeros(1000 * number)}, {}, lambda tensor: True)
        found.append(writer.write(draft, Header(number, 1, number, EVALUATED, 0)))
    writer.close()
    assert found == [True, False, False]


def test_what_may_change_is_cloned_and_what_stays_is_not() -> None:
    stays, changes = torch.zeros(4), torch.zeros(4)
    draft = SlotDraft({"stays": stays, "changes": changes}, {}, lambda tensor: tensor is stays)
    changes += 1
    assert draft.tensors["changes"].sum() == 0
    assert draft.tensors["stays"].data_ptr() == stays.data_ptr()


def test_a_clone_needs_no_further_copy_before_it_is_written() -> None:
    draft = SlotDraft({"gaps": torch.arange(6).view(2, 3).t()}, {}, lambda tensor: False)
    assert draft.tensors["gaps"].is_contiguous()
    assert draft.tensors["gaps"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_what_no_checkpoint_holds_is_refused_before_anything_is_written() -> None:
    with pytest.raises(UnsupportedStateError, match="found at state"):
        SlotDraft({"x": object()}, {}, lambda tensor: True)


def test_headers_compare_by_their_numbers(slot: Slot) -> None:
    write(slot, a_state())
    header = slot.header()
    assert header is not None
    assert replace(header, sequence=1) == Header(1, 2, 3, 1, 0, header.tensors, header.state, header.meta)


# Room.


def _proc(directory: Path, available: int, groups: str) -> Path:
    (directory / "proc" / "self").mkdir(parents=True)
    (directory / "proc" / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available // 1024} kB\n")
    (directory / "proc" / "self" / "cgroup").write_text(groups)
    return directory / "proc"


def _group(path: Path, **values: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (path / name.replace("_dot_", ".")).write_text(value)


def test_without_groups_the_host_counts(tmp_path: Path) -> None:
    assert room(_proc(tmp_path, 1 << 30, "0::/\n"), tmp_path / "none")[0] == 1 << 30


def test_the_tightest_group_above_counts_in_version_2(tmp_path: Path) -> None:
    proc = _proc(tmp_path, 1 << 40, "0::/pods/a\n")
    _group(tmp_path / "cg" / "pods", memory_dot_max="1000000", memory_dot_current="400000")
    _group(tmp_path / "cg" / "pods" / "a", memory_dot_max="max", memory_dot_current="300000")
    assert room(proc, tmp_path / "cg")[0] == 600000


def test_version_1_counts(tmp_path: Path) -> None:
    proc = _proc(tmp_path, 1 << 40, "4:memory:/pods/a\n2:cpu,cpuacct:/\n")
    limits = {"memory_dot_limit_in_bytes": "5000", "memory_dot_usage_in_bytes": "6000"}
    _group(tmp_path / "cg" / "memory" / "pods" / "a", **limits)
    assert room(proc, tmp_path / "cg")[0] == 0, "more used than allowed leaves nothing"


def test_memory_and_swap_together_count_in_version_1(tmp_path: Path) -> None:
    """Of 800 bytes of memory and 150 of swap; memory alone would leave 200."""
    proc = _proc(tmp_path, 1 << 40, "4:memory:/a\n")
    limits = {"memory_dot_limit_in_bytes": "1000", "memory_dot_usage_in_bytes": "800"}
    both = {"memory_dot_memsw_dot_limit_in_bytes": "1000", "memory_dot_memsw_dot_usage_in_bytes": "950"}
    _group(tmp_path / "cg" / "memory" / "a", **limits, **both)
    assert room(proc, tmp_path / "cg")[0] == 50


@pytest.mark.parametrize(("version", "name"), [(1, "total_inactive_file"), (2, "inactive_file")])
def test_a_dataset_that_was_read_takes_no_memory_from_snapshots(tmp_path: Path, version: int, name: str) -> None:
    stat = f"cache 900\ninactive_file 100\nactive_file 50\n{name} 700\n"
    if version == 1:
        proc, place = _proc(tmp_path, 1 << 40, "4:memory:/a\n"), tmp_path / "cg" / "memory" / "a"
        _group(place, memory_dot_limit_in_bytes="1000", memory_dot_usage_in_bytes="950", memory_dot_stat=stat)
    else:
        proc, place = _proc(tmp_path, 1 << 40, "0::/a\n"), tmp_path / "cg" / "a"
        _group(place, memory_dot_max="1000", memory_dot_current="950", memory_dot_stat=stat)
    assert room(proc, tmp_path / "cg") == (750, f"within the container's limit of 0.00 GiB ({place})")


def test_beyond_the_mark_at_which_processes_are_throttled_nothing_is_left(tmp_path: Path) -> None:
    proc = _proc(tmp_path, 1 << 40, "0::/a\n")
    _group(tmp_path / "cg" / "a", memory_dot_max="1000", memory_dot_high="600", memory_dot_current="500")
    assert room(proc, tmp_path / "cg")[0] == 100


def test_memory_that_others_take_during_the_allocation_is_an_error_and_all_of_it_is_given_back(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would kill a process instead, if a control group has no more."""
    slot.allocate(1 << 20)
    most = 0

    def left() -> tuple[int, str]:
        nonlocal most
        most = max(most, slot.allocated)
        return (300 << 20) - 2 * slot.allocated, "in this test"

    monkeypatch.setattr("elastic_launch.snapshot.room.room", left)
    with pytest.raises(OSError, match=r"one of them needs 0\.\d\d GiB more, and 0\.\d\d GiB are free in this test"):
        slot.allocate(200 << 20)
    assert 100 << 20 < most < 200 << 20
    assert slot.allocated == 0


def test_of_this_process_something_is_left() -> None:
    assert 0 < room()[0] < 1 << 50


def test_a_process_knows_what_it_has_used_beyond_what_it_uses() -> None:
    forget_peak()
    before = below_peak()
    taken = mmap.mmap(-1, 64 * 2**20)
    taken.write(bytes(64 * 2**20))
    taken.close()
    assert before + 32 * 2**20 < below_peak() < before + 192 * 2**20
    forget_peak()
    assert below_peak() < 32 * 2**20


def test_a_peak_that_is_not_known_is_none(tmp_path: Path) -> None:
    forget_peak(tmp_path)
    assert below_peak(tmp_path) == 0


def test_what_a_slot_takes_is_known(slot: Slot) -> None:
    assert slot.allocated == 0
    write(slot, {"x": torch.zeros(1_000_000)})
    assert 4_000_000 <= slot.allocated < 4_100_000


@pytest.mark.parametrize("shift", [0, 1, 105])
@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_what_changes_before_it_is_copied_gives_the_snapshot_up(
    slot: Slot, part: str, by_data: bool, shift: int
) -> None:
    """A script may decay its weights by hand, while the state of the previous step is being copied.

    After a tensor with an odd number of elements, the copy's address is not a multiple of 8.
    """
    if part == "optimizer" and by_data:
        return  # is not seen, and no script is known that does it
    state = {name: {"x": torch.ones(64, 30_000)} for name in ("model", "optimizer")}
    state["a"] = {"x": torch.ones(shift)}
    write(slot, a_state())
    draft = SlotDraft(state, {}, lambda tensor: True, watch=True)
    changed = state[part]["x"].data if by_data else state[part]["x"]
    changed[3, 5:] *= 0.9
    writer = SlotWriter(slot)
    with pytest.raises(TornSnapshotError, match=f"The script changed {part}/x while"):
        writer.write(draft, Header(2, 1, 2, EVALUATED, 0))
    assert slot.header() is None
    again = SlotDraft(state, {}, lambda tensor: True, watch=True)
    writer.write(again, Header(3, 1, 3, EVALUATED, 0))
    writer.close()
    header = slot.header()
    assert header is not None
    assert torch.equal(read_state(slot, header)[part]["x"], state[part]["x"])


def test_what_cannot_be_watched_is_cloned() -> None:
    state = {
        "small": torch.zeros(10),
        "gaps": torch.zeros(300, 300).t(),
        "odd": torch.zeros(99_999, dtype=torch.uint8),
        "watched": torch.zeros(300, 300),
    }
    draft = SlotDraft(state, {}, lambda tensor: True, watch=True)
    assert list(draft.watched) == ["watched"]
    shared = [name for name, value in state.items() if draft.tensors[name].data_ptr() == value.data_ptr()]
    assert shared == ["watched"]

"""The node's snapshots: which slot is written next, and copies to durable storage by a real process."""

from __future__ import annotations

import json
import logging
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SLOWNESS, alive, wait_for
from hypothesis import given
from hypothesis import strategies as st

from elastic_agents.helpers import helper_command
from elastic_agents.snapshots import copier as copiers
from elastic_agents.snapshots import snapshot_store as module
from elastic_agents.snapshots.slots import HeldSlot, SlotTable
from elastic_agents.snapshots.snapshot_store import SnapshotStore
from elastic_launch import codec, snapshot
from elastic_launch.contract import SLOTS, Copied, Copying, CopyJob, Save, Stored
from elastic_launch.snapshot.memory.slot import EVALUATED, PART, Header, Slot
from elastic_launch.snapshot.memory.slot_state import SlotDraft, SlotWriter
from elastic_launch.snapshot.storage import owner
from elastic_launch.snapshot.storage.shares import nonce_of


@given(st.lists(st.sampled_from(["store", "pin", "unpin", "agreed", "await"]), max_size=40))
def test_what_awaits_its_copy_is_never_overwritten(events: list[str]) -> None:
    """Only if the copy of another one goes on, and the last good one is a third, does it give way to a new one."""
    book, sequence = SlotTable(), 0
    for event in events:
        if event == "store":
            sequence += 1
            slot, agreed = book.use, book._good is not None
            before = book.awaits
            assert book.pinned is None or book.pinned.slot != slot
            book.stored(HeldSlot(slot, sequence, sequence, 1))
            assert book.awaits is None or book.awaits.slot != slot
            assert book.awaits == before or (agreed and book.pinned is not None)
        elif event == "pin":
            book.pin()
        elif event == "await":
            book.awaits = book.newest
        elif event == "agreed":
            book.agreed()
        else:
            book.unpin()


@given(st.lists(st.sampled_from(["store", "pin", "unpin"]), max_size=40))
def test_a_slot_in_use_is_never_overwritten(events: list[str]) -> None:
    book, sequence = SlotTable(), 0
    for event in events:
        if event == "store":
            sequence += 1
            book.stored(HeldSlot(book.use, sequence, sequence, 1))
        elif event == "pin":
            book.pin()
        else:
            book.unpin()
        kept = [held.slot for held in (book.newest, book.pinned) if held is not None]
        assert 0 <= book.use < SLOTS
        assert book.use not in kept
        assert book.sequence == sequence


def test_the_good_snapshot_is_not_replaced_before_the_next_agreement() -> None:
    book = SlotTable()
    for sequence in range(1, 4):
        book.stored(HeldSlot(book.use, sequence, sequence, 1))
    good = book.newest
    assert good is not None
    book.agreed()
    for sequence in range(4, 20):
        if sequence % 5 == 0:
            book.pin()
        if sequence % 5 == 3:
            book.unpin()
        assert book.use != good.slot
        book.stored(HeldSlot(book.use, sequence, sequence, 1))
    book.agreed()
    assert book.newest is not None
    newest = book.newest
    for sequence in range(20, 24):
        assert book.use != newest.slot
        book.stored(HeldSlot(book.use, sequence, sequence, 1))


GIVES_WAY = "from elastic_agents.priority import give_way; give_way(); "


@pytest.fixture(autouse=True)
def copies_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other tests, a copying process that gives way takes several times as long."""

    def command(code: str, *arguments: str) -> list[str]:
        return helper_command(code.removeprefix(GIVES_WAY), *arguments)

    monkeypatch.setattr(copiers, "helper_command", command)


class Node:
    """A snapshot store, and the worker that writes its snapshots."""

    def __init__(self, directory: Path, nodes: int = 1, rank: int = 0) -> None:
        self.directory = directory
        self.nodes, self.rank = nodes, rank
        self.member = True
        self.told: list[Copied] = []
        self.asked = self.going_on = 0
        self.workers = True
        self.size = 1000
        self.may_commit = lambda: self.member
        self.adds = self.stands_by = False
        self.snapshot_store = SnapshotStore(lambda: self.may_commit(), self._tell, may_add=lambda: self.adds)
        self.snapshot_store.start()
        offer, numbers = self.snapshot_store.offer()
        self.use = offer.use
        self.slots = [Slot(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        self.sequence = 0
        self.owner = ""
        self.meta: dict[str, Any] = {}

    def _tell(self, told: Copied | Copying | Save | None) -> bool:
        self.asked += isinstance(told, Save)
        self.going_on += isinstance(told, Copying)
        if isinstance(told, Copied):
            self.told.append(told)
        return self.workers

    def used(self) -> list[int]:
        """The steps of the snapshots that there are, and of which nothing is freed."""
        headers = [slot.header() for slot in self.slots if slot.allocated]
        return sorted(-1 if header is None else header.step for header in headers)

    def store(
        self,
        step: int,
        *,
        durable: bool = True,
        round: int = 1,
        keep: int = 2,
        training: int = 0,
        results: bool = False,
    ) -> None:
        self._write(step, self.meta, round, training)
        job = CopyJob(self.sequence, step, round, stands_by=self.stands_by, results=results)
        if durable or not self.rank:
            job = replace(job, directory=str(self.directory), keep=keep, now=durable, owner=self.owner)
        if durable and self.nodes > 1:
            job = replace(job, shares=self.nodes, share=self.rank, nonce=nonce_of(9, round, step))
        self.use = self.snapshot_store.stored(Stored(self.use, job))

    def holds_up_a_copy(self, step: int = 1) -> threading.Event:
        """Store a step, whose copy waits before its commit until the event is set."""
        asked, goes_on = threading.Event(), threading.Event()
        self.may_commit = lambda: asked.set() or goes_on.wait(60)
        self.store(step)
        assert asked.wait(60)
        return goes_on

    def store_part(self, step: int) -> None:
        """Store a part of a snapshot that is split among the nodes."""
        self._write(step, {PART: {"ranks": [0, 1], "world_size": 3}}, 1, 0)
        self.use = self.snapshot_store.stored(Stored(self.use, CopyJob(self.sequence, step, 1)))

    def _write(self, step: int, meta: dict[str, Any], round: int, training: int) -> None:
        self.sequence += 1
        writer = SlotWriter(self.slots[self.use])
        state = {name: torch.full((self.size,), float(step)) for name in "xy"}
        draft = SlotDraft(state, meta, lambda x: True)
        writer.write(draft, Header(self.sequence, round, step, EVALUATED, training))
        writer.close()

    def copied(self) -> list[int]:
        assert self.snapshot_store.wait(30 * SLOWNESS)
        return [info.step for info in snapshot.find(self.directory)]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "checkpoints")
    yield made
    made.snapshot_store.close()


def test_a_snapshot_is_copied_as_a_checkpoint_that_any_reader_loads(node: Node) -> None:
    node.store(7)
    assert node.copied() == [7]
    loaded = snapshot.newest(node.directory)
    assert loaded is not None
    assert loaded.state["x"].tolist() == [7.0] * 1000
    (told,) = node.told
    assert (told.step, told.error, told.path) == (7, "", str(loaded.info.path))
    assert (told.digest, told.bytes) == (loaded.info.digest, loaded.info.bytes)


def test_a_snapshot_that_is_to_stay_in_memory_is_not_copied(node: Node) -> None:
    node.store(7, durable=False)
    assert node.snapshot_store.idle
    assert node.copied() == []


def test_the_newest_snapshot_is_of_the_training_that_was_stored_last(node: Node) -> None:
    assert node.snapshot_store.newest_position is None
    for training, step in ((0, 7), (1, 3)):
        node.store(step, training=training)
        assert node.snapshot_store.newest_position == (training, step)


def test_old_copies_are_removed(node: Node) -> None:
    for step in range(1, 5):
        node.store(step)
        node.copied()
    assert node.copied() == [4, 3]


def _copier() -> int:
    """Pid of the copying process; 0 if there is none."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                status = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if any(b"elastic_agents.snapshots.copying" in word for word in words) and int(status[1]) == os.getpid():
                return int(name)
    return 0


def _stops_the_copy_of(node: Node, step: int) -> int:
    """Store a step; return the pid of the process that copies it, which is stopped before it has done anything."""
    started: queue.SimpleQueue[int] = queue.SimpleQueue()
    popen = subprocess.Popen

    def stopped(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = popen(command, **how)
        if json.loads(command[-3])["share"] == node.rank:
            os.kill(process.pid, signal.SIGSTOP)
            started.put(process.pid)
        return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copiers.subprocess, "Popen", stopped)
        node.store(step)
        return started.get(timeout=30 * SLOWNESS)


def test_while_one_is_copied_slowly_the_newest_waits_and_the_training_does_not(node: Node) -> None:
    goes_on = node.holds_up_a_copy()
    for step in range(2, 8):
        node.store(step)
    goes_on.set()
    assert node.copied() == [7, 1]
    assert [copied.step for copied in node.told] == [1, 7]


@pytest.mark.parametrize(("last", "lower"), [(False, 10), (True, 0)], ids=["a copy", "the final copy"])
def test_the_copying_process_runs_at_a_lower_priority_unless_the_end_waits_for_it(
    node: Node, last: bool, lower: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copiers, "helper_command", helper_command)
    found: list[int] = []

    def look() -> bool:
        found.append(os.getpriority(os.PRIO_PROCESS, _copier()))
        return True

    node.may_commit = look
    node.store(1, durable=not last)
    if last:
        node.snapshot_store.secure()
    assert node.copied() == [1]
    assert found == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + lower)]


def test_a_copying_process_that_is_killed_is_started_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.01)
    killed: list[int] = []

    def kill() -> bool:
        if not killed:
            killed.append(wait_for("the copying process", _copier))
            os.kill(killed[0], signal.SIGKILL)
            wait_for("its end", lambda: not alive(killed[0]))
        return True

    node.may_commit = kill
    node.store(1)
    assert node.copied() == [1]
    assert killed


def test_what_was_to_be_copied_is_and_not_a_newer_one(node: Node) -> None:
    """Workers compare their states only before a snapshot that is marked for copying."""
    node.store(1)
    node.store(2, durable=False)
    node.store(3, durable=False)
    assert node.copied() == [1]
    assert not node.asked


@pytest.mark.parametrize("workers", [True, False])
def test_a_copy_that_comes_late_asks_for_another_to_be_copied(node: Node, workers: bool) -> None:
    """Without workers that could take another snapshot, the newest is copied."""
    goes_on = node.holds_up_a_copy()
    node.workers = workers
    node.store(2)
    for step in (3, 4):
        node.store(step, durable=False)
    goes_on.set()
    if workers:
        wait_for("the question", lambda: node.asked)
        node.store(5)
    assert node.copied() == [5 if workers else 4, 1]


def test_what_has_results_waits_for_a_slow_copy_and_newer_ones_do_not_replace_it(node: Node) -> None:
    goes_on = node.holds_up_a_copy()
    node.store(2, results=True)
    node.store(3)
    for step in (4, 5):
        node.store(step, durable=False)
    node.store(6)
    goes_on.set()
    assert node.snapshot_store.wait(30 * SLOWNESS)
    assert [told.step for told in node.told] == [1, 2, 6]
    assert not node.asked


def test_what_has_results_is_tried_again_and_not_a_newer_one(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.5)
    node.directory.write_text("a file")
    node.store(1, results=True)
    wait_for("the first attempt", lambda: "Tried again" in caplog.text)
    for step in (2, 3, 4):
        node.store(step, durable=step != 3)
    node.directory.unlink()
    assert node.snapshot_store.wait(30 * SLOWNESS)
    assert [told.step for told in node.told] == [1, 4]


def test_results_for_which_there_is_no_slot_are_named(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    goes_on = node.holds_up_a_copy()
    node.workers = False
    for step in (2, 3):
        node.store(step, results=True)
    for step in (4, 5):
        node.store(step, durable=False)
    goes_on.set()
    assert node.snapshot_store.wait(30 * SLOWNESS)
    assert [told.step for told in node.told] == [1, 2, 5]
    assert "the evaluation after step 3 has no checkpoint" in caplog.text


def test_a_part_of_a_snapshot_is_not_copied_in_place_of_a_whole_one(node: Node) -> None:
    """Snapshots are split since the one that was to be copied, which is gone."""
    goes_on = node.holds_up_a_copy()
    node.workers = False
    node.store(2)
    for step in (3, 4):
        node.store_part(step)
    goes_on.set()
    assert node.copied() == [1]
    assert [(told.step, told.error) for told in node.told] == [
        (1, ""),
        (4, "This node has only a part of the newest snapshot."),
    ]


def test_a_copying_process_that_cannot_be_started_is_tried_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.2)
    node.store(1, durable=False)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))  # open descriptors stay open
    try:
        node.snapshot_store.secure()
        wait_for("the first attempt", lambda: "cannot be started: [Errno 24]" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert node.copied() == [1]


def test_a_copying_process_whose_agent_was_killed_commits_nothing_and_ends_silently(node: Node, tmp_path: Path) -> None:
    node.store(1, durable=False)
    slot = (node.slots[0].tensors, node.slots[0].head)
    job = codec.dumps(CopyJob(1, 1, 1, str(tmp_path))).decode()
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            helper_command("from elastic_agents.snapshots.copying import main; main()", job, *map(str, slot)),
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=subprocess.PIPE,
            pass_fds=slot,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, b"")
    assert snapshot.find(tmp_path) == []


def test_a_copying_process_that_sends_an_unexpected_reply_is_ended(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.01)
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\necho welcome\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    node.store(1)
    assert node.copied() == []
    assert [told.error for told in node.told] == [r"The process that copies it said 'welcome\n', an unexpected reply."]
    monkeypatch.undo()
    node.store(2)
    assert node.copied() == [2]


def test_a_checkpoint_is_saved_even_if_the_copying_process_is_killed_while_it_removes_old_ones(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; print({!r}, flush=True); os.kill(os.getpid(), 9)"
    written = codec.dumps(Copied(1, 1, path="/there/step-1", pruning=True), type="copied").decode()
    monkeypatch.setattr(copiers, "helper_command", lambda *_: [sys.executable, "-c", code.format(written)])
    node.store(1)
    assert node.snapshot_store.wait(30 * SLOWNESS)
    error = "The process that copies it ended with -9."
    assert node.told == [Copied(1, 1, path="/there/step-1", error=error)], "reported, and not tried again"
    assert node.snapshot_store.failed == ""
    assert node.snapshot_store.has_saved(0, 1)


def test_a_copying_process_imports_nothing_from_the_scripts_directory(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("secrets", "json", "types", "elastic_launch", "elastic_agents", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    node.store(1)
    assert node.copied() == [1]
    assert list(tmp_path.glob("*.ran")) == []


def test_an_evicted_node_commits_nothing_and_does_not_try_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PAUSE", 1000.0)
    node.member = False
    node.store(1)
    assert node.copied() == []
    assert "not committed" in node.told[-1].error
    assert "Tried again" not in caplog.text
    assert os.listdir(node.directory) == [], "nor does it leave anything behind"


def test_a_directory_that_cannot_be_written_is_reported_and_tried_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.01)
    node.directory.write_text("a file")
    node.store(1)
    assert node.snapshot_store.wait(30 * SLOWNESS)
    (told,) = node.told
    assert told.path == ""
    assert str(node.directory) in told.error
    assert node.snapshot_store.failed == f"{told.error} {told.hint}"
    node.directory.unlink()
    node.store(2)
    assert node.copied() == [2]
    assert node.snapshot_store.failed == ""


def test_a_url_without_a_driver_is_reported_at_once(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.directory = "nowhere://bucket"  # type: ignore[assignment]
    node.store(1)
    assert node.snapshot_store.wait(30 * SLOWNESS)
    (told,) = node.told
    assert told.error == "Checkpoints cannot be saved to nowhere://bucket: fsspec knows no nowhere://."
    assert told.final
    assert "Tried again" not in caplog.text


def test_a_directory_that_another_run_has_taken_since_is_refused_at_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE", 1000.0)
    node.owner = MINE
    owner.claim(node.directory, MINE)
    node.store(1)
    assert node.copied() == [1]
    owner.claim(node.directory, ANOTHER)
    node.store(2)
    assert node.copied() == [1]
    assert "was taken since by run 'another'" in node.snapshot_store.failed


def test_checkpoints_of_an_ended_run_do_not_prevent_a_late_node_from_saving(node: Node) -> None:
    """It has restored from the others' memory, and so has never claimed the directory on its own disk."""
    owner.claim(node.directory, owner.owned_by("e3", "ended"))
    node.owner = owner.owned_by("a1", "mine", replaces="e3")
    node.store(1)
    assert node.copied() == [1]
    owner.claim(node.directory, ANOTHER)
    node.store(2)
    assert node.copied() == [1], "that one came after this node"


def test_a_snapshot_only_in_memory_is_secured_at_the_end(node: Node) -> None:
    node.store(1)
    node.copied()
    node.store(2, durable=False)
    node.snapshot_store.secure()
    assert node.copied() == [2, 1]
    node.snapshot_store.secure()
    assert node.copied() == [2, 1], "once"


def test_a_node_that_stands_by_saves_only_if_no_other_can_and_removes_nothing(node: Node) -> None:
    node.stands_by, node.meta = True, _of_run("a1")
    for step in (1, 2, 3, 4):
        node.store(step, durable=False, keep=1)
        node.snapshot_store.secure()
        assert node.copied() == [*range(step - 1, 0, -1)]
        assert not node.snapshot_store.saves
        node.snapshot_store.secure(stands_in=True)
        assert node.copied() == [*range(step, 0, -1)]


@pytest.mark.parametrize("adds", [True, False])
def test_without_confirmed_membership_a_node_adds_if_it_may_and_removes_nothing(node: Node, adds: bool) -> None:
    node.store(1, keep=1)
    node.copied()
    node.member, node.adds = False, adds
    node.store(2, keep=1)
    assert node.copied() == ([2, 1] if adds else [1])
    node.member = True
    node.store(3, keep=1)
    assert node.copied() == [3]


def test_what_was_refused_is_saved_once_no_other_node_can(node: Node) -> None:
    node.member = False
    node.store(1)
    assert node.copied() == []
    node.adds = True
    node.snapshot_store.secure()
    assert node.copied() == []
    node.snapshot_store.secure(stands_in=True)
    assert node.copied() == [1]


def test_of_two_nodes_that_save_one_state_at_once_one_adds_it(node: Node, tmp_path: Path) -> None:
    other = Node(node.directory)
    try:
        for each in (node, other):
            each.stands_by, each.meta = True, _of_run("a1")
            each.store(7, durable=False)
        both = threading.Barrier(2, timeout=60)
        for each in (node, other):  # each has looked, and found none, before either commits
            each.may_commit = lambda: both.wait() >= 0
        for each in (node, other):
            each.snapshot_store.secure(stands_in=True)
        assert node.copied() == other.copied() == [7]
        assert [len(each.told) for each in (node, other)] == [1, 1]
        assert node.told[0].path == other.told[0].path
        assert [name for name in os.listdir(node.directory) if not name.startswith("step-")] == []
    finally:
        other.snapshot_store.close()


MINE, ANOTHER = owner.owned_by("a1", "mine"), owner.owned_by("b2", "another")


def _of_run(number: str) -> dict[str, Any]:
    return {"branch": {"run": number}}


def test_a_newer_checkpoint_of_a_run_that_took_the_directory_since_does_not_count_as_saved(node: Node) -> None:
    node.owner, node.meta = MINE, _of_run("a1")
    owner.claim(node.directory, MINE)
    node.store(2, durable=False)
    owner.claim(node.directory, ANOTHER)
    snapshot.write(node.directory, {}, step=400, round=1, meta=_of_run("b2"))
    node.snapshot_store.secure()
    assert node.copied() == [400]
    (told,) = node.told
    assert (told.step, told.path) == (2, "")
    assert "was taken since by run 'another'" in told.error
    assert not node.snapshot_store.has_saved(0, 2)


def test_a_later_process_of_a_run_does_not_take_the_directory_back_from_another_run(node: Node) -> None:
    node.owner = MINE
    owner.claim(node.directory, MINE)
    node.store(2, durable=False)
    owner.claim(node.directory, ANOTHER)
    node.snapshot_store.secure()
    assert node.copied() == []
    assert "was taken since by run 'another'" in node.told[0].error


@pytest.mark.parametrize("left_by", [_of_run("b2"), {}], ids=["another", "unknown"])
def test_what_another_run_has_left_in_the_directory_does_not_count_as_saved(
    node: Node, left_by: dict[str, Any]
) -> None:
    snapshot.write(node.directory, {}, step=400, round=1, meta=left_by)
    node.owner, node.meta = MINE, _of_run("a1")
    owner.claim(node.directory, MINE)
    node.store(2, durable=False)
    node.snapshot_store.secure()
    assert node.copied() == [400, 2]
    assert [told.step for told in node.told] == [2]


def test_a_newer_checkpoint_of_the_same_run_counts_and_is_reported_with_its_own_step(node: Node) -> None:
    there = snapshot.write(node.directory, {}, step=3, round=1, meta=_of_run("a1"))
    node.owner, node.meta = MINE, _of_run("a1")
    owner.claim(node.directory, MINE)
    node.store(2, durable=False)
    node.snapshot_store.secure()
    assert node.copied() == [3]
    assert [(told.step, told.path) for told in node.told] == [(3, str(there.path))]


def test_the_end_does_not_wait_for_storage_that_hangs(node: Node) -> None:
    hanging = _stops_the_copy_of(node, 1)
    node.snapshot_store.close()
    assert not Path(f"/proc/{hanging}").exists()


def test_a_complete_snapshot_of_a_writer_killed_before_it_reported_it_is_kept(node: Node) -> None:
    """The next workers resume from it: they must not overwrite it, and a run that fails must copy it."""
    node.store(3, durable=False)
    untold, told = node.use, node.snapshot_store.stored
    node.snapshot_store.stored = lambda stored: stored.slot  # type: ignore[method-assign]
    node.store(4, durable=False)
    node.snapshot_store.stored = told  # type: ignore[method-assign]
    node.snapshot_store.secure()
    assert node.copied() == [4]
    offer, numbers = node.snapshot_store.offer()
    assert offer.use != untold
    assert offer.sequence == 2
    assert len(numbers) == 2 * SLOTS


def test_a_slot_whose_writer_was_killed_half_way_is_the_next_to_be_written(node: Node) -> None:
    node.store(3, durable=False)
    torn = node.use
    node.slots[torn].begin()
    offer, _ = node.snapshot_store.offer()
    assert (offer.use, offer.sequence) == (torn, 1)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes that copy together, into one directory."""
    made = (Node(tmp_path / "checkpoints", 2, 0), Node(tmp_path / "checkpoints", 2, 1))
    yield made
    for node in made:
        node.snapshot_store.close()


def _names(node: Node) -> list[list[str]]:
    """The tensor files of each checkpoint, by step number; checks that nothing else exists."""
    assert all(name.startswith("step-") for name in os.listdir(node.directory))
    return [sorted(path.name[8:13] for path in found.glob("tensors*")) for found in sorted(node.directory.iterdir())]


def _loads(node: Node, step: int) -> bool:
    loaded = snapshot.newest(node.directory)
    assert loaded is not None
    return all(loaded.state[name].tolist() == [float(step)] * 1000 for name in "xy")


def test_two_nodes_copy_a_snapshot_together(pair: tuple[Node, Node]) -> None:
    first, other = pair
    other.store(7)
    first.store(7)
    assert other.snapshot_store.wait(30 * SLOWNESS)
    assert first.copied() == [7]
    assert _names(first) == [["00001", "00002"]]
    assert _loads(first, 7)
    assert [told.error for told in first.told] == [""]
    assert other.told == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_first_writes_the_share_of_a_node_whose_copier_does_not(
    pair: tuple[Node, Node], how: signal.Signals
) -> None:
    first, other = pair
    copier = _stops_the_copy_of(other, 7)
    os.kill(copier, how)
    first.store(7)
    assert first.copied() == [7]
    assert len(first.told) == 1
    assert _loads(first, 7)
    if how == signal.SIGSTOP:
        os.kill(copier, signal.SIGCONT)
    assert other.snapshot_store.wait(30 * SLOWNESS)
    assert _names(first) == [["00001", "00002"]]
    assert _loads(first, 7)


def test_a_first_node_whose_copier_is_killed_copies_alone(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.01)
    first, other = pair
    os.kill(_stops_the_copy_of(first, 7), signal.SIGKILL)
    assert first.copied() == [7]
    assert {path.name for path in first.directory.glob("step-*/tensors*")} == {"tensors.safetensors"}
    other.store(7)
    assert other.snapshot_store.wait(30 * SLOWNESS)
    first.store(8, durable=False)
    first.snapshot_store.secure()
    assert first.copied() == [8, 7]
    assert _names(first) == [["safet"], ["safet"]], "and removes what nobody takes any more"


def test_a_first_node_that_comes_late_asks_for_a_snapshot_that_all_can_copy(pair: tuple[Node, Node]) -> None:
    first, other = pair
    other.store(1)
    slow = _stops_the_copy_of(first, 1)
    for node in pair:
        node.store(2)
        node.store(3, durable=False)
    os.kill(slow, signal.SIGCONT)
    wait_for("the request", lambda: first.asked)
    assert not first.snapshot_store.idle
    for node in pair:
        node.store(4)
    assert other.snapshot_store.wait(30 * SLOWNESS)
    assert first.copied() == [4, 1]
    assert _names(first) == [["00001", "00002"]] * 2


def test_a_node_whose_requests_are_not_answered_copies_the_newest_alone(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CATCH_UP", 0.01)
    first, _ = pair
    slow = _stops_the_copy_of(first, 1)
    first.store(2)
    first.store(3, durable=False)
    os.kill(slow, signal.SIGCONT)
    assert first.copied() == [3, 1]
    assert _loads(first, 3)


def test_what_only_another_node_has_is_never_copied_by_it_at_the_end(pair: tuple[Node, Node]) -> None:
    _, other = pair
    other.store(7)
    other.store(8, durable=False)
    other.snapshot_store.secure()
    assert other.copied() == []


@pytest.mark.parametrize("queued", [False, True], ids=["begun", "queued"])
def test_a_node_that_copies_a_share_saves_the_whole_if_no_other_can(pair: tuple[Node, Node], queued: bool) -> None:
    """The first node is gone, which would have committed the checkpoint."""
    _, other = pair
    slow = _stops_the_copy_of(other, 7)
    newest = 7
    if queued:
        other.store(8)
        newest = 8
    other.snapshot_store.secure(stands_in=True)
    os.kill(slow, signal.SIGCONT)
    assert other.copied() == [newest]
    assert _loads(other, newest)


def test_a_copy_that_fails_gives_way_to_this_nodes_share_of_a_later_one(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The node is no longer the first of its round, and only the first reports the outcome."""
    monkeypatch.setattr(module, "PAUSE", 0.2)
    node.directory.write_text("a file")
    node.store(1)
    wait_for("the first attempt", lambda: "Tried again" in caplog.text)
    node.nodes, node.rank = 2, 1
    node.store(2)
    assert node.snapshot_store.wait(30 * SLOWNESS)
    assert "a share of the checkpoint of step 2" in caplog.text
    assert node.told == []


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[copiers.Copier]:
    """The copiers that are created: a test decides when one is given up. The next attempt follows immediately.

    The first one does not begin: one that copies may be done before a test on a busy machine has stopped it.
    """
    monkeypatch.setattr(module, "PAUSE", 0.01)
    monkeypatch.setattr(copiers, "WARN_AFTER", 0.2)
    monkeypatch.setattr(copiers, "KILLED_WITHIN", 0.2)
    made: list[copiers.Copier] = []
    begin = copiers.Copier.__init__

    def beginning(copier: copiers.Copier, *args: Any, **options: Any) -> None:
        begin(copier, *args, **options)
        made.append(copier)

    monkeypatch.setattr(copiers.Copier, "__init__", beginning)
    command = copiers.helper_command

    def first_without_beginning(code: str, *arguments: str) -> list[str]:
        return command(code if made else f"import time; time.sleep(600); {code}", *arguments)

    monkeypatch.setattr(copiers, "helper_command", first_without_beginning)
    return made


def test_a_copying_process_that_hangs_is_warned_of_and_replaced(
    node: Node, made: list[copiers.Copier], caplog: pytest.LogCaptureFixture
) -> None:
    node.store(1)
    hanging = wait_for("the copying process", _copier)
    late = f"the process that copies to {node.directory} has not begun"
    wait_for("the warning", lambda: late in caplog.text)
    assert alive(hanging)
    made[0]._stall = 0.5
    assert node.copied() == [1]
    assert f"{late[0].upper()}{late[1:]} within 0.5 s. Tried again" in caplog.text
    assert not alive(hanging)


@pytest.mark.slow
def test_a_copying_process_that_waits_for_a_processor_is_not_replaced(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another one would wait as long, and so nothing would ever be saved while the machine is busy."""
    processor, command = min(os.sched_getaffinity(0)), copiers.helper_command
    here = f"import os; os.sched_setaffinity(0, {{{processor}}}); "
    monkeypatch.setattr(copiers, "helper_command", lambda code, *arguments: command(here + code, *arguments))
    monkeypatch.setattr(copiers, "STALL", 0.5)
    # Each in a session of its own: the kernel may share a processor out among sessions.
    command_line = [sys.executable, "-c", f"{here}\nwhile True: pass"]
    busy = [subprocess.Popen(command_line, start_new_session=True) for _ in range(6)]
    try:
        began = time.monotonic()
        node.store(1)
        assert node.copied() == [1]
        assert time.monotonic() - began > 2 * copiers.STALL
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert "Tried again" not in caplog.text


def test_an_agent_that_ends_does_not_wait_for_a_copying_process_that_the_kernel_holds(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = _stops_the_copy_of(node, 1)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda process: None)  # as on a frozen file system
        node.snapshot_store.close()
    os.kill(held, signal.SIGKILL)
    os.waitpid(held, 0)
    assert f"process {held}, which copies to {node.directory}, cannot be killed" in caplog.text


def _hanging(code: str, *arguments: str) -> list[str]:
    """The command of a copying process that begins, and then hangs in its storage."""
    return [sys.executable, "-c", 'import time; print(\'{"type":"copying"}\', flush=True); time.sleep(600)']


def test_storage_that_always_hangs_is_reported_as_an_error(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.01)
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    monkeypatch.setattr(copiers, "STALL", 2.0)
    monkeypatch.setattr(copiers, "helper_command", _hanging)
    node.store(1)
    assert node.copied() == []
    assert [told.error for told in node.told] == [
        f"{node.directory} does not respond: the copy made no progress for 2 s."
    ]
    assert "does not respond" in node.snapshot_store.failed
    monkeypatch.undo()
    node.store(2)
    assert node.copied() == [2], "copies go on once it responds"


def test_storage_does_not_respond_again_because_its_copying_process_is_killed(
    node: Node, made: list[copiers.Copier], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "ATTEMPTS", 1)
    monkeypatch.setattr(copiers, "helper_command", _hanging)
    caplog.set_level(logging.INFO)
    node.store(1)
    wait_for("the warning", lambda: f"{node.directory} does not respond" in caplog.text)
    made[0]._process.kill()
    assert node.copied() == []
    assert [told.error for told in node.told] == ["The process that copies it ended with -9."]
    assert "responds again" not in caplog.text


HELD = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
if libc.ptrace(0x4206, int(sys.argv[1]), 0, 0) != 0:  # PTRACE_SEIZE
    sys.exit(os.strerror(ctypes.get_errno()))
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_copying_process_that_cannot_be_killed_delays_nothing(
    node: Node, made: list[copiers.Copier], caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel reports a traced process' end to its tracer first: until then it looks like one in a dead mount."""
    stuck = _stops_the_copy_of(node, 1)
    with subprocess.Popen(
        [sys.executable, "-c", HELD, str(stuck)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as by:
        assert by.stdout is not None
        assert by.stdout.readline() == b"held\n"
        made[0]._stall = 0.5
        assert node.copied() == [1]
        assert f"process {stuck}, which copies to {node.directory}, cannot be killed" in caplog.text
        assert Path(f"/proc/{stuck}").exists()
        node.snapshot_store.close()
    wait_for("its end", lambda: all(process.poll() is not None for process in copiers.Copier._left))


def test_a_copy_that_is_slow_and_makes_progress_is_not_given_up(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its total time; and workers that wait for it are informed."""
    monkeypatch.setattr(copiers, "STALL", 30.0)
    monkeypatch.setattr(module, "COPYING_EVERY", 0.0)
    node.size = 4_000_000  # four parts of 8 MiB
    node.store(1)
    assert node.copied() == [1]
    assert node.going_on >= 1


def test_nothing_is_freed_as_long_as_snapshots_are_written(node: Node) -> None:
    node.store(5, durable=False)
    node.store(6, durable=False)
    node.snapshot_store.between_rounds()
    node.snapshot_store.restored(0)
    assert node.used() == [5, 6]
    assert node.snapshot_store.offer()[0].writes


def test_without_memory_a_snapshot_is_kept_until_it_is_restored_and_copied(node: Node) -> None:
    free = node.holds_up_a_copy(5)
    for step in (6, 7):
        node.store(step, durable=False)
    assert node.snapshot_store.leave_out() > 3 * 8 * node.size
    assert not node.snapshot_store.leave_out(), "it is so already"
    assert node.used() == [5, 6, 7], "workers of the round may be writing"
    assert not node.snapshot_store.offer()[0].writes
    node.snapshot_store.between_rounds()
    assert node.used() == [5, 7], "one is being copied, the other is to be restored"
    node.snapshot_store.restored(0)
    assert node.used() == [5, 7], "the newest is not in durable storage"
    free.set()
    assert node.copied() == [7, 5]
    assert node.used() == []
    assert node.snapshot_store.newest is None


def test_without_memory_the_snapshot_of_a_later_training_waits_for_that(node: Node) -> None:
    node.store(7, durable=False)
    node.store(2, training=1)
    assert node.copied() == [2]
    assert node.snapshot_store.leave_out()
    node.snapshot_store.between_rounds()
    assert node.used() == [2, 7], "each is the newest of its training"
    node.snapshot_store.restored(0)
    assert node.used() == [2]
    node.snapshot_store.restored(1)
    assert node.used() == []


def test_without_memory_a_copy_waits_for_no_other_snapshot(node: Node) -> None:
    """Workers, which would be asked for one as that of step 6 is overwritten, write none any more."""
    free = node.holds_up_a_copy(5)
    node.store(6)
    for step in (7, 8):
        node.store(step, durable=False)
    assert node.snapshot_store.leave_out()
    node.snapshot_store.between_rounds()
    node.snapshot_store.restored(0)
    free.set()
    assert node.copied() == [8, 5]
    assert node.asked == 0
    assert node.used() == []


def test_without_memory_an_incomplete_snapshot_is_freed(node: Node) -> None:
    node.store(7, durable=False)
    node.store(8, durable=False)
    node.slots[node.snapshot_store.newest.slot if node.snapshot_store.newest else 0].begin()
    assert node.used() == [-1, 7]
    assert node.snapshot_store.leave_out()
    node.snapshot_store.between_rounds()
    assert node.used() == [7]


def test_snapshots_of_a_run_that_has_begun_anew_are_dropped(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.store(5, durable=False)
    node.store(6, durable=False)
    node.snapshot_store.forget()
    assert node.used() == []
    assert node.snapshot_store.newest is None
    assert "the state of step 6 in this node's memory is dropped: the run has begun anew" in caplog.text
    node.snapshot_store.secure()
    node.store(1)
    assert node.copied() == [1]


def test_a_copy_of_what_is_dropped_is_not_committed(node: Node) -> None:
    free = node.holds_up_a_copy(5)
    node.store(6)
    node.snapshot_store.forget()
    assert node.used() == []
    free.set()
    node.store(1)
    assert node.copied() == [1]
    assert [told.step for told in node.told] == [1]

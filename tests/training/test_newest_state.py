"""Whether a training resumes from memory or durable storage, and the number under which it then saves."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileOpener
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import elastic_launch as el
from elastic_launch import snapshot
from elastic_launch.errors import FINAL_NOTE
from elastic_launch.snapshot import stall
from elastic_launch.snapshot.format import files
from elastic_launch.snapshot.memory.slot import EVALUATED, Header, Slot
from elastic_launch.snapshot.memory.slot_state import SlotDraft, SlotWriter
from elastic_launch.snapshot.storage import url_storage as storage
from elastic_launch.snapshot.storage.listing import positions
from elastic_launch.snapshot.storage.owner import OwnerMark, check, claim, look, owned_by
from elastic_launch.system.threads import within
from elastic_launch.training.checkpoints import manager as checkpoints
from elastic_launch.training.checkpoints.branches import Branch, following
from elastic_launch.training.checkpoints.manager import CheckpointManager
from elastic_launch.training.checkpoints.state import TrainingState
from elastic_launch.training.engine import Engine
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run

RUN, NUMBER = "this run", "5eed"
MINE = owned_by(NUMBER, RUN)


class Node:
    """A node's memory, and the worker of a round that resumes on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.place = str(directory)  # or as a URL
        self.slots = [Slot.make(f"test-{number}") for number in range(3)]

    def remembers(self, round: int, step: int, branch: Branch | None = None) -> None:
        model = nn.Linear(2, 2)
        writer = SlotWriter(self.slots[0])
        meta = {"identity": {}, "worlds": [1], "equal": (0, 0), "branch": (branch or self._branch(round)).meta()}
        draft = SlotDraft({"model": model.state_dict()}, meta, lambda tensor: True)
        writer.write(draft, Header(1, round, step, EVALUATED, 0))
        writer.close()

    def saved(self, round: int, step: int, branch: Branch | None = None, owner: str = "") -> snapshot.CheckpointInfo:
        state = {"model": nn.Linear(2, 2).state_dict()}
        meta = {"identity": {}, "worlds": [1], "branch": (branch or self._branch(round)).meta()}
        return snapshot.write(self.directory, state, step=step, round=round, meta=meta, owner=owner)

    def _branch(self, round: int) -> Branch:
        """A branch of this run, with the epoch of its directory."""
        mark = look(self.directory)
        return Branch(round, 0, NUMBER, epoch=0 if mark is None else mark.epoch)

    def resumes(self, world_round: int, number: str = NUMBER) -> tuple[int, Branch]:
        """Return the step that a round resumes from, and the numbers that it saves under."""
        agent, worker = socket.socketpair()
        with agent:
            link = AgentLink(worker)
            link.slots = [Slot(os.dup(slot.tensors), os.dup(slot.head)) for slot in self.slots]
            run = Run(Engine(World(round=world_round, run=number), torch.device("cpu"), link))
            run.register("model", nn.Linear(2, 2))
            try:
                step = run.resume(el.Checkpoint(self.place, every=1000))
                assert run._engine.checkpoint is not None
                return step, run._engine.checkpoint.branch
            finally:
                run._engine.release()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", RUN)
    made = Node(tmp_path / "checkpoints")
    yield made
    for slot in made.slots:
        slot.close()


@pytest.mark.parametrize(
    ("memory", "durable", "resumed"),
    [((2, 210), (3, 422), 422), ((3, 15), (2, 422), 15), ((3, 422), (3, 420), 422), ((3, 420), (3, 422), 422)],
)
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_the_newest_by_round_and_step_wins(
    node: Node, memory: tuple[int, int], durable: tuple[int, int], resumed: int, scheme: str
) -> None:
    node.place = f"{scheme}{node.directory}"
    node.remembers(*memory)
    node.saved(*durable)
    step, branch = node.resumes(4)
    assert step == resumed
    assert branch.round == 4


def test_with_a_damaged_newer_one_memory_counts_and_the_number_is_not_used_again(node: Node) -> None:
    node.remembers(2, 210)
    (node.saved(9, 422).path / "manifest.json").write_text("{}")
    step, branch = node.resumes(4)
    assert step == 210
    assert branch.round == 10


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_later_save_of_another_run_is_not_a_newer_state_of_this_one(
    node: Node, caplog: pytest.LogCaptureFixture, scheme: str
) -> None:
    node.place = f"{scheme}{node.directory}"
    node.remembers(2, 210)
    claim(node.directory, MINE)
    node.saved(9, 422)
    claim(node.directory, owned_by("b2", "another run"))
    step, branch = node.resumes(4)
    assert step == 210
    assert branch.round == 10
    assert "was taken by run 'another run'" in caplog.text


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_state_of_an_earlier_run_of_the_same_id_is_not_this_runs(node: Node, scheme: str) -> None:
    """This run's first round ended before it saved anything, so the second one reads what the earlier run has saved."""
    node.place = f"{scheme}{node.directory}"
    earlier = Branch(2, 0, "earlier", epoch=3)
    claim(node.directory, owned_by("earlier", RUN), epoch=3)
    node.saved(2, 40, earlier)
    step, branch = node.resumes(2)
    assert (step, branch.begins, branch.epoch) == (40, True, 4)
    node.saved(branch.round, 50, branch, MINE)
    later, its = node.resumes(3)
    assert (later, its.begins, its.epoch) == (50, False, 4)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_runs_own_state_counts_before_one_that_a_late_node_has_brought(node: Node, scheme: str) -> None:
    """The earlier run has been through more rounds, and its location was taken more often."""
    node.place = f"{scheme}{node.directory}"
    claim(node.directory, owned_by("earlier", RUN), epoch=6)
    node.saved(70, 90, Branch(70, 0, "earlier", epoch=6))
    mine = Branch(2, 0, NUMBER, epoch=1)
    node.saved(2, 40, mine)
    step, branch = node.resumes(3)
    assert (step, branch.begins, branch.round, branch.epoch) == (40, False, 71, 7)
    node.remembers(2, 40, mine)
    step, from_memory = node.resumes(4)
    assert (step, from_memory.begins, from_memory.epoch) == (40, False, 8)
    assert (mark := look(node.directory)) is not None
    assert (mark.token, mark.epoch) == (NUMBER, 8)


def test_a_round_without_a_state_in_memory_begins_with_what_its_run_began_with(node: Node) -> None:
    """The run has saved nothing, and what a node brings has higher numbers."""
    node.saved(2, 40, Branch(2, 0, "earlier", epoch=3))
    claim(node.directory, owned_by("earlier", RUN), epoch=3)
    assert node.resumes(1)[0] == 40
    mark = look(node.directory)
    assert mark is not None
    info = snapshot.find(node.directory)[0]
    assert mark.base == info.digest
    foreign = replace(info, digest="of another", meta={"branch": Branch(9, 0, "foreign", epoch=8).meta()})
    brought = OwnerMark("foreign", RUN, "b", 8)
    ranks = {
        "its own": checkpoints._belongs(
            replace(info, meta={"branch": Branch(1, 0, NUMBER).meta()}), mark, NUMBER, begins=False
        ),
        "its base": checkpoints._belongs(info, mark, NUMBER, begins=False),
        "nothing, as it began": checkpoints._belongs(None, replace(mark, base=""), NUMBER, begins=False),
        "foreign": checkpoints._belongs(foreign, brought, NUMBER, begins=False),
        "foreign, taken over": checkpoints._belongs(foreign, replace(mark, base=None), NUMBER, begins=False),
    }
    assert ranks == {"its own": 2, "its base": 1, "nothing, as it began": 1, "foreign": 0, "foreign, taken over": 0}


def test_a_run_begins_with_what_the_last_one_in_each_location_had(node: Node) -> None:
    """Of an earlier one that a node had brought it begins with none, although that may have counted further."""
    info = node.saved(2, 40, Branch(2, 0, "last", epoch=1))
    mark = OwnerMark("last", RUN, "a", 9, base="of its beginning")
    began_with = replace(info, digest="of its beginning", meta={})
    assert checkpoints._belongs(info, mark, NUMBER, begins=True) == 1
    assert checkpoints._belongs(began_with, mark, NUMBER, begins=True) == 1
    assert checkpoints._belongs(replace(info, meta={}), mark, NUMBER, begins=True) == 0
    assert checkpoints._belongs(info, None, NUMBER, begins=True) == 1, "checkpoints that were copied there"
    old = replace(info, meta={"branch": {"run": RUN}})
    assert checkpoints._belongs(old, replace(mark, base=None), NUMBER, begins=True) == 1, "of an earlier version"
    assert checkpoints._belongs(None, mark, NUMBER, begins=True) == 0
    assert checkpoints._belongs(None, None, NUMBER, begins=True) == 0, "a new node has nothing that outranks a state"


def test_a_run_that_has_begun_from_nothing_begins_so_again(node: Node) -> None:
    assert node.resumes(1)[0] == 0
    node.saved(2, 40, Branch(2, 0, "foreign", epoch=3))
    assert node.resumes(2)[0] == 0


def test_a_run_whose_location_another_one_has_taken_does_not_go_on_from_there(node: Node) -> None:
    assert node.resumes(1)[0] == 0
    claim(node.directory, owned_by("b2", "another"))
    node.saved(2, 40, Branch(2, 0, "b2", epoch=2))
    with pytest.raises(snapshot.CheckpointError, match="was taken since by run 'another'") as caught:
        node.resumes(2)
    assert FINAL_NOTE in caught.value.__notes__


@pytest.mark.parametrize("memory", [None, (2, 210)])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_copy_that_an_earlier_round_has_requested_is_still_committed(
    node: Node, memory: tuple[int, int] | None, scheme: str
) -> None:
    """What the next round begins with is read from storage while that copy is under way."""
    node.place = f"{scheme}{node.directory}"
    assert node.resumes(1)[0] == 0
    if memory is not None:
        node.remembers(*memory)
    node.saved(3, 422)
    assert node.resumes(4)[0] == 422
    check(node.directory, MINE)


def test_storage_that_hangs_does_not_prevent_a_resume_from_memory(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node.remembers(2, 210)
    hung = threading.Event()
    monkeypatch.setattr(checkpoints, "LOOK_TIMEOUT", 0.2)
    monkeypatch.setattr(checkpoints, "positions", lambda directory: hung.wait(60) and [])
    try:
        assert node.resumes(4) == (210, Branch(4, 0, NUMBER, begins=False, line=((2, 210),)))
    finally:
        hung.set()
    assert "took more than 0.2 s" in caplog.text


class Gate:
    """Makes the kernel's reads wait: forever, or for a moment each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.reads = 0
        self._preadv, self._fetch = os.preadv, LocalFileOpener.read
        monkeypatch.setattr(stall, "WARN", 0.3)
        monkeypatch.setattr(stall, "STALL", 1.5)
        monkeypatch.setattr(stall, "STALL_URL", 1.5)

    def hang(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        def preadv(*arguments: Any) -> int:
            self.reads += 1
            self.opened.wait(seconds)
            return self._preadv(*arguments)

        def read(*arguments: Any) -> bytes:
            self.reads += 1
            self.opened.wait(seconds)
            return bytes(self._fetch(*arguments))

        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(LocalFileOpener, "read", read)


@pytest.mark.parametrize("memory", [None, (2, 210)])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_storage_that_hangs_as_it_is_read_is_an_error_and_no_older_state_is_taken(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    memory: tuple[int, int] | None,
    scheme: str,
) -> None:
    node.place = f"{scheme}{node.directory}"
    node.saved(3, 421)
    node.saved(3, 422)
    if memory is not None:
        node.remembers(*memory)
    gate = Gate(monkeypatch)
    gate.hang(monkeypatch, 120)
    try:
        with pytest.raises(snapshot.CheckpointReadError) as caught:
            node.resumes(4)
    finally:
        gate.opened.set()
    assert str(node.directory) in str(caught.value)
    assert "does not respond: reading made no progress for 1.5 s" in str(caught.value)
    assert "reading has made no progress for 0.3 s; after 1.5 s it is given up" in caplog.text


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_storage_that_is_slow_is_waited_for_as_long_as_bytes_come(
    node: Node, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    node.place = f"{scheme}{node.directory}"
    node.saved(3, 422)
    gate = Gate(monkeypatch)
    for module in (files, storage):
        monkeypatch.setattr(module, "_CHUNK", 30)
    gate.hang(monkeypatch, 0.5)
    assert node.resumes(4)[0] == 422
    assert gate.reads * 0.5 > 1.5


def test_a_run_in_an_old_directory_numbers_its_branches_apart(node: Node) -> None:
    """Two rounds that resume from one state, and do not know each other, save under different numbers."""
    saved = node.saved(50, 9, Branch(50, 0, "earlier"))
    step, first = node.resumes(1)
    base = 9, str(saved.path)
    assert (step, first) == (9, Branch(51, 50, NUMBER, epoch=1, line=((50, 9),), base=base))
    node.remembers(51, 20, first)
    shutil.rmtree(node.directory)
    _, second = node.resumes(2)
    _, third = node.resumes(3)
    assert (second.round, third.round) == (52, 53)
    assert (first.begins, second.begins, third.begins) == (True, False, False)
    assert (second.epoch, second.line, second.base) == (1, ((50, 9), (51, 20)), base)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=8), st.integers(0, 30))
def test_numbers_rise_along_each_line_and_are_not_shared(starts: list[tuple[int, int]], before: int) -> None:
    """Each start is a round of the run, which resumes from any state that an earlier one has left."""
    number, states = 1, [following(1, NUMBER, {}, before)]
    for later, index in starts:
        number += later
        parent = states[min(index, len(states) - 1)]
        child = following(number, NUMBER, {"branch": parent.meta()}, parent.round)
        assert child.round > parent.round
        assert not child.begins
        states.append(child)
    assert [state.round for state in states] == sorted({state.round for state in states})


def test_what_hangs_is_left_and_what_fails_fails() -> None:
    assert within(60, "nothing", lambda: 3) == 3
    with pytest.raises(FileNotFoundError):
        within(60, "to list", lambda: os.listdir("/nowhere"))
    hung = threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"to wait took more than 0\.1 s"):
        within(0.1, "to wait", lambda: hung.wait(60))
    assert time.monotonic() - began < 30
    hung.set()


@pytest.mark.parametrize("passes", [True, False], ids=["an error that passes", "one that stays"])
def test_an_error_of_a_listing_that_passes_lets_no_older_state_win(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, passes: bool
) -> None:
    node.saved(51, 30)
    attempts: list[object] = []

    def listed(directory: Path) -> list[tuple[int, int]]:
        attempts.append(directory)
        if len(attempts) < 3 or not passes:
            raise snapshot.CheckpointReadError(directory, f"{directory} cannot be listed.", "Try later.")
        return positions(node.directory)

    monkeypatch.setattr("elastic_launch.training.checkpoints.manager.positions", listed)
    monkeypatch.setattr("elastic_launch.training.checkpoints.manager.LOOK_TIMEOUT", 0.2)
    monkeypatch.setattr("elastic_launch.training.checkpoints.manager.LOOK_AGAIN", 0.01)
    assert CheckpointManager(el.Checkpoint(node.directory)).has_newer(World(round=2, run=NUMBER), (51, 20)) is passes
    assert ("it is not known whether there is a newer checkpoint" in caplog.text) is not passes
    assert len(attempts) >= 3


@pytest.mark.parametrize(
    ("own", "taken", "failure"),
    [
        (None, False, "No checkpoint of this run could be saved in"),
        (15, False, "The last checkpoint, of step 21, could not be saved in"),
        (21, False, ""),
        (21, True, "The last checkpoint, of step 21, could not be saved in"),
    ],
)
def test_a_run_fails_if_its_last_state_could_not_be_saved(
    node: Node, monkeypatch: pytest.MonkeyPatch, own: int | None, taken: bool, failure: str
) -> None:
    """Neither a save of another run counts, nor an older state of this one, saved by an earlier process."""
    node.saved(50, 9, Branch(50, 0, "earlier"))
    _, first = node.resumes(1)
    node.remembers(51, 20, first)

    def refused(*arguments: object, **options: object) -> None:
        raise snapshot.CheckpointWriteError(f"Could not write a checkpoint in {node.directory}: no.")

    monkeypatch.setattr("elastic_launch.snapshot.storage.background.write", refused)
    saving = CheckpointManager(el.Checkpoint(node.directory, every=1))
    assert saving.has_newer(World(round=2, run=NUMBER), (51, 20)) is False
    saving.go_on(World(round=2, run=NUMBER), {"branch": first.meta()}, (20, 0.0), (51, 20))
    saving.save({}, 21, {})
    saving.finish()
    if own is not None:
        node.saved(51, own, first)
    if taken:
        claim(node.directory, owned_by("b2", "another"))
    failed = saving.failed()
    assert str(failed or "").startswith(f"{failure} {node.directory}: Could not write" if failure else "")
    assert (failed is None) == (not failure)


def test_a_checkpoint_counts_as_saved_if_only_removing_old_ones_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*arguments: object, **others: object) -> None:
        raise snapshot.CheckpointWriteError(f"Could not remove old checkpoints in {tmp_path}: no.")

    monkeypatch.setattr("elastic_launch.snapshot.storage.background.prune", refused)
    saving = CheckpointManager(el.Checkpoint(tmp_path, every=1))
    saving.open(World(), {}, parts=TrainingState())
    saving.save({}, 1, {})
    saving.finish()
    assert saving.failed() is None
    (logged,) = (record.message for record in caplog.records)
    assert logged.startswith("checkpoint of step 1 is saved, but removing old ones failed: Could not remove")

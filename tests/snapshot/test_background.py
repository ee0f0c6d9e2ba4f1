"""The writer thread: the newest snapshot wins, errors are reported, nothing hangs."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import namedtuple
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import wait_for
from snapshot_helpers import refuse, same, state_of

from elastic_launch.errors import UsageError
from elastic_launch.snapshot import (
    BackgroundWriter,
    CheckpointError,
    CheckpointWriteError,
    UnsupportedStateError,
    find,
    load,
    newest,
    write,
)
from elastic_launch.snapshot.storage import background


class Gate:
    """Replaces ``write``: it begins when the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.may_go = threading.Semaphore(0)
        self._write = background.write
        monkeypatch.setattr(background, "write", self)

    def __call__(self, directory: Any, state: Any, **options: Any) -> Any:
        self.begun.release()
        assert self.may_go.acquire(timeout=30)
        return self._write(directory, state, **options)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_states_are_written_and_old_ones_pruned(tmp_path: Path) -> None:
    with closing(BackgroundWriter(tmp_path / "a", keep=2)) as writer:
        for step in range(1, 6):
            writer.submit(state_of(step, 3), step=step, round=3, meta={"G": step})
            assert writer.flush(30)
        outcomes = writer.poll()
        assert writer.poll() == []
    assert [(o.step, o.round, o.error) for o in outcomes] == [(step, 3, None) for step in range(1, 6)]
    assert all(outcome.info is not None and outcome.seconds > 0 for outcome in outcomes)
    assert [info.step for info in find(tmp_path / "a", refuse)] == [5, 4]
    loaded = newest(tmp_path / "a")
    assert loaded is not None
    assert same(loaded.state, state_of(5, 3))
    assert loaded.info.meta == {"G": 5}


def test_the_newest_replaces_what_waits(gate: Gate, tmp_path: Path) -> None:
    with closing(BackgroundWriter(tmp_path)) as writer:
        writer.submit(state_of(1), step=1, round=0)
        assert gate.begun.acquire(timeout=30)
        started = time.monotonic()
        for step in (2, 3, 4):
            writer.submit(state_of(step), step=step, round=0)
        assert not writer.flush(0.01)
        assert time.monotonic() - started < 5, "nobody waits for a write"
        gate.may_go.release(2)
        assert writer.flush(30)
        assert [outcome.step for outcome in writer.poll()] == [1, 4]
    assert [info.step for info in find(tmp_path, refuse)] == [4, 1]


def test_a_newer_state_does_not_replace_one_that_is_to_stay(gate: Gate, tmp_path: Path) -> None:
    with closing(BackgroundWriter(tmp_path)) as writer:
        writer.submit(state_of(1), step=1, round=0)
        assert gate.begun.acquire(timeout=30)
        assert not writer.drop_waiting()
        for step in (2, 3, 4):
            writer.submit(state_of(step), step=step, round=0, stays=step == 3)
        assert writer.drop_waiting()
        writer.submit(state_of(5), step=5, round=0)
        gate.may_go.release(3)
        assert writer.flush(30)
        assert [outcome.step for outcome in writer.poll()] == [1, 3, 5]


def test_close_writes_what_waits(gate: Gate, tmp_path: Path) -> None:
    writer = BackgroundWriter(tmp_path)
    writer.submit(state_of(1), step=1, round=0)
    assert gate.begun.acquire(timeout=30)
    writer.submit(state_of(2), step=2, round=0)
    gate.may_go.release(2)
    writer.close()
    writer.close()
    assert [info.step for info in find(tmp_path, refuse)] == [2, 1]
    with pytest.raises(CheckpointError, match="has ended"):
        writer.submit({}, step=3, round=0)


def test_an_error_is_returned_by_poll_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with closing(BackgroundWriter(tmp_path / "a", keep=1)) as writer:
        writer.submit(state_of(1), step=1, round=0)
        assert writer.flush(30)
        (outcome,) = writer.poll()
        assert outcome.info is None
        assert isinstance(outcome.error, CheckpointWriteError)
        (tmp_path / "a").unlink()
        writer.submit(state_of(2), step=2, round=0)
        assert writer.flush(30)
        (outcome,) = writer.poll()
        assert outcome.error is None
    assert [info.step for info in find(tmp_path / "a", refuse)] == [2]


def test_an_error_that_was_not_polled_is_raised_by_close(tmp_path: Path) -> None:
    writer = BackgroundWriter(tmp_path)
    writer.submit({"a": object()}, step=1, round=0)
    with pytest.raises(UnsupportedStateError, match=r"state\['a'\]"):
        writer.close()
    writer.close()


def test_a_failure_to_remove_old_ones_is_reported_with_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(*arguments: Any, **others: Any) -> None:
        raise CheckpointWriteError("stuck")

    monkeypatch.setattr(background, "prune", stuck)
    with closing(BackgroundWriter(tmp_path, keep=1)) as writer:
        writer.submit(state_of(1), step=1, round=0)
        assert writer.flush(30)
        (outcome,) = writer.poll()
    assert outcome.info is not None
    assert str(outcome.error) == "stuck"


def test_an_error_of_torch_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("CUDA error: device lost")

    monkeypatch.setattr(background, "write", lost)
    writer = BackgroundWriter(tmp_path)
    writer.submit({}, step=1, round=0)
    with pytest.raises(CheckpointError, match=r"step 1 could not be written: CUDA error: device lost"):
        writer.close()


def test_any_other_error_is_reported_and_the_next_state_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise AttributeError("no such thing")

    with closing(BackgroundWriter(tmp_path)) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(background, "write", broken)
            writer.submit({}, step=1, round=0)
            assert writer.flush(30)
        (outcome,) = writer.poll()
        assert "step 1 could not be written: AttributeError: no such thing" in str(outcome.error)
        writer.submit({}, step=2, round=0)
        assert writer.flush(30)
        assert [outcome.error for outcome in writer.poll()] == [None]


def test_torchs_format_holds_a_named_tuple_of_a_local_class(tmp_path: Path) -> None:
    local = namedtuple("local", "a b")
    state = {"model": {"w": torch.ones(2), "_extra_state": {"n": local(1, (local(2, 3),))}}}
    info = write(tmp_path, state, step=1, round=0, meta={"format": "dcp"})
    found = load(info).state["model"]["_extra_state"]["n"]
    assert (found.a, found.b[0].b) == (1, 3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_by_a_bug_hangs_no_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt("a bug")

    monkeypatch.setattr(background, "write", broken)
    writer = BackgroundWriter(tmp_path)
    writer.submit({}, step=1, round=0)
    assert not writer.flush(30)
    wait_for("the end of the thread", lambda: not writer._thread.is_alive())
    with pytest.raises(CheckpointError, match="has ended"):
        writer.submit({}, step=2, round=0)
    with pytest.raises(CheckpointError, match="its traceback is above"):
        writer.close()


def test_close_gives_up_on_a_write_that_hangs(gate: Gate, tmp_path: Path) -> None:
    writer = BackgroundWriter(tmp_path)
    writer.submit(state_of(1), step=1, round=0)
    assert gate.begun.acquire(timeout=30)
    with pytest.raises(CheckpointWriteError, match=r"still being written after 0\.01 s"):
        writer.close(timeout=0.01)
    gate.may_go.release()
    writer.close()


def test_a_state_that_is_written_is_released(tmp_path: Path) -> None:
    with closing(BackgroundWriter(tmp_path)) as writer:
        tensor = torch.ones(1000)
        kept = weakref.ref(tensor)
        writer.submit({"w": tensor}, step=1, round=0)
        del tensor
        assert writer.flush(30)
        gc.collect()
        assert kept() is None


def test_invalid_arguments_are_refused_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep=0"):
        BackgroundWriter(tmp_path, keep=0)
    with closing(BackgroundWriter(tmp_path)) as writer, pytest.raises(UsageError, match="step=-1"):
        writer.submit({}, step=-1, round=0)

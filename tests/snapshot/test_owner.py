"""Which run a directory belongs to; for URLs, see test_urls."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from snapshot_helpers import state_of

from elastic_launch import snapshot
from elastic_launch.snapshot.errors import TakenError
from elastic_launch.snapshot.storage import owner


def save(directory: Path, mine: str, step: int = 1) -> int:
    """Save once more; return the number of checkpoints."""
    snapshot.write(directory, state_of(step), step=step, round=1, owner=mine)
    return len(snapshot.find(directory))


def test_of_two_runs_the_earlier_one_is_refused(tmp_path: Path) -> None:
    first = owner.claim(tmp_path / "new" / "one", "first")
    directory = tmp_path / "new" / "one"
    assert save(directory, first) == 1
    second = owner.claim(directory, "second")
    for mine in (first, owner.owned_by("first")):
        with pytest.raises(TakenError, match=r"Two runs write to one directory: .*one was taken since by run 'second'"):
            save(directory, mine)
    assert save(directory, second) == 2
    assert save(directory, owner.owned_by("second")) == 3
    assert sorted(name for name in os.listdir(directory) if not name.startswith("step-")) == [owner.OWNER]


def test_a_run_that_is_resumed_takes_the_directory_again(tmp_path: Path) -> None:
    assert save(tmp_path, owner.claim(tmp_path, "mine")) == 1
    assert save(tmp_path, owner.claim(tmp_path, "mine")) == 2
    assert save(tmp_path, owner.owned_by("mine")) == 3


def test_a_later_process_of_a_run_does_not_refuse_the_copies_that_an_earlier_one_has_requested(tmp_path: Path) -> None:
    first = owner.claim(tmp_path, "mine", again=True)
    second = owner.claim(tmp_path, "mine", again=True)
    assert [save(tmp_path, first), save(tmp_path, second)] == [1, 2]
    other = owner.claim(tmp_path, "another", again=True)
    for mine in (first, second):
        with pytest.raises(TakenError):
            save(tmp_path, mine)
    assert save(tmp_path, other) == 3


def test_two_runs_without_an_id_are_distinguished(tmp_path: Path) -> None:
    first = owner.claim(tmp_path, "")
    owner.claim(tmp_path, "")
    with pytest.raises(TakenError):
        save(tmp_path, first)


def test_a_directory_without_a_mark_is_taken(tmp_path: Path) -> None:
    assert save(tmp_path, owner.owned_by("mine")) == 1
    with pytest.raises(TakenError):
        save(tmp_path, owner.owned_by("another"))


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{" * 100_000, b'{"format": "another", "run": "other", "epoch": 1}'),
        *(b'{"format": "elastic-launch owner", "run": "other"%b}' % epoch for epoch in (b"", b', "epoch": "1"')),
    ],
)
def test_an_invalid_mark_does_not_count(tmp_path: Path, content: bytes) -> None:
    (tmp_path / owner.OWNER).write_bytes(content)
    assert save(tmp_path, owner.owned_by("mine")) == 1
    with pytest.raises(TakenError):
        save(tmp_path, owner.owned_by("another"))


def test_a_mark_that_cannot_be_put_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(snapshot.CheckpointWriteError, match=f"Could not write to {file}"):
        owner.claim(file, "mine")

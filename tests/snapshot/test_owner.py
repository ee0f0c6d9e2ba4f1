"""Which run a directory belongs to; for URLs, see test_urls."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from snapshot_helpers import state_of

from elastic_launch import snapshot
from elastic_launch.snapshot.errors import TakenError
from elastic_launch.snapshot.storage import owner

FIRST, SECOND = owner.owned_by("a1", "id"), owner.owned_by("b2", "id")
"""Two runs of one id."""


def save(directory: Path, mine: str, step: int = 1) -> int:
    """Save once more; return the number of checkpoints."""
    snapshot.write(directory, state_of(step), step=step, round=1, owner=mine)
    return len(snapshot.find(directory))


def test_of_two_runs_the_earlier_one_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "one"
    assert not owner.claim(directory, FIRST)
    assert save(directory, FIRST) == 1
    assert not owner.claim(directory, SECOND)
    with pytest.raises(TakenError, match=r"Two runs write to one directory: .*one was taken since by run 'id'"):
        save(directory, FIRST)
    assert save(directory, SECOND) == 2
    assert sorted(name for name in os.listdir(directory) if not name.startswith("step-")) == [owner.OWNER]


def test_a_later_process_of_a_run_takes_the_directory_back_from_no_other_run(tmp_path: Path) -> None:
    owner.claim(tmp_path, FIRST)
    assert owner.claim(tmp_path, FIRST), "again"
    assert save(tmp_path, FIRST) == 1
    owner.claim(tmp_path, SECOND)
    assert owner.claim(tmp_path, FIRST)
    assert owner.ownership(tmp_path, FIRST) == owner.Ownership(0, True, "'id'")
    with pytest.raises(TakenError):
        save(tmp_path, FIRST)
    assert save(tmp_path, SECOND) == 2


def test_what_an_earlier_run_has_left_is_taken_with_the_first_checkpoint_and_counted(tmp_path: Path) -> None:
    """As by a node that joins late, or a run that could not write a mark as it began."""
    owner.claim(tmp_path, FIRST, epoch=4)
    assert owner.ownership(tmp_path, SECOND) == owner.Ownership(epoch=4)
    owner.check(tmp_path, SECOND, epoch=5, claims=False)
    assert not owner.ownership(tmp_path, SECOND).taken, "it was only looked at"
    owner.check(tmp_path, SECOND, epoch=5)
    assert owner.ownership(tmp_path, SECOND) == owner.Ownership(5, taken=True)
    with pytest.raises(TakenError):
        owner.check(tmp_path, FIRST, epoch=9, claims=False)


def test_the_epoch_in_a_mark_rises_with_its_run_and_never_falls(tmp_path: Path) -> None:
    for epoch, known in ((2, 2), (1, 2), (3, 3)):
        owner.claim(tmp_path, FIRST, epoch=epoch)
        assert owner.ownership(tmp_path, FIRST).epoch == known
    owner.check(tmp_path, FIRST, epoch=4)
    owner.claim(tmp_path, SECOND)
    assert owner.ownership(tmp_path, SECOND).epoch == 4


def test_a_mark_of_a_version_that_did_not_number_runs_is_one_of_an_earlier_run(tmp_path: Path) -> None:
    old = b'{"format": "elastic-launch owner", "run": "id", "token": "0011223344556677", "host": "a", "epoch": 3}'
    (tmp_path / owner.OWNER).write_bytes(old)
    assert owner.ownership(tmp_path, FIRST) == owner.Ownership(epoch=3)
    assert save(tmp_path, FIRST) == 1


def test_a_mark_names_a_limited_number_of_earlier_runs(tmp_path: Path) -> None:
    for number in range(300):
        owner.claim(tmp_path, owner.owned_by(f"{number:016x}", "id"))
    lost = [owner.ownership(tmp_path, owner.owned_by(f"{number:016x}", "id")).lost_to for number in range(299)]
    assert lost == [""] * 43 + ["'id'"] * 256
    assert (tmp_path / owner.OWNER).stat().st_size < owner._LIMIT


def test_a_directory_without_a_mark_is_taken(tmp_path: Path) -> None:
    assert save(tmp_path, FIRST) == 1
    assert owner.ownership(tmp_path, FIRST).taken


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{" * 100_000, b'{"format": "another", "run": "other", "epoch": 1}'),
        *(b'{"format": "elastic-launch owner", "run": "other"%b}' % epoch for epoch in (b"", b', "epoch": "1"')),
        *(b'{"format": "elastic-launch owner", "epoch": 1, "before": %b}' % before for before in (b"1", b"[1]")),
    ],
)
def test_an_invalid_mark_does_not_count(tmp_path: Path, content: bytes) -> None:
    (tmp_path / owner.OWNER).write_bytes(content)
    assert owner.ownership(tmp_path, FIRST) == owner.Ownership()
    assert save(tmp_path, FIRST) == 1
    assert owner.ownership(tmp_path, FIRST).taken


def test_a_mark_that_cannot_be_put_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(snapshot.CheckpointWriteError, match=f"Could not write to {file}"):
        owner.claim(file, FIRST)

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


def mark_in(directory: Path) -> owner.OwnerMark:
    found = owner.look(directory)
    assert found is not None
    return found


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
    with pytest.raises(TakenError):
        save(tmp_path, FIRST)
    assert save(tmp_path, SECOND) == 2


def test_a_run_takes_the_directory_of_no_other_one_when_it_saves(tmp_path: Path) -> None:
    """Not even if its own mark was removed, as with the directory, or is too old to be named."""
    owner.claim(tmp_path, FIRST)
    (tmp_path / owner.OWNER).unlink()
    owner.claim(tmp_path, SECOND)
    with pytest.raises(TakenError):
        save(tmp_path, FIRST)
    assert save(tmp_path, SECOND) == 1


def test_what_a_run_has_found_where_it_could_write_no_mark_is_taken_with_its_first_checkpoint(tmp_path: Path) -> None:
    owner.claim(tmp_path, FIRST, epoch=4)
    late = owner.owned_by("b2", "id", replaces="a1")
    owner.check(tmp_path, late, epoch=5, claims=False)
    assert mark_in(tmp_path).token == "a1", "it was only looked at"
    owner.check(tmp_path, late, epoch=5)
    mark = mark_in(tmp_path)
    assert (mark.token, mark.epoch, mark.before) == ("b2", 5, ("a1",))
    with pytest.raises(TakenError):
        owner.check(tmp_path, FIRST, epoch=9, claims=False)
    owner.claim(tmp_path, owner.owned_by("c3", "id"))
    with pytest.raises(TakenError):
        owner.check(tmp_path, late)


def test_the_epoch_in_a_mark_rises_with_its_run_and_never_falls_and_the_base_stays(tmp_path: Path) -> None:
    for epoch, known in ((2, 2), (1, 2), (3, 3)):
        owner.claim(tmp_path, FIRST, epoch=epoch, base=f"of {epoch}")
        assert (mark_in(tmp_path).epoch, mark_in(tmp_path).base) == (known, "of 2")
    owner.check(tmp_path, FIRST, epoch=4)
    owner.claim(tmp_path, SECOND)
    assert (mark_in(tmp_path).epoch, mark_in(tmp_path).base) == (4, None)


def test_a_mark_of_a_version_that_did_not_number_runs_is_one_of_an_earlier_run(tmp_path: Path) -> None:
    old = b'{"format": "elastic-launch owner", "run": "id", "token": "0011223344556677", "host": "a", "epoch": 3}'
    (tmp_path / owner.OWNER).write_bytes(old)
    assert owner.look(tmp_path) == owner.OwnerMark("0011223344556677", "id", "a", 3)
    owner.claim(tmp_path, FIRST)
    assert save(tmp_path, FIRST) == 1


def test_a_mark_names_a_limited_number_of_earlier_runs(tmp_path: Path) -> None:
    for number in range(300):
        owner.claim(tmp_path, owner.owned_by(f"{number:016x}", "id"))
    assert mark_in(tmp_path).before == tuple(f"{number:016x}" for number in range(43, 299))
    assert (tmp_path / owner.OWNER).stat().st_size < owner._LIMIT


def test_a_directory_without_a_mark_is_taken(tmp_path: Path) -> None:
    assert save(tmp_path, FIRST) == 1
    assert mark_in(tmp_path).token == "a1"


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{" * 100_000, b'{"format": "another", "run": "other", "epoch": 1}'),
        *(b'{"format": "elastic-launch owner", "run": "other"%b}' % epoch for epoch in (b"", b', "epoch": "1"')),
        *(
            b'{"format": "elastic-launch owner", "token": "a", "epoch": 1, %b}' % more
            for more in (b'"before": 1', b'"before": [1]', b'"base": 1', b'"token": []', b'"token": "%b"' % (33 * b"a"))
        ),
        *(
            b'{"format": "elastic-launch owner", "token": "a", "epoch": %b}' % x
            for x in (b"true", b"-1", b"1%030d" % 0)
        ),
    ],
)
def test_an_invalid_mark_does_not_count(tmp_path: Path, content: bytes) -> None:
    (tmp_path / owner.OWNER).write_bytes(content)
    assert owner.look(tmp_path) is None
    assert save(tmp_path, FIRST) == 1
    assert mark_in(tmp_path).token == "a1"


def test_a_mark_that_cannot_be_put_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(snapshot.CheckpointWriteError, match=f"Could not write to {file}"):
        owner.claim(file, FIRST)

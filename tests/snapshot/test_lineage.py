"""Which of several checkpoints is the newest, and which of them retention counts."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from elastic_launch import snapshot
from elastic_launch.snapshot.storage import owner
from elastic_launch.snapshot.storage.lineage import leads_to, order, same_run
from elastic_launch.training.checkpoints.branches import LONGEST_LINE, Branch, following

FIRST = following(1, "run", {}, 0)
AFTER_FIRST = following(2, "run", {"branch": FIRST.meta()}, 1, parent=(1, 40))
RESUMED = following(1, "later", {"branch": FIRST.meta()}, 1, parent=(1, 40), base=(40, "there"), taken=1)


def _meta(branch: Branch) -> dict[str, Any]:
    return {"branch": branch.meta()}


def _save(directory: Path, branch: Branch, step: int) -> tuple[int, int]:
    snapshot.write(directory, {}, step=step, round=branch.round, meta=_meta(branch))
    return branch.round, step


def _there(directory: Path) -> list[tuple[int, int]]:
    return [(info.round, info.step) for info in snapshot.find(directory)]


@pytest.mark.parametrize("saves", list(permutations([(FIRST, 52), (AFTER_FIRST, 45), (FIRST, 40)])))
def test_of_the_parts_of_a_run_the_later_round_wins_in_whatever_order_they_save(
    tmp_path: Path, saves: tuple[tuple[Branch, int], ...]
) -> None:
    for branch, step in saves:
        _save(tmp_path, branch, step)
    assert _there(tmp_path) == [(2, 45), (1, 52), (1, 40)]


def test_of_two_parts_that_end_in_one_round_the_later_step_wins(tmp_path: Path) -> None:
    _save(tmp_path, FIRST, 52)
    _save(tmp_path, FIRST, 51)
    assert _there(tmp_path)[0] == (1, 52)


@pytest.mark.parametrize("thaws_first", [True, False])
def test_what_a_node_saves_after_the_run_was_resumed_without_it_never_wins(tmp_path: Path, thaws_first: bool) -> None:
    """It has been through rounds of which the resumed run knows nothing, so its numbers are higher."""
    _save(tmp_path, FIRST, 40)
    old = following(7, "run", _meta(FIRST), 1, parent=(1, 60))
    assert old.round > RESUMED.round
    for branch, step in [(old, 90), (RESUMED, 41)][:: 1 if thaws_first else -1]:
        _save(tmp_path, branch, step)
    assert _there(tmp_path) == [(RESUMED.round, 41), (old.round, 90), (1, 40)]


def test_a_node_that_thaws_after_the_run_was_resumed_is_refused_under_the_same_id_too(tmp_path: Path) -> None:
    first, resumed = owner.owned_by(FIRST.run, "id"), owner.owned_by(RESUMED.run, "id")
    owner.claim(tmp_path, first, epoch=FIRST.epoch)
    snapshot.write(tmp_path, {}, step=50, round=1, meta=_meta(FIRST), owner=first)
    owner.claim(tmp_path, resumed, epoch=RESUMED.epoch)
    with pytest.raises(snapshot.CheckpointError, match="was taken since"):
        snapshot.write(tmp_path, {}, step=60, round=1, meta=_meta(FIRST), owner=first)
    snapshot.write(tmp_path, {}, step=41, round=RESUMED.round, meta=_meta(RESUMED), owner=resumed)
    assert _there(tmp_path)[0] == (RESUMED.round, 41)


def test_the_epoch_of_a_run_rises_above_that_of_a_location_that_a_node_brings(tmp_path: Path) -> None:
    """Of what the node has, the next start does not go on from the earlier runs', although they have counted more."""
    earlier = following(1, "earlier", {}, 60, taken=6)
    _save(tmp_path, earlier, 50)
    joined = following(2, "run", _meta(FIRST), 61, parent=(1, 40), taken=earlier.epoch)
    assert (FIRST.epoch, joined.epoch, joined.begins) == (1, 8, False)
    newest = _save(tmp_path, joined, 41)
    assert _there(tmp_path)[0] == newest
    assert same_run(_meta(joined), _meta(FIRST))
    later = following(3, "run", _meta(joined), 62, parent=newest, taken=joined.epoch)
    assert later.epoch == joined.epoch


def test_a_run_without_a_number_recognises_no_state_as_its_own() -> None:
    unnumbered = following(0, "", {}, 0)
    assert not same_run(_meta(unnumbered), _meta(unnumbered))
    assert following(0, "", _meta(unnumbered), 1).begins


def test_retention_counts_what_the_training_went_through(tmp_path: Path) -> None:
    """What another part has saved is not counted, and goes once it is older than what is kept."""
    for branch, step in [(FIRST, 30), (FIRST, 40), (FIRST, 52), (AFTER_FIRST, 45)]:
        _save(tmp_path, branch, step)
    snapshot.prune(tmp_path, 2, AFTER_FIRST.round, meta=_meta(AFTER_FIRST))
    assert _there(tmp_path) == [(2, 45), (1, 52), (1, 40)]
    _save(tmp_path, AFTER_FIRST, 50)
    snapshot.prune(tmp_path, 2, AFTER_FIRST.round, meta=_meta(AFTER_FIRST))
    assert _there(tmp_path) == [(2, 50), (2, 45)]


def test_an_earlier_part_removes_nothing_of_a_later_branch(tmp_path: Path) -> None:
    for branch, step in [(FIRST, 40), (AFTER_FIRST, 41), (FIRST, 52), (FIRST, 53)]:
        _save(tmp_path, branch, step)
    snapshot.prune(tmp_path, 1, FIRST.round, meta=_meta(FIRST))
    assert _there(tmp_path) == [(2, 41), (1, 53)]


def test_a_state_names_the_branches_before_it_up_to_a_limit() -> None:
    assert leads_to(1, 40, _meta(AFTER_FIRST), 2)
    assert not leads_to(1, 41, _meta(AFTER_FIRST), 2)
    branch = FIRST
    for number in range(2, LONGEST_LINE + 4):
        branch = following(number, "run", _meta(branch), branch.round, parent=(branch.round, 10 * number))
    assert len(branch.line) == LONGEST_LINE
    assert leads_to(1, 10**6, _meta(branch), branch.round), "not recorded any more"


@pytest.mark.parametrize("branch", [None, [], {"epoch": "x", "line": 3}, {"line": [1, [2], ["a", None]]}])
def test_what_others_have_written_is_no_error(branch: object) -> None:
    meta = {"branch": branch}
    assert order(meta, 2, 3) == (0, 2, 3)
    assert leads_to(5, 5, meta, 6)
    assert not same_run(meta, _meta(FIRST))

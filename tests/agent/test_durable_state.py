"""What an agent says at the end about where the final state is."""

from __future__ import annotations

from typing import Any, cast

import pytest

from elastic_agents.main import _tell
from elastic_agents.outcome import NodeOutcome
from elastic_agents.snapshots.durable_state import DurableState
from elastic_agents.snapshots.snapshot_store import SnapshotStore
from elastic_launch.contract import Copied, CopyJob, Stored
from elastic_launch.errors import ExitCode
from elastic_launch.events.facts import LastSaved
from elastic_launch.events.sentences import last_saved


@pytest.fixture
def durable() -> DurableState:
    return DurableState(SnapshotStore(lambda: True, lambda told: True))


def where(durable: DurableState, **how: Any) -> str:
    """What is said of it on the node of the first worker, after eight steps."""
    return last_saved(durable.where((0, 8), **how))


def test_a_checkpoint_that_a_worker_of_an_earlier_round_wrote_is_not_forgotten(durable: DurableState) -> None:
    durable.begin()
    durable.reported(6, "")
    durable.begin()
    assert not durable.has(0, 6), "not in this round"
    assert where(durable, others=False) == "step 6 is saved; 2 steps since then lost"


def test_a_copy_of_an_earlier_round_is_named(durable: DurableState) -> None:
    durable.copied(Copied(8, 1, path="saved/step-8"))
    durable.begin()
    assert where(durable, others=False) == "step 8 is saved in saved/step-8"
    continued = "step 8 is saved in saved/step-8; run the same command to continue"
    assert where(durable, others=False, continues=True) == continued


def test_without_a_checkpoint_the_reason_is_never_empty(durable: DurableState) -> None:
    assert where(durable, others=False) == "nothing is saved, 8 steps lost: the script saves no checkpoints"
    job = CopyJob(1, 3, 1, directory="saved")
    durable._snapshot_store.stored(Stored(0, job))
    assert where(durable, others=False) == "nothing is saved, 8 steps lost: no checkpoint was complete"


def test_a_script_that_saves_checkpoints_but_no_snapshots_is_not_said_to_save_none(
    durable: DurableState,
) -> None:
    durable.checkpoints = True
    assert where(durable, others=False) == "nothing is saved, 8 steps lost: no checkpoint was complete"
    durable.reported(8, "no room")
    assert where(durable, others=False) == "nothing is saved, 8 steps lost: no room"


def test_the_checkpoint_that_the_run_resumed_from_counts_and_what_came_since_is_lost(
    durable: DurableState,
) -> None:
    durable.base = 0, 5, "saved/step-5"
    why = "the script saves no checkpoints"
    assert where(durable, others=False) == f"step 5 is saved in saved/step-5; 3 steps since then lost: {why}"
    durable.reported(8, "no room")
    lost = "3 steps since then lost: no room"
    assert where(durable, others=False) == f"step 5 was the last to be saved in saved/step-5; {lost}"
    durable.copied(Copied(7, 1, path="saved/step-7"))
    assert where(durable, others=False) == "step 7 is saved in saved/step-7; 1 step since then lost"


def test_a_checkpoint_of_a_node_that_is_gone_counts_as_far_as_the_leader_has_told_of_it(
    durable: DurableState,
) -> None:
    durable.base = 0, 2, "saved/step-2"
    why = "the script saves no checkpoints"
    assert where(durable, others=False, told=(0, 6)) == f"step 6 is saved; 2 steps since then lost: {why}"


def test_states_of_an_earlier_training_of_the_script_do_not_count(durable: DurableState) -> None:
    durable.base = 0, 5, "first/step-5"
    durable.copied(Copied(10, 1, path="first/step-10"))
    assert not durable.has(1, 10)
    lost = "3 steps lost: the script saves no checkpoints"
    found = durable.where((1, 3), others=False, told=(0, 10))
    assert last_saved(found) == f"nothing of the script's training 2 is saved, {lost}"
    assert durable.where((1, 3), others=True) is None, "another node may have saved"
    durable.reported(2, "", 1)
    assert durable.has(1, 2)
    found = durable.where((1, 3), others=False, told=(0, 10))
    assert last_saved(found) == "step 2 of the script's training 2 is saved; 1 step since then lost"


def test_a_round_that_has_not_come_to_the_training_that_was_saved_loses_nothing(durable: DurableState) -> None:
    durable.reported(2, "", 1)
    durable.begin()
    assert last_saved(durable.where((0, 10), others=False)) == "step 2 of the script's training 2 is saved"


def test_checkpoints_that_were_removed_since_they_may_be_wrong_do_not_count(durable: DurableState) -> None:
    durable.base = 0, 5, "saved/step-5"
    durable.copied(Copied(7, 1, path="saved/step-7"))
    durable.withdrew(5)
    assert not durable.has(0, 7)
    assert where(durable, others=False) == "step 5 is saved in saved/step-5; 3 steps since then lost"
    durable.withdrew(0)
    why = "the script saves no checkpoints"
    assert where(durable, others=False) == f"nothing is saved, 8 steps lost: {why}"


@pytest.mark.parametrize(("lost", "told"), [(3, False), (0, True)])
def test_why_a_copy_failed_is_told_once(lost: int, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    where = LastSaved(5, "saved", lost, "no room" if lost else "", True, False)
    _tell(cast(Any, None), NodeOutcome(ExitCode.DONE, "done", unsaved="no room", where=where), None, cast(Any, None))
    assert ("not saved: no room" in caplog.text) is told

"""Which incident an event belongs to: one id, from what began it to the round that follows."""

from __future__ import annotations

from elastic_launch.events import types as ev
from elastic_launch.events.incidents import Incidents


def exited(number: int, code: int = -9, *, stopped: bool = False) -> ev.WorkerExited:
    return ev.WorkerExited(number, 0, 0, 42, code, 1.0, stopped)


def order(name: str, number: int, workers: int = 0) -> ev.OrderReceived:
    return ev.OrderReceived(name, number, 1, "crash", workers=workers)


def formed(number: int, *nodes: str) -> ev.RoundFormed:
    return ev.RoundFormed(number, 1, nodes, 2, 0, "first", 0.1)


def started(number: int, local_rank: int) -> ev.WorkerStarted:
    return ev.WorkerStarted(number, local_rank, local_rank, 42, "crash", 0.01)


def broken(number: int) -> ev.RoundBroken:
    return ev.RoundBroken(number, "crash", "rank 0", 9.0, "")


BEGIN = [formed(1, "a"), order("form", 1, 2), started(1, 0), started(1, 1), ev.TrainingBegun(1, 0, 0, 0, 0.0)]
AGAIN = [formed(2, "a"), order("form", 2, 2), started(2, 0), started(2, 1)]
SAVED = ev.CheckpointSaved(2, 8, "saved/step-8")


def ids(*events: ev.Event, node_id: str = "a") -> list[int | None]:
    incidents = Incidents(node_id)
    return [incidents.add(event) for event in events]


def test_all_from_the_exit_to_the_next_rounds_workers_has_the_number_of_the_round_that_it_ended() -> None:
    incident = [exited(1), broken(1), ev.RestartCharged(1, "crash", 1, 3), order("break", 1)]
    rest = [exited(1, stopped=True), *AGAIN]
    assert ids(*BEGIN, *incident, *rest, SAVED) == [None] * 5 + [1] * 9 + [None]


def test_the_first_step_and_the_last_words_of_the_round_belong_to_it_too() -> None:
    late = [ev.TrainingBegun(2, 0, 4, 0, 0.1), ev.FirstStep(2, 5), ev.RoundSteps(1, 0, 4, 1.0)]
    assert ids(*BEGIN, exited(1), broken(1), *AGAIN, *late)[-3:] == [1, 1, 1]
    assert ids(*BEGIN, ev.FirstStep(1, 1)) == [None] * 6


def test_a_further_training_of_the_next_round_is_no_part_of_it() -> None:
    resumed = [ev.TrainingBegun(2, 0, 4, 0, 0.1), ev.TrainingBegun(2, 0, 2, 0, 0.1, training=1), ev.FirstStep(2, 3, 1)]
    further = [ev.TrainingBegun(2, 0, 0, 0, 0.1, training=2), ev.FirstStep(2, 1, 2)]
    assert ids(*BEGIN, exited(1), broken(1), *AGAIN, *resumed, *further)[-5:] == [1, 1, 1, None, None]


def test_a_node_whose_workers_have_not_failed_learns_the_same_id_from_the_order() -> None:
    found = ids(*BEGIN[1:], order("break", 1), exited(1, -15, stopped=True), *AGAIN[1:], node_id="b")
    assert found == [None] * 4 + [1] * 5


def test_a_leader_without_workers_in_the_next_round_does_not_wait_for_them() -> None:
    assert ids(formed(1, "a"), broken(1), formed(2, "a"), SAVED, node_id="spare") == [None, 1, 1, None]


def test_a_round_that_ends_as_it_starts_begins_another_incident() -> None:
    found = ids(*BEGIN, exited(1), broken(1), *AGAIN[:3], exited(2, 1), broken(2), formed(3, "a"))
    assert found == [None] * 5 + [1] * 5 + [2] * 3


def test_workers_that_start_ahead_are_no_part_of_the_next_round() -> None:
    ahead = ev.WorkerStarted(0, None, 1, 43, "ahead", 0.01)
    found = ids(*BEGIN, exited(1), *AGAIN[:3], ahead, started(2, 1), SAVED)
    assert found == [None] * 5 + [1] * 6 + [None]


def test_the_end_of_the_run_ends_the_incident() -> None:
    end = [ev.RunEnded(91, "crash", 3, 2, 9.0), ev.NodeEnded(91, "crash")]
    assert ids(*BEGIN, exited(1), broken(1), *end, SAVED)[-3:] == [1, None, None]


def test_a_run_that_ends_well_has_no_incident() -> None:
    assert ids(*BEGIN, exited(1, 0), exited(1, 0), ev.NodeEnded(0, "done")) == [None] * 8

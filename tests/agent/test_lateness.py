"""When workers are late, by what they report and the time that their agent has seen pass."""

from __future__ import annotations

import math
from itertools import count

import pytest

from elastic_agents.hangs.lateness import (
    FACTOR,
    FORMING,
    LEAST_OF_OTHERS,
    MOST_FORMING,
    RECONNECTS,
    UNKNOWN,
    Lateness,
    Standstill,
)
from elastic_launch.failure import Doing
from elastic_launch.shared_progress import Activity, WorkerProgress


class Node:
    """The workers of a node, and the agent that looks at them every second.

    Args:
        workers: how many there are.
    """

    def __init__(self, workers: int = 1) -> None:
        self.lateness = Lateness()
        self.reports: dict[int, WorkerProgress | None] = dict.fromkeys(range(workers))
        self.stopped: set[int] = set()
        self._numbers = count()

    def says(
        self, activity: Activity, step: int = 0, *, rank: int = 0, number: int = 1, limit: float = 0.0, what: str = ""
    ) -> None:
        self.reports[rank] = WorkerProgress(number, step, 0.0, activity, limit, next(self._numbers), what)

    def look(self, elapsed: float = 1.0, number: int = 1) -> Standstill | None:
        return self.lateness.look(number, self.reports, elapsed, self.stopped)

    def left(self, elapsed: float = 1.0) -> float:
        found = self.look(elapsed)
        assert found is not None
        return found.left

    def train(self, steps: int, seconds: float = 1.0) -> None:
        """All do so many steps, each of which takes so many seconds."""
        for rank in self.reports:
            self.says(Activity.FIRST_STEP, rank=rank)
        for step in range(1, steps + 1):
            self.look()
            for _ in range(int(seconds) - 1):
                self.look()
            for rank in self.reports:
                self.says(Activity.STEP, step, rank=rank)
        self.look()


def test_a_step_is_late_after_ten_seconds_at_least() -> None:
    node = Node()
    node.train(5)
    assert node.left(9.0) == 1.0
    found = node.look()
    assert found == Standstill(10.0, 0.0, Doing(Activity.STEP, 5))
    node.says(Activity.STEP, 6)
    assert node.left() == FACTOR * 10, "it has done a step that was late: others may be, too"


def test_a_step_is_late_after_five_times_the_longest_so_far() -> None:
    node = Node()
    node.train(3, seconds=2.0)
    node.train(1, seconds=20.0)
    node.says(Activity.STEP, 4)
    node.look()
    for _ in range(19):
        node.look()
    node.says(Activity.STEP, 5)
    assert node.left() == FACTOR * 19
    for step in range(6, 106):
        node.says(Activity.STEP, step)
        node.look()
    assert 10 < node.left() < FACTOR * 19 / 2, "it was a single one"
    node.train(200)
    assert node.left() == pytest.approx(10.0, abs=1.0)


def test_before_workers_have_begun_in_a_round_none_is_late() -> None:
    node = Node(workers=2)
    assert node.look(1e6) is None
    node.says(Activity.FIRST_STEP, rank=0)
    assert node.look(1e6) is None, "the other restores its state"
    node.says(Activity.FIRST_STEP, rank=1)
    assert node.look() is not None
    assert node.look(1e6, number=2) is None, "they wait for their places in the next round"
    found = Standstill(0.0, UNKNOWN, Doing(Activity.FIRST_STEP))
    assert node.look(number=1) == found, "the time between does not count"


def test_a_first_step_may_take_half_an_hour_and_later_ones_five_times_the_longest() -> None:
    node = Node()
    node.says(Activity.FIRST_STEP)
    assert node.left() == UNKNOWN
    assert node.left(100.0) == UNKNOWN - 100
    node.says(Activity.STEP, 1)
    assert node.left() == 10.0, "the time of a first step does not count for other steps"
    node.says(Activity.FIRST_STEP, 1)
    assert node.left() == FACTOR * 100


def test_what_is_rarer_than_steps_is_learned_by_itself() -> None:
    for activity in (Activity.CHECKPOINT, Activity.EVALUATION):
        node = Node()
        node.train(3)
        node.says(activity, 3)
        assert node.look() == Standstill(0.0, UNKNOWN, Doing(activity, 3))
        node.look(30.0)
        node.says(Activity.STEP, 3)
        assert node.left() == 10.0
        node.says(activity, 4)
        assert node.left() == LEAST_OF_OTHERS


def test_an_announced_pause_takes_as_long_as_announced() -> None:
    node = Node()
    node.train(3)
    node.says(Activity.PAUSE, 3, limit=60.0, what="upload")
    assert node.look() == Standstill(0.0, 60.0, Doing(Activity.PAUSE, 3, "upload"))
    assert node.left(60.0) == 0.0
    node.says(Activity.STEP, 3)
    assert node.left() == 10.0


def test_none_is_late_while_another_is_not() -> None:
    node = Node(workers=2)
    node.train(3)
    node.says(Activity.EVALUATION, 3, rank=1)
    node.look()
    found = node.look(100.0)
    assert found is not None
    assert found.left > 0
    assert found.doing == Doing(Activity.EVALUATION, 3)


def test_a_part_of_the_script_of_which_nothing_is_known_is_not_watched() -> None:
    node = Node()
    node.train(3)
    node.says(Activity.UNWATCHED, 3)
    assert node.look(1e6) is None


def test_ranks_that_wait_for_each_other_as_they_enter_a_round_are_late_after_ten_seconds() -> None:
    node = Node(workers=2)
    node.train(300, seconds=1.0)
    for rank in (0, 1):
        node.says(Activity.FORMING, 300, rank=rank, number=2)
    assert node.look(number=2) == Standstill(0.0, FORMING, Doing(Activity.FORMING, 300))
    node.look(9.0, number=2)
    node.says(Activity.FORMING, 300, rank=1, number=2)
    found = node.look(number=2)
    assert found is not None
    assert found.left == FORMING, "a part of the state has arrived"
    found = node.look(FORMING, number=2)
    assert found is not None
    assert found.left == 0


def test_the_start_of_a_process_does_not_count() -> None:
    """It says nothing until its script has come to the training; between its session and that it is not watched."""
    node = Node(workers=2)
    node.says(Activity.FORMING, rank=0)
    node.reports[1] = None
    assert node.look(1e6) is None
    node.says(Activity.UNWATCHED, rank=1)
    assert node.look(1e6) is None
    node.says(Activity.FORMING, rank=1)
    assert node.look() is not None


def test_what_a_script_does_as_a_state_is_restored_may_take_long_unless_the_process_is_stopped() -> None:
    node = Node(workers=2)
    for _ in range(2):
        node.says(Activity.FORMING, rank=0)
        node.says(Activity.RESTORE, rank=1)
        found = node.look()
        assert found is not None
        assert (found.left, found.doing.activity) == (UNKNOWN, Activity.RESTORE), "no limit is learned from the first"
        node.look(100.0)
    for stopped, elapsed, late in (({1}, 1.0, False), (set(), 1.0, False), ({1}, 9.0, False), ({1}, 2.0, True)):
        node.stopped = stopped
        found = node.look(elapsed)
        assert found is not None
        assert (found.left < 0) is late, "only the time for which it was stopped counts"


@pytest.mark.parametrize(
    "activity", [Activity.UNWATCHED, Activity.FIRST_STEP, Activity.EVALUATION, Activity.PAUSE, None]
)
def test_a_stopped_worker_is_late_in_whatever_part_of_its_script(activity: Activity | None) -> None:
    node = Node(workers=2)
    node.says(Activity.FIRST_STEP, rank=0)
    if activity is not None:
        node.says(activity, 3, rank=1, limit=3600.0, what="upload")
    node.look(100.0)
    node.stopped = {1}
    for elapsed in (1.0, FORMING - 2, 1.0):
        found = node.look(elapsed)
    assert found is not None
    assert (found.seconds, found.left) == (FORMING, 0.0)
    assert found.doing.activity == (Activity.UNWATCHED if activity is None else activity)
    node.stopped = set()
    found = node.look()
    assert found is None or found.left > 0


def test_a_worker_that_has_advanced_since_was_not_stopped_all_the_time() -> None:
    node = Node()
    node.train(3)
    node.stopped = {0}
    node.look(FORMING - 1)
    node.says(Activity.STEP, 4)
    assert node.left(2.0) > 0


def test_a_first_step_is_looked_at_once_it_takes_longer_than_other_steps_may() -> None:
    for seconds, usual in ((1.0, RECONNECTS * 10), (20.0, RECONNECTS * FACTOR * 20)):
        node = Node(workers=2)
        assert node.lateness.suspect_in(node.reports) == math.inf
        node.train(3, seconds)
        node.says(Activity.RESUMED_STEP, 3, rank=0, number=2)
        assert node.look(number=2) is None
        assert node.lateness.suspect_in(node.reports) == math.inf, "the other has not begun"
        node.says(Activity.FIRST_STEP, 3, rank=1, number=2)
        node.look(number=2)
        found = node.look(7.0, number=2)
        assert found is not None
        assert node.lateness.suspect_in(node.reports) == pytest.approx(usual - 7.0, rel=0.1)
        assert found.left >= LEAST_OF_OTHERS - 8.0
        node.says(Activity.EVALUATION, 3, rank=0, number=2)
        node.look(number=2)
        assert node.lateness.suspect_in(node.reports) > UNKNOWN - 10, "others wait for an evaluation"


def test_after_a_round_was_broken_as_it_formed_the_next_has_more_time() -> None:
    node = Node()
    for number in range(1, 9):
        node.says(Activity.FORMING, number=number)
        found = node.look(number=number)
        assert found is not None
        assert found.left == min(FORMING * 2 ** (number - 1), MOST_FORMING)
        node.lateness.broken()
    node.train(3)
    node.lateness.broken()
    assert node.left(0.0) == 10.0, "steps have their own limit"


def test_the_time_of_entering_a_round_is_not_learned() -> None:
    node = Node()
    node.says(Activity.FORMING)
    node.look()
    node.look(100.0)  # it waits for another node's processes
    node.says(Activity.FORMING, number=2)
    found = node.look(number=2)
    assert found is not None
    assert found.left == FORMING


def test_after_a_change_of_the_round_survivors_may_take_twice_as_long_as_for_other_steps() -> None:
    for seconds, limit in ((1.0, 10.0), (20.0, FACTOR * 20)):
        node = Node(workers=2)
        node.train(3, seconds)
        for rank in (0, 1):
            node.says(Activity.RESUMED_STEP, 3, rank=rank, number=2)
        found = node.look(number=2)
        assert found is not None
        assert found.left == pytest.approx(RECONNECTS * limit, rel=0.1)


def test_a_new_worker_among_them_has_the_time_of_a_first_step() -> None:
    """It may compile the model, and those that wait for it are not late as long as it is not."""
    node = Node(workers=2)
    node.train(3)
    node.says(Activity.RESUMED_STEP, 3, rank=0, number=2)
    node.says(Activity.FIRST_STEP, 3, rank=1, number=2)
    found = node.look(number=2)
    assert found is not None
    assert found.left == LEAST_OF_OTHERS


def test_a_new_worker_that_has_rehearsed_has_five_times_the_longest_first_step_of_its_node() -> None:
    node = Node(workers=2)
    for rank in (0, 1):
        node.says(Activity.FIRST_STEP, rank=rank)
    node.look()
    node.look(30.0)
    node.train(3)
    node.says(Activity.RESUMED_STEP, 3, rank=0, number=2)
    node.says(Activity.REHEARSED_STEP, 3, rank=1, number=2)
    found = node.look(number=2)
    assert found is not None
    assert found.left == FACTOR * 30


def test_a_node_that_has_seen_no_steps_knows_no_limit_for_those_of_others() -> None:
    for activity in (Activity.RESUMED_STEP, Activity.REHEARSED_STEP):
        node = Node()
        node.says(activity, 3)
        assert node.left() == UNKNOWN


def test_after_a_round_was_broken_in_its_first_step_the_next_has_more_time() -> None:
    """What is slow only then, such as a loader that begins anew, must not break one round after the other."""
    node = Node()
    node.train(3)
    node.says(Activity.RESUMED_STEP, 3, number=2)
    node.look(number=2)
    node.look(20.0, number=2)
    node.lateness.broken()
    node.says(Activity.RESUMED_STEP, 3, number=3)
    found = node.look(number=3)
    assert found is not None
    assert found.left == FACTOR * 20


def test_hangs_in_first_steps_never_give_survivors_more_time_than_new_processes_have() -> None:
    node = Node()
    node.says(Activity.FIRST_STEP)
    node.look()
    node.look(1.0)
    node.train(3)
    limits = []
    for number in range(2, 7):
        node.says(Activity.RESUMED_STEP, 3, number=number)
        found = node.look(number=number)
        assert found is not None
        limits.append(found.left)
        node.look(found.left, number=number)
        node.lateness.broken()
    assert limits == [20.0, 100.0, LEAST_OF_OTHERS, LEAST_OF_OTHERS, LEAST_OF_OTHERS]

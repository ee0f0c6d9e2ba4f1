"""What an agent learns about the speed of its workers."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_agents.timers import UNKNOWN_START, StartTimer, StepTimer
from elastic_launch.shared_progress import STEP_BOUNDS, SharedProgress, WorkerProgress


def trained(steps: int, *, total: int, first: int = 0, first_takes: float = 9.0) -> StepTimer:
    """A timer after steps of 2 s each, except the first."""
    step_timer = StepTimer()
    step_timer.begin(1, first, 100.0, total)
    for number in range(1, steps + 1):
        step_timer.step(1, first + number, 100.0 + first_takes + 2.0 * (number - 1))
    return step_timer


def test_the_remaining_time_is_estimated_from_the_rounds_own_steps() -> None:
    assert trained(4, total=50, first=10).remaining() == pytest.approx(2.0 * (50 - 14))
    assert trained(100, total=150).remaining() == pytest.approx(2.0 * 50)


def test_another_rounds_steps_do_not_count_for_the_remaining_time() -> None:
    step_timer = trained(30, total=50)
    step_timer.begin(2, 20, 500.0, 50)
    for step in (21, 22):
        step_timer.step(2, step, 500.0 + step)
        assert step_timer.remaining() is None
    step_timer.step(2, 23, 523.0)
    assert step_timer.remaining() == pytest.approx(27.0)


def test_the_rest_is_unknown_without_a_total_and_beyond_it() -> None:
    assert trained(10, total=0).remaining() is None
    assert trained(10, total=9).remaining() is None, "it trains a second time"
    assert trained(10, total=10).remaining() == 0.0


def test_a_further_training_of_a_round_counts_from_its_own_beginning() -> None:
    timer = trained(10, total=10)
    timer.begin(1, 0, 200.0, 50, training=1)
    timer.begin(1, 0, 201.0, 50, training=1)
    timer.step(1, 10, 202.0)  # a late report of the first one
    assert (timer.position, timer.of_round(1), timer.remaining()) == ((1, 0), (0, 10), None)
    for step in (1, 2, 3):
        timer.step(1, step, 200.0 + 4.0 * step, training=1)
    assert (timer.reached, timer.position, timer.of_round(1)) == ((1, 3), (1, 3), (0, 13))
    assert (timer.total, timer.trained[0], timer.remaining()) == (50, 13, pytest.approx(4.0 * 47))
    timer.begin(2, 10, 500.0, 10)
    assert (timer.position, timer.of_round(2)) == ((0, 10), (10, 0))


def test_a_first_step_that_is_longer_than_the_others_is_known_after_the_second() -> None:
    assert trained(1, total=50).first_longer(1) is None
    assert trained(2, total=50).first_longer(1) == pytest.approx(7.0)
    timer = trained(100, total=150)
    assert timer.first_longer(1) == pytest.approx(7.0)
    assert timer.first_longer(2) is None
    timer.begin(2, 100, 500.0, 150)
    assert (timer.first_longer(1), timer.first_longer(2)) == (None, None)
    timer.step(2, 103, 512.0)  # the first report
    timer.step(2, 104, 514.0)
    assert timer.first_longer(2) == pytest.approx(6.0)
    timer.begin(3, 104, 600.0, 150)
    timer.step(3, 105, 601.0)
    timer.step(3, 106, 603.0)
    assert timer.first_longer(3) == 0.0


def test_a_start_takes_until_the_first_step_is_no_longer_than_others() -> None:
    timer = StartTimer()
    assert (timer.seen, timer.expected) == (None, UNKNOWN_START)
    timer.ready(3.0)
    timer.ready(2.0)
    timer.ready(4.0)
    assert timer.expected == 2.0, "the others had to wait for other workers"
    timer.first_step(10.0)
    timer.first_step(30.0)
    assert timer.expected == 12.0
    timer.ahead(9.0)
    assert timer.expected == 9.0, "it was measured"
    timer.first_step(1.0)
    assert timer.seen == 9.0


def test_unreported_steps_are_found_when_they_matter() -> None:
    """Each counts as one step, at their average pace."""
    reached = [WorkerProgress(1, 1, 9.0)]
    step_timer = StepTimer(lambda: reached[-1])
    step_timer.begin(1, 0, 0.0, 101)
    assert step_timer.remaining() is None
    reached.append(WorkerProgress(1, 41, 89.0))
    assert step_timer.reached == (1, 41)
    assert step_timer.remaining() == pytest.approx(2.0 * 60)
    assert step_timer.drain_seconds() == pytest.approx(4.0)
    reached.append(WorkerProgress(2, 50, 95.0))
    assert step_timer.done == 41, "of a round that has not begun here"


def test_progress_is_what_was_written_last() -> None:
    progress = SharedProgress.make("test")
    assert progress.read() is None
    progress.write(3, 7)
    first = progress.read()
    progress.write(3, 8)
    second = progress.read()
    assert first is not None
    assert second is not None
    assert (first[:2], second[:2]) == ((3, 7), (3, 8))
    assert 0 <= second.at - first.at < 10
    os.pwrite(progress.descriptor, b"x", 0)  # as left by a writer that was killed in the middle
    assert progress.read() is None
    progress.close()
    assert progress.read() is None


def test_progress_is_not_written_into_an_unrelated_file(tmp_path: Path) -> None:
    progress = SharedProgress.make("test")
    with (tmp_path / "other").open("w+") as other:
        os.dup2(other.fileno(), progress.descriptor)
        with pytest.raises(OSError, match="Bad file descriptor"):
            progress.write(1, 1)
    progress.close()
    assert (tmp_path / "other").read_text() == ""


def test_leaving_a_round_may_take_some_steps_within_limits() -> None:
    assert StepTimer().suspend_seconds() == 2.0
    assert trained(10, total=50).suspend_seconds() == pytest.approx(3 * 2.0)
    slow = StepTimer()
    slow.begin(1, 0, 0.0)
    slow.step(1, 1, 500.0)
    assert slow.suspend_seconds() == 60.0


def test_steps_are_counted_by_their_durations_and_on_by_the_next_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("elastic_launch.shared_progress.MonotonicClock", lambda: SimpleNamespace(now=lambda: now))
    agent = SharedProgress.make("test")
    worker = SharedProgress(os.dup(agent.descriptor), 1)
    for number, step, at in ((1, 5, 10.0), (1, 6, 10.25), (1, 6, 11.0), (1, 8, 12.25), (2, 8, 90.0), (2, 9, 590.0)):
        now = at
        worker.write(number, step)
    worker.close()
    counted = agent.read(1)
    assert counted is not None
    assert counted.steps_s == 502.25
    expected = {0.25: 1, 1.0: 2}
    assert counted.durations == (*(expected.get(bound, 0) for bound in STEP_BOUNDS), 1)
    following = SharedProgress(os.dup(agent.descriptor), 1)
    following.write(3, 5)
    now += 0.001
    following.write(3, 6)
    found = agent.read(1)
    assert found is not None
    assert (found.durations[0], sum(found.durations)) == (1, 5)
    for progress in (agent, following):
        progress.close()

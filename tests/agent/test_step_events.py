"""What an agent records about its workers' steps."""

from __future__ import annotations

from elastic_agents.step_events import FIRST, MOST, StepEvents
from elastic_launch.contract import Ready, WorkerHello
from elastic_launch.events.types import Event, FirstStep, RoundProgress, RoundSteps, TrainingBegun
from elastic_launch.testing import FakeClock


class Book:
    """A StepEvents, the events that it emitted, and a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = FakeClock(50.0)
        self.events: list[Event] = []
        self.step_events = StepEvents(self.clock, self)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def ready(self, number: int, *, local_rank: int = 0, step: int = 0) -> None:
        self.step_events.begin(WorkerHello(number, 4 + local_rank, local_rank), Ready(step, 90, 0.25, 3))

    def step(self, number: int, step: int, after: float = 1.0) -> None:
        self.clock.advance(after)
        self.step_events.step(number, step, self.clock.now())


def test_a_round_makes_three_events_whatever_the_number_of_steps_and_workers() -> None:
    book = Book()
    book.ready(3, local_rank=1, step=10)
    book.ready(3, local_rank=0, step=10)
    for step in range(11, 31):
        book.step(3, step)
        book.step_events.step(3, step, book.clock.now() + 1)
    book.clock.advance(7)
    book.step_events.hung_up(3)
    assert book.events == [TrainingBegun(3, 5, 10, 90, 0.25, 3), FirstStep(3, 11)]
    book.step_events.hung_up(3)
    assert book.events[2:] == [RoundSteps(3, 10, 30, 20.0)]
    book.step_events.close()
    assert len(book.events) == 3


def test_a_round_without_a_step_is_recorded() -> None:
    book = Book()
    book.ready(1, step=5)
    book.step_events.hung_up(1)
    assert book.events[1:] == [RoundSteps(1, 5, 5, 0.0)]


def test_pending_events_are_written_when_the_next_round_begins_and_at_the_end() -> None:
    book = Book()
    book.ready(1)
    book.step(1, 1)
    book.ready(2, step=1)
    book.step(2, 2)
    book.step_events.close()
    assert [event for event in book.events if isinstance(event, RoundSteps)] == [
        RoundSteps(1, 0, 1, 1.0),
        RoundSteps(2, 1, 2, 1.0),
    ]


def test_messages_of_an_older_round_are_ignored() -> None:
    book = Book()
    book.ready(2, step=5)
    before = list(book.events)
    book.ready(1)
    book.step(1, 9)
    book.step_events.hung_up(1)
    assert book.events == before


def test_progress_is_recorded_ever_more_rarely_and_only_if_steps_were_done() -> None:
    book = Book()
    assert book.step_events.until_progress() is None, "nothing trains"
    book.ready(1)
    assert book.step_events.until_progress() is None, "no step was done"
    book.step(1, 1)
    started = book.clock.now()
    told: list[float] = []
    for step in range(2, 602):
        book.step(1, step)
        before = len(book.events)
        book.step_events.progress()
        told += [book.clock.now() - started] * (len(book.events) - before)
    assert told[:5] == [FIRST, 3 * FIRST, 7 * FIRST, 15 * FIRST, 15 * FIRST + MOST]
    assert len(told) < 15, "at most one a minute in the long run"
    assert book.events[2] == RoundProgress(1, 5, 5.0)
    before = len(book.events)
    book.clock.advance(2 * MOST)
    assert book.step_events.until_progress() == 0.0
    book.step_events.progress()
    assert book.step_events.until_progress() == MOST
    assert book.events[before:] == [], "no step since then, or it was recorded"
    book.step_events.hung_up(1)
    assert isinstance(book.events[-1], RoundSteps)
    assert book.step_events.until_progress() is None


def test_a_further_training_of_a_round_has_events_of_its_own() -> None:
    book = Book()
    for local_rank in (0, 1):
        book.ready(1, local_rank=local_rank)
    for step in range(1, 11):
        book.step(1, step)
    for local_rank in (0, 1):
        book.clock.advance(5)
        who, ready = WorkerHello(1, 4 + local_rank, local_rank), Ready(0, 90, 0.5, training=1)
        book.step_events.begin(who, ready, further=True)
    book.step_events.step(1, 11, book.clock.now())
    book.clock.advance(1)
    for step in (1, 2):
        book.step_events.step(1, step, book.clock.now(), 1)
    for _ in range(2):
        book.step_events.hung_up(1)
    assert book.events == [
        TrainingBegun(1, 4, 0, 90, 0.25, 3),
        FirstStep(1, 1),
        RoundProgress(1, 10, 10.0),
        TrainingBegun(1, 4, 0, 90, 0.5, training=1),
        FirstStep(1, 1, 1),
        RoundSteps(1, 0, 2, 6.0, 1),
    ]


def test_a_worker_that_is_still_in_an_earlier_training_than_another_one_tells_nothing() -> None:
    """One that was kept begins at once; one that is new restores the end of the first training before."""
    book = Book()
    book.step_events.begin(WorkerHello(2, 4, 0), Ready(3, training=1))
    book.step_events.begin(WorkerHello(2, 5, 1), Ready(10))
    book.step_events.begin(WorkerHello(2, 5, 1), Ready(3, training=1), further=True)
    book.step_events.step(2, 4, book.clock.now(), 1)
    book.step_events.hung_up(2)
    assert book.events == [TrainingBegun(2, 4, 3, 0, 0.0, training=1), FirstStep(2, 4, 1)]
    book.step_events.hung_up(2)
    assert book.events[2:] == [RoundSteps(2, 3, 4, 0.0, 1)]

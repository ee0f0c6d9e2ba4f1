"""What those who watch a run are shown."""

from __future__ import annotations

import pytest

from elastic_launch.events import types as ev
from elastic_launch.observe.live import LiveLedger
from elastic_launch.observe.present import Present
from elastic_launch.observe.watch import Watch, span


class Told:
    """A watch whose clock the test sets."""

    def __init__(self) -> None:
        self.at = 100.0
        self.ledger = LiveLedger(self)
        self.watch = Watch(self, self.ledger)

    def now(self) -> float:
        return self.at

    def add(self, *events: ev.Event) -> None:
        for event in events:
            self.at += 0.1
            self.ledger.add(event)
            self.watch.add(event)

    def figures(self, present: Present) -> dict[str, str]:
        return dict(self.watch.figures(present))


def begun(number: int, step: int) -> list[ev.Event]:
    """The events of a round of two workers until it trains."""
    return [
        ev.RoundFormed(number, 1, ("a",), 2, 0, "first", 0.1),
        ev.OrderReceived("form", number, 1, "first", workers=2),
        ev.WorkerStarted(number, 0, 0, 10, "first", 0.1),
        ev.WorkerStarted(number, 1, 1, 11, "first", 0.1),
        ev.TrainingBegun(number, 0, step, 100, 0.0),
        ev.FirstStep(number, step + 1),
    ]


def test_figures_that_are_not_known_are_left_out() -> None:
    told = Told()
    assert told.figures(Present("starting")) == {"world size": "none yet", "running for": "0 s"}


def test_all_figures() -> None:
    told = Told()
    told.add(*begun(1, 0), ev.CheckpointSaved(1, 20, "/c"))
    members = (("a", 2), ("b", 1))
    present = Present("running", 1, 2, 3, 2, 30, 100, 61.0, 30, 3.0, 28, 1, 3, members, 0.123456, 64, 4)
    told.figures(present)
    told.at += 5
    assert told.figures(present) == {
        "world size": "3 on 2 nodes: a 2, b 1",
        "step": "30 of 100 (30%)",
        "steps/s": "10",
        "time left": "61 s",
        "loss": "0.1235",
        "global batch": "64, accumulation 4",
        "restarts left": "2 of 3",
        "snapshot": "step 28, 5 s ago",
        "checkpoint": "step 20, 5 s ago",
        "running for": "6 s",
    }


def test_what_a_start_waits_for() -> None:
    told = Told()
    assert told.watch.doing(Present("starting")) == "starts: imports torch"
    assert told.watch.doing(Present("waiting")) == "waiting: finds the run's leader"
    told.add(ev.LinkChanged(up=True, cause="hello accepted"), ev.NodeJoined("a", 2, "::1", "1 more node is needed"))
    assert told.watch.doing(Present("waiting")) == "waiting: 1 more node is needed"
    *starts, training, first = begun(1, 0)
    told.add(*starts[:-1])
    running = Present("running", workers=2)
    assert told.watch.doing(running) == "workers start: 1 of 2 have; none has begun to train yet"
    told.add(starts[-1], training)
    assert told.watch.doing(running) == "trains; first step"
    told.add(first)
    assert told.watch.doing(running) == "trains"


def test_an_incident_is_told_with_its_phases_until_training_goes_on() -> None:
    told = Told()
    told.add(
        *begun(1, 0), ev.WorkerExited(1, 1, 1, 11, -9, 3.0, False), ev.RoundBroken(1, "crash", "rank 1\nfell", 3.0, "")
    )
    told.at += 2
    text = told.watch.doing(Present("stopping"))
    assert text == "still for 2.1 s (detect 0.1 s, stop 0.0 s, form 2.0 s): crash, rank 1 fell; stopping: rank 1 fell"
    told.add(*begun(2, 1)[:-1])
    text = told.watch.doing(Present("running", workers=2))
    assert "start 0.4 s" in text
    assert text.endswith("crash, rank 1 fell; trains; first step")
    told.add(ev.FirstStep(2, 2))
    assert told.watch.doing(Present("running")) == "trains; incident 1 cost 2.7 s: crash, rank 1 fell"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (99, "99 s"), (100, "2 min"), (7500, "2 h 5 min"), (864000, "10 days")]
)
def test_times(seconds: float, text: str) -> None:
    assert span(seconds) == text

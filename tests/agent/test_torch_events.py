"""What a log handler that is registered with torch gets."""

from __future__ import annotations

import json
import logging
import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.elastic.events.handlers import _log_handlers

from elastic_agents.console import Consoles
from elastic_agents.torch_events import MOST, TorchEvents
from elastic_launch.clock import MonotonicClock
from elastic_launch.config.launch_config import Command, LaunchConfig
from elastic_launch.config.torch_options import TorchOptions
from elastic_launch.events import types as ev
from elastic_launch.observe.chronicle import Chronicle
from elastic_launch.observe.ledger import build


class Kept(logging.Handler):
    """Keeps the records; a name of its own keeps torch's logger for it apart from others'."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(json.loads(record.getMessage()))


class Sink:
    def __init__(self) -> None:
        self.found: list[ev.Event] = []

    def emit(self, event: ev.Event) -> None:
        self.found.append(event)


def test_a_registered_handler_gets_rounds_checkpoints_and_incidents(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, sink = Kept(), Sink()
    monkeypatch.setitem(_log_handlers, "kept-here", kept)
    config = replace(
        LaunchConfig(Command(("/s/train.py",), ())), run_id="r", options=TorchOptions(event_log_handler="kept-here")
    )
    chronicle = Chronicle()
    story: list[ev.Event] = [
        ev.OrderReceived("form", 1, 1, "first", workers=1),
        ev.RoundFormed(1, 1, ("a",), 1, 0, "first", 0.1),
        ev.TrainingBegun(1, 0, 0, 50, 0.0),
        ev.FirstStep(1, 1),
        ev.CheckpointSaved(1, 4, "/c"),
        ev.WorkerExited(1, 0, 0, 10, -9, 3.0, False),
        ev.OrderReceived("break", 1, 1, "rank 0 fell", kind="crash"),
        ev.RoundFormed(2, 1, ("a",), 1, 1, "rank 0 fell", 0.1),
        ev.TrainingBegun(2, 0, 4, 50, 0.0),
        ev.FirstStep(2, 5),
    ]
    with closing(Consoles()) as consoles, closing(TorchEvents(config, sink, MonotonicClock(), consoles)) as events:
        for at, event in enumerate(story):
            events.emit(event)
            chronicle.add(float(at), event)
        (incident,) = build(chronicle).incidents
        events.over(incident)
        events.ended(0, "", 1)
    assert sink.found == story
    names = [found["name"].removeprefix("elastic_launch.") for found in kept.found]
    assert names == [
        "order_received",
        "checkpoint_saved",
        "torchelastic.worker.status.FAILED",
        "order_received",
        "incident",
        "torchelastic.worker.status.SUCCEEDED",
    ]
    about = [json.loads(found["metadata"]["metadata"]) for found in kept.found]
    assert (about[0]["order"], about[1]["step"], about[3]["cause"]) == ("form", 4, "rank 0 fell")
    assert (about[4]["kind"], about[4]["still_s"]) == ("crash", incident.still_s)
    assert {found["metadata"]["run_id"] for found in kept.found} == {"r"}


class Held(Kept):
    """Takes events once it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        assert self.let_go.wait(60)
        super().emit(record)


def test_a_handler_that_is_slow_holds_up_nothing_and_what_it_missed_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held, sink = Held(), Sink()
    monkeypatch.setitem(_log_handlers, "held-here", held)
    config = replace(LaunchConfig(Command(("/s/train.py",), ())), options=TorchOptions(event_log_handler="held-here"))
    missed = 5
    with closing(Consoles()) as consoles, closing(TorchEvents(config, sink, MonotonicClock(), consoles)) as events:
        for step in range(MOST + missed):
            events.emit(ev.CheckpointSaved(1, step, "/c"))  # returns, or the test would not end
        assert len(sink.found) == MOST + missed
        assert not held.found
        held.let_go.set()
    assert [json.loads(found["metadata"]["metadata"])["step"] for found in held.found] == [*range(MOST)]
    assert f"held-here was too slow: {missed} events within" in caplog.text


def test_a_handler_that_never_returns_is_named_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held()
    monkeypatch.setitem(_log_handlers, "stuck-here", held)
    config = replace(LaunchConfig(Command(("/s/train.py",), ())), options=TorchOptions(event_log_handler="stuck-here"))
    with closing(Consoles()) as consoles, closing(TorchEvents(config, Sink(), MonotonicClock(), consoles)) as events:
        events.ended(0, "", 0)
    assert "stuck-here does not return: it did not get the last events" in caplog.text
    held.let_go.set()

"""What a log handler that is registered with torch gets."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.elastic.events.handlers import _log_handlers

from elastic_agents.console import Consoles
from elastic_agents.torch_events import TorchEvents
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
    with closing(Consoles()) as consoles:
        events = TorchEvents(config, sink, MonotonicClock(), consoles)
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

"""An event that this package defines, with its sentence, is shown by all that shows events: no other file knows it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agents.main import _Journal
from elastic_launch.cli.event_lines import show_events
from elastic_launch.events.sentences import SENTENCES
from elastic_launch.events.sinks import JsonLines
from elastic_launch.events.types import KINDS, Counter, LeaderEvent, OrderReceived
from elastic_launch.observe.__main__ import main
from elastic_launch.observe.document import document
from elastic_launch.observe.metrics import NodeMetrics
from elastic_launch.observe.present import Present
from elastic_launch.observe.reading import Host
from elastic_launch.testing import FakeClock

SAID = "the cooling of rack 7 has failed: <b> 3 nodes get hot"


@pytest.fixture
def cooling_failed() -> Iterator[type[LeaderEvent]]:
    class CoolingFailed(LeaderEvent):
        """The cooling of a rack has failed."""

        rack: int
        nodes: int

        tone = "bad"
        counter = Counter("cooling_failures_total", "Racks whose cooling has failed.", {"rack": ()})

    SENTENCES[CoolingFailed] = lambda e: f"the cooling of rack {e.rack} has failed: <b> {e.nodes} nodes get hot"
    yield CoolingFailed
    del SENTENCES[CoolingFailed], KINDS["cooling_failed"]


def test_a_new_event_is_shown_everywhere(
    cooling_failed: type[LeaderEvent],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = FakeClock(100.0)
    journal = _Journal(JsonLines(tmp_path / "events-a.jsonl", clock, lambda error: pytest.fail(str(error))), clock)
    metrics = NodeMetrics("r", "a", "1")
    journal.follow.append(metrics.add)
    caplog.set_level(logging.INFO, "elastic_launch")
    journal.emit(OrderReceived("form", 1, 1, "first", workers=1, world_size=1))
    clock.advance(5.0)
    journal.emit(cooling_failed(7, 3))

    assert caplog.messages == [SAID]
    text = metrics.text(Present("running"), leads=True, goodput=None).decode()
    assert re.search(r'^elastic_launch_cooling_failures_total{node="a",rack="7",run_id="r"} 1\.0$', text, re.MULTILINE)
    assert "# HELP elastic_launch_cooling_failures_total Racks whose cooling has failed." in text
    mark = {"at": 5.0, "tone": "bad", "text": SAID}
    live = journal.ledger.drawn(lambda told, events, ledger: document(Host("a", told, (), tuple(events)), ledger))
    assert live["marks"] == [mark]

    report = tmp_path / "report.html"
    assert main([str(tmp_path), "--html", str(report)]) == 0
    (inside,) = re.findall(r'<script type="application/json" id="document">(.*?)</script>', report.read_text())
    assert json.loads(inside)["marks"] == [mark]
    capsys.readouterr()
    assert show_events(tmp_path, since=None, follow=False, as_json=False, alive=lambda: False) == 0
    assert SAID in capsys.readouterr().out

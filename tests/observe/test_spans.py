"""A run as OpenTelemetry spans."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from harness import wait_for
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from otlp_receiver import receiver

from elastic_launch.events import types as ev
from elastic_launch.observe import spans as module
from elastic_launch.observe.live import LiveLedger
from elastic_launch.observe.spans import MOST, Spans, processor, wanted
from elastic_launch.testing import FakeClock

CRASH: list[tuple[float, ev.Event]] = [
    (10.0, ev.RoundFormed(1, 1, ("a",), 1, 0, "first", 1.0)),
    (10.0, ev.OrderReceived("form", 1, 1, "first", workers=1)),
    (10.5, ev.WorkerStarted(1, 0, 0, 10, "first", 0.1)),
    (12.0, ev.TrainingBegun(1, 0, 0, 50, 0.5)),
    (13.0, ev.FirstStep(1, 1)),
    (29.5, ev.WorkerExited(1, 0, 0, 10, -9, 3.0, False)),
    (30.0, ev.RoundBroken(1, "crash", "rank 0", 20.0, "a new round forms")),
    (30.0, ev.OrderReceived("break", 1, 1, "rank 0", "crash")),
    (31.0, ev.RoundFormed(2, 1, ("a",), 1, 1, "rank 0", 1.0)),
    (31.0, ev.OrderReceived("form", 2, 1, "rank 0", workers=1)),
    (31.1, ev.RoundSteps(1, 0, 9, 16.0)),
    (31.5, ev.WorkerStarted(2, 0, 0, 12, "rank 0", 0.1)),
    (33.0, ev.TrainingBegun(2, 0, 5, 50, 0.5)),
    (34.0, ev.FirstStep(2, 6)),
    (40.0, ev.OrderReceived("end", 2, 1, "all workers finished")),
    (40.5, ev.NodeEnded(0, "all workers finished")),
]


class Told:
    """Spans of events at given times, by the names of the span and its parent, each with its start and end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module.time, "time", lambda: 1000.0)
        self.clock = FakeClock(0.0)
        self.kept = InMemorySpanExporter()
        self.ledger = LiveLedger(self.clock)
        self.spans = Spans("r", "a", self.clock, SimpleSpanProcessor(self.kept))

    def add(self, told: list[tuple[float, ev.Event]]) -> None:
        for at, event in told:
            self.clock.advance(at - self.clock.now())
            self.spans.add(event)
            for incident in self.ledger.add(event):
                self.spans.over(incident)

    def roots(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.kept.get_finished_spans() if span.parent is None}

    def children(self, name: str) -> list[tuple[str, float, float]]:
        root = self.roots()[name]
        found = [s for s in self.kept.get_finished_spans() if s.parent and s.parent.span_id == root.context.span_id]
        assert all(span.context.trace_id == root.context.trace_id for span in found)
        return [(span.name, *times(span)) for span in found]


def times(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9 - 1000, span.end_time / 1e9 - 1000


def test_rounds_and_an_incident_with_their_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    told.add(CRASH)
    assert {name: times(span) for name, span in told.roots().items()} == {
        "round 1": (10, 30),
        "incident: crash": (29.5, 34),
        "round 2": (31, 40),
    }
    assert told.children("round 1") == [
        ("start", 10, 11.5), ("restore", 11.5, 12), ("first step", 12, 13), ("train", 13, 30),
    ]  # fmt: skip
    assert told.children("incident: crash") == [
        ("detect", 29.5, 30), ("stop", 30, 30), ("form", 30, 31), ("start", 31, 32.5), ("restore", 32.5, 33),
        ("first step", 33, 34),
    ]  # fmt: skip
    about = dict(told.roots()["incident: crash"].attributes or {})
    expected = {"run_id": "r", "node": "a", "cause": "rank 0", "lost_steps": 4, "drained": False, "next_round": 2}
    assert {f"elastic_launch.{name}": value for name, value in expected.items()}.items() <= about.items()
    about = dict(told.roots()["round 1"].attributes or {})
    expected = {"cause": "first", "workers": 1, "ended_by": "break", "kind": "crash", "first_step": 0, "last_step": 9}
    assert {f"elastic_launch.{name}": value for name, value in expected.items()}.items() <= about.items()
    assert [event.name for event in told.roots()["round 1"].events] == ["round_broken"]
    assert told.roots()["round 1"].resource.attributes["service.instance.id"] == "a"


def test_a_round_has_its_phases_once_however_many_trainings_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first step it may restore the end of a training; what comes after that step is training."""
    told = Told(monkeypatch)
    resumed = (32.2, ev.TrainingBegun(2, 0, 5, 50, 0.25))
    further = [(36.0, ev.TrainingBegun(2, 0, 0, 50, 0.5, training=2)), (37.0, ev.FirstStep(2, 1, 2))]
    told.add([*CRASH[:12], resumed, *CRASH[12:14], *further, *CRASH[14:]])
    assert told.children("round 2") == [
        ("start", 31, 32.25), ("restore", 32.25, 33), ("first step", 33, 34), ("train", 34, 40),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "status", "description"),
    [
        ("crash", StatusCode.ERROR, "rank 0"),
        ("hang", StatusCode.ERROR, "rank 0"),
        ("node loss", StatusCode.ERROR, "rank 0"),
        ("membership", StatusCode.UNSET, None),
        ("preemption", StatusCode.UNSET, None),
    ],
)
def test_an_incident_that_is_a_fault_has_the_status_error(
    monkeypatch: pytest.MonkeyPatch, kind: str, status: StatusCode, description: str | None
) -> None:
    told = Told(monkeypatch)
    broken = ev.RoundBroken(1, kind, "rank 0", 20.0, "a new round forms")
    told.add([(at, broken if isinstance(event, ev.RoundBroken) else event) for at, event in CRASH])
    found = told.roots()[f"incident: {kind}"].status
    assert (found.status_code, found.description) == (status, description)
    assert told.roots()["round 1"].status.status_code is StatusCode.UNSET


def test_a_round_of_a_plain_script_ends_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    told.add([x for x in CRASH if not isinstance(x[1], ev.TrainingBegun | ev.FirstStep | ev.RoundSteps)])
    assert {name: times(span) for name, span in told.roots().items()} == {"round 1": (10, 30), "round 2": (31, 40)}
    assert told.children("round 2") == [("start", 31, 31.5), ("run", 31.5, 40)]


def test_a_round_has_a_bounded_number_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    told.add(CRASH[:5])
    told.add([(14.0, ev.NodeRefused("x", "no token"))] * (2 * MOST))
    told.add(CRASH[7:8] + CRASH[-1:])
    assert len(told.roots()["round 1"].events) == MOST


def test_names_in_the_environment_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    told = Told(monkeypatch)
    told.add(CRASH)
    assert told.roots()["round 1"].resource.attributes["service.name"] == "mine"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://here:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://here:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://here:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://here:4318", "OTEL_SDK_DISABLED": "True"}, False),
    ],
)
def test_the_standard_variables_decide(environ: dict[str, str], expected: bool) -> None:
    assert wanted(environ) is expected


def test_an_exporter_that_is_not_there_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert processor({"OTEL_TRACES_EXPORTER": "nothing"}) is None
    assert "no spans are sent: the exporter nothing cannot be used: it is not installed." in caplog.text


def test_spans_reach_a_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver() as (address, came):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        sends = processor({"OTEL_EXPORTER_OTLP_ENDPOINT": address})
        assert sends is not None
        clock = FakeClock(0.0)
        spans = Spans("r", "a", clock, sends)
        for at, event in CRASH:
            clock.advance(at - clock.now())
            spans.add(event)
        spans.close()
        wait_for("the spans", lambda: {"round 1", "round 2", "start", "train"} <= set(came))


def test_a_receiver_that_is_gone_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(module, "LAST", 0.1)
    sends = processor({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"})
    assert sends is not None
    spans = Spans("r", "a", FakeClock(0.0), sends)
    spans.add(CRASH[1][1])
    spans.add(CRASH[-1][1])
    began = time.monotonic()
    spans.close()
    assert time.monotonic() - began < 60
    wait_for("the thread's end", lambda: not [x for x in threading.enumerate() if x.name == "last spans"])
    logging.getLogger("opentelemetry").handlers.clear()

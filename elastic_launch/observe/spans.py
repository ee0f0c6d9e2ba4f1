"""A node's rounds and incidents as OpenTelemetry spans, each with its phases as children.

Each span is a trace of its own, so that it is complete once it is over, however long the run goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from elastic_launch.clock import Clock
from elastic_launch.events import types as ev
from elastic_launch.events.sentences import sentence
from elastic_launch.observe.ledger import PARTS, PLANNED, RoundIncident, spoken
from elastic_launch.system.plain_text import one_line

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.util.types import AttributeValue

_log = logging.getLogger("elastic_launch")

LAST = 3.0
"""Seconds at the run's end in which the last spans can be sent."""

MOST = 128
"""Events of a round that its span has: the first ones."""


def wanted(environ: Mapping[str, str]) -> bool:
    """Whether the standard variables name a place for spans.

    See https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
    """
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    if exporter == "none" or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return bool(
        exporter or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )


def processor(environ: Mapping[str, str]) -> SpanProcessor | None:
    """Return what sends spans in a thread of its own; None, after a warning, if that is impossible."""
    name = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if name == "otlp":
        protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    try:
        from importlib.metadata import entry_points

        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = next(iter(entry_points(group="opentelemetry_traces_exporter", name=name)), None)
        if exporter is None:
            raise LookupError("it is not installed")
        made = BatchSpanProcessor(exporter.load()())
    except Exception as error:  # noqa: BLE001 - an exporter of another package may raise anything
        hint = "Install the exporter with pip install 'elastic-launch[otel]', or set OTEL_TRACES_EXPORTER=none."
        _log.warning("no spans are sent: the exporter %s cannot be used: %s. %s", name, one_line(str(error)), hint)
        return None
    # What it complains about is shown as the launcher's own lines.
    for handler in _log.handlers:
        logging.getLogger("opentelemetry").addHandler(handler)
    return made


@dataclass(slots=True)
class _Round:
    """A round; times by the host's monotonic clock."""

    number: int
    formed: float
    about: dict[str, AttributeValue]
    started: float | None = None
    begun: float | None = None
    restore: float = 0.0
    first: float | None = None
    ended: float | None = None
    events: list[tuple[float, str, dict[str, AttributeValue]]] = field(default_factory=list)


class Spans:
    """Makes spans of a node's events. Thread-safe."""

    def __init__(self, run_id: str, node: str, clock: Clock, sends: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider

        own = Resource({"service.name": "elastic-launch", "service.instance.id": node})
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(sends)
        self._tracer = self._provider.get_tracer("elastic_launch")
        self._about: dict[str, AttributeValue] = {"elastic_launch.run_id": run_id, "elastic_launch.node": node}
        self._clock = clock
        self._offset = time.time() - clock.now()
        self._lock = threading.Lock()
        self._rounds: dict[int, _Round] = {}

    def add(self, event: ev.Event) -> None:
        """Add an event; a round that it ends is sent."""
        with self._lock:
            now = self._clock.now()
            newest = self._rounds[max(self._rounds)] if self._rounds else None
            tells = event.printed and not isinstance(event, ev.RoundFormed)
            if tells and newest is not None and newest.ended is None and len(newest.events) < MOST:
                newest.events.append((now, ev.event_name(type(event)), {"text": sentence(event)}))
            match event:
                case ev.OrderReceived(order="form", round=number, cause=cause, workers=workers):
                    for other in list(self._rounds.values()):
                        other.ended = other.ended or now
                        if other.begun is None:  # others are sent with their steps, which may be told later
                            self._send(other)
                    self._rounds[number] = _Round(number, now, {"round": number, "cause": cause, "workers": workers})
                case ev.NodeEnded():
                    for other in list(self._rounds.values()):
                        other.ended = other.ended or now
                        self._send(other)
                case _ if (told := self._rounds.get(getattr(event, "round", 0))) is not None:
                    self._follow(told, event, now)

    def _follow(self, told: _Round, event: ev.Event, now: float) -> None:
        match event:
            case ev.OrderReceived(order=order, kind=kind, cause=cause):
                told.ended = now if order != "drain" and told.ended is None else told.ended
                told.about |= {"ended_by": order, "kind": kind, "end_cause": cause}
            case ev.TrainingBegun(step=step, restore_s=seconds) if told.first is None:
                told.begun, told.restore, told.about["first_step"] = now, told.restore + seconds, step
            case ev.FirstStep() if told.first is None:
                told.first = now
            case ev.RoundSteps(last=last):
                told.ended, told.about["last_step"] = told.ended or now, last
                self._send(told)
            case ev.WorkerStarted() | ev.WorkerPlaced() | ev.WorkerKept():
                told.started = now

    def over(self, incident: RoundIncident) -> None:
        """Send an incident that is over now."""
        at = start = self._clock.now() - incident.still_s
        phases = []
        for part in PARTS:
            seconds = getattr(incident, part)
            if seconds is not None:
                phases.append((spoken(part), at, at + seconds))
                at += seconds
        names = ("round", "next_round", "kind", "cause", "drained", "lost_steps", "kept", "anew", "ahead")
        about = {name: value for name in names if (value := asdict(incident)[name]) is not None}
        about["incident"] = incident.round
        fault = "" if incident.kind in (*PLANNED, "unknown") else incident.cause or incident.kind
        self._make(f"incident: {incident.kind}", start, at, about, phases, fault=fault)

    def close(self) -> None:
        """Send the last spans, within a bounded time."""
        sending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(LAST)

    def _send(self, told: _Round) -> None:
        del self._rounds[told.number]
        ended = told.formed if told.ended is None else max(told.ended, told.formed)
        if told.begun is None:
            marks = [("start", told.started), ("run", ended if told.started is not None else None)]
        else:
            marks = [
                ("start", told.begun - told.restore),
                ("restore", told.begun),
                ("first step", told.first),
                ("train", ended),
            ]
        at, phases = told.formed, []
        for name, until in marks:
            if until is not None:
                until = min(max(until, at), ended)
                phases.append((name, at, until))
                at = until
        self._make(f"round {told.number}", told.formed, ended, told.about, phases, told.events)

    def _make(
        self,
        name: str,
        start: float,
        end: float,
        about: Mapping[str, AttributeValue],
        phases: Sequence[tuple[str, float, float]],
        events: Sequence[tuple[float, str, dict[str, AttributeValue]]] = (),
        *,
        fault: str = "",
    ) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context

        known = self._about | {f"elastic_launch.{key}": value for key, value in about.items()}
        span = self._tracer.start_span(name, Context(), attributes=known, start_time=self._wall(start))
        if fault:
            span.set_status(trace.StatusCode.ERROR, fault)
        for at, what, more in events:
            span.add_event(what, more, self._wall(at))
        within = trace.set_span_in_context(span, Context())
        of_incident = {"elastic_launch.incident": about["incident"]} if "incident" in about else {}
        for phase, since, until in phases:
            part = self._tracer.start_span(phase, within, attributes=of_incident, start_time=self._wall(since))
            part.end(self._wall(until))
        span.end(self._wall(end))

    def _wall(self, moment: float) -> int:
        """Return a moment of the monotonic clock as nanoseconds of Unix time."""
        return round((moment + self._offset) * 1e9)

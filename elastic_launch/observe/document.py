"""What the page of a run shows, as one JSON document, and the page: static files with a document inside.

The report is the page with the document of a run that is over, as one file that loads nothing. The page of a run in
progress fetches a new document each second.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import NotRequired, TypedDict

from elastic_launch.events.sentences import of_training, sentence
from elastic_launch.events.types import counted, listed
from elastic_launch.observe.advice import advice
from elastic_launch.observe.history import Sample
from elastic_launch.observe.ledger import PARTS, Ledger, spoken
from elastic_launch.observe.reading import Host

MOST = 300
"""Rounds, incidents and nodes that are shown: the last ones."""


class RoundBar(TypedDict):
    """A round on the time axis; ``world`` is 0 if the host does not know its world size."""

    since: float
    until: float
    world: int
    text: str


class Mark(TypedDict):
    """An event on the time axis; see :data:`elastic_launch.events.types.Tone`."""

    at: float
    tone: str
    text: str


class IncidentRow(TypedDict):
    """An incident, from when training stopped advancing until it went on; ``parts`` are its seconds by phase."""

    id: int
    since: float
    until: float
    rounds: str
    kind: str
    cause: str
    still_s: float
    parts: list[float | None]
    lost_steps: int | None
    text: str


class Chart(TypedDict):
    """A figure that workers report: its value at moments."""

    name: str
    unit: str
    points: list[tuple[float, float]]


class NodeTable(TypedDict):
    """The run's nodes; ``about`` says how old the table is, and what it lacks."""

    about: list[str]
    heads: list[str]
    rows: list[list[str | int | None]]
    marked: NotRequired[list[int]]  # numbers of the rows of nodes in question


class Now(TypedDict):
    """How this node's part of a run in progress is; ``ranks`` are those whose output can be chosen.

    ``state`` is what the run does in a word or two, ``since`` that moment; ``safe`` says where its state is, and
    ``happened`` what was decided and found last.
    """

    node: str
    state: str
    since: float
    safe: str
    happened: list[tuple[float, str]]
    doing: str
    figures: list[tuple[str, str]]
    ranks: list[int]
    ended: bool


class Document(TypedDict):
    """All that the page shows. Moments are in seconds from the first event of the host whose clock is used.

    Attributes:
        since, until: what the time axis shows.
    """

    lines: list[str]  # from when to when, and how the run ended
    summary: str
    notes: list[str]  # whose clock is used, and what a reader must know
    zero: float | None  # Unix time of the first event; null if only seconds are to be shown
    since: float
    until: float
    label: str  # the time axis as text
    rounds: list[RoundBar]
    marks: list[Mark]
    parts: list[str]  # names of an incident's phases
    incidents: list[IncidentRow]
    advice: list[str]
    charts: list[Chart]
    nodes: NodeTable | None  # null if nothing is known of them
    now: Now | None  # null in a report


def document(
    host: Host,
    ledger: Ledger,
    *,
    lines: Sequence[str] = (),
    samples: Sequence[Sample] = (),
    nodes: NodeTable | None = None,
    now: Now | None = None,
) -> Document:
    """Return the document of a run.

    Args:
        host: the host whose clock is used.
        ledger: what :func:`elastic_launch.observe.report.joined` returns.
        samples: the figures that workers reported.
    """
    zero = host.chronicle.since or 0.0
    whole = max(0.0, host.chronicle.until - zero)
    bars = _bars(host)
    since = bars[-MOST]["since"] if len(bars) > MOST else 0.0
    notes = [f"Times are those of node {host.node}'s clock, from its first event."]
    if now is not None and host.chronicle.rounds and not host.chronicle.leads:
        notes.append(
            f"Node {host.node} does not lead: the figures, rounds and incidents here are those of this node, and the "
            "run may have trained without it. The leader's page shows those of the run."
        )
    largest = max([1, *(bar["world"] for bar in bars)])
    rounds = counted(len(host.chronicle.rounds), "round")
    marks: list[Mark] = [
        {"at": moment - zero, "tone": event.tone, "text": sentence(event)}
        for moment, event in host.told
        if event.tone and moment - zero >= since
    ]
    return {
        "lines": list(lines),
        "summary": ledger.line(),
        "notes": notes,
        "zero": None if (begun := host.time(zero)) is None else begun.timestamp(),
        "since": since,
        "until": whole,
        "label": f"{rounds} in {whole:.1f} s, world size up to {largest}",
        "rounds": bars[-MOST:],
        "marks": marks,
        "parts": [spoken(part) for part in PARTS],
        "incidents": _incidents(ledger),
        "advice": advice(ledger),
        "charts": _charts([sample for sample in samples if sample.at - zero >= since], zero),
        "nodes": nodes,
        "now": now,
    }


def page(title: str, shown: Document) -> str:
    """Return the page as HTML; it needs no other file, and no other host."""
    index, style, script = (_file(name) for name in ("index.html", "style.css", "page.js"))
    return Template(index).substitute(
        title=escape(title),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        document=json.dumps(shown).replace("<", "\\u003c"),  # so no text of it ends the element
    )


def _file(name: str) -> str:
    return (files("elastic_launch.observe") / "page" / name).read_text()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _bars(host: Host) -> list[RoundBar]:
    """Return the rounds of which the host knows when they were formed, in order."""
    chronicle, zero = host.chronicle, host.chronicle.since or 0.0
    rounds = [chronicle.rounds[number] for number in sorted(chronicle.rounds)]
    ends = [told.formed or chronicle.until for told in rounds[1:]] + [chronicle.until]
    bars: list[RoundBar] = []
    for told, following in zip(rounds, ends, strict=False):
        if told.formed is not None:
            end = min(moment for moment in (told.ended, told.reaped, following) if moment is not None)
            spans = [f"{x.step} to {x.last}{of_training(number)}" for number, x in told.stretches.items()]
            steps = f", steps {listed(spans)}" if spans else ""
            text = f"round {told.number}: world size {told.world}{steps}; {told.kind or 'trains'} {told.cause}"
            bars.append({"since": told.formed - zero, "until": end - zero, "world": told.world, "text": text})
    return bars


def _incidents(ledger: Ledger) -> list[IncidentRow]:
    return [
        {
            "id": incident.round,
            "since": incident.at_s,
            "until": incident.at_s + incident.still_s,
            "rounds": f"{incident.round} → {incident.next_round or 'end'}",
            "kind": incident.kind + (", drained" if incident.drained else ""),
            "cause": " ".join(incident.cause.split()),
            "still_s": incident.still_s,
            "parts": [getattr(incident, part) for part in PARTS],
            "lost_steps": incident.lost_steps,
            "text": incident.line(),
        }
        for incident in ledger.incidents[-MOST:]
    ]


def _charts(samples: Sequence[Sample], zero: float) -> list[Chart]:
    """Return charts of the figures that workers report."""
    found: list[Chart] = []
    for name, unit, values in (
        ("loss", "", [(x.at, x.loss) for x in samples]),
        ("seconds per step", " s", [(x.at, x.step_s) for x in samples]),
        ("learning rate", "", [(x.at, x.lr) for x in samples]),
    ):
        points = [(at - zero, value) for at, value in values if value is not None and math.isfinite(value)]
        if points:
            found.append({"name": name, "unit": unit, "points": points})
    return found

"""What ``--http`` serves: a page of the run, what ranks print, a node's metrics for Prometheus, its status as JSON."""

from __future__ import annotations

import copy
import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from elastic_agents.probes.health import Page
from elastic_agents.probes.http_server import HttpResponse
from elastic_agents.probes.roster import FRESH, Roster
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.events.types import Event
from elastic_launch.observe import page
from elastic_launch.observe.chronicle import Chronicle
from elastic_launch.observe.history import History
from elastic_launch.observe.ledger import Ledger
from elastic_launch.observe.live import LiveLedger
from elastic_launch.observe.metrics import CONTENT_TYPE, NodeMetrics
from elastic_launch.observe.node_watch import NodeWatch, span
from elastic_launch.observe.present import Present
from elastic_launch.observe.reading import Host
from elastic_launch.system.plain_text import plain

SAMPLE_EVERY = 1.0
"""Seconds after which figures are noted for the charts, whether or not there are readers."""

REDRAW = 0.5
"""Seconds for which what was drawn is shown, also to others: more readers do not cause more work."""

SEEN, STILL = 0.01, 3.0
"""By how much the pictures of a run may be old if nothing has happened since: those of its rounds a share of its time,
which is how far they grow, and at least so many seconds; charts so many seconds."""

OLD = 5.0
"""Seconds after which the page says how old its table of nodes is."""

NOTED = 3.0
"""Heartbeats without a message after which a node is shown as silent."""


def node_pages(
    config: LaunchConfig,
    metrics: NodeMetrics,
    ledger: LiveLedger,
    watch: NodeWatch,
    history: History,
    output: Callable[[int], Sequence[str]],
    roster: Roster,
) -> Mapping[str, Page]:
    """Return the pages by their paths.

    Args:
        output: returns the last lines that a rank of this node has printed.
        roster: tells of all nodes.
    """
    silent = NOTED * config.timing.beat_among(config.limits.max_nodes)

    def show_page(present: Present, query: str = "") -> HttpResponse:
        return HttpResponse(200, page.live_page(config.run_id, config.node_id).encode(), "text/html; charset=utf-8")

    lock = threading.Lock()
    drawn: list[tuple[float, HttpResponse]] = []  # the last one, and when

    def show_live(present: Present, query: str = "") -> HttpResponse:
        with lock:
            if not drawn or time.monotonic() - drawn[0][0] >= REDRAW:
                drawn[:] = [(time.monotonic(), redrawn(present))]
            return drawn[0][1]

    kept: dict[str, tuple[object, float, dict[str, str]]] = {}  # what was drawn, of what, and when

    def again(name: str, of: object, now: float, most: float, make: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Draw only if that of which it is drawn has changed, or if it is older than ``most``."""
        if name not in kept or kept[name][0] != of or now - kept[name][1] > most:
            kept[name] = of, now, make()
        return kept[name][2]

    def redrawn(present: Present) -> HttpResponse:
        # One event, after which the browser asks again: so a reader that is slow, or stays, holds nothing here.
        found = {"now": page.now_section(watch.figures(present), watch.doing(present))}
        found |= ledger.drawn(draw, present.step) | {"rank": page.rank_options(present.ranks)} | nodes()
        return HttpResponse(
            200, f"retry: {page.LOOK_EVERY}\ndata: {json.dumps(found)}\n\n".encode(), "text/event-stream"
        )

    def nodes() -> dict[str, str]:
        answer = roster.look()
        now = time.monotonic()
        age = now - answer.at
        old = span(age) if answer.status is not None and (answer.problem or age > OLD) else ""
        of = answer.at, answer.problem, old
        return again(
            "nodes",
            of,
            now,
            math.inf,
            lambda: {"nodes": page.roster_section(answer.status, old, answer.problem, silent)},
        )

    def draw(chronicle: Chronicle, told: Sequence[tuple[float, Event]], found: Ledger) -> dict[str, str]:
        if len(chronicle.rounds) > page.MOST:
            chronicle = copy.copy(chronicle)
            chronicle.rounds = dict(sorted(chronicle.rounds.items())[-page.MOST :])
            chronicle.since = next((x.formed for x in chronicle.rounds.values() if x.formed is not None), None)
        host = Host(config.node_id, chronicle, (), tuple(told))
        found = replace(found, incidents=found.incidents[-page.MOST :])
        samples, until = history.samples(), chronicle.until
        charts = again(
            "charts",
            ledger.events,
            until,
            STILL,
            lambda: {"charts": page.charts_section(samples, host, found.incidents)},
        )
        # An incident that lasts grows; a round does too, but slowly beside what is drawn already.
        lasts = bool(found.incidents) and not found.incidents[-1].recovered
        most = 0.0 if lasts else max(STILL, SEEN * (until - (chronicle.since or 0.0)))
        rounds = again("rounds", ledger.events, until, most, lambda: page.sections(host, found))
        part = "" if chronicle.leads or not chronicle.rounds else page.part_section(config.node_id)
        return {**charts, **rounds, "summary": page.summary_section(host, found) + part}

    def show_metrics(present: Present, query: str = "") -> HttpResponse:
        leads, goodput = ledger.goodput(present.step)
        with lock:
            return HttpResponse(200, metrics.text(present, leads=leads, goodput=goodput), CONTENT_TYPE)

    def show_log(present: Present, query: str) -> HttpResponse:
        wanted = re.fullmatch(r"rank=([0-9]{1,9})", query)
        if wanted is not None and int(wanted[1]) in present.ranks:
            return HttpResponse.text(200, plain("\n".join(output(int(wanted[1])))))
        own = ", ".join(map(str, present.ranks)) or "none"
        hint = "For another rank ask its node, or run elasticctl logs RANK on its host."
        return HttpResponse.text(404, f"Write /log?rank=N. The ranks of this node are: {own}. {hint}")

    def show_status(present: Present, query: str = "") -> HttpResponse:
        answer = roster.look(FRESH)
        leads, goodput = ledger.goodput(present.step)
        found = {
            "run_id": config.run_id,
            "node": config.node_id,
            "leads": leads,
            "goodput": goodput if leads else None,
            "roster": {
                "nodes": [asdict(node) for node in answer.status.nodes] if answer.status else None,
                "age": round(time.monotonic() - answer.at, 3) if answer.status else None,
                "problem": answer.problem,
            },
        }
        return HttpResponse(200, json.dumps(found | asdict(present)).encode() + b"\n", "application/json")

    return {"/": show_page, "/live": show_live, "/log": show_log, "/metrics": show_metrics, "/status": show_status}

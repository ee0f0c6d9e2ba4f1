"""What ``--http`` serves: a page of the run, what ranks print, a node's metrics for Prometheus, its status as JSON."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType

from elastic_agents.probes.health import Page
from elastic_agents.probes.http_server import HttpResponse
from elastic_agents.probes.roster import FRESH, LastStatus, Roster
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.failure import Suspect
from elastic_launch.observe.document import MOST, Document, NodeTable, Now, document, page
from elastic_launch.observe.history import History
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

OLD = 5.0
"""Seconds after which the page says how old its table of nodes is."""

NOTED = 3.0
"""Heartbeats without a message after which a node is shown as silent."""

_DOING = {"start": "start", "run": "run", "train": "train", "late": "make no step", "done": "have finished"}
"""What the workers of a node do, by the words of :class:`elastic_launch.rendezvous.admin.messages.NodeStatus`."""


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

    lock = threading.Lock()
    drawn: list[tuple[float, Document]] = []  # the last one, and when it was made

    def shown(present: Present) -> Document:
        with lock:
            ended = present.end is not None and not (drawn and drawn[0][1]["now"] and drawn[0][1]["now"]["ended"])
            if not drawn or ended or time.monotonic() - drawn[0][0] >= REDRAW:
                doing, begun = watch.doing(present), ledger.since
                word, since = watch.state(present)
                clock, happened = watch.happened()
                now: Now = {
                    "node": config.node_id,
                    "state": word,
                    "since": max(0.0, since - begun),
                    "safe": watch.safe(present),
                    "happened": [(at - begun, text) for at, text in happened],
                    "doing": doing,
                    "figures": watch.figures(present),
                    "ranks": list(present.ranks),
                    "ended": present.end is not None,
                }
                suspects, slow = watch.in_question(present), watch.slow()
                nodes = node_table(roster.look(), silent, suspects, slow, ended=present.end is not None)
                samples = history.samples()
                made = ledger.drawn(
                    lambda chronicle, told, found: document(
                        Host(config.node_id, chronicle, (), tuple(told), time.time() - clock),
                        found,
                        lines=present.end.root_cause.splitlines() if present.end else (),
                        samples=samples,
                        nodes=nodes,
                        now=now,
                    ),
                    present.step,
                )
                drawn[:] = [(time.monotonic(), made)]
            return drawn[0][1]

    def show_page(present: Present, query: str = "") -> HttpResponse:
        heading = config.title[0].upper() + config.title[1:]
        return HttpResponse(200, page(heading, shown(present)).encode(), "text/html; charset=utf-8")

    def show_live(present: Present, query: str = "") -> HttpResponse:
        return HttpResponse(200, json.dumps(shown(present)).encode(), "application/json")

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


def node_table(
    answer: LastStatus,
    silent: float,
    suspects: Sequence[Suspect] = (),
    slow: Mapping[str, int] = MappingProxyType({}),
    *,
    ended: bool = False,
) -> NodeTable:
    """Return the run's nodes as the leader sees them.

    Args:
        silent: seconds without a message after which a node is silent.
        suspects: the nodes and ranks for which the run stands still.
        slow: ranks that were found to be slow, by node.
        ended: whether this node's part of the run has ended, so that the leader may say nothing more.
    """
    status, age = answer.status, time.monotonic() - answer.at
    about: list[str] = []
    if status is not None and ended:
        about.append(f"This is how it was before the end, {span(age)} ago.")
    elif status is not None and (answer.problem or age > OLD):
        about.append(f"This is how it was {span(age)} ago.")
    if answer.problem and not ended:
        about.append(f"The leader does not answer: {answer.problem.rstrip('.')}.")
    elif status is None:
        about.append("Waiting for the leader's answer.")
    nodes = list(status.nodes) if status is not None else []
    if len(nodes) > MOST:
        about.append(f"{MOST} of {len(nodes)} nodes: first those that are silent, or do not train.")
        nodes.sort(key=lambda node: (node.silence <= silent, node.state == "training", node.ranks))
    rows: list[list[str | int | None]] = []
    marked: list[int] = []
    for node in sorted(nodes[:MOST], key=lambda node: (not node.ranks, node.ranks, node.node_id)):
        name = node.node_id + (" (leads)" if status is not None and node.node_id == status.leader else "")
        notes = [f"silent for {node.silence:.0f} s"] if node.silence > silent else []
        blamed = {suspect.rank for suspect in suspects if suspect.node == node.node_id}
        if ranks_blamed := sorted(rank for rank in blamed if rank is not None):
            notes.append(f"rank {', '.join(map(str, ranks_blamed))} in question")
        elif blamed:
            notes.append("in question")
        if node.node_id in slow:
            notes.append(f"rank {slow[node.node_id]} is slow")
        if notes or node.doing == "late":
            marked.append(len(rows))
        state = ", ".join([node.state, *notes])
        ranks = "-".join(map(str, dict.fromkeys(node.ranks))) or None
        rows.append(
            [
                *(name, node.address, state, ranks, f"{node.workers} {_DOING.get(node.doing, '')}".strip(), node.step),
                None if node.load is None else str(node.load),
            ]
        )
    heads = ["node", "address", "state", "ranks", "workers", "step", "load"]
    return {"about": about, "heads": heads, "rows": rows, "marked": marked}

"""The ledger of a run's directory, as text, as JSON and as an HTML page."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import UsageError
from elastic_launch.events import types as ev
from elastic_launch.events.types import counted
from elastic_launch.observe.document import NodeTable, document, page
from elastic_launch.observe.ledger import PARTS, Ledger, RoundIncident, build
from elastic_launch.observe.reading import Host, event_files, of_last_run, read
from elastic_launch.system.plain_text import one_line, plain

_HEADINGS = ("", "rounds", "kind", "detect", "stop", "form", "start", "restore", "first", "still", "lost", "cause")


def joined(hosts: Sequence[Host]) -> tuple[str, Ledger]:
    """Return the ledger of the host that saw most, and that host's node.

    Hosts' clocks are not compared. What this host does not know of an incident (its kind and cause, and the steps lost)
    is taken from other hosts by the round's number.

    Args:
        hosts: at least one.
    """
    ledgers = {host.node: build(host.chronicle) for host in hosts}
    best = max(hosts, key=lambda host: (_seen(host), host.chronicle.leads, ledgers[host.node].total_s))
    ledger = ledgers[best.node]
    others = [incident for node, other in ledgers.items() if node != best.node for incident in other.incidents]
    incidents = tuple(_filled(incident, others) for incident in ledger.incidents)
    lost = [incident.lost_steps for incident in incidents if incident.lost_steps is not None]
    restarts = max(other.restarts for other in ledgers.values())
    most = max((x for other in ledgers.values() if (x := other.max_restarts) is not None), default=None)
    own = ledger.by_steps and ledger.unsaved_steps is None  # of a script that saves its state itself
    unknown = ledger.lost_steps is None and (own or len(lost) < len(incidents))
    total_lost = (ledger.unsaved_steps or 0) + sum(lost) if lost and not unknown else ledger.lost_steps
    ahead = sum(other.lost_ahead for other in ledgers.values())
    ledger = replace(ledger, incidents=incidents, lost_steps=total_lost, lost_ahead=ahead)
    return best.node, replace(ledger, restarts=restarts, max_restarts=most)


def _seen(host: Host) -> int:
    return sum(told.mine for told in host.chronicle.rounds.values())


def _filled(incident: RoundIncident, others: Sequence[RoundIncident]) -> RoundIncident:
    same = [other for other in others if other.round == incident.round]
    for other in sorted(same, key=lambda other: not other.led):
        # Only the leader receives late reports, and so knows the cause.
        if other.kind != "unknown" and (incident.kind == "unknown" or (other.led and not incident.led)):
            incident = replace(incident, kind=other.kind, cause=other.cause, exit_code=other.exit_code)
        if incident.lost_steps is None:
            incident = replace(incident, lost_steps=other.lost_steps)
    return incident


def as_table(ledger: Ledger, width: int | None = None) -> str:
    """Return one row per incident, with times in seconds, and the summary.

    Args:
        width: width of the terminal. Causes that do not fit beside the other columns are put below them; if not even
            these fit, each incident is a sentence. None: one line for each, whatever its length.
    """
    if not ledger.incidents:
        return _wrapped(ledger.line(), width)
    rows = [_HEADINGS, *map(_row, ledger.incidents)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    columns = [(str.rjust if 3 <= column < 11 else str.ljust, most) for column, most in enumerate(widths)]
    lines = [[put(cell, most) for cell, (put, most) in zip(row, columns, strict=True)] for row in rows]
    shown = ["  ".join(cells).rstrip() for cells in lines]
    if width is not None and max(map(len, shown)) > width:
        shown = ["  ".join(cells[:-1]).rstrip() for cells in lines]
        if max(map(len, shown)) <= width:
            causes = [_wrapped(f"    {row[-1]}", width) for row in rows[1:]]
            pairs = zip(shown[1:], causes, strict=True)
            shown = [shown[0], *(line for row, cause in pairs for line in (row, cause) if line.strip())]
        else:
            shown = [_wrapped(incident.line(), width) for incident in ledger.incidents]
    return "\n".join([*shown, "", _wrapped(ledger.line(), width)])


def _wrapped(text: str, width: int | None) -> str:
    """Return a text in lines that fit the width, the later ones indented."""
    if width is None or len(text) <= width:
        return text
    return "\n".join(textwrap.wrap(text, max(width, 20), subsequent_indent="    ", break_on_hyphens=False))


def _row(incident: RoundIncident) -> tuple[str, ...]:
    times = [getattr(incident, name) for name in PARTS]
    kind = incident.kind + (", drained" if incident.drained else "")
    rounds = f"{incident.round} -> {incident.next_round or 'end'}"
    shown = ["-" if seconds is None else f"{seconds:.2f}" for seconds in times]
    lost = "-" if incident.lost_steps is None else str(incident.lost_steps)
    cause = " ".join(incident.cause.split())
    return (str(incident.round), rounds, kind, *shown, f"{incident.still_s:.2f}", lost, cause)


def standing(host: Host, hosts: Sequence[Host], *, alive: bool | None) -> list[str]:
    """Return how the run ended, or until when its events tell of it; then what the files tell of lost agents.

    Args:
        host: the host whose ledger is shown.
        alive: whether an agent of the run is alive on this host; None if that is not known.
    """
    known = [one for one in (host, *hosts) if one.chronicle.code is not None]
    told_last: list[str] = []
    ended = next((one for one in known if one.chronicle.over), host if host in known and not alive else None)
    if ended is not None:
        told = ended.chronicle
        lines = [f"ended at {when(ended, told.until)} with exit code {told.code}: {told.why}"]
        told_last = [plain(line) for text in end_of(hosts) for line in text.splitlines()]
    else:
        until = f"figures until {when(host, host.chronicle.known)}"
        lines = [f"{'in progress' if alive else 'the events stop before the end of the run'}; {until}"]
    for one in hosts:
        told = one.chronicle
        if told.link_cause and told.code is None:
            lines.append(f"node {one.node} has lost its link to the leader: {told.link_cause}")
        if told.code is None and not alive:
            end = f"the events of node {one.node} stop at {when(one, told.until)}: its agent has reported no end"
            lines.append(f"{end}; it was killed" + (" or lost" if alive is not None else " or still runs"))
    first, *others = map(one_line, lines)
    return [first, *told_last, *others]


def end_of(hosts: Sequence[Host]) -> tuple[str, str]:
    """Return where the state of a run that has ended is saved, and its root cause; empty if no file tells of it."""
    where = root_cause = ""

    def ended(host: Host) -> tuple[bool, float]:
        time = host.time(host.chronicle.until)
        return host.chronicle.over, time.timestamp() if time else 0.0  # a node may have left long before the run's end

    for host in sorted(hosts, key=ended):
        where, root_cause = host.chronicle.where or where, host.chronicle.root_cause or root_cause
    return where, root_cause


def when(host: Host, moment: float) -> str:
    """Return a moment of a host's clock as date and time; in seconds from its first event, if that is not known."""
    time = host.time(moment)
    return f"{moment - (host.chronicle.since or 0.0):.1f} s" if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC"


def _nodes(hosts: Sequence[Host]) -> NodeTable:
    """Return the nodes whose files there are, with the workers of their last rounds and how their parts ended."""
    addresses = {x.node: x.address for host in hosts for _, x in host.told if isinstance(x, ev.NodeJoined)}
    rows: list[list[str | int | None]] = []
    for host in hosts:
        ranks: dict[int, tuple[int, int]] = {}
        failed = 0
        for _, event in host.told:
            match event:
                case ev.WorkerStarted() | ev.WorkerKept() | ev.WorkerPlaced() if event.rank is not None:
                    newest = max((number for number, _ in ranks.values()), default=0)
                    ranks = ranks if event.round <= newest else {}
                    ranks[event.rank] = event.round, event.pid
                case ev.WorkerExited():
                    failed += event.failed
        workers = ", ".join(f"rank {rank} (pid {pid})" for rank, (_, pid) in sorted(ranks.items())) or "none"
        told = host.chronicle
        end = "the events stop before the node's end" if told.code is None else f"exit code {told.code}: {told.why}"
        rows.append([host.node, addresses.get(host.node), workers, failed, f"{when(host, told.until)}: {end}"])
    heads = ["node", "address", "workers of its last round", "failed", "end"]
    return {"about": [], "heads": heads, "rows": rows}


def last_run(hosts: Sequence[Host]) -> list[Host]:
    """Leave out files that cannot be used, and those of earlier runs."""
    return of_last_run([host for host in hosts if _tells(host)])


def _tells(host: Host) -> bool:
    # Of a file that is mostly something else, what was understood says little of the run.
    return host.chronicle.since is not None and host.usable


def show_report(directory: Path, *, as_object: bool, html: Path | None, alive: bool | None = None) -> None:
    """Print the ledger of a run's directory, or write it to a file.

    Args:
        as_object: print one JSON object instead of a table.
        html: write this file instead, a page.
        alive: whether an agent of the run is alive on this host; None if that is not known.

    Raises:
        UsageError: if there is nothing to read, or the file cannot be written.
    """
    every = [read(path) for path in event_files(directory)]
    for host in every:
        for complaint in host.complaints:
            left_out = "" if host.usable else "; the file is left out"
            print(plain(f"{complaint}{left_out}"), file=sys.stderr)
    hosts = last_run(every)
    if not hosts:
        raise UsageError(f"No event file in {directory} is mostly readable.", "See the lines above.")
    if earlier := sum(_tells(host) for host in every) - len(hosts):
        said = f"{counted(earlier, 'event file')} of an earlier run in {directory}"
        print(plain(f"{said} {'is' if earlier == 1 else 'are'} left out"), file=sys.stderr)
    node, ledger = joined(hosts)
    (host,) = (host for host in hosts if host.node == node)
    stands = standing(host, hosts, alive=alive)
    if html is not None:
        here = event_files(directory)[0].resolve().parent
        title = f"Run in {here}" if here.name == LaunchConfig.run_id else f"Run {here.name}"
        try:
            lines = [f"From {when(host, host.chronicle.since or 0.0)} to {when(host, host.chronicle.until)}.", *stands]
            shown = document(host, ledger, lines=lines, nodes=_nodes(hosts))
            html.write_bytes(page(title, shown).encode(errors="replace"))
        except OSError as error:
            raise UsageError(f"--html {html} cannot be written: {error.strerror}.") from error
    elif as_object:
        found = {"node": node, "goodput": ledger.goodput, **asdict(ledger), "standing": stands}
        print(json.dumps(found, indent=2))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(plain("\n".join([as_table(ledger, width), *(_wrapped(line, width) for line in stands)])))

"""A run as HTML: the report, which is one file without scripts, and the page of a run in progress. No other host.

Both show the rounds on a time axis, each as high as its world, what each incident cost, and what to change.
The page also has charts of the training's figures, and what a rank prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from elastic_launch.events import types as ev
from elastic_launch.events.types import counted
from elastic_launch.observe.advice import advice
from elastic_launch.observe.chronicle import Chronicle, RoundTold
from elastic_launch.observe.history import Sample
from elastic_launch.observe.ledger import PARTS, Ledger, RoundIncident, spoken
from elastic_launch.observe.reading import Host

if TYPE_CHECKING:
    from elastic_launch.rendezvous.admin.messages import NodeStatus, Status

WIDTH, HEIGHT, FLOOR, MARGIN = 960, 140, 128, 4
"""Size of a picture, whose width is stretched to that of the window; the bottom of what it draws, and its distance from
the top."""

BAR = 160
"""Width of the longest incident's bar, in pixels."""

TICKS = 4
"""Parts into which the marks of the time axis divide it."""

SECTIONS = ("summary", "rounds", "incidents")

LOOK_EVERY = 1000
"""Milliseconds after which a page asks for what is new."""

MOST = 300
"""Rounds and incidents that the page of a run in progress shows: the last ones."""

_DOING = {"start": "start", "run": "run", "train": "train", "late": "make no step", "done": "have finished"}
"""What the workers of a node do, by the words of :class:`elastic_launch.rendezvous.admin.messages.NodeStatus`."""

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --dim: #59636e; --line: #d1d9e0; --back: #ffffff; --fill: #2f6fde;
  --p0: #b35900; --p1: #c23b3b; --p2: #8250df; --p3: #1a7f37; --p4: #0a7ea4; --p5: #6e7781; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --dim: #9198a1; --line: #3d444d; --back: #0d1117;
  --fill: #4493f8; --p0: #db8b36; --p1: #f0716a; --p2: #b083f0; --p3: #57ab5a; --p4: #39c5e0; --p5: #9198a1; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } .dim { color: var(--dim); }
.wide { overflow-x: auto; } figure { margin: .75rem 0; } figcaption { color: var(--dim); font-size: .85rem; }
figcaption span { float: right; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .5rem 1rem; margin: 0; }
dt { color: var(--dim); font-size: .85rem; } dd { margin: 0; overflow-wrap: anywhere; }
.doing { font-weight: 600; overflow-wrap: anywhere; } button { font: inherit; padding: .25rem .8rem; }
.swatch { vertical-align: baseline; } .ticks { display: flex; justify-content: space-between; }
figure svg { width: 100%; height: 8.5rem; display: block; } svg * { vector-effect: non-scaling-stroke; }
select { font: inherit; } pre { border: 1px solid var(--line); padding: .5rem; height: 16rem; overflow: auto;
  font-size: .85rem; white-space: pre-wrap; overflow-wrap: anywhere; } [hidden] { display: none; }
.round { fill: var(--fill); } .curve { stroke: var(--fill); stroke-width: 2; fill: none; } .still { fill: var(--p1);
  opacity: .25; } .axis { stroke: var(--line); } .saved { stroke: var(--p3); stroke-width: 2; }
.broken { stroke: var(--p1); stroke-width: 2; }
.p0 { fill: var(--p0); } .p1 { fill: var(--p1); } .p2 { fill: var(--p2); }
.p3 { fill: var(--p3); } .p4 { fill: var(--p4); } .p5 { fill: var(--p5); }
"""

_ONLY_HERE = (
    "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; connect-src 'self'; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
)

# An event stream that ends is asked for again by the browser, after the time that it names.
_SCRIPT = """
const [state, button, rank, log] = ['state', 'pause', 'rank', 'log'].map(name => document.getElementById(name));
const base = location.origin + location.pathname.replace(/\\/*$/, '/');  // a proxy may leave the last slash out
const shown = {};
let source = null, tries = 0;
function put(part, html) {  // keeps what a reader has chosen, scrolled to or put the focus on
  const before = part.querySelector('.wide'), left = before && before.scrollLeft, value = part.value;
  const held = before && before === document.activeElement;
  part.innerHTML = html;
  const after = part.querySelector('.wide');
  if (after) { after.scrollLeft = left; if (held) after.focus({preventScroll: true}); }
  if (value) part.value = value;
  if (part.selectedIndex < 0) part.selectedIndex = 0;
}
async function look() {
  const chosen = rank.value, end = log.scrollHeight - log.scrollTop - log.clientHeight < 8;
  log.hidden = !chosen;
  if (!chosen) return;
  const text = await fetch(base + 'log?rank=' + chosen).then(answer => answer.ok ? answer.text() : null, () => null);
  if (text === null || chosen !== rank.value || text === log.textContent) return;
  log.textContent = text;
  if (end) log.scrollTop = log.scrollHeight;
}
rank.onchange = () => { log.textContent = ''; look(); };
function begin() {
  source = new EventSource(base + 'live');
  source.onmessage = event => {
    state.textContent = 'live';
    for (const [name, html] of Object.entries(JSON.parse(event.data)))
      if (shown[name] !== html) put(document.getElementById(name), shown[name] = html);
    look();
  };
  source.onopen = () => { tries = 0; };
  source.onerror = () => {
    if (++tries > 3) state.textContent = 'the agent does not answer: the run has ended, or it cannot be reached';
    if (source.readyState === EventSource.CLOSED) setTimeout(() => button.dataset.paused || begin(), 2000);
  };
}
button.onclick = () => {
  if (button.dataset.paused) { delete button.dataset.paused; button.textContent = 'Pause'; begin(); }
  else { button.dataset.paused = '1'; button.textContent = 'Go on'; state.textContent = 'paused'; source.close(); }
};
begin();
"""


def as_page(name: str, host: Host, ledger: Ledger, standing: Sequence[str] = (), hosts: Sequence[Host] = ()) -> str:
    """Return the report.

    Args:
        name: name of the run.
        host: the host whose clock is used.
        ledger: what :func:`elastic_launch.observe.report.joined` returns.
        standing: how the run ended, or that it did not.
        hosts: all of which there are files.
    """
    lines = [f"From {when(host, host.chronicle.since or 0.0)} to {when(host, host.chronicle.until)}.", *standing]
    head = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return _document(name, head + "".join(sections(host, ledger).values()) + (_nodes(hosts) if hosts else ""))


def live_page(name: str, node: str) -> str:
    """Return the page of a run in progress: its script fills it with what ``live`` beside it sends."""
    parts = "".join(f"<section id='{name}'></section>" for name in ("now", "nodes", "charts", *SECTIONS))
    parts += (
        "<section><h2>Output</h2><p><label>The last lines of rank <select id='rank'></select></label></p>"
        f"<p class='dim'>Here are the ranks of node {escape(node)}. The table of nodes has the others: open the page "
        "of the rank's node, or run <code>elasticctl logs RANK</code> on its host.</p>"
        "<pre id='log' tabindex='0' aria-label='output of the rank' hidden></pre></section>"
    )
    state = "<p><button id='pause'>Pause</button> <span id='state' role='status' class='dim'>connects</span></p>"
    return _document(
        name, f"{state}{parts}<noscript>This page needs scripts.</noscript><script>{_SCRIPT}</script>", _ONLY_HERE
    )


def now_section(figures: Sequence[tuple[str, str]], doing: str) -> str:
    """Return how the run is, as HTML."""
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)
    return f"<p class='doing'>{escape(doing)}</p><dl>{cells}</dl>"


def roster_section(status: Status | None, old: str, problem: str, silent: float) -> str:
    """Return the table of the run's nodes, as HTML.

    Args:
        old: how long ago that was, if it is to be said.
        problem: why the leader has not answered since; empty if it has, or was not asked.
        silent: seconds without a message after which a node is silent.
    """
    notes = [f"This is how it was {old} ago."] if old else []
    if problem:
        notes.append(f"The leader does not answer: {problem.rstrip('.')}.")
    elif status is None:
        notes.append("The leader is asked.")
    if status is not None and len(status.nodes) > MOST:
        notes.append(f"{MOST} of {len(status.nodes)} nodes: first those that are silent, or do not train.")
    told = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<h2>Nodes</h2>{told}{'' if status is None else _roster(status, silent)}"


def _roster(status: Status, silent: float) -> str:
    nodes: Sequence[NodeStatus] = status.nodes
    if len(nodes) > MOST:
        # What a reader looks for first: nodes that are silent, and those that do not train.
        nodes = sorted(nodes, key=lambda node: (node.silence <= silent, node.state == "training", node.ranks))[:MOST]
    rows = ""
    for node in sorted(nodes, key=lambda node: (not node.ranks, node.ranks, node.node_id)):
        name = node.node_id + (" (leads)" if node.node_id == status.leader else "")
        state = node.state + (f", silent for {node.silence:.0f} s" if node.silence > silent else "")
        workers = f"{node.workers} {_DOING.get(node.doing, '')}".strip()
        ranks = "-".join(map(str, dict.fromkeys(node.ranks))) or "-"
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in (name, node.address, state, ranks, workers))
        rows += f"<tr>{cells}<td class='number'>{'-' if node.step is None else node.step}</td></tr>"
    heads = "<th>node</th><th>address</th><th>state</th><th>ranks</th><th>workers</th><th class='number'>step</th>"
    return f"<div class='wide' tabindex='0'><table><tr>{heads}</tr>{rows}</table></div>"


def rank_options(ranks: Iterable[int]) -> str:
    """Return the ranks whose output can be chosen, as HTML."""
    return "".join(f"<option value='{rank}'>{rank}</option>" for rank in ("", *ranks))


def charts_section(samples: Sequence[Sample], host: Host, incidents: Sequence[RoundIncident]) -> str:
    """Return charts of the figures that workers report over the time of the run, as HTML; empty if they report none."""
    axis = _Axis(host.chronicle)
    found = []
    for name, unit, values in (
        ("loss", "", [(x.at, x.loss) for x in samples]),
        ("seconds per step", " s", [(x.at, x.step_s) for x in samples]),
        ("learning rate", "", [(x.at, x.lr) for x in samples]),
    ):
        known = [(at, value) for at, value in values if value is not None and at >= axis.since]
        if known:
            found.append(_chart(name, unit, known, axis, axis.bands(incidents)) + _ticks(host))
    return "<h2>Training</h2>" + "".join(found) if found else ""


def _chart(name: str, unit: str, known: Sequence[tuple[float, float]], axis: _Axis, bands: str) -> str:
    least, most = min(value for _, value in known), max(value for _, value in known)
    middle, height = (least + most) / 2, FLOOR - MARGIN
    scale = height / (most - least) if most > least else 0.0  # a value that stays is drawn in the middle
    points = " ".join(f"{axis.across(at):.1f},{FLOOR - height / 2 - scale * (at_y - middle):.1f}" for at, at_y in known)
    text = f"{name}: {known[-1][1]:.4g}{unit}"
    return _figure(
        f"{text}<span>{least:.4g} to {most:.4g}</span>", text, f"{bands}<polyline class='curve' points='{points}'/>"
    )


def _figure(caption: str, label: str, drawn: str) -> str:
    return (
        f"<figure><figcaption>{caption}</figcaption><svg viewBox='0 0 {WIDTH} {HEIGHT}' preserveAspectRatio='none' "
        f"role='img' aria-label='{label}'>{drawn}<line class='axis' x1='0' x2='{WIDTH}' y1='{FLOOR}' y2='{FLOOR}'/>"
        "</svg></figure>"
    )


def sections(host: Host, ledger: Ledger) -> dict[str, str]:
    """Return the parts of a report, as HTML by the names of :data:`SECTIONS`."""
    return {
        "summary": summary_section(host, ledger),
        "rounds": f"<h2>Rounds</h2>{_rounds(host, ledger.incidents)}"
        f"{_ticks(host)}"
        "<p class='dim'>Each bar is a round, as high as its world size. Red areas: training stood still. Red lines: "
        "rounds that broke. Green lines: durable checkpoints.</p>",
        "incidents": "<h2>Incidents</h2>" + _incidents(host, ledger.incidents) + _hints(ledger),
    }


def summary_section(host: Host, ledger: Ledger) -> str:
    """Return the run in one line, as HTML."""
    clock = f"Times are those of node {escape(host.node)}'s clock, from its first event."
    return f"<p>{escape(ledger.line())}</p><p class='dim'>{clock}</p>"


def part_section(node: str) -> str:
    """Return what a reader must know of a page whose node does not lead, as HTML."""
    return (
        f"<p class='dim'>Node {escape(node)} does not lead, so these figures, rounds and incidents are only its own, "
        "and the run may have trained without it. The page of the node that leads has those of the run.</p>"
    )


def _document(name: str, body: str, head: str = "") -> str:
    parts = [
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{escape(name)}</title>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"{head}<style>{_STYLE}</style></head><body>",
        f"<h1>Run {escape(name)}</h1>",
        body,
        "</body></html>\n",
    ]
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class _Bar:
    """A round: when it was there, by its host's clock, and its world size, 0 if the host does not know it."""

    told: RoundTold
    since: float
    until: float
    world: int


def _bars(chronicle: Chronicle, told: Sequence[tuple[float, ev.Event]]) -> list[_Bar]:
    """Return the rounds of which the host knows when they were formed, in order."""
    heard = {x.round: x.world_size for _, x in told if isinstance(x, ev.OrderReceived) and x.order == "form"}
    worlds = heard | {x.round: x.world_size for _, x in told if isinstance(x, ev.RoundFormed)}
    rounds = [chronicle.rounds[number] for number in sorted(chronicle.rounds)]
    ends = [x.formed or chronicle.until for x in rounds[1:]] + [chronicle.until]
    return [
        _Bar(x, x.formed, min(y for y in (x.ended, x.reaped, end) if y is not None), worlds.get(x.number, 0))
        for x, end in zip(rounds, ends, strict=False)
        if x.formed is not None
    ]


class _Axis:
    """The time of a run, from its first event until now or its last one, as the width of a picture."""

    def __init__(self, chronicle: Chronicle) -> None:
        self._chronicle = chronicle
        self.since = chronicle.since or 0.0
        self.whole = max(chronicle.until - self.since, 1e-6)

    def across(self, moment: float) -> float:
        return WIDTH * min(max((moment - self.since) / self.whole, 0.0), 1.0)

    def bands(self, incidents: Sequence[RoundIncident]) -> str:
        """Return when training stood still, as SVG."""
        drawn = []
        for incident in incidents:
            told = self._chronicle.rounds.get(incident.next_round, RoundTold(0))
            known = [x for x in (told.first, told.started, told.formed) if x is not None]
            end = known[0] if incident.recovered and known else self._chronicle.until
            left, right = self.across(end - incident.still_s), self.across(end)
            drawn.append(
                f"<rect class='still' x='{left:.1f}' y='0' width='{max(2.0, right - left):.1f}' height='{FLOOR}'>"
                f"<title>{escape(incident.line())}</title></rect>"
            )
        return "".join(drawn)


def _rounds(host: Host, incidents: Sequence[RoundIncident]) -> str:
    """The rounds of one host on a time axis, as SVG."""
    axis, drawn = _Axis(host.chronicle), _bars(host.chronicle, host.told)
    largest = max([1, *(bar.world for bar in drawn)])
    label = f"{counted(len(host.chronicle.rounds), 'round')} in {axis.whole:.1f} s, world size up to {largest}"
    shapes = [_bar(axis, bar, largest) for bar in drawn]
    marks = [_mark(axis, moment, event) for moment, event in host.told]
    return _figure(label, label, "".join([*shapes, axis.bands(incidents), *marks]))


def _bar(axis: _Axis, bar: _Bar, largest: int) -> str:
    told = bar.told
    high = (FLOOR - MARGIN) * bar.world / largest
    left, right = axis.across(bar.since), axis.across(bar.until)
    steps = "" if told.begun is None else f", steps {told.step} to {told.last}"
    what = f"round {told.number}: world size {bar.world}{steps}; {told.kind or 'trains'} {told.cause}"
    return (
        f"<rect class='round' x='{left:.1f}' y='{FLOOR - high:.1f}' width='{max(1.0, right - left):.1f}' "
        f"height='{high:.1f}'><title>{escape(what)}</title></rect>"
    )


def _mark(axis: _Axis, moment: float, event: ev.Event) -> str:
    match event:
        case ev.CheckpointSaved(step=step):
            kind, what = "saved", f"checkpoint of step {step}"
        case ev.RoundBroken(cause=cause):
            kind, what = "broken", cause
        case _:
            return ""
    x = f"{axis.across(moment):.1f}"
    return f"<line class='{kind}' x1='{x}' x2='{x}' y1='{FLOOR}' y2='{HEIGHT}'><title>{escape(what)}</title></line>"


def when(host: Host, moment: float) -> str:
    """Return a moment of a host's clock as date and time; in seconds from its first event, if that is not known."""
    time = host.time(moment)
    return f"{moment - (host.chronicle.since or 0.0):.1f} s" if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC"


def time_of_day(host: Host, seconds: float) -> str:
    """Return the time of day, or the seconds from the first event."""
    time = host.time((host.chronicle.since or 0.0) + seconds)
    return f"+{seconds:.1f} s" if time is None else f"{time:%H:%M:%S}"


def _ticks(host: Host) -> str:
    whole = max(0.0, host.chronicle.until - (host.chronicle.since or 0.0))
    marks = "".join(f"<span>{time_of_day(host, whole * part / TICKS)}</span>" for part in range(TICKS + 1))
    return f"<div class='ticks dim'>{marks}</div>"


def _incidents(host: Host, incidents: Sequence[RoundIncident]) -> str:
    if not incidents:
        return "<p>None.</p>"
    longest = max(incident.still_s for incident in incidents) or 1.0
    swatch = "<svg class='swatch' width='10' height='10'><rect class='p{}' width='10' height='10'/></svg> {}"
    legend = " &ensp; ".join(swatch.format(index, spoken(part)) for index, part in enumerate(PARTS))
    heads = "<th class='number'>#</th><th>at</th><th>rounds</th><th>kind</th>"
    heads += "<th class='number'>stood still</th><th>parts</th>"
    rows = "".join(_row(host, incident, longest) for incident in incidents)
    return (
        f"<div class='wide' tabindex='0'><table><tr>{heads}<th class='number'>steps lost</th><th>cause</th></tr>{rows}"
        "</table></div>"
        f"<p class='dim'>Parts: {legend}</p>"
    )


def _row(host: Host, incident: RoundIncident, longest: float) -> str:
    x, bars = 0.0, []
    for index, part in enumerate(PARTS):
        seconds = getattr(incident, part) or 0.0
        width = BAR * seconds / longest
        title = f"{spoken(part)}: {seconds:.2f} s"
        bars.append(f"<rect class='p{index}' x='{x:.1f}' width='{width:.1f}' height='12'><title>{title}</title></rect>")
        x += width
    spent = ", ".join(f"{spoken(part)} {getattr(incident, part) or 0.0:.2f} s" for part in PARTS)
    lost = "-" if incident.lost_steps is None else str(incident.lost_steps)
    kind = escape(incident.kind) + (", drained" if incident.drained else "")
    return (
        f"<tr><td class='number'>{incident.number}</td><td>{time_of_day(host, incident.at_s)}</td>"
        f"<td>{incident.round} → {incident.next_round or 'end'}</td>"
        f"<td>{kind}</td><td class='number'>{incident.still_s:.2f} s</td>"
        f"<td><svg width='{BAR}' height='12' role='img' aria-label='{spent}'>{''.join(bars)}</svg></td>"
        f"<td class='number'>{lost}</td><td>{escape(' '.join(incident.cause.split()))}</td></tr>"
    )


def _hints(ledger: Ledger) -> str:
    """What to change."""
    items = "".join(f"<li>{escape(line)}</li>" for line in advice(ledger))
    return f"<h2>What to change</h2><ul>{items}</ul>" if items else ""


def _nodes(hosts: Sequence[Host]) -> str:
    """The nodes whose files there are, with the workers of their last rounds and how their parts ended."""
    addresses = {x.node: x.address for host in hosts for _, x in host.told if isinstance(x, ev.NodeJoined)}
    rows = ""
    for host in hosts:
        ranks: dict[int, tuple[int, int]] = {}
        failed = 0
        for _, event in host.told:
            match event:
                case ev.WorkerStarted() | ev.WorkerKept() | ev.WorkerPlaced() if event.round:
                    newest = max((number for number, _ in ranks.values()), default=0)
                    ranks = ranks if event.round <= newest else {}
                    ranks[event.rank] = event.round, event.pid
                case ev.WorkerExited(exit_code=code, stopped=False) if code:
                    failed += 1
        workers = ", ".join(f"rank {rank} (pid {pid})" for rank, (_, pid) in sorted(ranks.items())) or "none"
        told = host.chronicle
        end = "the events end without an end" if told.code is None else f"exit code {told.code}: {told.why}"
        cells = (host.node, addresses.get(host.node, "-"), workers, str(failed), f"{when(host, told.until)}: {end}")
        rows += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    heads = "<tr><th>node</th><th>address</th><th>workers of its last round</th><th>failed</th><th>end</th></tr>"
    return f"<h2>Nodes</h2><div class='wide' tabindex='0'><table>{heads}{rows}</table></div>"

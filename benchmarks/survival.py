"""Draws the README's picture: one training through the same changes and faults, under elastic-launch and torchrun.

    python benchmarks/survival.py docs/survival.svg

Two agents on this machine train with two workers each. The second one is started late, loses a worker, is killed with
all its processes, comes back, and gets SIGTERM, each at the same time for both launchers. Then elastic-launch trains as
many steps without a fault, and the weights are compared. It takes three minutes, and prints the figures as a table.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path

from jobs import Job, Others, Record, Stop, become_subreaper, descendants
from launchers import CONTENDERS, Node, Nodes, start_alone

EVENTS = (
    (6.0, "a second node joins"),
    (16.0, "one of its workers is killed"),
    (26.0, "all its processes are killed"),
    (36.0, "the node comes back"),
    (50.0, "SIGTERM: the node leaves"),
)
"""In seconds from the first step on. An event waits until all workers of the one before train."""

END = 60.0
"""Seconds shown."""

STEPS = 4000
"""More than are done until then: the others are done without a pause, for the weights."""

RATE = "0.001"
"""The learning rate, low enough for the loss to fall until the end."""

RECENT = 0.5
"""Seconds within which a training worker must have done a step."""

PAUSE = 0.25
"""Seconds without a step of any worker that the picture shows as a pause."""

SMOOTH = 0.5
"""Seconds over which losses are averaged."""

WIDTH, LEFT, RIGHT = 560, 24, 24
BARS, LOSS, ROW = 50, 70, 24
"""Pixels: heights of the highest bar and of the losses, and of a line of text."""

COLUMN = 90
"""Width of a column of figures, in pixels."""

WIDE = 80
"""Width of a bar in which there is room for words, in pixels."""

STYLE = """
svg { --text: #1f2328; --dim: #59636e; --line: #d1d9e0; --back: #ffffff; --fill: #2f6fde; --other: #767e89;
      --mark: #c23b3b; }
@media (prefers-color-scheme: dark) {
  svg { --text: #e6edf3; --dim: #9198a1; --line: #3d444d; --back: #0d1117; --fill: #4493f8; --other: #767e89;
        --mark: #f0716a; } }
text { font: 15px system-ui, sans-serif; fill: var(--text); } .dim { fill: var(--dim); font-size: 13px; }
.title { font-weight: 600; } .size { fill: #ffffff; font-size: 13px; } .number { fill: #ffffff; font-size: 12px; }
.back { fill: var(--back); stroke: var(--line); } .mark { fill: var(--mark); }
.ours { fill: var(--fill); } .theirs { fill: var(--other); } path { fill: none; stroke-width: 2; }
path.ours { fill: none; stroke: var(--fill); } path.theirs { fill: none; stroke: var(--other); }
"""


@dataclass(frozen=True)
class Bar:
    """Seconds in which training goes on without a pause, and the number of workers."""

    since: float
    until: float
    workers: int


@dataclass(frozen=True)
class Story:
    """What happened to one training.

    Attributes:
        losses: pairs of a time and the mean loss about then.
        pauses: seconds without a step of any worker, after each event.
        again: steps that were done again after each event.
    """

    title: str
    bars: Sequence[Bar]
    losses: Sequence[tuple[float, float]]
    pauses: Sequence[float]
    again: Sequence[int]


def told(title: str, steps: Sequence[Record], events: Sequence[float]) -> Story:
    """The story of a training.

    Args:
        steps: what its workers have noted, in any order.
        events: when the events were, by the same clock.
    """
    steps = sorted((x for x in steps if x["step"]), key=lambda x: x["clock"])
    began = steps[0]["clock"]
    usual = statistics.median(b["clock"] - a["clock"] for a, b in pairwise([x for x in steps if x["rank"] == 0]))
    bars: list[Bar] = []
    for a, b in pairwise(steps):
        goes_on = b["clock"] - a["clock"] < PAUSE
        if bars and goes_on and bars[-1].until == a["clock"] - began and bars[-1].workers == b["world"]:
            bars[-1] = Bar(bars[-1].since, b["clock"] - began, b["world"])
        elif goes_on:
            bars.append(Bar(a["clock"] - began, b["clock"] - began, b["world"]))
    pauses, again, highest = [0.0] * len(events), [0] * len(events), 0
    for a, b in pairwise(steps):
        which = sum(at <= b["clock"] for at in events) - 1
        if which >= 0:
            pauses[which] = max(pauses[which], b["clock"] - a["clock"] - usual)
    for x in steps:
        if x["rank"]:
            continue
        which = sum(at <= x["clock"] for at in events) - 1
        if x["step"] <= highest and which >= 0:
            again[which] += 1
        highest = max(highest, x["step"])
    binned: dict[int, list[float]] = {}
    for x in steps:
        binned.setdefault(int((x["clock"] - began) / SMOOTH), []).append(x["loss"])
    losses = [((n + 0.5) * SMOOTH, statistics.fmean(values)) for n, values in sorted(binned.items())]
    return Story(title, bars, losses, pauses, again)


def picture(stories: Sequence[Story], events: Sequence[tuple[float, str]], title: str, end: str) -> str:
    """The SVG: bars of the workers of each training over one scale of time, the losses below, and what happened."""
    names = ("ours", "theirs")

    def across(moment: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(moment, END) / END

    parts = [f'<text class="title" x="{LEFT}" y="32">{escape(title)}</text>']
    top = 52
    for number, (at, _what) in enumerate(events, 1):
        parts.append(f'<circle class="mark" cx="{across(at):.1f}" cy="{top}" r="9"/>')
        parts.append(f'<text class="number" x="{across(at):.1f}" y="{top + 4}" text-anchor="middle">{number}</text>')
    top += 10
    most = max(bar.workers for story in stories for bar in story.bars)
    for name, story in zip(names, stories, strict=True):
        parts.append(f'<text x="{LEFT}" y="{top + 18}">{escape(story.title)}</text>')
        floor = top + 26 + BARS
        for bar in story.bars:
            left, right, high = across(bar.since), across(bar.until), BARS * bar.workers / most
            size = f'x="{left:.1f}" y="{floor - high:.1f}" width="{right - left:.1f}" height="{high:.1f}"'
            parts.append(f'<rect class="{name}" {size}/>')
            if right - left > WIDE:
                middle = f'x="{(left + right) / 2:.1f}" y="{floor - 8}" text-anchor="middle"'
                parts.append(f'<text class="size" {middle}>{bar.workers} workers</text>')
        top = floor + 6
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{top + 18}" text-anchor="end">loss</text>')
    low, high = (pick(loss for story in stories for _, loss in story.losses) for pick in (min, max))
    floor = top + LOSS
    for name, story in reversed(list(zip(names, stories, strict=True))):
        heights = [(at, LOSS * math.log(loss / low) / math.log(high / low)) for at, loss in story.losses if at < END]
        before = [-math.inf, *(at for at, _ in heights)]
        line = " ".join(
            f"{'L' if at - last < 1.5 * SMOOTH else 'M'}{across(at):.1f} {floor - height:.1f}"
            for last, (at, height) in zip(before, heights, strict=False)
        )
        parts.append(f'<path class="{name}" d="{line}"/>')
    floor += 18
    parts.append(f'<text class="dim" x="{LEFT}" y="{floor}">0 s</text>')
    parts.append(f'<text class="dim" x="{WIDTH - RIGHT}" y="{floor}" text-anchor="end">{END:.0f} s</text>')
    columns = (WIDTH - RIGHT - COLUMN, WIDTH - RIGHT)
    for name, story, x in zip(names, stories, columns, strict=True):
        parts.append(
            f'<text class="{name}" x="{x}" y="{floor + 6 + ROW}" text-anchor="end">{escape(story.title)}</text>'
        )
    parts.append(f'<text class="dim" x="{LEFT}" y="{floor + 6 + ROW}">pauses</text>')
    for number, (_at, what) in enumerate(events, 1):
        y = floor + 6 + ROW * (number + 1)
        parts.append(f'<circle class="mark" cx="{LEFT + 8}" cy="{y - 5}" r="9"/>')
        parts.append(f'<text class="number" x="{LEFT + 8}" y="{y - 1}" text-anchor="middle">{number}</text>')
        parts.append(f'<text x="{LEFT + 26}" y="{y}">{escape(what)}</text>')
        for story, x in zip(stories, columns, strict=True):
            parts.append(f'<text x="{x}" y="{y}" text-anchor="end">{story.pauses[number - 1]:.2f} s</text>')
    last = floor + 6 + ROW * (len(events) + 2)
    parts.append(f'<text x="{LEFT}" y="{last}">{escape(end)}</text>')
    height = last + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">'
    back = f'<rect class="back" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>'
    return "\n".join([head, f"<title>{escape(title)}</title><style>{STYLE}</style>", back, *parts]) + "\n</svg>\n"


def table(stories: Sequence[Story], events: Sequence[tuple[float, str]]) -> str:
    """The figures, as Markdown."""
    titles = [f"{story.title}: {what}" for story in stories for what in ("pause", "steps done again")]
    lines = [f"| | {' | '.join(titles)} |", f"|---|{'---|' * len(titles)}"]
    for number, (_at, what) in enumerate(events):
        cells = [f"{story.pauses[number]:.2f} s | {story.again[number]}" for story in stories]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def train(job: Job, who: str) -> Story:
    """Train under one launcher, through all events."""
    nodes = Nodes(job, who)
    options = ["--rate", RATE]
    options += ["--exact", "--steps", str(STEPS), "--result", str(result(job))] if CONTENDERS[who].library else []
    nodes.start("host", 2, *options)
    began = job.step(0, 2)["clock"]
    guests: list[Node] = []

    def workers() -> list[int]:
        below = set(descendants(guests[-1].pid))
        return sorted({x["pid"] for x in job.steps.read() if x["step"]} & below)

    def starts() -> None:
        guests.append(nodes.start("guest", 2, *options))

    acts: Sequence[tuple[int, Callable[[], None]]] = (
        (2, starts),
        (4, lambda: os.kill(workers()[-1], signal.SIGKILL)),
        (4, lambda: guests[-1].signal(signal.SIGKILL)),
        (2, starts),
        (4, lambda: os.kill(guests[-1].pid, signal.SIGTERM)),
    )
    moments = []
    for (at, _what), (world, act) in zip(EVENTS, acts, strict=True):
        job.sleep(began + at)
        job.until(f"{world} workers", partial(trains, world=world))
        moments.append(time.monotonic())
        act()
    job.sleep(began + END)
    noted = [x for x in job.steps.read() if x["clock"] <= began + END]
    for moment, (at, what) in zip(moments, EVENTS, strict=True):
        print(f"{who}: {what}: {moment - began - at:.1f} s late", file=sys.stderr)
    return told("elastic-launch" if CONTENDERS[who].ours else "torchrun", noted, moments)


def trains(record: Record, world: int) -> bool:
    return record["step"] > 0 and record["world"] == world and time.monotonic() - record["clock"] < RECENT


def result(job: Job) -> Path:
    return job.directory / "result.json"


def weights(job: Job) -> str:
    """Have the training do its last steps without a pause, and return the hash of its weights."""
    (job.directory / "hurry").touch()
    while job.running and not result(job).exists():
        job.sleep(time.monotonic() + 0.2)
    return str(json.loads(result(job).read_text())["hash"])


def main(out: str) -> None:
    stop, others = Stop(), Others(0.0)
    stop.catch()
    become_subreaper()
    with Job(stop, 300, others) as job:
        ours = train(job, "ours")
        ended = weights(job)
    with Job(stop, 300, others) as job:
        theirs = train(job, "torchrun")
    with Job(stop, 300, others) as job:
        start_alone(job, "ours", 1, "--rate", RATE, "--exact", "--steps", str(STEPS), "--result", str(result(job)))
        if weights(job) != ended:
            raise SystemExit("the weights differ from those of one worker without a fault")
    title = f"Five changes and faults: {sum(ours.again) or 'no'} steps done again (torchrun: {sum(theirs.again)})"
    end = "With exact=True, weights are to the bit those of an undisturbed run."
    Path(out).write_text(picture([ours, theirs], EVENTS, title, end))
    print(table([ours, theirs], EVENTS))
    print(f"others used {others.share:.0%} of the CPU")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Draw the README's picture of a run that survives, from the events of a real run.

    python scripts/survival_picture.py docs/survival.svg

Two agents on this machine train examples/digits in exact mode. The script starts the second one late, kills one of its
workers, kills the agent itself, starts it again, and stops it with SIGTERM. Then it trains the same in one process and
without a fault, and compares the weights. It takes about a minute.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from elastic_launch.observe.chronicle import Chronicle
from elastic_launch.observe.ledger import RoundIncident
from elastic_launch.observe.reading import event_files, read
from elastic_launch.observe.report import joined

TRAIN = [str(Path(__file__).resolve().parents[1] / "examples" / "digits" / "train.py"), "--exact", "--epochs", "25"]
TIMEOUT = 180.0

WIDTH, LEFT, RIGHT = 560, 24, 24
TOP, FLOOR, ROW = 64, 164, 24
"""Of the bars, in pixels: their highest and lowest place; and the height of a line of text below them."""

WIDE = 90
"""Width of a bar in which there is room for words, in pixels."""

STYLE = """
svg { --text: #1f2328; --dim: #59636e; --line: #d1d9e0; --back: #ffffff; --fill: #2f6fde; --mark: #c23b3b; }
@media (prefers-color-scheme: dark) {
  svg { --text: #e6edf3; --dim: #9198a1; --line: #3d444d; --back: #0d1117; --fill: #4493f8; --mark: #f0716a; } }
text { font: 15px system-ui, sans-serif; fill: var(--text); } .dim { fill: var(--dim); }
.title { font-weight: 600; } .size { fill: #ffffff; font-weight: 600; } .number { fill: #ffffff; font-size: 12px; }
.back { fill: var(--back); stroke: var(--line); } .round { fill: var(--fill); } .mark { fill: var(--mark); }
"""


@dataclass(frozen=True)
class Bar:
    """A round: when it trained, in seconds of the run, and with how many workers."""

    since: float
    until: float
    workers: int


@dataclass(frozen=True)
class Mark:
    """What ended a round, and when."""

    moment: float
    text: str


def told(incident: RoundIncident) -> str:
    what = {
        "membership": "node b joins",
        "crash": "kill -9 of a worker of node b",
        "node loss": "kill -9 of node b's agent",
    }
    what["preemption"] = "SIGTERM to node b: it leaves"
    lost = "no step lost" if incident.lost_steps == 0 else f"{incident.lost_steps} steps lost"
    return f"{what[incident.kind]}: a pause of {incident.still_s:.2f} s, {lost}"


def bars_and_marks(chronicle: Chronicle, incidents: Sequence[RoundIncident]) -> tuple[list[Bar], list[Mark]]:
    since = min(x.formed for x in chronicle.rounds.values() if x.formed is not None)
    bars, marks = [], []
    for number, x in sorted(chronicle.rounds.items()):
        following = chronicle.rounds.get(number + 1)
        until = x.ended or x.reaped or (following.formed if following else None) or chronicle.until
        bars.append(Bar((x.formed or since) - since, until - since, 2 * x.nodes))
    for incident in incidents:
        ended = chronicle.rounds[incident.round].ended
        marks.append(Mark((ended or since) - since, told(incident)))
    return bars, marks


def picture(bars: Sequence[Bar], marks: Sequence[Mark], title: str, end: str) -> str:
    """The SVG: bars over time, as high as their number of workers, and a numbered line of text for each mark."""
    whole, most = max(bar.until for bar in bars), max(bar.workers for bar in bars)
    height = FLOOR + 40 + ROW * (len(marks) + 1)

    def across(moment: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * moment / whole

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect class="back" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>',
        f'<text class="title" x="{LEFT}" y="32">{escape(title)}</text>',
    ]
    for bar in bars:
        left, right, top = across(bar.since), across(bar.until), FLOOR - (FLOOR - TOP) * bar.workers / most
        size = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{FLOOR - top:.1f}"'
        middle = f'x="{(left + right) / 2:.1f}" y="{FLOOR - 10}"'
        parts.append(f'<rect class="round" {size}/>')
        label = f"{bar.workers} workers" if right - left > WIDE else str(bar.workers)
        parts.append(f'<text class="size" {middle} text-anchor="middle">{label}</text>')
    parts.append(f'<text class="dim" x="{LEFT}" y="{FLOOR + 18}">0 s</text>')
    parts.append(f'<text class="dim" x="{WIDTH - RIGHT}" y="{FLOOR + 18}" text-anchor="end">{whole:.0f} s</text>')
    for number, mark in enumerate(marks, 1):
        y = FLOOR + 24 + ROW * number
        for x, middle in ((across(mark.moment), TOP - 10), (LEFT + 8, y - 5)):
            parts.append(f'<circle class="mark" cx="{x:.1f}" cy="{middle}" r="9"/>')
            parts.append(f'<text class="number" x="{x:.1f}" y="{middle + 4}" text-anchor="middle">{number}</text>')
        parts.append(f'<text x="{LEFT + 26}" y="{y}">{escape(mark.text)}</text>')
    parts.append(f'<text x="{LEFT}" y="{FLOOR + 24 + ROW * (len(marks) + 1)}">{escape(end)}</text></svg>')
    return "\n".join(parts) + "\n"


class Run:
    """The two agents and what they have written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str) -> None:
        flags = ["--nnodes", "1:2", "--nproc", "2", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "picture"]
        flags += ["--log-dir", str(self.directory / "logs"), "--node-id", node]
        train = [*TRAIN, "--step-time", "0.1", "--result", str(self.directory / "result.json")]
        with open(self.directory / f"{node}.out", "ab") as out:
            command = [sys.executable, "-m", "elastic_launch", *flags, *train]
            self.agents[node] = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def wait_for(self, what: str, seen: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + TIMEOUT
        while not (value := seen()):
            if time.monotonic() > deadline or self.agents["a"].poll() is not None:
                raise SystemExit(f"not seen: {what}\n{self.output('a')}")
            time.sleep(0.05)
        return value

    def output(self, node: str) -> str:
        path = self.directory / f"{node}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def trains(self) -> None:
        """Wait until forty further steps or so are done: the script reports every twentieth."""
        seen = self.output("a").count("\nstep ")
        self.wait_for("further steps", lambda: self.output("a").count("\nstep ") > seen + 2)

    def formed(self, nodes: int, times: int) -> None:
        pattern = rf"round \d+ formed .* on {nodes} node"
        self.wait_for(f"{nodes} nodes", lambda: len(re.findall(pattern, self.output("a"))) >= times)

    def worker(self, node: str) -> int:
        lines = (self.directory / "logs" / "picture" / f"events-{node}.jsonl").read_text().splitlines()
        return max((e["clock"], e["pid"]) for e in map(json.loads, lines) if e["event"] == "worker_started")[1]

    def end(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.terminate()
            agent.wait(60)


def main(out: str) -> None:
    with tempfile.TemporaryDirectory(prefix="elastic-launch-picture-") as temporary:
        directory = Path(temporary)
        run = Run(directory)
        try:
            run.start("a")
            run.trains()
            run.start("b")
            run.formed(2, 1)
            run.trains()
            os.kill(run.worker("b"), signal.SIGKILL)
            run.formed(2, 2)
            run.trains()
            run.agents["b"].kill()
            run.agents["b"].wait()
            run.formed(1, 2)
            run.trains()
            run.start("b")
            run.formed(2, 3)
            run.trains()
            run.agents["b"].send_signal(signal.SIGTERM)
            if run.agents["a"].wait(TIMEOUT):
                raise SystemExit(run.output("a"))
        finally:
            run.end()
        alone = [sys.executable, *TRAIN, "--result", str(directory / "alone.json")]
        subprocess.run(alone, check=True, stdout=subprocess.DEVNULL)
        ours, theirs = (json.loads((directory / f"{name}.json").read_text()) for name in ("result", "alone"))
        same = ours["weights_sha256"] == theirs["weights_sha256"]
        if not same:
            raise SystemExit("the weights differ from those of one process without a fault")
        hosts = [read(path) for path in event_files(directory / "logs" / "picture")]
        node, ledger = joined(hosts)
        (host,) = (host for host in hosts if host.node == node)
        bars, marks = bars_and_marks(host.chronicle, ledger.incidents)
        title = f"One training with {len(marks)} changes and faults; {ledger.lost_steps or 'no'} steps lost"
        end = f"Weights {ours['weights_sha256'][:16]}: to the bit those of an undisturbed run."
        Path(out).write_text(picture(bars, marks, title, end))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""From measurements to a report: each scenario measured in turn for each launcher, medians, ratios, JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from jobs import IDLE_SHARE, Job, Missing, Others, Record, Stop, Stopped, become_subreaper

Figures = tuple[float, ...]
NewJob = Callable[[], Job]


@dataclass(frozen=True)
class Scenario:
    """One thing to measure.

    Attributes:
        measure: does it once, for one of the launchers.
        rows: for each of its figures, a title, with its unit behind a comma if that is not seconds, and the goal, or an
            empty text.
    """

    measure: Callable[[NewJob, str], Figures]
    launchers: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]


Scenarios = Mapping[str, Scenario]


@dataclass
class Result:
    """What was measured of one scenario: by launcher, the figures of its runs and the number of runs without."""

    figures: dict[str, list[Figures]] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def attempt(scenarios: Scenarios, name: str, launcher: str, new_job: NewJob, result: Result) -> None:
    """Measure once and note the figures, or that there are none."""
    try:
        figures = scenarios[name].measure(new_job, launcher)
    except Missing as error:
        result.failed[launcher] = result.failed.get(launcher, 0) + 1
        say(f"{name}, {launcher}: no figure: {error}")
        return
    result.figures.setdefault(launcher, []).append(figures)
    say(f"{name}, {launcher}: " + ", ".join(f"{x:.3f}" for x in figures))


def measure_all(scenarios: Scenarios, results: Mapping[str, Result], runs: int, new_job: NewJob) -> None:
    """Measure each scenario so many times, the launchers in turn; all once before any twice, as machines have moods."""
    say("not counted, so that files are in memory:")
    first = next(iter(results))
    for launcher in sorted({launcher for name in results for launcher in scenarios[name].launchers}):
        attempt(scenarios, first, launcher, new_job, Result())
    for number in range(1, runs + 1):
        say(f"run {number} of {runs}:")
        for name, result in results.items():
            for launcher in scenarios[name].launchers:
                attempt(scenarios, name, launcher, new_job, result)


def column(result: Result, launcher: str, row: int) -> list[float]:
    return [figures[row] for figures in result.figures.get(launcher, [])]


def cell(result: Result, launcher: str, row: int) -> str:
    """Median (least..greatest), and how many runs gave nothing."""
    values = column(result, launcher, row)
    parts = [f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"] if values else []
    if failed := result.failed.get(launcher):
        parts.append(f"{failed} of {failed + len(values)} runs without a figure")
    return ", ".join(parts) or "-"


def table(scenarios: Scenarios, results: Mapping[str, Result]) -> str:
    """A Markdown table of all figures."""
    lines = ["| seconds, unless said otherwise | ours | torchrun | ours / torchrun | goal |", "|---|---|---|---|---|"]
    for name, result in results.items():
        for row, (title, goal) in enumerate(scenarios[name].rows):
            ours, theirs = column(result, "ours", row), column(result, "torchrun", row)
            base = statistics.median(theirs) if theirs else 0.0
            ratio = f"{statistics.median(ours) / base:.2f}" if ours and base else "-"
            cells = [title, cell(result, "ours", row), cell(result, "torchrun", row), ratio, goal or "-"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def circumstances(results: Mapping[str, Result], load: float, others: float) -> Record:
    """Under which the figures hold."""
    runs = [len(figures) for result in results.values() for figures in result.figures.values()]
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "versions": {name: version(name) for name in ("elastic-launch", "torch")}
        | {"python": platform.python_version()},
        "cores": len(os.sched_getaffinity(0)),
        "runs": min(runs, default=0),
        "load_before": round(load, 2),
        "others_cpu": round(others, 3),
    }


def report(scenarios: Scenarios, about: Record, results: Mapping[str, Result]) -> Record:
    """What --json writes: all figures, not only their medians."""
    rows = [
        {
            "scenario": name,
            "title": title,
            "goal": goal,
            "figures": {launcher: column(result, launcher, row) for launcher in scenarios[name].launchers},
            "without_figure": result.failed,
        }
        for name, result in results.items()
        for row, (title, goal) in enumerate(scenarios[name].rows)
    ]
    return {**about, "rows": rows}


def headline(about: Record) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    load = f"load before {about['load_before']:.2f}, {about['others_cpu']:.0%} of the CPU used by others meanwhile"
    return f"{about['date']}: {versions}, {about['cores']} cores, CPU, gloo; median of {about['runs']} runs; {load}"


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


def parse_args(scenarios: Scenarios, description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"{description} No figure is asserted: the exit code is 1 only if a measurement gave none."
    )
    parser.add_argument("--runs", type=positive, default=5, help="of each scenario and launcher [5]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    parser.add_argument("--only", choices=scenarios, action="append", help="measure this one; may be repeated")
    parser.add_argument("--timeout", type=positive, default=60, help="seconds for one measurement [60]")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="S",
        help=f"seconds to wait, before each measurement, until others use less than {IDLE_SHARE:.0%}% of the CPU [0]",
    )
    return parser.parse_args()


def main(scenarios: Scenarios, description: str) -> int:
    """Measure what the command line asks for, and print it."""
    args = parse_args(scenarios, description)
    load, others, stop = os.getloadavg()[0], Others(args.patience), Stop()
    results = {name: Result() for name in args.only or scenarios}
    stop.catch()
    become_subreaper()
    try:
        measure_all(scenarios, results, args.runs, lambda: Job(stop, args.timeout, others))
    except Stopped as stopped:
        say(f"{stopped}; what was measured until then:")
    about = circumstances(results, load, others.share)
    print(f"{headline(about)}\n\n{table(scenarios, results)}")
    if args.json:
        args.json.write_text(json.dumps(report(scenarios, about, results), indent=2) + "\n")
    if stop.number:
        return 128 + stop.number
    return 1 if any(result.failed for result in results.values()) else 0

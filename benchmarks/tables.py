"""Runs measurements: each scenario in turn for each contender, up to a report that `reports.py` can show."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jobs import IDLE_SHARE, Figures, Job, Missing, Others, Record, Stop, Stopped, become_subreaper
from reports import judged, show

NewJob = Callable[[], Job]


@dataclass(frozen=True)
class Goal:
    """A goal for elastic-launch.

    Attributes:
        most, least: of the median.
        ratio: the maximum ratio of the median to torchrun's at its best settings.
    """

    most: float | None = None
    least: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Row:
    """One figure of a scenario.

    Attributes:
        key: under which the measurement returns it.
    """

    key: str
    title: str
    goal: Goal | None = None
    unit: str = "s"
    digits: int = 2


@dataclass(frozen=True)
class Scenario:
    """One thing to measure.

    Attributes:
        measure: performs it once, for one contender.
        rows: the figures shown in the table. Those whose key begins with ``phase`` are shown separately.
    """

    measure: Callable[[NewJob, str], Figures]
    contenders: tuple[str, ...]
    rows: tuple[Row, ...]


Scenarios = Mapping[str, Scenario]


@dataclass
class Result:
    """The measurements of one scenario: by contender, the figures of its runs, and why others returned none."""

    figures: dict[str, list[Figures]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def attempt(scenarios: Scenarios, name: str, who: str, new_job: NewJob, result: Result) -> None:
    """Measure once and record the figures, or why there are none."""
    try:
        figures = scenarios[name].measure(new_job, who)
    except Missing as error:
        result.failed.setdefault(who, []).append(str(error).splitlines()[0])
        say(f"{name}, {who}: no figure: {error}")
        return
    result.figures.setdefault(who, []).append(figures)
    say(f"{name}, {who}: " + ", ".join(f"{key} {x:.3f}" for key, x in figures.items()))


def measure_all(
    scenarios: Scenarios, results: Mapping[str, Result], runs: int, new_job: NewJob, only: Iterable[str], warm: bool
) -> None:
    """Measure all scenarios repeatedly, contenders in turn; all once before any twice, as a machine's speed varies."""
    wanted = {name: [who for who in scenarios[name].contenders if who in only] for name in results}
    if warm:
        say("not counted, so that files are in memory:")
        for who in sorted({who for each in wanted.values() for who in each}):
            attempt(scenarios, next(name for name in results if who in wanted[name]), who, new_job, Result())
    for number in range(1, runs + 1):
        say(f"run {number} of {runs}:")
        for name, result in results.items():
            for who in wanted[name]:
                attempt(scenarios, name, who, new_job, result)


def described(scenario: str, row: Row, result: Result) -> Record:
    """A row of the report: all figures, not only their medians."""
    figures = {who: [run[row.key] for run in runs if row.key in run] for who, runs in result.figures.items()}
    about = {
        "scenario": scenario,
        "key": row.key,
        "title": row.title,
        "unit": row.unit,
        "digits": row.digits,
        "figures": {who: values for who, values in figures.items() if values},
        "goal": asdict(row.goal) if row.goal else None,
        "without_figure": result.failed,
    }
    return judged(about)


def phases(result: Result) -> Record:
    """The figures of all runs, by contender and phase."""
    found: Record = {}
    for who, runs in result.figures.items():
        for run in runs:
            for key, value in run.items():
                if key.startswith("phase "):
                    found.setdefault(who, {}).setdefault(key.removeprefix("phase "), []).append(value)
    return found


def processor() -> str:
    """The kernel's name for the processor (proc_cpuinfo(5)); its architecture if it has no name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def report(scenarios: Scenarios, results: Mapping[str, Result], load: float, others: float) -> Record:
    """The content that --json writes."""
    runs = [len(figures) for result in results.values() for figures in result.figures.values()]
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "versions": {name: version(name) for name in ("elastic-launch", "torch")}
        | {"python": platform.python_version()},
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "kernel": platform.release().partition("-")[0],
        "runs": max(runs, default=0),
        "load_before": round(load, 2),
        "others_cpu": round(others, 3),
        "rows": [described(name, row, result) for name, result in results.items() for row in scenarios[name].rows],
        "phases": {name: found for name, result in results.items() if (found := phases(result))},
    }


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


def parser(description: str, *, runs: int, timeout: int) -> argparse.ArgumentParser:
    """The options that all these programs share."""
    options = argparse.ArgumentParser(
        description=f"{description} No figure is asserted: the exit code is 1 only if a measurement of ours gave none."
    )
    options.add_argument("--runs", type=positive, default=runs, help=f"of each scenario and contender [{runs}]")
    options.add_argument("--timeout", type=positive, default=timeout, help=f"seconds for one measurement [{timeout}]")
    options.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="S",
        help=f"seconds to wait, before each measurement, until others use less than {IDLE_SHARE:.0%}% of the CPU [0]",
    )
    options.add_argument("--cold", action="store_true", help="leave out the first run of each, which is not counted")
    options.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    options.add_argument("--markdown", type=Path, metavar="FILE", help="put the tables into its generated section, too")
    options.add_argument("--chart", type=Path, metavar="FILE.svg", help="draw the medians there, too")
    options.add_argument(
        "--show", type=Path, metavar="FILE", nargs="+", help="measure nothing: show what --json wrote, of several runs"
    )
    return options


def run(scenarios: Scenarios, args: argparse.Namespace, only: Iterable[str], section: str) -> int:
    """Measure, and show the results as the options say.

    Args:
        only: contenders to measure.
        section: name of the generated section that ``--markdown`` fills.
    """
    if args.show:
        show([json.loads(path.read_text()) for path in args.show], args, section)
        return 0
    load, others, stop = os.getloadavg()[0], Others(args.patience), Stop()
    results = {name: Result() for name in scenarios}
    stop.catch()
    become_subreaper()
    try:
        new_job = lambda: Job(stop, args.timeout, others)  # noqa: E731
        measure_all(scenarios, results, args.runs, new_job, only, warm=not args.cold)
    except Stopped as stopped:
        say(f"{stopped}; what was measured until then:")
    found: dict[str, Any] = report(scenarios, results, load, others.share)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    show([found], args, section)
    if stop.number:
        return 128 + stop.number
    return 1 if any(result.failed.keys() & {"ours", "no-live"} for result in results.values()) else 0

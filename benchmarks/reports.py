"""Turns measurements into Markdown tables, a generated section of a page, and a chart."""

from __future__ import annotations

import argparse
import os
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from jobs import Record
from launchers import CONTENDERS
from recovery import PHASES

__all__ = ["chart", "fill", "judged", "phase_table", "show", "table"]

BASE = "torchrun"
"""The contender that ratios and goals compare with."""

COLOURS = {"ours": "#1b6ac9", "ours-plain": "#7fb2ea", "torchrun": "#d9822b", "torchrun-default": "#f0c592"}
COLOURS |= {"no-live": "#0b8a5c", "ours-confirmed": "#7cc4a8"}
PAGE = 140
"""Characters in a line of the pages."""

WIDTH, LABEL, BAR, ROW, GAP = 860, 210, 420, 18, 34


def judged(row: Record) -> Record:
    """A row with derived values: medians, the ratio to torchrun, and whether the goal is met."""
    medians = {who: statistics.median(values) for who, values in row["figures"].items()}
    ours, base, goal = medians.get("ours"), medians.get(BASE), row["goal"]
    met = None
    if goal and ours is not None and (goal["ratio"] is None or base is not None):
        met = (
            (goal["most"] is None or ours <= goal["most"])
            and (goal["least"] is None or ours >= goal["least"])
            and (goal["ratio"] is None or base is None or ours <= goal["ratio"] * base)
        )
    ratio = ours / base if ours is not None and base is not None and base > 0 else None
    return {**row, "medians": medians, "ratio": ratio, "met": met}


def joined(reports: Sequence[Record]) -> tuple[list[Record], dict[str, Record]]:
    """All rows and phases of several reports, combined."""
    rows: dict[tuple[str, str], Record] = {}
    phases: dict[str, Record] = {}
    for report in reports:
        for row in report["rows"]:
            whole = rows.setdefault((row["scenario"], row["key"]), {**row, "figures": {}, "without_figure": {}})
            for part in ("figures", "without_figure"):
                _add(whole[part], row[part])
        for scenario, found in report["phases"].items():
            for who, each in found.items():
                _add(phases.setdefault(scenario, {}).setdefault(who, {}), each)
    return [judged(row) for row in rows.values()], phases


def _add(whole: dict[str, list[Any]], part: Mapping[str, list[Any]]) -> None:
    for name, values in part.items():
        whole[name] = [*whole.get(name, []), *values]


def show(reports: Sequence[Record], args: argparse.Namespace, section: str) -> None:
    """Print reports, and write the outputs of ``--markdown``, without the phases, and ``--chart``."""
    rows, phases = joined(reports)
    text = "\n\n".join([*map(headline, reports), table(rows), *missing(rows)])
    print(text)
    if phases:
        print(f"\n{phase_table(phases)}")
    if args.markdown:
        if args.chart:
            text += f"\n\n![medians]({os.path.relpath(args.chart, args.markdown.parent)})"
        fill(args.markdown, section, text)
    if args.chart:
        args.chart.write_text(chart(rows))


def headline(report: Record) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    load = f"load before {report['load_before']:.2f}, {report['others_cpu']:.0%} of the CPU used by others meanwhile"
    machine = f"{report['cores']} cores ({report.get('processor', 'unknown')}), Linux {report.get('kernel', 'unknown')}"
    many = f"medians of {report['runs']} runs (least..greatest, where they differ)"
    runs = many if report["runs"] > 1 else "one run"
    return textwrap.fill(f"{report['date']}: {versions}, {machine}, CPU, gloo; {runs}; {load}.", PAGE)


def present(names: Iterable[str]) -> list[str]:
    """Contenders in their fixed order."""
    found = set(names)
    return [who for who in CONTENDERS if who in found]


def table(rows: Sequence[Record]) -> str:
    """A Markdown table of all figures; rows without any figure are left out."""
    columns = present(who for row in rows for who in (*row["figures"], *row["without_figure"]))
    titles = ["", *(CONTENDERS[who].title for who in columns), "goal"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in (row for row in rows if row["figures"] or row["without_figure"]):
        met = {None: "", True: ": met", False: ": missed"}[row["met"]]
        lines.append(f"| {' | '.join([row['title'], *(cell(row, who) for who in columns), wish(row) + met])} |")
    return "\n".join(lines)


def cell(row: Record, who: str) -> str:
    """Median with its unit, (min..max) if they differ, and how many runs returned nothing."""
    values, digits = row["figures"].get(who, []), row["digits"]
    parts = []
    if values:
        unit = f" {row['unit']}" if row["unit"] else ""
        least, median, most = (f"{f(values):.{digits}f}" for f in (min, statistics.median, max))
        parts.append(f"{median}{unit}" + (f" ({least}..{most})" if least != most else ""))
    if failed := len(row["without_figure"].get(who, [])):
        parts.append(f"none in {failed} of {failed + len(values)} runs")
    return ", ".join(parts) or "-"


def wish(row: Record) -> str:
    """The goal in words."""
    goal = row["goal"] or {}
    unit = f" {row['unit']}" if row["unit"] else ""
    parts = [f"<= {goal['most']:g}{unit}"] if goal.get("most") is not None else []
    parts += [f">= {goal['least']:g}{unit}"] if goal.get("least") is not None else []
    parts += [f"<= {goal['ratio']:g} x torchrun"] if goal.get("ratio") is not None else []
    return ", ".join(parts) or "-"


def phase_table(phases: Mapping[str, Record]) -> str:
    """Where the time goes: medians of each phase, in seconds."""
    known = {name for found in phases.values() for each in found.values() for name in each}
    names = [name for name in PHASES if name in known]
    lines = [f"| seconds, medians | | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for scenario, found in phases.items():
        for who in present(found):
            values = [f"{statistics.median(found[who][name]):.3f}" if name in found[who] else "-" for name in names]
            lines.append(f"| {scenario} | {CONTENDERS[who].title} | {' | '.join(values)} |")
    return "\n".join(lines)


def missing(rows: Sequence[Record]) -> list[str]:
    """Why runs returned no figure, one paragraph each."""
    reasons = {
        f"{row['scenario']}, {CONTENDERS[who].title}: no figure, as it {reason}."
        for row in rows
        for who, each in row["without_figure"].items()
        for reason in each
    }
    return sorted(reasons)


def fill(path: Path, section: str, text: str) -> None:
    """Write a text between the two marks of a generated section.

    Raises:
        SystemExit: if the file has no such section.
    """
    first, last = f"<!-- generated: {section} -->", f"<!-- end of generated: {section} -->"
    whole = path.read_text()
    found = re.search(f"{re.escape(first)}\n.*?{re.escape(last)}", whole, re.DOTALL)
    if found is None:
        raise SystemExit(f"{path} has no section between {first} and {last}")
    path.write_text(f"{whole[: found.start()]}{first}\n\n{text}\n\n{last}{whole[found.end() :]}")


def chart(rows: Sequence[Record]) -> str:
    """Bars of the medians that have a goal, as SVG: one group per row, each with its own scale."""
    shapes: list[str] = []
    top = 10
    for row in (row for row in rows if row["medians"] and row["goal"] and row["unit"]):
        shapes.append(_text(10, top + 14, row["title"], weight="bold"))
        top += 22
        longest = max(row["medians"].values()) or 1.0
        for who in present(row["medians"]):
            value = row["medians"][who]
            length = max(1.0, BAR * max(0.0, value) / longest)
            shapes.append(_text(10, top + 13, CONTENDERS[who].title))
            shapes.append(f'<rect x="{LABEL}" y="{top + 2}" width="{length:.1f}" height="14" fill="{COLOURS[who]}"/>')
            shapes.append(_text(LABEL + length + 6, top + 13, f"{value:.{row['digits']}f} {row['unit']}"))
            top += ROW
        top += GAP - ROW
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}" '
        'font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{top}" fill="white"/>', *shapes, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-weight="{weight}">{escape(text)}</text>'

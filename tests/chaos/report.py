"""Writes the figures of recorded plans into a page, between two marks."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["figures", "marks", "report"]

PHASES = {
    "start": "before the first step",
    "training": "while it trains",
    "change": "in a change of the round",
    "end": "in the last 25 steps",
}


def marks(pairs: bool) -> tuple[str, str]:
    """Return the lines of a page between which the figures are, of plans with pairs or of others."""
    what = "figures of pairs" if pairs else "figures"
    return f"<!-- {what} -->", f"<!-- end of the {what} -->"


def report(record: Path, page: Path, pairs: bool = False) -> None:
    """Replace what is between the marks of a page by the figures of a record."""
    outcomes = [json.loads(line) for line in record.read_text().splitlines()]
    begin, end = marks(pairs)
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{figures(outcomes)}{end}{rest.split(end)[1]}")


def figures(outcomes: list[dict[str, Any]]) -> str:
    """Return the figures of outcomes, as Markdown."""
    plans = [outcome["plan"] for outcome in outcomes]
    dates = sorted({outcome["date"] for outcome in outcomes})
    loads = [outcome["load"] for outcome in outcomes]
    failed = [str(outcome["plan"]["seed"]) for outcome in outcomes if outcome["problems"]]
    planned = Counter(fault["kind"] for plan in plans for fault in [*plan["faults"], plan["last"]] if fault)
    landed: Counter[str] = Counter()
    when: Counter[str] = Counter()
    for kind, phase in (tuple(each) for outcome in outcomes for each in outcome["landed"]):
        landed[kind] += 1
        when[phase] += 1
    live = sum(plan["live"] for plan in plans)
    forms = Counter(plan.get("form", "plain") for plan in plans)
    aimed = Counter(moment for outcome in outcomes for moment, _ in outcome.get("aimed", []))
    came = Counter(moment for outcome in outcomes for moment, hit in outcome.get("aimed", []) if hit)
    where = f"{os.cpu_count()} cores shared with other work (load {min(loads):.0f} to {max(loads):.0f})"
    lines = [
        f"{' and '.join(dates)}, {where}.",
        "",
        "| | |",
        "|---|---|",
        f"| plans | {len(outcomes)}, seeds {_ranges([plan['seed'] for plan in plans])} |",
        f"| that failed | {len(failed)}{': seeds ' + ', '.join(failed) if failed else ''} |",
        f"| nodes | {', '.join(f'{n}: {c} plans' for n, c in sorted(Counter(p['nodes'] for p in plans).items()))} |",
        f"| on c10d, on c10d with three voters, on etcd | {', '.join(map(str, _stores(plans)))} |",
        f"| forms of training | {', '.join(f'{form}: {count}' for form, count in forms.most_common())} |",
        f"| with workers that keep their processes, with workers that restart | {live}, {len(plans) - live} |",
        f"| faults planned, landed | {planned.total()}, {landed.total()} |",
        f"| {', '.join(PHASES.values())} | {', '.join(str(when[phase]) for phase in PHASES)} |",
        f"| of each kind | {', '.join(_landed(kind, count, planned[kind]) for kind, count in landed.most_common())} |",
        f"| restarts charged | {_sum(outcomes, 'restarts')} |",
        f"| rounds that ended after an agreed step | {_sum(outcomes, 'resizes')} |",
        f"| places that workers took without a new process | {_sum(outcomes, 'kept')} |",
        f"| steps done, of these again | {_sum(outcomes, 'steps')}, {_sum(outcomes, 'again')} |",
        f"| plans side by side | {', '.join(str(jobs) for jobs in sorted({x['jobs'] for x in outcomes}))} |",
        f"| time of the plans, added up | {sum(outcome['seconds'] for outcome in outcomes) / 60:.0f} min |",
    ]
    if aimed:
        moments = "; ".join(f"{moment} {count}, {came[moment]}" for moment, count in aimed.most_common())
        lines.append(f"| aimed at a moment, of these when it came | {moments} |")
    return "\n".join(lines) + "\n"


def _landed(kind: str, landed: int, planned: int) -> str:
    return f"{kind} {landed}" if landed == planned else f"{kind} {landed} of {planned}"


def _stores(plans: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Return how many plans are on one host, on three voters, and on etcd."""
    etcd, voters = sum(plan["members"] > 0 for plan in plans), sum(plan["voters"] for plan in plans)
    return len(plans) - etcd - voters, voters, etcd


def _sum(outcomes: list[dict[str, Any]], name: str) -> int:
    return sum(outcome[name] for outcome in outcomes)


def _ranges(numbers: list[int]) -> str:
    """Return numbers as ranges: ``1 to 5, 7``."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in found)

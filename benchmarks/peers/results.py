"""Reads what measure.py wrote, in one run or several, and prints it as a Markdown table.

python benchmarks/peers/results.py benchmarks/peers/results/*.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TITLES = {
    "worker-killed": "a worker is killed",
    "worker-hung": "a worker hangs",
    "node-lost": "a node is lost",
    "node-sigterm": "a node gets SIGTERM",
    "node-joins": "a node joins",
}
FIGURES = {"pause": "pause", "whole": "until the world is whole", "again": "steps done again"}


def table(found: Mapping[str, Any]) -> str:
    """The medians, least and greatest figures of a result, by event and launcher."""
    names = list(found["versions"])
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for event, title in TITLES.items():
        runs = {name: runs_of(found, event, name) for name in names}
        if not any(runs.values()):
            continue
        for key, text in FIGURES.items():
            cells = (cell(runs[name], key, found["limit"]) for name in names)
            lines.append(f"| {title}: {text} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def joined(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several results as one, as if all had been measured in one run."""
    return {
        "limit": results[0]["limit"],
        "versions": results[0]["versions"],
        "measured": [one for found in results for one in found["measured"]],
    }


def runs_of(found: Mapping[str, Any], event: str, who: str) -> list[dict[str, float]]:
    """The figures of each run; none for a training that did not begin."""
    return [one["figures"] or {} for one in found["measured"] if (one["event"], one["who"]) == (event, who)]


def cell(runs: Sequence[Mapping[str, float]], key: str, limit: float) -> str:
    """Median and range; how many runs had no figure."""
    if not runs:
        return "-"
    values = [run[key] for run in runs if key in run and (key != "again" or "pause" in run)]
    without = len(runs) - len(values)
    if not values:
        return f"none within {limit:g} s"
    show = (lambda x: f"{x:.0f}") if key == "again" else (lambda x: f"{x:.2f} s")
    text = show(statistics.median(values))
    if show(min(values)) != show(max(values)):
        text += f" ({show(min(values)).removesuffix(' s')}..{show(max(values)).removesuffix(' s')})"
    return text + (f"; none in {without} of {len(runs)}" if without else "")


if __name__ == "__main__":
    print(table(joined([json.loads(Path(name).read_text()) for name in sys.argv[1:]])))

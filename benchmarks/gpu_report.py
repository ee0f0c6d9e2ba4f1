"""Makes the Markdown page of what scripts/gpu-check has found from its JSON."""

from __future__ import annotations

from typing import Any

__all__ = ["markdown"]


def markdown(found: dict[str, Any]) -> str:
    """The page: a table of the parts, then each part with its tables and notes."""
    took = f"{found['seconds']:.0f} s of {found['limit']:.0f} s"
    rows = [[part["title"], part["state"], part["reason"], f"{part['seconds']:.0f} s"] for part in found["parts"]]
    lines = ["# GPU check", "", f"{found['date']}, {found['where']}; {took}.", ""]
    lines += table(["part", "state", "why", "took"], rows)
    for part in (part for part in found["parts"] if part["tables"] or part["notes"]):
        lines += ["", f"## {part['title']}"]
        for each in part["tables"]:
            lines += ["", *([f"{each['title']}:", ""] if each["title"] else []), *table(each["head"], each["rows"])]
        lines += [""] if part["notes"] else []
        lines += [f"- {' '.join(note.split())}" for note in part["notes"]]
    return "\n".join(lines) + "\n"


def table(head: list[str], rows: list[list[Any]]) -> list[str]:
    """A Markdown table; what is not there is a dash."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return lines + [f"| {' | '.join(map(cell, row))} |" for row in rows]


def cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    return " ".join(str(value).split()).replace("|", "\\|") if value not in (None, "") else "-"

"""Check that no line of the Markdown pages has more than 140 characters. Rows of tables may be longer.

    python scripts/check_pages.py [DIRECTORY]

The pages are those in the directory (the repository) and below it, without hidden directories and those that git
ignores. Each line that is too long is named as file:line, and the exit code is 1. The standard library only.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 140
IGNORED = {"build", "dist", "runs", "snapshots"}


def pages(root: Path) -> list[Path]:
    folders = [path for path in root.iterdir() if path.is_dir() and path.name[0] != "." and path.name not in IGNORED]
    return sorted([*root.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))])


def problems(root: Path) -> list[str]:
    return [
        f"{page.relative_to(root)}:{number}: {len(line)} characters; wrap the line at {LONGEST}"
        for page in pages(root)
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > LONGEST and not line.startswith("|")
    ]


if __name__ == "__main__":
    found = problems(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    for problem in found:
        print(problem, file=sys.stderr)
    sys.exit(1 if found else 0)

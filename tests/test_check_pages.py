"""make check names lines of the pages that are too long."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "check_pages.py"


def check(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_line_that_is_too_long_is_named(tmp_path: Path) -> None:
    (tmp_path / "docs" / "how-to").mkdir(parents=True)
    page = tmp_path / "docs" / "how-to" / "page.md"
    page.write_text("# Title\n\n" + "é" * 140 + "\n")
    assert (check(tmp_path).returncode, check(tmp_path).stderr) == (0, "")
    (tmp_path / "README.md").write_text("a" * 141 + "\n")
    page.write_text("# Title\n\n```sh\nmake " + "b" * 137 + "\n```\n")
    done = check(tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "README.md:1: 141 characters; wrap the line at 140",
        "docs/how-to/page.md:4: 142 characters; wrap the line at 140",
    ]


def test_rows_of_tables_and_what_git_ignores_may_have_longer_lines(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("| " + "a" * 200 + " |\n")
    for folder in (".venv", "build"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "page.md").write_text("a" * 200 + "\n")
    done = check(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_make_check_checks_the_pages_of_this_project() -> None:
    done = check()
    assert (done.returncode, done.stderr) == (0, "")
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert "scripts/check_pages.py" in recipe[1]

"""CI's commands end with the reason for a failure: the last lines may be all that a reader sees."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SKIPPED = "<testsuites><testcase name='a'><skipped message='no reason'/></testcase></testsuites>"


@pytest.mark.parametrize(
    ("recipe", "code", "end"),
    [
        ("echo fine", 0, ["ci: passed: make test"]),
        ("seq 99; echo why >&2; exit 3", 1, ["99", "why", "make: *** [Makefile:1: test] Error 3"]),
        (f'echo "{SKIPPED}" > build/junit-test.xml', 1, ["ci: failed: skips"]),
    ],
    ids=["passes", "fails", "skips"],
)
def test_the_end_of_what_a_failed_target_printed_is_repeated(
    tmp_path: Path, recipe: str, code: int, end: list[str]
) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    report = "@mkdir -p build; echo '<testsuites/>' > build/junit-test.xml"
    (tmp_path / "Makefile").write_text(f"test: ; {report}; {recipe}\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of a make test
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([".ci/run"], cwd=tmp_path, env=env, timeout=60, check=False, **told)
    assert done.returncode == code
    assert done.stdout.splitlines()[-len(end) :] == end
    assert done.stdout.count("\n98\n") == (2 if "seq" in recipe else 0)
    assert done.stdout.count("\n9\n") == (1 if "seq" in recipe else 0), "30 lines, not all"

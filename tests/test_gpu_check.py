"""scripts/gpu-check without a GPU: its page, what it reads of pytest, and a run with gloo."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmark() -> Iterator[Callable[[str], Any]]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module
    finally:
        del sys.path[0]


def test_the_page_has_the_state_of_each_part_and_its_tables(benchmark: Callable[[str], Any]) -> None:
    empty: dict[str, Any] = {"reason": "", "tables": [], "notes": []}
    rows = [["a|b", 0.01234, None, True], ["c", 12.345, "", False], ["d", 3.0, 4, "e\nf"]]
    table = {"title": "Seconds", "head": ["what", "x", "y", "z"], "rows": rows}
    parts = [
        {**empty, "title": "One", "state": "passed", "seconds": 1.4, "tables": [table], "notes": ["a\n note"]},
        {**empty, "title": "Two", "state": "skipped", "seconds": 0.0, "reason": "no GPU"},
    ]
    found = {"date": "2026-11-29", "where": "on a GPU", "seconds": 2.0, "limit": 480.0, "parts": parts}
    assert benchmark("gpu_report").markdown(found).splitlines() == [
        "# GPU check",
        "",
        "2026-11-29, on a GPU; 2 s of 480 s.",
        "",
        "| part | state | why | took |",
        "|---|---|---|---|",
        "| One | passed | - | 1 s |",
        "| Two | skipped | no GPU | 0 s |",
        "",
        "## One",
        "",
        "Seconds:",
        "",
        "| what | x | y | z |",
        "|---|---|---|---|",
        "| a\\|b | 0.0123 | - | yes |",
        "| c | 12.35 | - | no |",
        "| d | 3 | 4 | e f |",
        "",
        "- a note",
    ]


def test_the_states_of_tests_are_read_of_one_process_and_of_several(benchmark: Callable[[str], Any]) -> None:
    lines = [
        "tests/a.py::test_one[x y] PASSED   [ 50%]",
        "[gw1] [ 66%] FAILED tests/b.py::test_two[no live] ",
        "FAILED tests/b.py::test_two[no live] - AssertionError",
        "tests/c.py::test_three ",
    ]
    found = benchmark("gpu_check").results(lines)
    assert found == [("tests/a.py::test_one[x y]", "PASSED"), ("tests/b.py::test_two[no live]", "FAILED")]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_all_parts_pass_with_gloo(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu-check"), str(tmp_path), "--on-cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    parts = {part["name"]: part for part in json.loads((tmp_path / "gpu-check.json").read_text())["parts"]}
    assert {name for name, part in parts.items() if part["state"] != "passed"} == {"tests"}, done.stdout
    weights, changes = parts["faults"]["tables"]
    assert [row[-1] for row in weights["rows"]] == [True]
    assert [row[3] for row in changes["rows"]] == ["killed", "frozen", "lost", "joins", "leaves"]
    for name in ("steps", "standstills", "probe", "snapshots"):
        assert all(isinstance(row[-1], float) or row[-1] is None for row in parts[name]["tables"][0]["rows"]), name
        assert parts[name]["tables"][0]["rows"], name
    assert (tmp_path / "gpu-check.md").read_text() == done.stdout.removesuffix("\n")


@pytest.mark.slow
def test_without_a_gpu_parts_are_skipped_and_say_why(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu-check"), str(tmp_path), "--only", "faults", "tests"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| skipped | no GPU that torch can use;") == 2

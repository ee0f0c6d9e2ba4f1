"""The benchmarks run with their smallest settings, and write results that can be read again."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from harness import SLOWNESS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(800)]


def run(program: str, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / program), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300 * SLOWNESS)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def measured(program: str, result: Path, *options: str) -> dict[str, dict[str, Any]]:
    """Run it and return its rows by scenario and key."""
    run(program, "--runs", "1", "--json", str(result), *options)
    found = json.loads(result.read_text())
    assert found["runs"] == 1
    return {f"{row['scenario']}.{row['key']}": row for row in found["rows"]}


def test_a_killed_worker_is_measured_with_both_launchers_and_shown(tmp_path: Path) -> None:
    result, page, picture = tmp_path / "faults.json", tmp_path / "page.md", tmp_path / "chart.svg"
    who = ("--who", "ours", "--who", "ours-plain", "--who", "torchrun")
    limit = ("--timeout", str(round(90 * SLOWNESS)))
    rows = measured("faults.py", result, "--cold", "--only", "worker-killed", *who, *limit)
    step, new = rows["worker-killed.step"], rows["worker-killed.new"]
    for who in ("ours", "ours-plain", "torchrun"):
        assert 0 < step["medians"][who] <= new["medians"][who]
    assert new["ratio"] == pytest.approx(new["medians"]["ours"] / new["medians"]["torchrun"])
    assert 0 <= rows["worker-killed.lost"]["medians"]["torchrun"] <= 11, "it saves every ten steps"

    phases = json.loads(result.read_text())["phases"]["worker-killed"]
    parts = {name: values[0] for name, values in phases["ours-plain"].items()}
    before = sum(parts[name] for name in ("detect", "stop", "form", "start"))
    assert before == pytest.approx(parts["until begin"])
    assert sum(parts.values()) - before == pytest.approx(new["medians"]["ours-plain"])
    assert "until begin" in phases["torchrun"]
    assert "detect" not in phases["torchrun"], "nothing is known of it"

    page.write_text("before\n<!-- generated: faults -->\nold\n<!-- end of generated: faults -->\nafter\n")
    shown = run("faults.py", "--show", str(result), "--markdown", str(page), "--chart", str(picture))
    text = page.read_text()
    assert f"{new['medians']['ours']:.2f} s" in text
    assert shown.splitlines()[0] in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "![medians](chart.svg)" in text
    bars = ElementTree.fromstring(picture.read_text()).findall("{http://www.w3.org/2000/svg}rect")
    assert len(bars) == 1 + 3, "the background, and three contenders of one row with a goal"


@pytest.mark.soak
def test_a_planned_change_costs_the_library_no_step(tmp_path: Path) -> None:
    rows = measured("faults.py", tmp_path / "faults.json", "--cold", "--only", "scale-up", "--who", "ours")
    assert rows["scale-up.lost"]["figures"] == {"ours": [0]}
    assert rows["scale-up.lost"]["met"] is True
    assert rows["scale-up.new"]["ratio"] is None


@pytest.mark.soak
def test_the_memory_of_an_agent_is_measured_without_its_workers(tmp_path: Path) -> None:
    options = ["--cold", "--only", "footprint", "--who", "ours", "--watch", "1"]
    rows = measured("faults.py", tmp_path / "faults.json", *options)
    assert rows["footprint.processes"]["medians"]["ours"] >= 2, "the agent and its guard"
    assert 10 < rows["footprint.memory"]["medians"]["ours"] <= rows["footprint.peak"]["medians"]["ours"]
    assert rows["footprint.cpu"]["medians"]["ours"] >= 0


@pytest.mark.soak
def test_a_standstill_is_measured_with_and_without_live_rounds(tmp_path: Path) -> None:
    options = ["--cold", "--only", "killed", "--start", "1", "--workers", "2", "--who", "ours", "--who", "no-live"]
    rows = measured("live.py", tmp_path / "live.json", *options)
    assert 0.9 < rows["killed-1.standstill"]["medians"]["no-live"] < rows["killed-1.whole"]["medians"]["no-live"]
    assert rows["killed-1.kept"]["figures"]["no-live"] == [0]
    assert rows["killed-1.starts"]["figures"]["no-live"] == [2]
    assert rows["killed-1.next"]["medians"]["ours"] > 0


@pytest.mark.soak
def test_goodput_counts_the_steps_that_were_kept(tmp_path: Path) -> None:
    options = ["--schedule", "kill-4", "--schedule", "node-4", "--schedule", "none", "--seconds", "6", "--who", "ours"]
    rows = measured("goodput.py", tmp_path / "goodput.json", *options)
    for schedule, faults in (("kill-4", 1), ("node-4", 1), ("none", 0)):
        assert rows[f"{schedule}.faults"]["figures"] == {"ours": [faults]}
        assert rows[f"{schedule}.kept"]["medians"]["ours"] > 10
        assert 0 < rows[f"{schedule}.with launch"]["medians"]["ours"] < rows[f"{schedule}.goodput"]["medians"]["ours"]
        assert 0 < rows[f"{schedule}.loss"]["medians"]["ours"] < 2
    assert rows["none.again"]["figures"] == {"ours": [0]}
    assert rows["kill-4.goodput"]["medians"]["ours"] < rows["none.goodput"]["medians"]["ours"] <= 101


@pytest.mark.soak
def test_snapshots_and_copies_to_slow_storage_are_found(tmp_path: Path) -> None:
    options = ["--width", "64", "--sleep", "0.05", "--steps", "40"]
    options += ["--copy-steps", "200", "--every", "80", "--delay", "0.5"]
    rows = measured("snapshots.py", tmp_path / "snapshots.json", *options)
    assert rows["memory.taken"]["medians"]["ours"] >= 1
    assert rows["memory.off"]["medians"]["ours"] > 0
    assert rows["copies.copies"]["medians"]["ours"] >= 1
    assert rows["copies.within"]["medians"]["ours"] <= rows["copies.longest"]["medians"]["ours"]


@pytest.mark.soak
def test_what_watching_costs_is_measured_while_it_is_read(tmp_path: Path) -> None:
    rows = measured("watching.py", tmp_path / "watching.json", "--steps", "60")
    assert rows["watched.off"]["medians"]["ours"] > 0.045
    assert rows["watched.on"]["medians"]["ours"] > 0.045
    assert rows["watched.cpu-on"]["medians"]["ours"] >= 0
    assert rows["watched.cpu-added"]["figures"]["ours"]


@pytest.mark.soak
def test_a_sharded_model_is_measured_through_changes_of_the_world(tmp_path: Path) -> None:
    options = ["--width", "64", "--steps", "60", "--sleep", "0.04"]
    rows = measured("sharded.py", tmp_path / "sharded.json", *options)
    for who in ("ours", "torchrun"):
        assert 0.02 < rows["steps.step"]["medians"][who] < 5
    assert rows["steps.taken"]["medians"]["ours"] >= 1
    for change in ("grow", "shrink"):
        assert rows[f"resize.{change}-lost"]["figures"] == {"ours": [0]}
        # Half of the state: parameters and two moments in float32.
        assert rows[f"resize.{change}-least"]["medians"]["ours"] == pytest.approx(3 * 4 * 6 * 64**2 / 2**20 / 2)
        assert rows[f"resize.{change}-times"]["medians"]["ours"] > 1
        standstill, whole = (rows[f"resize.{change}-{key}"]["medians"]["ours"] for key in ("standstill", "whole"))
        assert 0 < standstill < whole


@pytest.mark.soak
def test_steps_until_corruption_is_found_are_counted() -> None:
    shown = run("verified.py", "--runs", "1", "--blocks", "1", "--steps", "5", "--width", "16", "--accumulate", "1")
    rows = {row.split("|")[1].strip(): row.split("|")[2].strip() for row in shown.splitlines() if row.startswith("| ")}
    assert [*rows] == ["share verified", "100 %", "10 %", "1 %", "0.1 %", "0 %"]
    assert (rows["0 %"], rows["100 %"]) == ("never", "1 (1..1)")


@pytest.mark.soak
def test_the_readmes_picture_is_that_of_a_run_of_both_launchers(tmp_path: Path) -> None:
    shown = run("survival.py", str(tmp_path / "picture.svg"))
    assert shown.count("\n| ") == 5
    assert "to the bit" in (tmp_path / "picture.svg").read_text()

"""The alert rules, by promtool, with what Prometheus would read from agents every 15 s."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_launch.events import types as ev
from elastic_launch.observe.metrics import NodeMetrics
from elastic_launch.observe.present import Present
from elastic_launch.shared_progress import STEP_BOUNDS

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool of the Debian package prometheus"),
]

RULES = Path(__file__).parents[2] / "examples" / "monitoring" / "alerts.yaml"

PER_MINUTE = 4
"""Scrapes; examples/monitoring/prometheus.yaml has one every 15 s."""

TRAINS = Present(
    "running", 1, 2, 4, 2, step=0, total=100_000, restarts=0, max_restarts=3, ranks=(0, 1), round_steps=0,
    members=(("a", 2), ("b", 2)),
)  # fmt: skip
PLAIN = replace(TRAINS, step=None, total=0, round_steps=None)


class Node:
    """What Prometheus reads from a node's agent."""

    def __init__(self) -> None:
        self.metrics = NodeMetrics("r", "a", "0.0.1")
        self.now = Present("starting")
        self.series: dict[str, list[str]] = {}
        self.scrapes = 0
        self.steps(0)
        self.wait(1)

    def wait(self, minutes: float, *, steps: int = 0) -> None:
        """Let time pass, with so many steps between two scrapes."""
        for _ in range(round(minutes * PER_MINUTE)):
            if steps:
                self.steps(steps)
            shown = {}
            for family in text_string_to_metric_families(
                self.metrics.text(self.now, leads=True, goodput=None).decode()
            ):
                for sample in family.samples:
                    labels = ",".join(f"{name}={json.dumps(value)}" for name, value in sample.labels.items())
                    shown[f"{sample.name}{{{labels}}}"] = str(sample.value)
            self._add(shown)

    def steps(self, number: int) -> None:
        done = sum(self.now.durations) + number
        durations = (0, done, *(0,) * (len(STEP_BOUNDS) - 1))
        step, of_round = self.now.step, self.now.round_steps
        self.now = replace(self.now, durations=durations)
        if step is not None and of_round is not None:
            self.now = replace(self.now, step=step + number, round_steps=of_round + number)

    def becomes(self, present: Present) -> None:
        self.now = replace(present, durations=self.now.durations)

    def is_gone(self, minutes: int) -> None:
        """Let time pass without an agent."""
        for _ in range(minutes * PER_MINUTE):
            self._add({})

    def _add(self, shown: dict[str, str]) -> None:
        for name in shown:
            self.series.setdefault(name, ["_"] * self.scrapes)
        for name, values in self.series.items():
            values.append(shown.get(name) or ("_" if values[-1] in ("_", "stale") else "stale"))
        self.scrapes += 1


def compiles_at_its_start(node: Node) -> None:
    node.becomes(TRAINS)
    node.wait(30)
    node.wait(5, steps=3)


def compiles_after_it_is_resumed(node: Node) -> None:
    node.becomes(replace(TRAINS, step=5000))
    node.wait(30)
    node.wait(5, steps=3)


def compiles_after_a_change(node: Node) -> None:
    node.becomes(TRAINS)
    node.wait(5, steps=3)
    node.becomes(replace(node.now, phase="waiting"))
    node.wait(2)
    node.becomes(replace(node.now, phase="running", round=2, round_steps=0))
    node.wait(30)
    node.wait(5, steps=3)


def stands_still(node: Node) -> None:
    node.becomes(TRAINS)
    node.wait(5, steps=3)
    node.wait(15)


def never_does_a_step(node: Node) -> None:
    node.becomes(TRAINS)
    node.wait(65)


def lacks_nodes(node: Node) -> None:
    node.becomes(TRAINS)
    node.wait(5, steps=3)
    node.becomes(replace(node.now, phase="waiting"))
    node.wait(75)


def plain_script_dies(node: Node) -> None:
    node.becomes(PLAIN)
    node.wait(5)
    node.metrics.add(ev.WorkerExited(1, 0, 0, 10, 1, 3.0, False))
    node.wait(1)
    node.is_gone(10)


def plain_script_is_done(node: Node) -> None:
    node.becomes(PLAIN)
    node.wait(5)
    node.is_gone(20)


def worker_is_stopped_by_its_agent(node: Node) -> None:
    node.becomes(PLAIN)
    node.wait(5)
    node.metrics.add(ev.WorkerExited(1, 0, 0, 10, -15, 3.0, True))
    node.wait(5)


def training_is_done(node: Node) -> None:
    node.becomes(TRAINS)
    node.wait(5, steps=3)
    node.becomes(replace(node.now, phase="finished", remaining=0.0))
    node.wait(1)
    node.is_gone(20)


def training_is_gone(node: Node) -> None:
    node.becomes(replace(TRAINS, remaining=600.0))
    node.wait(5, steps=3)
    node.is_gone(5)


def has_a_straggler(node: Node) -> None:
    node.becomes(TRAINS)
    node.wait(5, steps=3)
    node.metrics.add(ev.StragglerFound(1, 2, "b", "compute", 2.0, 3.0))
    node.wait(5, steps=3)


def computes_wrong(node: Node) -> None:
    node.becomes(TRAINS)
    node.wait(5, steps=3)
    node.metrics.add(ev.CorruptionFound(1, 20, (1,), ("b",), 3))
    node.wait(5, steps=3)


@pytest.mark.parametrize(
    ("run", "alerts"),
    [
        (compiles_at_its_start, ()),
        (compiles_after_it_is_resumed, ()),
        (compiles_after_a_change, ()),
        (stands_still, ("ElasticLaunchNoProgress",)),
        (never_does_a_step, ("ElasticLaunchNoFirstStep",)),
        (lacks_nodes, ("ElasticLaunchParked",)),
        (plain_script_dies, ("ElasticLaunchWorkerFailed",)),
        (plain_script_is_done, ()),
        (worker_is_stopped_by_its_agent, ()),
        (training_is_done, ()),
        (training_is_gone, ("ElasticLaunchRunGone",)),
        (has_a_straggler, ("ElasticLaunchStraggler",)),
        (computes_wrong, ("ElasticLaunchCorruption",)),
    ],
)
def test_a_run_raises_these_alerts_and_no_others(
    tmp_path: Path, run: Callable[[Node], None], alerts: tuple[str, ...]
) -> None:
    node = Node()
    run(node)
    until = f"{node.scrapes * 60 // PER_MINUTE}s"
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in alerts]
    fired = f'group by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}[{until}]))'
    test = {
        "interval": f"{60 // PER_MINUTE}s",
        "input_series": [{"series": name, "values": " ".join(values)} for name, values in node.series.items()],
        "promql_expr_test": [{"expr": fired, "eval_time": until, "exp_samples": expected}],
    }
    path = tmp_path / "test.yaml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

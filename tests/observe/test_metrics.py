"""A node's metrics in Prometheus' format, and what uses them: the documentation, the alerts and the dashboard."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from elastic_agents.policy_types import Phase
from elastic_launch.errors import UsageError
from elastic_launch.events import types as ev
from elastic_launch.observe.chronicle import Chronicle
from elastic_launch.observe.ledger import PARTS, build
from elastic_launch.observe.metrics import PHASES, NodeMetrics, all_metrics
from elastic_launch.observe.present import Present
from elastic_launch.rendezvous.leader.verdict import Kind
from elastic_launch.system.host_load import HostLoad

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "monitoring.md"
EXAMPLES = ROOT / "examples" / "monitoring"

METRICS = all_metrics()

NAME = re.compile(r"elastic_launch_[a-z_]+")
BY = re.compile(r"\bby \(([^)]*)\)")


def metrics() -> NodeMetrics:
    return NodeMetrics("r", "a", "0.0.1")


def values(found: NodeMetrics, present: Present, goodput: float | None = None) -> dict[str, float]:
    """Samples by name and labels other than the run's and the node's, each of which must have both."""
    shown = {}
    for family in text_string_to_metric_families(found.text(present, leads=True, goodput=goodput).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("run_id"), labels.pop("node")) == ("r", "a")
            more = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            shown[f"{sample.name}{{{more}}}" if more else sample.name] = sample.value
    return shown


def test_a_node_that_starts_shows_what_is_known() -> None:
    shown = values(metrics(), Present("starting"))
    assert shown["elastic_launch_phase{phase=starting}"] == 1
    assert shown["elastic_launch_phase{phase=running}"] == 0
    assert shown["elastic_launch_info{version=0.0.1}"] == 1
    assert shown["elastic_launch_nodes_lost_total"] == 0, "so that the first one is seen to rise"
    for kind in Kind:
        for name in ("restarts_charged", "incidents"):
            assert shown[f"elastic_launch_{name}_total{{kind={kind.text}}}"] == 0
        for how in ("broken", "drained"):
            assert shown[f"elastic_launch_rounds_ended_total{{how={how},kind={kind.text}}}"] == 0
    assert shown["elastic_launch_notices_total{kind=maintenance,source=GCP}"] == 0
    unknown = {
        "step",
        "round_steps",
        "total_steps",
        "remaining_seconds",
        "snapshot_step",
        "checkpoint_step",
        "goodput_ratio",
        "host_cpu_ratio",
    }
    unknown |= {"restarts", "max_restarts"}  # a budget of 0 would look as if it were used up
    assert not {f"elastic_launch_{name}" for name in unknown} & shown.keys()


def test_a_node_that_trains_shows_its_progress() -> None:
    steps = {"steps_s": 6.5, "durations": (0, 0, 0, 100, 28, *(0,) * 9, 1, 1)}
    load = HostLoad(51, 3 << 30, 8 << 30)
    present = Present("running", 3, 2, 8, 4, 120, 500, 38.0, 130, 6.5, 118, 1, 3, **steps, load=load)
    shown = values(metrics(), present, goodput=0.9)
    expected = {
        "round": 3, "nodes": 2, "world_size": 8, "workers": 4, "step": 120, "total_steps": 500, "remaining_seconds": 38,
        "step_seconds_count": 130, "step_seconds_sum": 6.5, "snapshot_step": 118, "restarts": 1, "max_restarts": 3,
        "goodput_ratio": 0.9, "leads": 1, "host_cpu_ratio": 0.51, "host_memory_used_bytes": 3 << 30,
        "host_memory_bytes": 8 << 30,
    }  # fmt: skip
    assert {name: shown[f"elastic_launch_{name}"] for name in expected} == expected
    buckets = {bound: shown[f"elastic_launch_step_seconds_bucket{{le={bound}}}"] for bound in ("0.025", "0.05", "0.1")}
    assert buckets == {"0.025": 0, "0.05": 100, "0.1": 128}
    assert shown["elastic_launch_step_seconds_bucket{le=300.0}"] == 129
    assert shown["elastic_launch_step_seconds_bucket{le=+Inf}"] == 130


def test_a_reading_after_others_has_what_the_first_one_would_have() -> None:
    found, first = metrics(), metrics()
    steps = {"steps_s": 6.5, "durations": (0, 0, 0, 100, 28, *(0,) * 9, 1, 1)}
    for present in (Present("starting"), Present("running", 1, 1, 2, 2, 4, 9), Present("waiting", 1, **steps)):
        for one in found, first:
            one.add(ev.WorkerStarted(1, 0, 0, 4711, "first", 0.1))
        last = found.text(present, leads=True, goodput=0.5)
    assert last == first.text(present, leads=True, goodput=0.5)
    assert list(METRICS) == [line.split()[2] for line in last.decode().splitlines() if line.startswith("# TYPE")]


def test_a_snapshot_has_the_time_at_which_it_was_first_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found, times = metrics(), iter([1000.0, 1020.0])
    monkeypatch.setattr("elastic_launch.observe.metrics.time.time", lambda: next(times))
    seen = [values(found, Present("running", snapshot=step)) for step in (7, 7, 9)]
    assert [shown["elastic_launch_snapshot_timestamp_seconds"] for shown in seen] == [1000, 1000, 1020]


def test_a_world_that_does_not_train_has_no_size() -> None:
    shown = values(metrics(), Present("waiting", 3, 2, 8, round_steps=5))
    names = ("world_size", "nodes", "round_steps")
    assert [shown[f"elastic_launch_{name}"] for name in names] == [0, 0, 0]


def test_events_are_counted() -> None:
    found = metrics()
    for event in (
        ev.RoundFormed(1, 1, ("a", "b"), 2, 0, "first", 2.0),
        ev.WorkerStarted(1, 0, 0, 10, "first", 0.1),
        ev.WorkerExited(1, 0, 0, 10, 1, 3.0, False),
        ev.WorkerExited(1, 1, 1, 11, -15, 3.0, True),
        ev.RoundBroken(1, "crash", "rank 0", 20.0, ""),
        ev.RestartCharged(1, "crash", 1, 3, ""),
        ev.RoundFormed(2, 1, ("a",), 1, 1, "rank 0", 1.0),
        ev.RoundDrained(2, 7, "membership", "resize", 0.1, ""),
        ev.NodeLost("b", "silent", 5.0, 0, ""),
        ev.NoticeReceived("AWS", "preemption", "spot", 120.0, True),
        ev.StragglerFound(2, 1, "b", "data", 2.0, 0.5),
        ev.CorruptionFound(2, 7, (1,), ("b",), 0),
        ev.CheckpointSaved(2, 7, "/c"),
    ):
        found.add(event)
    shown = values(found, Present("running"))
    assert shown["elastic_launch_rounds_formed_total"] == 2
    assert shown["elastic_launch_rounds_ended_total{how=broken,kind=crash}"] == 1
    assert shown["elastic_launch_rounds_ended_total{how=drained,kind=membership}"] == 1
    assert shown["elastic_launch_restarts_charged_total{kind=crash}"] == 1
    assert shown["elastic_launch_nodes_lost_total"] == 1
    assert shown["elastic_launch_corruption_total"] == 1
    assert shown["elastic_launch_worker_failures_total"] == 1, "the stopped one did not fail"
    assert shown["elastic_launch_notices_total{kind=preemption,source=AWS}"] == 1
    assert shown["elastic_launch_stragglers_total{host=normal,phase=data,slow_node=b}"] == 1
    assert (shown["elastic_launch_checkpoint_step"], shown["elastic_launch_checkpoints_total"]) == (7, 1)
    assert shown["elastic_launch_checkpoint_timestamp_seconds"] > 1.7e9


def test_the_first_straggler_of_a_node_raises_a_counter_that_was_there() -> None:
    found = metrics()
    members = (("a", 1), ("b", 1))
    name = "elastic_launch_stragglers_total{host=overloaded,phase=compute,slow_node=b}"
    assert name not in values(found, Present("running", members=members, ranks=(1,))), (
        "another node tells of stragglers"
    )
    present = Present("running", members=members, ranks=(0,))
    assert values(found, present)[name] == 0
    found.add(ev.StragglerFound(1, 1, "b", "compute", 2.0, 3.0))
    assert values(found, present)[name] == 1


def test_the_parts_of_incidents_add_up() -> None:
    chronicle, found = Chronicle(), metrics()
    for at, event in (
        (10.0, ev.RoundFormed(1, 1, ("a",), 1, 0, "first", 1.0)),
        (10.1, ev.WorkerStarted(1, 0, 0, 10, "first", 0.1)),
        (12.0, ev.TrainingBegun(1, 0, 0, 50, 0.0)),
        (13.0, ev.FirstStep(1, 1)),
        (29.5, ev.WorkerExited(1, 0, 0, 10, -9, 3.0, False)),
        (30.0, ev.RoundBroken(1, "crash", "rank 0", 20.0, "")),
        (30.0, ev.RoundSteps(1, 0, 9, 16.0)),
        (31.0, ev.RoundFormed(2, 1, ("a",), 1, 1, "rank 0", 1.0)),
        (31.5, ev.WorkerStarted(2, 0, 0, 12, "rank 0", 0.1)),
        (33.0, ev.TrainingBegun(2, 0, 5, 50, 0.5)),
        (34.0, ev.FirstStep(2, 6)),
    ):
        chronicle.add(at, event)
    (incident,) = build(chronicle).incidents
    found.over(incident)
    shown = values(found, Present("running"))
    parts = [shown[f"elastic_launch_incident_seconds_total{{phase={part.removesuffix('_s')}}}"] for part in PARTS]
    assert sum(parts) == pytest.approx(incident.still_s)
    assert shown["elastic_launch_incidents_total{kind=crash}"] == 1
    assert shown["elastic_launch_lost_steps_total"] == 4


def test_labels_may_have_any_characters() -> None:
    name = 'no"de\n\\x'
    text = NodeMetrics("r", name, "1").text(Present("waiting"), leads=False, goodput=None).decode()
    nodes = {s.labels["node"] for family in text_string_to_metric_families(text) for s in family.samples}
    assert nodes == {name}


def test_every_phase_is_one_of_the_metric() -> None:
    assert {phase.value for phase in Phase} <= set(PHASES)


def test_without_the_package_the_flag_and_the_remedy_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match="--http needs the package prometheus_client") as refused:
        metrics()
    assert "elastic-launch[monitoring]" in refused.value.hint


def test_the_page_shows_every_metric_and_every_field_of_a_status() -> None:
    shown = re.findall(r"^\| `(elastic_launch_\w+)(?:\{([\w,]+)\})?` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    expected = [(name, ",".join(kind.labels), kind.help) for name, kind in METRICS.items()]
    assert sorted(shown) == sorted(expected)
    by_name = {name: "counter" if name.endswith("_total") else "gauge" for name in METRICS}
    by_name["elastic_launch_step_seconds"] = "histogram"
    assert {name: kind.type for name, kind in METRICS.items()} == by_name
    status = PAGE.read_text().split("## The status")[1].split("\n## ")[0]
    rows = [name for row in re.findall(r"^\| (`.*?) \|", status, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert rows == [item.name for item in fields(Present)]


def expressions() -> list[str]:
    rules = [
        rule for group in yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
    ]
    panels = json.loads((EXAMPLES / "dashboard.json").read_text())["panels"]
    return [*(rule["expr"] for rule in rules), *(target["expr"] for panel in panels for target in panel["targets"])]


@pytest.mark.parametrize("expression", expressions())
def test_alerts_and_dashboard_use_metrics_and_labels_that_exist(expression: str) -> None:
    series = {"histogram": ("_bucket", "_count", "_sum")}
    known = {f"{name}{suffix}" for name, kind in METRICS.items() for suffix in series.get(kind.type, ("",))}
    used = NAME.findall(expression)
    assert used
    assert set(used) <= known
    labels = {"run_id", "node"} | {"le" for name in used if name.endswith("_bucket")}
    labels |= {label for name in used for label in METRICS[re.sub(r"_(bucket|count|sum)$", "", name)].labels}
    grouped = {label.strip() for found in BY.findall(expression) for label in found.split(",")}
    chosen = set(re.findall(r"[{,](\w+)=~?\"", expression))
    assert grouped | chosen <= labels
    assert expression.count("(") == expression.count(")")


def test_no_alert_takes_a_budget_of_one_restart_for_a_low_one_before_it_is_charged() -> None:
    (low,) = [expression for expression in expressions() if "max_restarts) -" in expression and "<=" in expression]
    assert low.endswith("<= 1 and max by (run_id) (elastic_launch_restarts) > 0")


def test_the_page_names_every_alert() -> None:
    rules = [
        rule for group in yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
    ]
    assert re.findall(r"^\| `(ElasticLaunch\w+)` \|", PAGE.read_text(), re.MULTILINE) == [
        rule["alert"] for rule in rules
    ]

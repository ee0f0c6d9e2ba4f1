"""torch's metrics for a Python caller: elastic_agents.calls.metrics."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from torch.distributed.elastic import metrics
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.metrics.api import MetricData, MetricHandler, NullMetricHandler

from elastic_agents.calls.metrics import Meter, MetricPipe, Monitor, put_results, wanted
from elastic_launch.events.types import Event, OrderReceived, WorkerExited, WorkerKept, WorkerPlaced, WorkerStarted


class Kept(MetricHandler):
    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def emit(self, metric_data: MetricData) -> None:
        self.found.append((metric_data.name, metric_data.value))


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    metrics.configure(handler, "torchelastic")
    yield handler
    metrics.configure(NullMetricHandler(), "torchelastic")


def order(kind: str, number: int, workers: int = 2) -> Event:
    return OrderReceived(kind, number, 1, "why", workers=workers if kind == "form" else 0)


def started(local_rank: int) -> Event:
    return WorkerStarted(1, local_rank, local_rank, 100 + local_rank, "first", 0.0)


def exited(local_rank: int, code: int, *, stopped: bool = False) -> Event:
    return WorkerExited(1, local_rank, local_rank, 100 + local_rank, code, 1.0, stopped)


def test_a_restart_is_measured_from_the_first_failure() -> None:
    now, said = 10.0, list[object]()
    meter = Meter(lambda: now, lambda name, value: said.append((name, value)), said.append)

    def after(seconds: float, *events: Event) -> list[object]:
        nonlocal now
        now += seconds
        said.clear()
        for event in events:
            meter.hear(event)
        return [one for one in said if isinstance(one, str) or one[0].endswith(".ms")]  # type: ignore[index]

    simple, local = "SimpleElasticAgent.{}.duration.ms".format, "LocalElasticAgent.{}.duration.ms".format
    assert after(2, order("form", 1)) == [(simple("_rendezvous"), 2000)]
    begun = [(local("_start_workers"), 1000), (simple("_initialize_workers"), 3000), "healthy"]
    assert after(1, started(0), started(1)) == begun
    assert ("LocalElasticAgent._start_workers.success", 1) in said
    assert after(5, exited(0, -9)) == ["failed"]
    assert after(1, order("break", 1), exited(1, -15, stopped=True)) == [(local("_stop_workers"), 1000)]
    assert after(0.5, order("form", 2)) == [(simple("_rendezvous"), 500)]
    assert after(0.25, started(0), started(1)) == [
        *[(local("_start_workers"), 250), (simple("_initialize_workers"), 750), (simple("_restart_workers"), 1750)],
        "healthy",
    ]
    assert after(1, exited(1, 0)) == []
    assert after(1, exited(0, 0), order("end", 2)) == ["succeeded"]


def test_a_kept_worker_takes_part_like_one_that_was_started() -> None:
    said: list[object] = []
    meter = Meter(lambda: 0.0, lambda name, value: None, said.append)
    round_one = (order("form", 1), started(0), started(1), exited(0, -9), order("break", 1))
    for event in (*round_one, order("form", 2), WorkerKept(2, 1, 1, 101), started(0), exited(0, 0), exited(1, 0)):
        meter.hear(event)
    assert said == ["healthy", "failed", "healthy", "succeeded"]


def test_a_worker_that_starts_ahead_counts_once_it_has_a_place() -> None:
    said: list[object] = []
    meter = Meter(lambda: 0.0, lambda name, value: None, said.append)
    lost = (order("form", 1), started(0), started(1), exited(0, -9), order("break", 1))
    without = (order("form", 2, 1), WorkerKept(2, 0, 1, 101), WorkerStarted(0, None, 0, 102, "ahead", 0.0))
    for event in (*lost, *without):
        meter.hear(event)
    assert said == ["healthy", "failed", "healthy"]
    joined = (order("drain", 2), order("form", 3), WorkerKept(3, 1, 1, 101))
    for event in (WorkerExited(0, None, 0, 102, -9, 1.0, False), *joined):
        meter.hear(event)
    assert said[3:] == [""]
    for event in (WorkerPlaced(3, 0, 0, 103), exited(0, 0), exited(1, 0)):
        meter.hear(event)
    assert said[4:] == ["healthy", "succeeded"]


def test_a_round_that_others_break_has_no_failure_here() -> None:
    said: list[object] = []
    meter = Meter(lambda: 0.0, lambda name, value: said.append(name), said.append)
    for event in (order("form", 1, 1), started(0), order("drain", 1), order("break", 1), exited(0, -15, stopped=True)):
        meter.hear(event)
    assert [one for one in said if "." not in str(one)] == ["healthy", ""]
    assert said.count("LocalElasticAgent._stop_workers.success") == 1


def test_a_state_is_repeated_at_each_interval_while_workers_are_healthy(kept: Kept) -> None:
    assert wanted()
    source, tell = os.pipe()
    try:
        pipe, monitor = MetricPipe(tell), Monitor(source, "r", 0.05)
        pipe.put("a.duration.ms", 7)
        pipe.put("healthy", 3)
        assert monitor.pause is None
        monitor.put()
        healthy = [("workers.r.remaining_restarts", 3), ("workers.r.healthy", 1)]
        assert kept.found == [("a.duration.ms", 7), *healthy]
        monitor.put()
        assert monitor.pause is not None
        time.sleep(monitor.pause + 0.01)
        monitor.put()
        assert kept.found.count(healthy[1]) == 2
        pipe.put("succeeded", 3)
        monitor.put()
        assert kept.found[-1] == ("workers.r.succeeded", 1)
        assert monitor.pause is None
    finally:
        os.close(source)
        os.close(tell)


def test_a_caller_that_does_not_read_loses_metrics_and_delays_nothing(caplog: pytest.LogCaptureFixture) -> None:
    source, tell = os.pipe()
    try:
        pipe = MetricPipe(tell)
        for number in range(10_000):
            pipe.put("some.metric.duration.ms", number)
        assert caplog.text.count("metrics are dropped") == 1
    finally:
        os.close(source)
        os.close(tell)


@pytest.mark.parametrize(
    ("state", "restarts", "flakiness", "outcome"),
    [
        (WorkerState.SUCCEEDED, 0, 0, "run_success_no_retries"),
        (WorkerState.SUCCEEDED, 1, 25, "run_success_with_retries"),
        (WorkerState.FAILED, 3, 100, "run_failed_with_retries"),
    ],
)
def test_the_end_is_judged_as_torch_judges_it(
    kept: Kept, state: WorkerState, restarts: int, flakiness: int, outcome: str
) -> None:
    put_results("r", RunResult(state), restarts, 3)
    found = dict(kept.found)
    assert found.pop("workers.r.flakiness") == flakiness
    assert found.pop("workers.r.run_total") == 1
    assert found == {
        f"workers.r.{name}": int(name == outcome)
        for kind in ("success", "failed")
        for name in (f"run_{kind}_with_retries", f"run_{kind}_no_retries")
    }

"""A node's metrics for Prometheus.

Names and units follow https://prometheus.io/docs/practices/naming/. Each node serves its own metrics. Counters of the
leader's decisions rise on the node that leads; sum them over the nodes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, product
from typing import TYPE_CHECKING, NamedTuple

from elastic_launch.errors import UsageError
from elastic_launch.events import types as ev
from elastic_launch.observe.ledger import PARTS, RoundIncident
from elastic_launch.observe.present import Present
from elastic_launch.shared_progress import STEP_BOUNDS

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

PHASES = (
    *("starting", "waiting", "running", "held", "draining", "suspended", "stopping", "saving"),
    *("finished", "over", "leaving", "ended"),
)


class _Kind(NamedTuple):
    """A metric.

    Attributes:
        labels: those in addition to the run's id and the node's, and the values that each can have, if known.
        of: the value of a gauge without labels, given how the node is; None if it is not known.
    """

    type: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = {}
    of: Callable[[Present], float | None] | None = None


def _gauge(help: str, of: Callable[[Present], float | None]) -> _Kind:
    return _Kind("gauge", help, {}, of)


_PHASE_OF = {part.removesuffix("_s"): part for part in PARTS}


def _trains(present: Present) -> bool:
    return present.phase in ("running", "draining")


METRICS = {
    "elastic_launch_info": _Kind("gauge", "1; the label is the version of elastic-launch.", {"version": ()}),
    "elastic_launch_phase": _Kind(
        "gauge", "1 for the phase that the node's agent is in, 0 for the others.", {"phase": PHASES}
    ),
    "elastic_launch_ended": _gauge(
        "1 if the run has ended, or the node's part of it, else 0.", lambda p: p.end is not None
    ),
    "elastic_launch_exit_code": _gauge(
        "Exit code, once elastic_launch_ended is 1.", lambda p: p.end.code if p.end else None
    ),
    "elastic_launch_leads": _Kind("gauge", "1 if the node made the run's last decision, else 0."),
    "elastic_launch_round": _gauge("Number of the current or last round.", lambda p: p.round),
    "elastic_launch_nodes": _gauge("Nodes in the round that trains; 0 if none does.", lambda p: _trains(p) * p.nodes),
    "elastic_launch_world_size": _gauge(
        "Workers in the round that trains; 0 if none does.", lambda p: _trains(p) * p.world_size
    ),
    "elastic_launch_workers": _gauge("The node's own workers that run.", lambda p: p.workers),
    "elastic_launch_step": _gauge("Optimizer steps done; it falls when steps are repeated.", lambda p: p.step),
    "elastic_launch_total_steps": _gauge(
        "Optimizer steps of the whole training, if that is known.", lambda p: p.total or None
    ),
    "elastic_launch_remaining_seconds": _gauge(
        "Time until the training ends at this pace, if that is known.", lambda p: p.remaining
    ),
    "elastic_launch_round_steps": _gauge(
        "Optimizer steps done in the round that trains; 0 if none does.",
        lambda p: None if p.round_steps is None else _trains(p) * p.round_steps,
    ),
    "elastic_launch_step_seconds": _Kind(
        "histogram", "Optimizer steps of the node's workers, repeated ones included, each from the end of the last."
    ),
    "elastic_launch_snapshot_step": _gauge("Steps in the newest snapshot in the node's memory.", lambda p: p.snapshot),
    "elastic_launch_snapshot_timestamp_seconds": _Kind(
        "gauge", "When the newest snapshot was first seen in the node's memory, in Unix time."
    ),
    "elastic_launch_checkpoint_step": _Kind("gauge", "Steps in the last durable checkpoint that the node wrote."),
    "elastic_launch_checkpoint_timestamp_seconds": _Kind(
        "gauge", "When the node's last durable checkpoint was committed, in Unix time."
    ),
    "elastic_launch_restarts": _gauge("Restarts charged to the run's budget.", lambda p: p.restarts),
    "elastic_launch_max_restarts": _gauge("The budget: restarts that may be charged.", lambda p: p.max_restarts),
    "elastic_launch_host_cpu_ratio": _gauge(
        "Share of the time of the host's CPUs in which they were not idle.",
        lambda p: p.load.cpu / 100 if p.load else None,
    ),
    "elastic_launch_host_memory_used_bytes": _gauge(
        "Memory in use on the host, or in the container if that has a limit.", lambda p: p.load.used if p.load else None
    ),
    "elastic_launch_host_memory_bytes": _gauge(
        "Memory of the host, or the container's limit if that is lower.", lambda p: p.load.total if p.load else None
    ),
    "elastic_launch_incidents_total": _Kind(
        "counter", "Incidents that are over, on the leader's node.", {"kind": (*ev.ROUND_ENDS, "unknown")}
    ),
    "elastic_launch_incident_seconds_total": _Kind(
        "counter",
        "Time for which training stood still in incidents, by the ledger's parts.",
        {"phase": tuple(_PHASE_OF)},
    ),
    "elastic_launch_lost_steps_total": _Kind("counter", "Steps that had to be repeated after incidents."),
    "elastic_launch_goodput_ratio": _Kind("gauge", "Share of the time in steps that were kept, on the leader's node."),
}
"""The metrics that no single event counts, by name."""


def all_metrics() -> dict[str, _Kind]:
    """Return all metrics by name, those that events declare last; each also has the labels ``run_id`` and ``node``."""
    counters = [kind.counter for kind in ev.KINDS.values() if kind.counter]
    return METRICS | {f"elastic_launch_{x.name}": _Kind("counter", x.help, x.labels) for x in counters}


_RUN = ("run_id", "node")

_Values = dict[tuple[str, ...], float]


class NodeMetrics:
    """Collects a node's metrics from its events. Thread-safe, but for :meth:`text`.

    Raises:
        UsageError: if the package prometheus_client is missing.
    """

    def __init__(self, run_id: str, node: str, version: str) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise UsageError(
                f"--http needs the package prometheus_client: {error}.",
                "Install it with: pip install 'elastic-launch[monitoring]'.",
            ) from error
        self._run = (run_id, node)
        self._version = version
        self._metrics = all_metrics()
        self._lock = threading.Lock()
        # By name, then by the values of the labels. Those that are known are there from the start, with 0: Prometheus'
        # increase() does not see the first rise of a series that was not there before.
        self._counters: dict[str, _Values] = {
            name: dict.fromkeys(product(*kind.labels.values()), 0.0)
            for name, kind in self._metrics.items()
            if kind.type == "counter"
        }
        self._checkpoint: tuple[int, float] | None = None
        self._present = Present("starting")
        self._snapshot = 0.0  # when the newest one was first seen
        self._leads = False
        self._goodput: float | None = None
        self._registry: CollectorRegistry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def add(self, event: ev.Event) -> None:
        counter = event.counter
        if counter is not None and (not counter.when or getattr(event, counter.when)):
            self._count(f"elastic_launch_{counter.name}", *(str(getattr(event, label)) for label in counter.labels))
        if isinstance(event, ev.CheckpointSaved):
            self._checkpoint = event.step, time.time()

    def over(self, incident: RoundIncident) -> None:
        """Count an incident that is over."""
        count = self._count
        count("elastic_launch_incidents_total", incident.kind)
        count("elastic_launch_lost_steps_total", by=incident.lost_steps or 0)
        for phase, part in _PHASE_OF.items():
            count("elastic_launch_incident_seconds_total", phase, by=getattr(incident, part) or 0.0)

    def _count(self, name: str, *labels: str, by: float = 1.0) -> None:
        with self._lock:
            values = self._counters[name]
            values[labels] = values.get(labels, 0.0) + by

    def see(self, present: Present) -> None:
        """Note how this node is; called about once a second, from any thread."""
        if present.snapshot != self._present.snapshot:
            self._snapshot = time.time()
        self._present = present
        if 0 in present.ranks:  # this node tells which ranks are slow
            name = "elastic_launch_stragglers_total"
            known = {**self._metrics[name].labels, "slow_node": tuple(node for node, _ in present.members)}
            with self._lock:
                self._counters[name] = dict.fromkeys(product(*known.values()), 0.0) | self._counters[name]

    def text(self, present: Present, *, leads: bool, goodput: float | None) -> bytes:
        """Return all metrics in Prometheus' text format.

        Args:
            present: how this node is.
            leads: whether it made the run's last decision.
            goodput: see :mod:`elastic_launch.observe.ledger`.
        """
        from prometheus_client import generate_latest

        self.see(present)
        self._leads, self._goodput = leads, goodput
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics; called by the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        with self._lock:
            found = self._gauges() | {name: dict(values) for name, values in self._counters.items()}
        for name, kind in self._metrics.items():
            labels = [*_RUN, *kind.labels]
            if kind.type == "histogram":
                histogram = HistogramMetricFamily(name, kind.help, labels=labels)
                counts = zip(
                    (*map(str, STEP_BOUNDS), "+Inf"),
                    accumulate(self._present.durations or (0,) * (len(STEP_BOUNDS) + 1)),
                    strict=True,
                )
                histogram.add_metric(self._run, list(counts), self._present.steps_s)
                yield histogram
                continue
            made = CounterMetricFamily if kind.type == "counter" else GaugeMetricFamily
            family = made(name, kind.help, labels=labels)
            for more, value in found.get(name, {}).items():
                family.add_metric([*self._run, *more], value)
            yield family

    def _gauges(self) -> dict[str, _Values]:
        present = self._present
        known = {name: kind.of(present) for name, kind in self._metrics.items() if kind.of}
        known["elastic_launch_leads"] = float(self._leads)
        known["elastic_launch_goodput_ratio"] = self._goodput if self._leads else None
        if present.snapshot is not None:
            known["elastic_launch_snapshot_timestamp_seconds"] = self._snapshot
        if self._checkpoint is not None:
            step, at = self._checkpoint
            known |= {"elastic_launch_checkpoint_step": step, "elastic_launch_checkpoint_timestamp_seconds": at}
        found: dict[str, _Values] = {name: {(): value} for name, value in known.items() if value is not None}
        found["elastic_launch_info"] = {(self._version,): 1.0}
        found["elastic_launch_phase"] = {(phase,): float(phase == present.phase) for phase in PHASES}
        return found

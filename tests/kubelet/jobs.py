"""The job controller: which pods exist, and what follows from the end of a pod.

As documented in https://kubernetes.io/docs/concepts/workloads/controllers/job/ (completion mode Indexed, pod failure
policy, back-off limit per index, success policy, pod replacement policy, elastic indexed jobs).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from kubelet.manifests import Manifest

__all__ = ["IndexedJob", "Runs", "decide"]

BACK_OFF, LONGEST_BACK_OFF = 10.0, 360.0
"""Seconds before a pod that counted as failed is replaced: the initial value, doubled each time, and the maximum."""


class Runs(Protocol):
    """A started pod."""

    exit_code: int | None
    disrupted: bool

    def turn(self) -> None: ...
    def terminate(self) -> None: ...


def decide(spec: Manifest, exit_code: int, *, disrupted: bool) -> str:
    """Return what the pod failure policy does about a failed pod: the first matching rule decides, otherwise it counts.

    Args:
        spec: the job's.
        exit_code: of the pod's only container, not 0.
        disrupted: whether the pod has the condition DisruptionTarget: evicted, preempted, or its node lost.
    """
    (container,) = spec["template"]["spec"]["containers"]
    for rule in spec["podFailurePolicy"]["rules"]:
        if any(_meets(pattern, disrupted) for pattern in rule.get("onPodConditions", ())):
            return str(rule["action"])
        if codes := rule.get("onExitCodes"):
            assert codes.get("containerName", container["name"]) == container["name"]
            if (exit_code in codes["values"]) is (codes["operator"] == "In"):
                return str(rule["action"])
    return "Count"


def _meets(pattern: Manifest, disrupted: bool) -> bool:
    assert pattern == {"type": "DisruptionTarget", "status": "True"}, "the only one that this stands in for"
    return disrupted


class IndexedJob:
    """Keeps one pod running for each index until the job is over.

    Args:
        spec: the job's.
        create: starts the pod of an index.
        haste: factor by which it backs off faster than Kubernetes.
    """

    def __init__(self, spec: Manifest, create: Callable[[int], Any], haste: float = 100.0) -> None:
        assert spec["completionMode"] == "Indexed"
        assert spec["podReplacementPolicy"] == "Failed"
        self._spec, self._create, self._haste = spec, create, haste
        self.pods: dict[int, Any] = {}
        self.failures: Counter[int] = Counter()
        self.decisions: list[tuple[int, int, str]] = []
        """Index, exit code and decision, in order."""
        self.succeeded: set[int] = set()
        self.failed: set[int] = set()
        """Indexes whose pods are not replaced any more."""
        self.over = ""
        """``Complete`` or ``Failed`` once that is decided; pods may still be ending."""
        self._due = dict.fromkeys(range(spec["completions"]), 0.0)

    def resize(self, pods: int) -> None:
        """Change completions and parallelism together; pods with higher indexes are ended, and not replaced."""
        known = {*self.pods, *self._due, *self.succeeded}
        self._spec |= {"completions": pods, "parallelism": pods}
        self._due = {index: due for index, due in self._due.items() if index < pods}
        self._due |= {index: 0.0 for index in range(pods) if index not in known}
        for index, pod in self.pods.items():
            if index >= pods:
                pod.terminate()

    def turn(self) -> None:
        """Check all pods once, and do what is due."""
        for index, pod in list(self.pods.items()):
            pod.turn()
            if pod.exit_code is not None:
                del self.pods[index]
                self._ended(index, pod)
        for index, due in list(self._due.items()):
            if not self.over and time.monotonic() >= due:
                del self._due[index]
                self.pods[index] = self._create(index)

    def _ended(self, index: int, pod: Any) -> None:
        if self.over or index >= self._spec["completions"]:
            return
        if pod.exit_code == 0:
            self.succeeded.add(index)
            if self._is_success():
                self._end("Complete")
            return
        decision = decide(self._spec, pod.exit_code, disrupted=pod.disrupted)
        self.decisions.append((index, pod.exit_code, decision))
        if decision == "FailJob":
            self._end("Failed")
        elif decision == "FailIndex":
            self._fail(index)
        elif decision == "Ignore":
            self._due[index] = 0.0
        else:
            self._count(index)

    def _count(self, index: int) -> None:
        self.failures[index] += 1
        limit = self._spec["backoffLimitPerIndex"]
        if self.failures[index] <= limit:
            wait = min(BACK_OFF * 2 ** (self.failures[index] - 1), LONGEST_BACK_OFF)
            self._due[index] = time.monotonic() + wait / self._haste
        else:
            self._fail(index)

    def _fail(self, index: int) -> None:
        self.failed.add(index)
        none_left = len(self.failed) + len(self.succeeded) >= self._spec["completions"]
        if none_left or len(self.failed) > self._spec["maxFailedIndexes"]:
            self._end("Failed")

    def _is_success(self) -> bool:
        if len(self.succeeded) == self._spec["completions"]:
            return True
        return any(map(self._is_met, self._spec.get("successPolicy", {}).get("rules", ())))

    def _is_met(self, rule: Manifest) -> bool:
        named = rule.get("succeededIndexes")
        counted = {int(index) for index in named.split(",")} if named else {*range(self._spec["completions"])}
        return len(counted & self.succeeded) >= rule.get("succeededCount", len(counted))

    def _end(self, how: str) -> None:
        self.over = how
        for pod in self.pods.values():
            pod.terminate()

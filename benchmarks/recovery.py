"""Breaks down the time from a fault, or a change, to the next step.

The script's lines show its own phases, for any launcher; the events of the node named ``host`` show the phases before
that, for elastic-launch only.
"""

from __future__ import annotations

from jobs import Figures, Job, Record, life

__all__ = ["PHASES", "Before", "launched", "recovered"]

PHASES = (
    "detect",
    "stop",
    "form",
    "start",
    "until begin",
    "import",
    "init",
    "build, restore",
    "first step",
    "new step",
)
"""In order; ``until begin`` is the sum of those before it, which are known for elastic-launch only."""

MARKS = ("begin", "imported", "initialized", "restored")
"""The marks of a script that has reached its first step."""

NOTICED = ("worker_exited", "node_lost", "round_broken")


class Before:
    """The processes that trained before a fault or a change, in the rounds until then."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.lives = {life(record) for record in job.steps.read()}

    def last(self) -> Record:
        """Their last step; valid only once others train."""
        return max(
            (record for record in self._job.steps.read() if life(record) in self.lives and record["step"]),
            key=lambda record: (record["step"], record["clock"]),
        )


def launched(job: Job, began: float, world: int = 2) -> Figures:
    """The first start of a run: from the launcher's start to rank 0's script and first step."""
    first = job.step(0, world)
    marks = _marks(job, first["pid"])
    moments = {"until begin": marks["begin"], **_own_phases(marks), "first step": first["clock"]}
    return {"begin": marks["begin"] - began, "step": first["clock"] - began, **_durations(began, moments)}


def recovered(job: Job, before: Before, world: int | None, fault: float | None) -> Figures:
    """The time until a world of the given size trained.

    Args:
        world: None: of any size.
        fault: when it happened; None: a planned change, counted from the last step before it.

    Returns:
        seconds to the start of rank 0's next script, to its first step and to the first new step; ``lost``: earlier
        steps that were repeated; phases. If the process was kept, its script does not start again, and has no phases.
    """
    first = _later_step(job, before, world)
    last = before.last()
    since = last["clock"] if fault is None else fault
    new = _later_step(job, before, world, last["step"] + 1)
    marks = _marks(job, first["pid"])
    figures = {
        "step": first["clock"] - since,
        "new": new["clock"] - since,
        "lost": float(last["step"] - first["step"] + 1),
    }
    if marks["begin"] < since:
        return figures
    moments = {
        **_launcher_phases(job.events("host"), since, marks["begin"], planned=fault is None),
        "until begin": marks["begin"],
        **_own_phases(marks),
        "first step": first["clock"],
        "new step": new["clock"],
    }
    return {"begin": marks["begin"] - since, **figures, **_durations(since, moments)}


def _later_step(job: Job, before: Before, world: int | None, at_least: int = 1) -> Record:
    if world is not None:
        return job.step(0, world, at_least, other_than=before.lives)
    return job.until(
        f"rank 0 to do step {at_least} after the change",
        lambda x: x["rank"] == 0 and x["step"] >= at_least and life(x) not in before.lives,
    )


def _marks(job: Job, pid: int) -> dict[str, float]:
    lines = [record for record in job.steps.read() if record["pid"] == pid and record["step"] == 0]
    found = {record["mark"]: record["clock"] for record in lines}
    return {mark: found[mark] for mark in MARKS}


def _own_phases(marks: dict[str, float]) -> dict[str, float]:
    return {
        "import": marks["imported"],
        "init": marks["initialized"],
        "build, restore": marks["restored"],
    }


def _launcher_phases(events: list[Record], since: float, begin: float, *, planned: bool) -> dict[str, float]:
    """Ends of elastic-launch's phases until the script starts; empty for a launcher without events."""
    within = [event for event in events if since < event["clock"] < begin]
    formed = [event["clock"] for event in within if event["event"] == "round_formed"]
    if not formed:
        return {}
    noticed = [event["clock"] for event in within if event["event"] in NOTICED]
    exits = [event["clock"] for event in within if event["event"] == "worker_exited" and event["clock"] < formed[-1]]
    detected = since if planned or not noticed else noticed[0]
    return {
        "detect": detected,
        "stop": max(exits, default=detected),
        "form": formed[-1],
        "start": begin,
    }


def _durations(since: float, moments: dict[str, float]) -> Figures:
    """Seconds from each moment to the next; the script's start is counted from the very first."""
    durations, at = {}, since
    for name in PHASES:
        if name not in moments:
            continue
        moment = max(at, moments[name])
        durations[f"phase {name}"] = moment - (since if name == "until begin" else at)
        at = moment
    return durations

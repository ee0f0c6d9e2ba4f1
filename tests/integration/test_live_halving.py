"""``micro="auto"`` is halved while another rank is killed: all ranks go on with the same micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Job, read_lines


def run(job: Job, name: str, *options: str) -> list[dict[str, Any]]:
    """Run the training to its end; return what its ranks noted, in their order."""
    work = Path(job.work) / name
    work.mkdir()
    command = [str(SCRIPTS / "halving.py"), str(work), *options]
    agent = job.launch("--standalone", "--nproc", "3", name=name, command=command)
    assert agent.wait(100) == 0, agent.output
    return sorted(read_lines(work / "results.jsonl"), key=lambda result: result["rank"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "incidents"),
    [
        ("gives-up", [1, 2]),
        pytest.param("knows", [1, 1], marks=pytest.mark.soak),
        pytest.param("later", [1, 1], marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_runs_out_of_memory_keeps_its_process_if_another_is_killed(
    job: Job, when: str, incidents: list[int]
) -> None:
    undisturbed, *_ = run(job, "undisturbed")
    assert undisturbed["incidents"] == [["out of memory", 5]]
    results = run(job, when, when)
    assert "ended with signal 9 (SIGKILL)" in job.agents[-1].output
    assert {(result["hash"], result["micro"]) for result in results} == {(undisturbed["hash"], 4)}
    kept = {event["rank"]: event["pid"] for event in job.events("worker_kept")}
    assert kept == {0: results[0]["pid"], 1: results[1]["pid"]}
    seen = [[kind for kind, _ in result["incidents"]].count("out of memory") for result in results[:2]]
    assert seen == incidents, "a rank that the others could not hear runs out of memory again"
    if when == "later":
        assert results[2]["incidents"] == [["restart", 8]], "a new process begins with the size that was found"

"""Rounds that end while a ``Trainer`` evaluates: no evaluation is lost, none counts twice, and the hash stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Job, read_lines, run_script

SCRIPT = str(SCRIPTS / "evaluating.py")
EVALUATED = [5, 10, 15, 18]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("undisturbed")
    run_script(SCRIPT, str(directory))
    (result,) = read_lines(directory / "results.jsonl")
    assert [step for step, _ in result["evaluations"]] == EVALUATED
    return result


def run(job: Job, *flags: str, options: list[str]) -> list[dict[str, Any]]:
    """Run the training to its end; return what its last processes noted, those that were kept first."""
    agent = job.launch("--standalone", *flags, command=[SCRIPT, str(job.work), *options])
    assert agent.wait(100) == 0, agent.output
    kept = [event["pid"] for event in job.events("worker_kept")]
    return sorted(read_lines(job.work / "results.jsonl"), key=lambda result: result["pid"] not in kept)


def begun(job: Job, round_number: int) -> list[int]:
    """The steps after which rank 0 began an evaluation in a round."""
    notes = read_lines(Path(job.work) / "begun.jsonl")
    return [note["step"] for note in notes if note["round"] == round_number and note["rank"] == 0]


def assert_same(results: list[dict[str, Any]], undisturbed: dict[str, Any]) -> None:
    for result in results:
        assert [result[key] for key in ("hash", "rate", "history")] == [
            undisturbed[key] for key in ("hash", "rate", "history")
        ]


def test_an_evaluation_that_a_kill_breaks_begins_again_in_the_next_round(job: Job, undisturbed: dict[str, Any]) -> None:
    kept, new = run(job, "--nproc", "2", options=["--die-in-evaluation", "1:10:1"])
    assert_same([kept, new], undisturbed)
    assert (kept["steps"], kept["rounds"]) == (list(range(1, 19)), [0, 10])
    assert kept["evaluations"] == undisturbed["evaluations"]
    assert new["evaluations"] == undisturbed["evaluations"][1:]
    assert (begun(job, 1), begun(job, 2)) == ([5, 10], [10, 15, 18])


def test_a_callback_that_fails_with_the_words_of_a_broken_connection_is_the_cause(job: Job) -> None:
    agent = job.launch("--standalone", "--max-restarts", "0", command=[SCRIPT, str(job.work), "--fail", "5"])
    assert agent.wait(100) != 0, agent.output
    assert "RuntimeError: Connection closed by peer: the tracker" in agent.output
    (broken,) = job.events("round_broken")
    assert broken["round"] == 1
    assert not job.events("worker_kept")


def test_a_run_that_ends_in_an_evaluation_saves_the_step_before_it(job: Job, undisturbed: dict[str, Any]) -> None:
    options = ["--checkpoint", str(job.directory / "checkpoints")]
    failing = job.launch(
        "--standalone", "--max-restarts", "0", command=[SCRIPT, str(job.work), "--fail", "10", *options]
    )
    assert failing.wait(100) != 0, failing.output
    assert len(list((job.directory / "checkpoints").glob("step-10.*"))) == 1, failing.output
    (result,) = run(job, options=options)
    assert_same([result], undisturbed)
    assert (result["rounds"], result["evaluations"]) == ([10], undisturbed["evaluations"][1:])


@pytest.mark.slow
def test_a_rank_that_has_an_evaluation_which_others_lack_takes_part_in_it_again(
    job: Job, undisturbed: dict[str, Any]
) -> None:
    options = ["--torn", "10", "--die-in-step", "1:11:2"]
    first, second, new = run(job, "--nproc", "3", options=options)
    assert_same([first, second, new], undisturbed)
    for kept in (first, second):
        assert kept["steps"] == list(range(1, 19))
        assert kept["evaluations"] == undisturbed["evaluations"], "each once"
    assert new["steps"] == list(range(11, 19))
    assert begun(job, 2) == [10, 15, 18]


@pytest.mark.slow
def test_after_a_restart_only_an_evaluation_that_has_not_ended_is_done_again(
    job: Job, undisturbed: dict[str, Any]
) -> None:
    options = ["--die-in-evaluation", "1:10:1", "--die-in-step", "2:11:1"]
    results = run(job, "--no-live", "--nproc", "2", options=options)
    assert_same(results, undisturbed)
    assert [begun(job, number) for number in (1, 2, 3)] == [[5, 10], [10], [15, 18]]
    for result in results:
        assert (result["rounds"], result["steps"]) == ([10], list(range(11, 19))), "no step is lost"
        assert result["evaluations"] == undisturbed["evaluations"][2:]


@pytest.mark.slow
def test_the_snapshot_before_an_evaluation_has_the_weights_of_training_mode(job: Job) -> None:
    (job.work / "alone").mkdir()
    run_script(SCRIPT, str(job.work / "alone"), "--merge")
    (undisturbed,) = read_lines(job.work / "alone" / "results.jsonl")
    results = run(job, "--no-live", "--nproc", "2", options=["--merge", "--die-in-evaluation", "1:10:1"])
    assert_same(results, undisturbed)
    assert [result["rounds"] for result in results] == [[10], [10]], "no step is lost"

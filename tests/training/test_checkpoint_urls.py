"""Checkpoints behind URLs in real runs, with a real S3 server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Agent, Job, run_script, wait_for
from s3_server import BUCKET, S3Server, s3_server

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits" / "train.py")
SHORT = ["--epochs", "1", "--exact"]  # 23 steps
LONG = ["--epochs", "8"]  # 184
URL = f"s3://{BUCKET}/runs/a"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def s3(server: S3Server) -> S3Server:
    """The server, with an empty bucket."""
    server.remove_bucket()
    server.make_bucket()
    return server


def digits(job: Job, url: str, *options: str) -> list[str]:
    """A command that is slow until :func:`hurry`."""
    paced = [str(SCRIPTS / "paced.py"), str(job.directory / "hurry"), DIGITS, *SHORT, "--step-time", "0.5"]
    return [*paced, "--checkpoint", url, "--result", str(job.directory / "result.json"), *options]


def hurry(job: Job) -> None:
    (job.directory / "hurry").touch()


def launch(job: Job, server: S3Server, *options: str, name: str = "agent", nproc: int = 1, url: str = URL) -> Agent:
    """A launch without restarts: what fails is seen once."""
    flags = ["--standalone", "--nproc", str(nproc), "--max-restarts", "0", "--rdzv-id", f"run-{name}"]
    return job.launch(*flags, command=digits(job, url, *options), name=name, env=server.env)


def result_of(job: Job) -> dict[str, Any]:
    return dict(json.loads((job.directory / "result.json").read_text()))


def manifests(server: S3Server) -> list[str]:
    """Names of the checkpoints in the bucket."""
    return [
        key.split("/")[2] for key in server.objects() if key.startswith("runs/a/") and key.endswith("/manifest.json")
    ]


@pytest.mark.slow
def test_a_run_whose_nodes_are_all_killed_resumes_in_another_run_from_s3(job: Job, s3: S3Server) -> None:
    alone = job.directory / "alone.json"
    run_script(DIGITS, *SHORT, "--result", str(alone))

    command = digits(job, URL, "--every", "4")
    nodes = [job.node(name, nnodes="2:2", command=command, env=s3.env) for name in ("a", "b")]
    wait_for("a checkpoint", lambda: manifests(s3), 60)
    for node in nodes:
        node.kill()
    hurry(job)
    saved = manifests(s3)
    assert launch(job, s3, "--every", "4", name="second").wait(100) == 0, job.agents[-1].output

    result = result_of(job)
    assert result["resumed_step"] == max(int(name.split(".")[0].removeprefix("step-")) for name in saved)
    assert result["weights_sha256"] == json.loads(alone.read_text())["weights_sha256"]
    assert result["worlds"] == [2, 1]
    assert any(name.startswith("step-23.") for name in manifests(s3)), "the last one is awaited"
    assert len(manifests(s3)) <= 3


@pytest.mark.slow
def test_a_bucket_that_vanishes_is_reported_and_training_continues(job: Job, s3: S3Server) -> None:
    # Few steps, since each failed copy takes long on a busy machine; slow ones, so that most are left then.
    agent = launch(job, s3, "--step-time", "3", "--every", "1", nproc=2)
    wait_for("a checkpoint", lambda: manifests(s3), 60)
    s3.remove_bucket()
    agent.says(f"Could not write a checkpoint in {URL}: FileNotFoundError: The specified bucket does not exist", 60)
    agent.says("Training goes on.", 60)
    hurry(job)
    assert agent.wait(100) == 93, agent.output
    assert "Tried again in 0.5 s" in agent.output
    failed = f"The last checkpoint, of step 23, could not be saved in {URL}: Could not write a checkpoint in"
    assert failed in agent.output.partition("exit code 93: ")[2]
    assert result_of(job)["steps"] == 23


@pytest.mark.slow
def test_a_missing_bucket_is_reported_on_all_ranks_before_the_first_step(job: Job, server: S3Server) -> None:
    server.remove_bucket()
    agent = launch(job, server, nproc=2)
    assert agent.wait(100) == 1, agent.output
    for rank in (0, 1):
        (errors,) = job.logged(f"round_1/{rank}/stderr.log")
        assert f"Could not write to {URL}: FileNotFoundError: The specified bucket does not exist" in errors.read_text()
    assert "loss" not in agent.output


@pytest.mark.slow
def test_refused_credentials_are_reported_on_all_ranks_before_the_first_step(job: Job) -> None:
    with s3_server(unchecked=1) as server:
        server.make_bucket()
        agent = launch(job, server, nproc=2)
        assert agent.wait(100) == 1, agent.output
    for rank in (0, 1):
        (errors,) = job.logged(f"round_1/{rank}/stderr.log")
        assert f"Could not list {URL}: PermissionError: The AWS Access Key Id you provided" in errors.read_text()
        assert "Check the credentials, and what they allow" in errors.read_text()
    assert "loss" not in agent.output


@pytest.mark.soak
def test_of_two_runs_that_save_to_one_url_the_later_one_does(job: Job, s3: S3Server) -> None:
    first = launch(job, s3, *LONG, "--every", "4", name="first")
    wait_for("a checkpoint", lambda: manifests(s3), 60)
    second = launch(job, s3, *LONG, "--every", "4", name="second")
    first.says("Two runs write to one directory", 60)
    hurry(job)
    assert [first.wait(100), second.wait(100)] == [93, 0], first.output
    assert f"{URL} was taken since by run 'run-second' on" in first.output
    assert "Two runs" not in second.output
    assert result_of(job)["steps"] == 184


@pytest.mark.slow
def test_the_memory_of_a_process_is_refused_where_others_copy_checkpoints(job: Job, server: S3Server) -> None:
    agent = launch(job, server, url="memory://runs/a")
    assert agent.wait(100) != 0
    assert "Checkpoints cannot be saved to memory://runs/a under elastic-launch" in agent.output
    assert "loss" not in agent.output


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [pytest.param("memory", marks=pytest.mark.soak), "s3"])
def test_without_an_agent_the_process_saves_itself(job: Job, s3: S3Server, scheme: str) -> None:
    hurry(job)
    command = [sys.executable, *digits(job, f"{scheme}://{BUCKET}/runs/a", "--every", "4")]
    done = subprocess.run(command, env={**os.environ, **s3.env}, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "checkpoint" not in done.stderr
    assert any(name.startswith("step-23.") for name in manifests(s3)) == (scheme == "s3")

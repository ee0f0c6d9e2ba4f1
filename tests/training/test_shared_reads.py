"""A checkpoint in a directory is read by one of the workers that share it, whatever happens to that worker."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from harness import SCRIPTS, Job

from elastic_launch import snapshot

SCRIPT = str(SCRIPTS / "reading.py")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two checkpoints of the script's model."""
    directory = tmp_path / "saved"
    for step in (1, 2):
        weights = {"weight": torch.full((500, 1000), float(step)), "bias": torch.zeros(500)}
        meta = {"identity": {}, "worlds": [1], "fingerprint": {}}
        snapshot.write(directory, {"model": weights}, step=step, round=1, meta=meta)
    return directory


def _asked(job: Job, saved: Path, *more: str) -> tuple[dict[int, int], set[str], str]:
    """Return how many bytes each of three workers has read, the hashes, and the output."""
    agent = job.launch(
        "--standalone", "--nproc", "3", "--max-restarts", "1", command=[SCRIPT, str(saved), "500", *more]
    )
    assert agent.wait(60) == 0, agent.output
    found = re.findall(r"rank (\d) asked for (\d+) bytes, weights (\w+)", agent.output)
    assert len(found) == 3, agent.output
    return {int(rank): int(size) for rank, size, _ in found}, {weights for _, _, weights in found}, agent.output


def test_three_workers_read_a_checkpoint_once(job: Job, saved: Path) -> None:
    """They also agree that the newest one is damaged, though only one has read it."""
    newest = snapshot.find(saved)[0].path
    (tensors,) = Path(str(newest)).glob("*.safetensors")
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    asked, hashes, output = _asked(job, saved)
    assert len(hashes) == 1
    assert asked[0] >= 2 * 2_000_000  # the damaged one, too
    assert asked[1] == asked[2] == 0
    assert output.count("a checkpoint is skipped") == 1


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["a", "ab"])
def test_a_run_whose_checkpoints_are_all_damaged_ends_at_once(job: Job, saved: Path, nodes: str) -> None:
    for checkpoint in snapshot.find(saved):
        os.truncate(Path(str(checkpoint.path)) / "manifest.json", 10)
    command = [SCRIPT, str(saved), "500"]
    agents = [job.node(name, nnodes=str(len(nodes)), nproc=2, command=command) for name in nodes]
    assert [agent.wait(100) for agent in agents] == [93] * len(nodes), agents[0].output
    for agent in agents:
        assert "is damaged: " in agent.output.partition("root cause: ")[2]
    assert len(job.events("round_formed")) == 1
    assert not job.events("restart_charged")


@pytest.mark.slow
def test_a_read_that_takes_longer_than_an_exchange_may_ends_no_worker(job: Job, saved: Path) -> None:
    asked, hashes, output = _asked(job, saved, "slow")
    assert len(hashes) == 1
    assert asked[0] >= 2_000_000
    assert "restarts: 0;" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("befalls", "cause"),
    [pytest.param("kill", "rank 0 .*signal 9 ", marks=pytest.mark.soak), ("hang", "made no progress for 3 s")],
)
def test_a_reader_that_dies_or_hangs_ends_the_wait_of_the_others(
    job: Job, saved: Path, befalls: str, cause: str
) -> None:
    """The next start reads again."""
    asked, hashes, output = _asked(job, saved, befalls)
    assert len(hashes) == 1
    assert asked[0] >= 2_000_000
    assert re.search(cause, output), output
    assert "restart 1 of 1" in output

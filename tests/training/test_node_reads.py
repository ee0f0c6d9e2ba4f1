"""A checkpoint in a directory is read once per node, whatever happens to the worker that reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from harness import SCRIPTS, Job

from elastic_launch import snapshot
from elastic_launch.snapshot.storage import shared_copies as copies_module
from elastic_launch.snapshot.storage.shared_copies import CopiedFiles, Copies
from elastic_launch.training.checkpoints import node_reads
from elastic_launch.training.ranks.world import World

SCRIPT = str(SCRIPTS / "reading.py")
STATE = {"weights": torch.arange(5000.0), "list": [torch.zeros(3, dtype=torch.bool), 7]}


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
    assert max(asked[1], asked[2]) < 100_000
    assert output.count("a checkpoint is skipped") == 1


@pytest.mark.slow
def test_workers_that_cannot_open_what_was_read_read_for_themselves(job: Job, saved: Path) -> None:
    asked, hashes, output = _asked(job, saved, "hide")
    assert len(hashes) == 1
    assert min(asked.values()) >= 2_000_000
    assert output.count("reads the checkpoint by itself") == 2


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


@pytest.mark.parametrize(
    ("found", "nodes"),
    [
        ([(1, 0, 2), (0, 1, 2), (1, 0, 1)], [[0, 1], [0, 1], [2]]),
        ([(1, 1, 2), (0, 3, 2), (1, 0, 1)], [[0, 1], [0, 1], [2]]),  # some of a node's workers
        ([(1, 0, 2), (1, 0, 2), (0, 1, 2), (0, 1, 2)], [[0], [1], [2], [3]]),  # one after the other
    ],
)
def test_the_workers_of_a_node_find_each_other(
    found: list[tuple[int, int, int]], nodes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tells whether it is the first on its node, its local rank, and the number of workers there."""

    def all_gather(gathered: list[torch.Tensor], mine: torch.Tensor) -> None:
        for target, numbers in zip(gathered, found, strict=True):
            target.copy_(torch.tensor(numbers))

    monkeypatch.setattr("torch.distributed.all_gather", all_gather)
    size = len(found)
    assert [node_reads._on_node(World(rank, size)) for rank in range(size)] == nodes


def test_what_was_read_is_the_same_in_another_process(saved: Path) -> None:
    """Opened by way of /proc, as another process does."""
    snapshot.write(saved, STATE, step=3, round=1, meta={"a": [1, (2, 3)]})
    copies = Copies()
    loaded = snapshot.newest(saved, copies=copies)
    assert loaded is not None
    info, state = CopiedFiles(json.loads(json.dumps(copies.told()))).load()
    assert info == loaded.info
    torch.testing.assert_close(state, STATE, rtol=0, atol=0)
    told = copies.told()
    copies.close()
    with pytest.raises(OSError, match="No such file"):
        CopiedFiles(told).load()


def test_without_room_nothing_is_kept_and_the_checkpoint_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "free_memory", lambda: 1_000_000)
    copies = Copies()
    loaded = snapshot.newest(saved, copies=copies)
    assert loaded is not None
    assert copies.info is None
    assert loaded.step == 2

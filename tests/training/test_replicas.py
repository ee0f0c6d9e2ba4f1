"""Ranks whose states differ are found, and stop the run before anything wrong is saved."""

from __future__ import annotations

import gc
import json
import re
import socket
from pathlib import Path

import pytest
import torch
from harness import SCRIPTS, Job, run_script
from torch import Tensor, nn

from elastic_launch import snapshot
from elastic_launch.training.checkpoints import saving
from elastic_launch.training.checkpoints.memory import Newest
from elastic_launch.training.checkpoints.state import TrainingState
from elastic_launch.training.engine import Engine
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks import checksum
from elastic_launch.training.ranks.checksum import checksums, combined
from elastic_launch.training.ranks.replicas import replicated
from elastic_launch.training.ranks.world import World

SCRIPT = str(SCRIPTS / "differing.py")
LARGE = checksum._CHUNK * 2 + 5


def _sum(*tensors: Tensor) -> int:
    return int(combined(checksums(tensors)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.uint8])
@pytest.mark.parametrize("size", [1, 7, LARGE])
def test_a_single_bit_always_changes_the_checksum(dtype: torch.dtype, size: int) -> None:
    tensor = torch.zeros(size, dtype=dtype)
    raw = tensor.view(torch.uint8)
    generator = torch.Generator().manual_seed(size)
    places = {0, size - 1, *torch.randint(size, (5,), generator=generator).tolist()}
    seen = {_sum(tensor)}
    for place in places:
        for bit in range(8 * tensor.element_size()):
            byte = place * tensor.element_size() + bit // 8
            raw[byte] ^= 1 << bit % 8
            seen.add(_sum(tensor))
            raw[byte] ^= 1 << bit % 8
    assert len(seen) == 1 + len(places) * 8 * tensor.element_size()


def test_signs_of_two_numbers_and_the_order_of_all_count() -> None:
    """A sum of words would miss both: the topmost bits of two cancel each other out."""
    numbers = torch.arange(1.0, 9.0, dtype=torch.float64)
    other = numbers.clone()
    other[[2, 5]] *= -1
    assert len({_sum(numbers), _sum(other), _sum(numbers.flip(0)), _sum(numbers[:4], numbers[4:])}) == 4
    grid = torch.randn(4, 6, dtype=torch.float64)
    assert _sum(grid.t()) == _sum(grid.t().contiguous())
    assert _sum(grid[:, 1:]) == _sum(grid[:, 1:].clone())
    assert _sum() == 0


def test_parameters_buffers_and_the_state_of_the_optimizer_are_compared() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    own = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam([*model.parameters(), own])
    (model(torch.randn(4, 2)).sum() * own).backward()
    optimizer.step()
    names = [name for name, _ in replicated(model, optimizer, ["1.running_var"])()]
    assert "parameter '0.bias'" in names
    assert "buffer '1.running_mean'" in names
    assert "buffer '1.running_var'" not in names
    assert "optimizer's exp_avg of '0.weight'" in names
    assert "parameter 4 of the optimizer" in names


def _alone(*flags: str) -> str:
    return re.findall(r"hash (\w+)", run_script(SCRIPT, *flags))[0]


@pytest.mark.slow
def test_a_bit_that_flips_on_one_rank_is_found_by_name_and_a_restart_cures_it(job: Job, tmp_path: Path) -> None:
    """In exact mode the weights are those of the undisturbed run."""
    flags = ["--exact", "--steps", "30"]
    fault = ["--at", "20", "--checkpoint", str(tmp_path / "saved")]
    agent = job.launch("--standalone", "--nproc", "3", "--max-restarts", "1", command=[SCRIPT, *flags, *fault])
    undisturbed = _alone(*flags)
    assert agent.wait(60) == 0, agent.output
    found = re.findall(r"After step (\d+) the ranks do not have the same parameter '0.weight': (.*)\.\n", agent.output)
    assert found, agent.output
    assert {where for _, where in found} == {"rank 1 differs from ranks 0, 2"}
    # It is compared before the checkpoint of step 24 at the latest.
    assert all(20 <= int(step) <= 24 for step, _ in found)
    assert "restart 1 of 1 (--max-restarts 1), charged for a crash" in agent.output
    ends = re.findall(r"hash (\w+) resumed (\d+) restarts 1", agent.output)
    assert [weights for weights, _ in ends] == [undisturbed] * 3, agent.output
    assert all(int(step) < 20 for _, step in ends)


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param("8", marks=pytest.mark.soak), "1h"])
def test_ranks_that_always_differ_end_the_run_and_nothing_wrong_is_saved(job: Job, tmp_path: Path, every: str) -> None:
    """Nor is it copied from memory as the run fails."""
    saved = tmp_path / "saved"
    fault = ["--at", "20", "--always", "--what", "2.bias", "--checkpoint", str(saved), "--every", every]
    agent = job.launch("--standalone", "--nproc", "2", "--max-restarts", "1", command=[SCRIPT, *fault])
    assert agent.wait(100) == 91, agent.output
    assert "the ranks do not have the same parameter '2.bias': ranks 0, 1 differ." in agent.output
    assert all(info.step < 20 for info in snapshot.find(saved))


@pytest.mark.parametrize(("compared", "equal"), [(False, 7), (True, 9)])
def test_a_restart_from_a_snapshot_that_was_not_compared_is_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compared: bool, equal: int
) -> None:
    """A difference between ranks of one node is lost by it. It is usual after a fault, and thus not a warning."""
    gc.collect()  # averages of other tests, about which it would be warned
    meta = {"worlds": [2], "identity": {}, "equal": (1, equal), "compared": compared}
    monkeypatch.setattr(saving, "newest", lambda *_: Newest((1, 9), 1, False, None, [0], True))
    monkeypatch.setattr(saving, "restore", lambda *_: ({}, meta))
    agent, worker = socket.socketpair()
    with agent, worker, caplog.at_level("INFO", "elastic_launch"):
        run = Engine(World(round=2), torch.device("cpu"), AgentLink(worker))
        assert run.restore(None, {}, TrainingState(), ()).step == 9
        run.begin(9)
        run.release()
        ready = json.loads(agent.makefile().readlines()[-1])
    assert (ready["type"], ready["uncompared"]) == ("ready", 0 if compared else 2)
    said = "training resumes from the snapshot of step 9 in memory; the ranks were last compared after step 7, and"
    assert [(said in record.message, record.levelname) for record in caplog.records] == (
        [] if compared else [(True, "INFO")]
    )


@pytest.mark.slow
def test_a_resume_reports_a_state_that_was_not_compared_before_the_run_failed(job: Job, tmp_path: Path) -> None:
    """One rank's memory has failed, and the run ends by another error before that is found."""
    saved = tmp_path / "saved"
    flags = ["--steps", "30", "--every", "1h", "--sleep", "0.05", "--checkpoint", str(saved)]
    fault = ["--at", "16", "--fail-at", "18"]
    agent = job.launch("--standalone", "--nproc", "2", "--max-restarts", "0", command=[SCRIPT, *flags, *fault])
    assert agent.wait(100) == 1, agent.output
    (info,) = snapshot.find(saved)
    assert info.meta["compared"] is False
    said = f"the checkpoint of step {info.step} was saved without a comparison of the ranks"
    assert said in agent.output
    again = job.launch("--standalone", "--nproc", "2", name="again", command=[SCRIPT, *flags])
    assert again.wait(100) == 0, again.output
    assert f"The checkpoint of step {info.step} in {info.path} was not compared among the ranks" in again.output
    newest = snapshot.find(saved)[0]
    assert (newest.step, newest.meta["compared"]) == (30, True)
    third = job.launch("--standalone", "--nproc", "2", name="third", command=[SCRIPT, *flags])
    assert third.wait(100) == 0, third.output
    assert "was not compared" not in third.output

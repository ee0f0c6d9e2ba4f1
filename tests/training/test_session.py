"""What a session sets and restores."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import SCRIPTS, Job
from torch import nn

import elastic_launch as el
from elastic_launch.errors import UsageError

SETTINGS = str(SCRIPTS / "guards" / "settings.py")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Non-default values, which show what is restored."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.backends.cudnn.benchmark = True
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = False
    assert not torch.are_deterministic_algorithms_enabled()


def _present() -> tuple[int, bool, bool]:
    return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark


def _train(run: el.Run, exact: bool) -> tuple[int, bool, bool]:
    """Return the settings in a step."""
    model = nn.Linear(4, 4)
    loader = el.ElasticLoader(torch.randn(8, 4), el.GlobalBatch(8, 4))
    found = None
    for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), 0.1), until="1ba", exact=exact):
        found = _present()
        for x in step:
            step.backward(step.model(x).square().mean())
        step.update()
    assert found is not None
    return found


def test_only_exact_trainings_change_torchs_settings_and_the_sessions_end_gives_them_back() -> None:
    with el.session() as run:
        assert _train(run, exact=False) == _present() == (3, False, True)
        assert _train(run, exact=True) == _present() == (1, True, False)
    assert _present() == (3, False, True)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize(
    ("options", "at_first", "exact"),
    [
        ({"threads": 2}, (2, False, True), (2, True, False)),
        ({"deterministic": True}, (3, True, False), (1, True, False)),
        ({"deterministic": False}, (3, False, True), (1, False, True)),
    ],
)
def test_requested_settings_hold_from_the_start(
    options: dict[str, Any], at_first: tuple[int, bool, bool], exact: tuple[int, bool, bool]
) -> None:
    with el.session(**options) as run:
        assert _present() == at_first
        assert _train(run, exact=True) == exact
    assert _present() == (3, False, True)


def test_an_error_gives_them_back_too() -> None:
    def fails() -> None:
        with el.session() as run:
            _train(run, exact=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert _present() == (3, False, True)


def test_after_the_session_its_run_trains_no_more() -> None:
    with el.session() as run:
        pass
    with pytest.raises(UsageError, match=r"Trainer.fit\(\) came after the end of the session"):
        _train(run, exact=False)
    with pytest.raises(UsageError, match=r"run.boundary\(\) came after the end of the session"):
        run.boundary()
    assert (run.rank, run.world_size) == (0, 1)


def test_a_process_cannot_join_its_round_for_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's store still has the addresses of the group that it has left."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29600", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **where}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("elastic_launch.training.ranks.world._left", "127.0.0.1:29600")
    with pytest.raises(UsageError, match="has left the run already") as raised, el.session():
        pass
    assert "one session" in raised.value.hint


def test_a_forked_process_does_not_end_its_parents_session() -> None:
    session = el.session()
    run = session.__enter__()
    with subprocess.Popen(["sleep", "60"]) as process:
        run.background(process)
        if (pid := os.fork()) == 0:
            session.__exit__(SystemExit, SystemExit(0), None)
            del session, run
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert process.poll() is None
        session.__exit__(None, None, None)
        assert process.poll() is not None


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), "60", timedelta(0), True])
def test_an_invalid_timeout_is_refused(timeout: Any) -> None:
    with pytest.raises(UsageError, match=r"session\(timeout=.*\) is not a timeout"), el.session(timeout=timeout):
        pass


def test_a_session_that_was_not_entered_says_so() -> None:
    found = el.session()
    with pytest.raises(UsageError, match=r"session\(\)\.steps: the session was not entered") as raised:
        found.steps  # type: ignore[attr-defined]  # noqa: B018
    assert "with session() as run" in raised.value.hint
    assert not hasattr(found, "stepz")


def test_an_existing_group_keeps_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match="was made before the session"), el.session(timeout=5):
        pass
    assert _present() == (3, False, True)


@pytest.mark.slow
def test_a_collective_that_a_rank_does_not_come_to_fails_after_the_timeout(job: Job) -> None:
    agent = job.launch("--standalone", "--nproc", "2", "--max-restarts", "0", command=[SETTINGS, "hang"])
    assert agent.wait(60) == 1, agent.output
    assert "in the session: 3 threads, deterministic False, benchmark True" in agent.output
    assert "exact=False: 3 threads, deterministic False, benchmark True" in agent.output
    assert "exact=True: 1 threads, deterministic True, benchmark False" in agent.output
    assert "Timed out waiting 2000ms" in agent.output

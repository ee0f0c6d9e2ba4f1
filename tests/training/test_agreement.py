"""Saving by the clock, with an agreement that is one boundary late: the ranks' exchange is replaced by a queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import elastic_launch as el
from elastic_launch.training.engine import Engine
from elastic_launch.training.ranks.agreement import NOTHING, Agreement, Wishes
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run
from elastic_launch.training.stopping import StopSource


class Late:
    """How an exchange with other ranks changes a rank's own requests."""

    def __init__(self) -> None:
        self._posted = Wishes()

    def exchange(self, wishes: Wishes) -> Wishes:
        agreed, self._posted = self._posted, wishes
        return agreed

    def settle(self) -> Wishes:
        return self._posted


@pytest.mark.parametrize("in_between", [0, 1, 2])
def test_each_interval_is_saved_once_for_any_boundaries_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_between: int
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    run = Run(Engine(World(), torch.device("cpu")))
    run._engine._agreement = Late()  # type: ignore[assignment]
    run.register("model", nn.Linear(1, 1))
    run.resume(el.Checkpoint(tmp_path, every="10s", keep=100))
    checkpoint = run._engine.checkpoint
    assert checkpoint is not None
    saved = []

    def save(state: object, step: int, *rest: object) -> None:
        saved.append(step)
        checkpoint._last_step, checkpoint._last_time = step, now

    monkeypatch.setattr(checkpoint, "save", save)
    for step in range(1, 41):
        now += 1.0
        assert not run.boundary(step)
        for _ in range(in_between):
            assert not run.boundary()
    assert saved == [11, 22, 33]


@pytest.mark.parametrize("stop", list(StopSource))
def test_the_sums_of_what_ranks_want_are_what_any_of_them_wants(stop: StopSource) -> None:
    ranks = [Wishes(stop, save=True), Wishes(StopSource.SCRIPT, keep=True), Wishes(compare=True, checksum=3), NOTHING]
    sums = [sum(column) for column in zip(*(wishes.counts() for wishes in ranks), strict=True)]
    assert Wishes.of_counts(sums) == Wishes(max(stop, StopSource.SCRIPT), save=True, keep=True, compare=True)


def test_a_group_is_formed_by_the_first_exchange_of_its_own() -> None:
    @contextmanager
    def forming() -> Iterator[None]:
        raise LookupError
        yield

    agreement = Agreement(2, forming=forming)
    agreement.exchange_by_step(NOTHING)
    agreement.exchange_by_step(Wishes(save=True))  # is sent with the losses
    with pytest.raises(LookupError):
        agreement.exchange_by_step(Wishes(checksum=1))


def test_wishes_are_kept_until_they_have_come_with_a_steps_losses() -> None:
    agreement = Agreement(2, forming=nullcontext)  # the sums here are those of another rank
    assert agreement.exchange_by_step(Wishes(keep=True)) == NOTHING
    assert agreement.exchange_by_step(Wishes(save=True)) == NOTHING
    given_up = agreement.leave()
    sums = agreement.leave()
    assert sums == given_up == Wishes(save=True, keep=True).counts()
    agreement.arrive(sums)
    agreement.arrive(Wishes(StopSource.AGENT).counts())
    assert not any(agreement.leave())
    assert agreement.exchange_by_step(NOTHING) == Wishes(StopSource.AGENT, save=True, keep=True)
    assert agreement.exchange_by_step(NOTHING) == NOTHING

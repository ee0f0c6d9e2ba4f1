"""What checkpoints contain; state that they cannot contain ends the training before it has done any work."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import elastic_launch as el
from elastic_launch.snapshot import UnsupportedStateError
from elastic_launch.training.checkpoints.state import TrainingState
from elastic_launch.training.checkpoints.step_start import copied as copy_of
from elastic_launch.training.engine import Engine
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run

DATA = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
Best = namedtuple("Best", "step loss")


class Extra:
    """An object whose state is the value that it was given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"it": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["it"]


def _train(directory: Path, extra: Extra, until: int, lr: Any = 0.1, late: Any = None) -> list[int]:
    run, model = Run(Engine(World(), torch.device("cpu"))), nn.Linear(4, 4)
    done: list[int] = []
    run.register("extra", extra)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    saving = el.Checkpoint(directory, every=1)
    loader = el.ElasticLoader(DATA, el.GlobalBatch(8, 4))
    try:
        for step in run.steps(loader, model, optimizer, until=f"{until}ba", checkpoint=saving):
            for x in step:
                step.backward(step.model(x).square().mean())
            step.update()
            done.append(step.number)
            if late is not None and step.number >= late[0]:
                extra.state = late[1]
    except UnsupportedStateError as error:
        error.add_note(str(done[-1] if done else 0))
        run._engine.saver.abandon()
        raise
    return done


def test_what_numpy_and_the_standard_library_have_is_saved_and_restored(tmp_path: Path) -> None:
    state = {
        "best": Best(3, np.float64(0.25)),
        "losses": defaultdict(list, a=[1.5]),
        "window": deque([1, 2], maxlen=5),
        "random": (np.random.get_state(), random.getstate()),
        "mask": np.array([True, False]),
        "names": {"b", "a"},
    }
    assert _train(tmp_path, Extra(state), 2, lr=np.float64(0.1)) == [1, 2]
    resumed = Extra(None)
    assert _train(tmp_path, resumed, 3, lr=np.float64(0.1)) == [3]
    back = resumed.state
    assert type(back["best"]) is Best
    assert type(back["best"].loss) is np.float64
    assert back["losses"].default_factory is list
    assert (back["window"], back["window"].maxlen) == (state["window"], 5)
    np.random.set_state(back["random"][0])
    random.setstate(back["random"][1])
    assert (back["mask"].tolist(), back["names"]) == ([True, False], {"a", "b"})


def test_what_cannot_be_saved_fails_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match=r"longdouble.*\['optimizer'\]\['param_groups'\]\[0\]\['lr'\]"):
        _train(tmp_path, Extra(None), 2, lr=np.longdouble(0.1))
    with pytest.raises(UnsupportedStateError, match=r"object, found at state\['extra'\]\['it'\]"):
        _train(tmp_path, Extra(object()), 2)


@pytest.mark.parametrize("step", [1, 3])
def test_state_that_appears_later_fails_at_a_save_and_not_at_the_end(tmp_path: Path, step: int) -> None:
    with pytest.raises(UnsupportedStateError, match=r"object, found at state\['extra'\]\['it'\]") as caught:
        _train(tmp_path, Extra(None), 10_000, late=(step, object()))
    done = caught.value.__notes__[-1]
    assert step <= int(done) < 10_000, "by the first save that is not left out because another is under way"


def test_a_run_that_saves_nothing_may_have_any_state() -> None:
    run, model = Run(Engine(World(), torch.device("cpu"))), nn.Linear(4, 4)
    run.register("extra", Extra(object()))
    steps = run.steps(el.ElasticLoader(DATA, el.GlobalBatch(8, 4)), model, torch.optim.SGD(model.parameters()), until=1)
    assert next(steps).number == 1


def test_a_copy_for_the_writer_shares_nothing_and_keeps_types() -> None:
    model = nn.BatchNorm1d(2).state_dict()
    state = {
        "model": model,
        "best": Best(1, [torch.ones(1)]),
        "dict": defaultdict(list, a=[1]),
        "window": deque([torch.ones(1)], 2),
        "array": np.ones(2),
        "size": torch.Size([2]),
        "ordered": OrderedDict(a={1}),
    }
    copied = copy_of(state)
    state["best"].loss[0].zero_()
    state["dict"]["a"].append(2)
    state["window"][0].zero_()
    state["array"][:] = 0
    state["ordered"]["a"].add(2)
    assert copied["model"]._metadata == model._metadata
    assert (copied["best"].loss, copied["dict"], copied["window"]) == (
        [torch.ones(1)],
        {"a": [1]},
        deque([torch.ones(1)]),
    )
    assert copied["window"].maxlen == 2
    assert copied["array"].tolist() == [1, 1]
    assert (copied["size"], copied["ordered"]) == (torch.Size([2]), OrderedDict(a={1}))
    assert [type(copied[key]) for key in state] == [type(value) for value in state.values()]


@pytest.mark.parametrize("name", ["on_save", "on_restore"])
def test_functions_that_all_ranks_call_are_known(name: str) -> None:
    # They may exchange data, so a process that keeps its state could not be left out.
    state = TrainingState()
    assert not state.calls_functions
    getattr(state, name)(lambda: None)
    assert state.extended({}).calls_functions

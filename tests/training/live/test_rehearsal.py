"""A trainer's worker ahead does a pass before it waits for its place; nothing remains that a script could notice."""

from __future__ import annotations

import gc
import multiprocessing
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from played_agent import PlayedAgent
from torch import Tensor, nn

import elastic_launch as el
from elastic_launch import contract as c
from elastic_launch import dist
from elastic_launch.shared_progress import Activity
from elastic_launch.training.live.rehearsal import graphs_fit_any_world, randomness_kept, unchanged


class Net(nn.Module):
    """A model with all that a pass may change; notes whether it had a process group in each of its passes."""

    def __init__(self, extra: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.calls = 0
        self.extra = extra
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        PASSES.append(torch.distributed.is_initialized())
        self.calls += 1
        assert isinstance(self.cache, Tensor)
        self.cache.add_(self.calls)
        self.extra()
        noise = random.random() + np.random.normal() + float(torch.rand(()))
        output: Tensor = self.body(x) + noise
        return output


PASSES: list[bool] = []

STEPS = 12
"""Passes of three steps."""

CHECKED = 3
"""Passes in exact mode besides: each of the first steps computes a micro-batch again."""


@pytest.fixture(autouse=True)
def no_passes() -> None:
    PASSES.clear()


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sample = torch.full((6,), float(index)) + torch.rand(6) + np.random.normal()
        return sample, torch.tensor(index % 3)


class Seen(el.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_round(self, start: el.RoundStart) -> None:
        # The generators' states, before a step seeds them.
        self.seen.append(("round", random.random(), np.random.normal(), float(torch.rand(()))))

    def on_step(self, end: el.StepEnd) -> None:
        self.seen.append((end.step, end.loss, end.metrics))


def train(model: Net, **options: Any) -> tuple[str, list[Any]]:
    """Train for three steps; return a hash of the weights, and what callbacks saw."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = Seen()
    micro, until = options.pop("micro", 4), options.pop("until", "3ba")
    torch.manual_seed(5), random.seed(6), np.random.seed(7)
    np.random.normal()  # the second of two is kept
    with el.session() as run:
        loader = el.ElasticLoader(Data(), el.GlobalBatch(16, micro), seed=1)
        counted = {"metric": lambda output, target: torch.tensor(1.0)}
        options = {"loss_fn": nn.functional.cross_entropy, "exact": True, "metrics": counted, **options}
        options["buffers"] = {"cache": "ignore"}
        el.Trainer(run, model, optimizer, loader, callbacks=[seen], **options).fit(until)
    return el.weights_sha256(model) + str(model.cache) + str(model.calls), seen.seen


@contextmanager
def without_agent() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        for name in (c.ENV_AHEAD, c.ENV_SOCKET, c.ENV_ROUND, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.delenv(name, raising=False)
        yield


def undisturbed(**options: Any) -> tuple[str, list[Any]]:
    with without_agent():
        result = train(Net(), **options)
    assert [False] * (STEPS + CHECKED * options.get("exact", True)) == PASSES
    PASSES.clear()
    return result


@pytest.mark.parametrize("options", [{}, {"exact": False}, {"precision": "bf16"}], ids=str)
def test_a_rehearsal_changes_nothing(agent: PlayedAgent, options: dict[str, Any]) -> None:
    expected = undisturbed(**options)
    found = train(Net(), **options)
    passes = STEPS + CHECKED * options.get("exact", True)
    assert [False] + [True] * passes == PASSES, "one pass before there is a place"
    assert found == expected
    assert agent.worker(0).said(c.Ready)[0].rehearses


def test_it_comes_before_the_place_and_neither_metrics_nor_the_optimizer_take_part(agent: PlayedAgent) -> None:
    connected: list[bool] = []
    measured: list[bool] = []
    model = Net(lambda: connected.append(agent.connected(0)))

    def metric(output: Tensor, target: Tensor) -> Tensor:
        measured.append(torch.distributed.is_initialized())
        return torch.tensor(1.0)

    train(model, metrics={"metric": metric})
    assert connected == [False] + [True] * (STEPS + CHECKED)
    assert measured == [True] * STEPS


@pytest.mark.parametrize("what", ["rank", "dist", "error", "memory", "group"])
def test_what_fails_in_it_fails_no_worker(agent: PlayedAgent, what: str) -> None:
    expected = undisturbed()
    model = Net()

    def extra() -> None:
        if torch.distributed.is_initialized():
            return
        match what:
            case "rank":
                dist.get_global_rank()
            case "dist":
                dist.barrier()
            case "error":
                raise ValueError("there is no group")
            case "memory":
                torch.empty(2**60)
            case "group":
                torch.distributed.all_reduce(torch.zeros(1))

    model.extra = extra
    assert train(model) == expected
    assert PASSES == [False] + [True] * (STEPS + CHECKED)


def test_a_stop_that_is_requested_in_it_does_not_count(agent: PlayedAgent) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with el.session() as run:
        model.extra = lambda: None if torch.distributed.is_initialized() else run.request_stop()
        loader = el.ElasticLoader(Data(), el.GlobalBatch(16, 16))
        buffers = {"cache": "ignore"}
        trainer = el.Trainer(run, model, optimizer, loader, loss_fn=nn.functional.cross_entropy, buffers=buffers)
        trainer.fit("3ba")
        assert (trainer.step, PASSES) == (3, [False, True, True, True])


def test_a_micro_batch_whose_size_is_not_known_is_not_rehearsed(agent: PlayedAgent) -> None:
    train(Net(), micro="auto")
    assert PASSES[0]
    assert not agent.worker(0).said(c.Ready)[0].rehearses


def test_a_process_that_has_its_place_already_rehearses_no_more(agent: PlayedAgent) -> None:
    model = Net()
    with el.session() as run:
        assert run.rank == 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = el.ElasticLoader(Data(), el.GlobalBatch(16, 16))
        el.Trainer(run, model, optimizer, loader, loss_fn=nn.functional.cross_entropy, buffers={"cache": "ignore"}).fit(
            "2ba"
        )
    assert PASSES == [True, True]


def test_the_agent_learns_whether_the_first_step_of_a_round_is_like_those_before(agent: PlayedAgent) -> None:
    seen: list[tuple[int, int]] = []

    def note() -> None:
        report = agent.progress.read(0)
        if report is not None and (report.round, report.activity) not in seen[-1:]:
            seen.append((report.round, report.activity))

    def move() -> None:
        worker = agent.worker(0)
        worker.wait(c.Ready)
        worker.tell(c.Stop("membership"))
        worker.wait(c.Drained)
        worker.tell(c.Suspend(7, "membership"))
        worker.wait(c.Suspended)
        agent.tell_place(worker, 8, 0, 0, 1)

    mover = threading.Thread(target=move)
    mover.start()
    train(Net(note), until="20ba")
    mover.join()
    first, last = (7, Activity.REHEARSED_STEP), (8, Activity.RESUMED_STEP)
    assert (seen[0], seen[-2:]) == (first, [last, (8, Activity.STEP)])


@pytest.mark.slow
def test_the_loader_s_processes_are_not_those_of_the_rehearsal(agent: PlayedAgent) -> None:
    """They would not know the process' place."""
    model = Net()
    with el.session() as run:

        def draw(step: int, micro: el.MicroBatch) -> tuple[Tensor, Tensor]:
            return torch.full((len(micro), 6), float(run.rank)), torch.zeros(len(micro), dtype=torch.int64)

        loader = el.FunctionLoader(draw, el.GlobalBatch(16, 16), num_workers=1, persistent_workers=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_fn = nn.functional.cross_entropy
        trainer = el.Trainer(run, model, optimizer, loader, loss_fn=loss_fn, buffers={"cache": "ignore"})
        trainer.fit("2ba")
    assert PASSES == [True, True], "the rehearsal had no data"
    assert len(multiprocessing.active_children()) == 1
    del loader, trainer
    gc.collect()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_unscales_gradients_itself_is_rehearsed(
    agent: PlayedAgent, caplog: pytest.LogCaptureFixture, several: bool, fails: bool
) -> None:
    """An error in the rehearsal, too, leaves nothing unscaled that the first step unscales."""
    norms: list[tuple[bool, float]] = []

    def trained() -> str:
        torch.manual_seed(0)
        model, scaler = nn.Linear(6, 3), torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = el.ElasticLoader(Data(), el.GlobalBatch(16, 4), seed=1)

        def train(step: el.Step) -> None:
            for name in ("first", "second") if several else (None,):
                for x, y in step:
                    step.backward(nn.functional.cross_entropy(step.model(x), y))
                scaler.unscale_(optimizer)
                norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
                norms.append((torch.distributed.is_initialized(), norm))
                step.update(optimizer=name and "only")

        def rehearse(step: el.Step) -> None:
            train(step)
            if fails:
                scaler.unscale_(optimizer)
                raise ValueError("as it is")

        with el.session() as run:
            optimizers: Any = {"only": optimizer, "other": torch.optim.SGD([nn.Parameter(torch.zeros(1))])}
            given = optimizers if several else optimizer
            for step in run.steps(loader, model, given, until="3ba", scaler=scaler, rehearse=rehearse):
                train(step)
        return el.weights_sha256(model) + str(scaler.state_dict())

    with without_agent():
        expected = trained()
    norms.clear()
    assert trained() == expected
    passes = 1 + several
    assert [placed for placed, _ in norms] == [False] * passes + [True] * 3 * passes
    assert [norm for placed, norm in norms if not placed] == [0.0] * passes
    assert [x.levelname for x in caplog.records if "could not rehearse" in x.message] == ["WARNING"] * fails


# Compiled models.


COMPILES: list[bool] = []


@pytest.fixture
def compiler() -> Iterator[None]:
    COMPILES.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled(nn.Module):
    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.asks = asks

        def backend(graph: Any, inputs: Any) -> Any:
            COMPILES.append(torch.distributed.is_initialized())
            return graph.forward

        self.compile(backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        return output + 1 if self.asks and not torch.distributed.is_initialized() else output


def compiled(model: Compiled, steps: int, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with el.session() as run:
        loader = el.ElasticLoader(Data(), el.GlobalBatch(16, 4))
        loss_fn = nn.functional.cross_entropy
        el.Trainer(run, model, optimizer, loader, loss_fn=loss_fn, **options).fit(f"{steps}ba")


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.usefixtures("compiler")
def test_a_model_is_compiled_in_it_and_not_again(agent: PlayedAgent, exact: bool) -> None:
    model = Compiled()
    compiled(model, 5, exact=exact)
    assert COMPILES == [False], "before there is a process group"


@pytest.mark.usefixtures("compiler")
def test_graphs_that_depend_on_the_world_are_compiled_again(agent: PlayedAgent) -> None:
    model = Compiled(asks=True)
    compiled(model, 2)
    assert COMPILES == [False, True]


@pytest.mark.usefixtures("compiler")
def test_graphs_of_a_pass_that_failed_are_compiled_again() -> None:
    compiles = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiles.append(graph)
        return graph.forward

    def double(x: Tensor) -> Tensor:
        return x * 2

    function = torch.compile(double, backend=backend)
    with graphs_fit_any_world():
        function(torch.ones(2))
    function(torch.ones(2))
    assert len(compiles) == 1

    def fails() -> None:
        with graphs_fit_any_world():
            raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        fails()
    function(torch.ones(2))
    assert len(compiles) == 2


# What is restored.


def test_attributes_buffers_modes_hooks_and_gradients_are_restored() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    first: Any = model[0]
    first.count, first.kept, first.plain = 0, {"inner": [1, 2]}, torch.ones(2)
    first.register_buffer("running", torch.zeros(2))
    mean, plain, running = model[1].running_mean, first.plain, first.running
    assert isinstance(mean, Tensor)
    gradient = first.weight.grad = torch.ones(2, 2)
    beside = nn.Parameter(torch.ones(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = len(first._forward_hooks)
    with unchanged(model, beside, "anything"):
        model.eval()
        first.count += 1
        first.new = "attribute"
        first.kept["inner"].append(3)
        first.kept["other"] = 4
        first.plain.add_(1)
        first.running += first.weight.sum(0)  # of a graph from now on
        first.running = torch.full((2,), 7.0)
        first.weight.grad = None
        first.bias.requires_grad_(False)
        beside.grad = torch.ones(1)
        mean.data.add_(3.0)
        first.register_forward_hook(lambda *_: None)
        del first.plain
    assert (first.count, first.kept, hasattr(first, "new")) == (0, {"inner": [1, 2]}, False)
    assert first.plain is plain
    assert plain.tolist() == [1.0, 1.0]
    assert first.running is running
    assert (running.is_leaf, running.requires_grad) == (True, False)
    assert first.weight.grad is gradient
    assert (first.bias.requires_grad, beside.grad) == (True, None)
    assert model[1].running_mean is mean
    assert all(module.training for module in model.modules())
    assert len(first._forward_hooks) == hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    def drawn() -> list[float]:
        return [random.random(), float(np.random.normal()), float(np.random.normal()), float(torch.rand(()))]

    def seed() -> None:
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        np.random.normal()  # the second of two is kept

    seed()
    expected = drawn()
    seed()
    with randomness_kept():
        drawn()
    assert drawn() == expected

"""The trainer in one process: what it computes, reports, saves and restores."""

from __future__ import annotations

import gc
import math
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_reads import Reads
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import Dataset, TensorDataset

import elastic_launch as el
from elastic_launch.batch import halved
from elastic_launch.errors import UsageError
from elastic_launch.training.callbacks import CheckpointEnd, Evaluation, Incident, RoundStart, StepEnd
from elastic_launch.training.engine import Engine
from elastic_launch.training.ranks.world import World
from elastic_launch.training.schedule import Schedules
from elastic_launch.training.session import Run

GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(44, 6, generator=GENERATOR)
TARGETS = INPUTS[:, :3].argmax(dim=1)


pytestmark = pytest.mark.usefixtures("one_thread")


def _accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def _data(start: int = 0, stop: int = 44) -> Dataset[Any]:
    return TensorDataset(INPUTS[start:stop], TARGETS[start:stop])


def plateau(optimizer: torch.optim.Optimizer) -> lr_scheduler.ReduceLROnPlateau:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=1e9)


class Recorder(el.Callback):
    """Records its calls."""

    def __init__(self) -> None:
        self.rounds: list[RoundStart] = []
        self.steps: list[StepEnd] = []
        self.evaluations: list[Evaluation] = []
        self.checkpoints: list[CheckpointEnd] = []
        self.incidents: list[Incident] = []

    def on_round(self, start: RoundStart) -> None:
        self.rounds.append(start)

    def on_step(self, end: StepEnd) -> None:
        self.steps.append(end)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    def on_checkpoint(self, end: CheckpointEnd) -> None:
        self.checkpoints.append(end)

    def on_incident(self, incident: Incident) -> None:
        self.incidents.append(incident)


class Case:
    """A trainer with all its parts, constructed as after a restart."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.run = Run(Engine(World(), torch.device("cpu")))
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        make = options.pop("schedule", lambda optimizer: lr_scheduler.StepLR(optimizer, 3, gamma=0.5))
        self.scheduler = make(self.optimizer)
        self.seen = Recorder()
        micro = options.pop("micro", 4)
        settings: dict[str, Any] = {
            "loss_fn": nn.functional.cross_entropy,
            "scheduler": self.scheduler,
            "clip_norm": 1.0,
            "eval_loader": el.ElasticLoader(_data(32), el.GlobalBatch(5, 2), shuffle=False),
            "metrics": {"accuracy": _accuracy},
            "callbacks": [self.seen],
        }
        self.loader = el.ElasticLoader(_data(0, 32), el.GlobalBatch(12, micro), seed=5)
        self.trainer = el.Trainer(self.run, self.model, self.optimizer, self.loader, **settings | options)

    @property
    def hash(self) -> str:
        return el.weights_sha256(self.model)


def test_a_training_reports_its_steps_and_evaluations() -> None:
    case = Case()
    case.trainer.fit("2ep")
    assert [end.step for end in case.seen.steps] == [1, 2, 3, 4, 5, 6]
    assert [end.samples for end in case.seen.steps] == [12, 12, 8, 12, 12, 8]
    assert [end.epoch for end in case.seen.steps] == [0, 0, 0, 1, 1, 1]
    assert [(x.step, x.epoch) for x in case.seen.evaluations] == [(3, 1), (6, 2)]
    assert case.seen.rounds == [RoundStart(0, 1, 0, 0, 0, 4, 3, "first")]
    assert case.seen.incidents == []
    assert case.trainer.history == case.seen.evaluations
    assert case.trainer.loss == case.seen.steps[-1].loss
    assert case.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 4)


def test_a_state_that_lacks_its_evaluation_is_evaluated_before_the_next_step(tmp_path: Path) -> None:
    first = Case(checkpoint=el.Checkpoint(tmp_path, every=1), eval_loader=None)
    first.trainer.fit("1ep")
    resumed = Case(checkpoint=el.Checkpoint(tmp_path, every=1))
    resumed.trainer.fit("5ba")
    assert [(x.step, x.epoch) for x in resumed.seen.evaluations] == [(3, 1), (5, 1)]
    assert [end.step for end in resumed.seen.steps] == [4, 5]


def test_an_evaluation_follows_the_trainings_micro_batches_as_they_become_smaller() -> None:
    loader = el.ElasticLoader(_data(32), el.GlobalBatch(8, "auto"), shuffle=False)
    case = Case(eval_loader=loader)
    sizes: list[int] = []

    def forward(model: nn.Module, sample: Any) -> tuple[Any, Any]:
        sizes.append(len(sample[0]))
        return model(sample[0]), sample[1]

    case.trainer._forward = forward
    case.trainer.evaluate()
    case.loader.batch = halved(case.loader.batch)
    # A process that has just begun knows only the training's present micro-batches.
    case.trainer.evaluate()
    assert sizes == [4, 4, 4, 2, 2, 2, 2, 2, 2]


def test_metrics_are_means_over_the_global_batch_for_any_micro_batches() -> None:
    """Without dropout and BatchNorm, whose results depend on the micro-batch by their nature."""

    def first_step(micro: int) -> StepEnd:
        case = Case(micro=micro)
        case.model[1], case.model[3] = nn.Identity(), nn.Identity()
        case.trainer.fit("1ba")
        return case.seen.steps[0]

    whole, parts = first_step(12), first_step(5)
    assert parts.metrics["accuracy"] == pytest.approx(whole.metrics["accuracy"])
    assert parts.loss == pytest.approx(whole.loss)
    assert (whole.metrics["accuracy"] * 12) == pytest.approx(round(whole.metrics["accuracy"] * 12))


def test_evaluation_is_over_each_sample_once_and_leaves_the_modes_as_they_are() -> None:
    case = Case()
    case.model[3].eval()
    case.trainer.fit("1ep")
    assert [module.training for module in case.model] == [True, True, True, False, True]
    with torch.no_grad():
        output = case.model.eval()(INPUTS[32:])
    expected = {
        "loss": nn.functional.cross_entropy(output, TARGETS[32:]).item(),
        "accuracy": _accuracy(output, TARGETS[32:]).item(),
    }
    assert case.trainer.history[-1].metrics == pytest.approx(expected)


class Merging(nn.Linear):
    """Changes its weight with its mode, as LoRA layers do; twice a number and half of it are exact."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            self.merged = not mode
            self.weight.data *= 0.5 if mode else 2
        return self


def test_a_layer_that_evaluation_mode_changes_is_trained_as_without_evaluations() -> None:
    cases = Case(), Case(eval_loader=None)
    for case in cases:
        torch.manual_seed(0)
        case.model[2], case.model[3] = nn.Sequential(Merging(8, 8)), nn.Sequential(Merging(8, 8)).eval()
        case.trainer.fit("2ep")
        assert [case.model[k][0].merged for k in (2, 3)] == [False, True]
        assert [case.model[k][0].training for k in (2, 3)] == [True, False]
    assert len(cases[0].trainer.history) == 2
    assert cases[0].hash == cases[1].hash


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stop", [2, 3, 4])
def test_all_of_it_is_restored(tmp_path: Path, precision: str, stop: int) -> None:
    """Model, optimizer, scheduler, scaler, position, evaluations: the resumed training ends as the undisturbed one."""
    undisturbed = Case(precision=precision)
    undisturbed.trainer.fit("2ep")
    first = Case(precision=precision, checkpoint=el.Checkpoint(tmp_path, every=1))
    first.trainer.fit(f"{stop}ba")
    resumed = Case(precision=precision, checkpoint=el.Checkpoint(tmp_path, every=1))
    resumed.trainer.fit("2ep")
    assert resumed.hash == undisturbed.hash
    # The first one took its end for the training's, which is always evaluated.
    assert [x for x in resumed.trainer.history if x.step in (3, 6)] == undisturbed.trainer.history
    assert resumed.scheduler.state_dict() == undisturbed.scheduler.state_dict()
    assert resumed.seen.rounds[0].resumed_step == stop
    assert [end.step for end in resumed.seen.steps] == list(range(stop + 1, 7))
    assert [end.loss for end in resumed.seen.steps] == [end.loss for end in undisturbed.seen.steps[stop:]]
    assert [end.step for end in first.seen.checkpoints][-1] == stop
    assert all(end.path is not None and end.error is None for end in first.seen.checkpoints)


def test_a_finished_training_resumes_to_its_end_at_once(tmp_path: Path) -> None:
    first = Case(checkpoint=el.Checkpoint(tmp_path))
    first.trainer.fit("1ep")
    again = Case(checkpoint=el.Checkpoint(tmp_path))
    again.trainer.fit("1ep")
    assert again.hash == first.hash
    assert (again.trainer.step, again.trainer.loss) == (3, first.trainer.loss)
    assert again.seen.steps == []


def test_a_second_fit_continues_where_the_first_ended(tmp_path: Path) -> None:
    whole, parts = Case(), Case(checkpoint=el.Checkpoint(tmp_path, every=1))
    whole.trainer.fit("6ba")
    parts.trainer.fit("2ba")
    parts.trainer.fit("6ba")
    assert parts.hash == whole.hash
    assert [end.step for end in parts.seen.steps] == [1, 2, 3, 4, 5, 6]


def test_an_overflow_under_fp16_leaves_the_step_out_and_the_scheduler_where_it_is() -> None:
    case = Case(precision="fp16")
    before = case.hash
    case.trainer._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=10_000)
    weights = [parameter.detach().clone() for parameter in case.model.parameters()]
    case.trainer.fit("1ba")
    assert before != case.hash  # BatchNorm's statistics have moved
    assert all(torch.equal(old, new) for old, new in zip(weights, case.model.parameters(), strict=True))
    assert case.scheduler.last_epoch == 0


def test_a_learning_rate_is_read_for_callbacks_alone() -> None:
    def reads(**options: Any) -> int:
        case, rate = Case(**options), torch.tensor(0.05)
        case.optimizer.param_groups[0]["lr"] = rate
        with Reads() as found:
            case.trainer.fit("2ba")
        return found.addresses.count(rate.data_ptr())

    assert reads() - reads(callbacks=[]) == 2


def test_a_skipped_step_is_asked_for_only_if_a_scheduler_follows_each_step() -> None:
    optimizer, asked = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0), []

    def skipped() -> bool:
        asked.append(True)
        return False

    for every in ("2ba", 1, None):
        schedules = Schedules(el.Schedule(lr_scheduler.ConstantLR(optimizer), every=every), 2, [])
        optimizer.step()
        schedules.step_done(1, skipped)
        schedules.step_done(2, skipped)
        assert len(asked) == (2 if every is None else 0)


def test_a_plateau_scheduler_follows_the_evaluations() -> None:
    case = Case(eval_every="1ba", schedule=plateau)
    case.trainer.fit("3ba")
    assert case.scheduler.last_epoch == 3
    assert case.optimizer.param_groups[0]["lr"] < 0.05


def test_schedulers_are_stepped_after_steps_epochs_or_evaluations() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        by_step = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
        by_two = lr_scheduler.ConstantLR(optimizer)
        by_epoch = lr_scheduler.ExponentialLR(optimizer, 0.1)
        return {
            "by step": by_step,
            "by two": el.Schedule(by_two, every="2ba"),
            "by epoch": el.Schedule(by_epoch, every=1),
            "plateau": el.Schedule(lr_scheduler.ReduceLROnPlateau(optimizer), metric="accuracy"),
        }

    def make(optimizer: torch.optim.Optimizer) -> Any:
        made.append(schedule(optimizer))
        return made[-1]

    made: list[dict[str, Any]] = []
    case = Case(schedule=make, eval_every="4ba")
    case.trainer.fit("7ba")
    counts = {name: getattr(x, "scheduler", x).last_epoch for name, x in made[0].items()}
    assert counts == {"by step": 7, "by two": 3, "by epoch": 2, "plateau": 2}
    assert made[0]["plateau"].scheduler.best == min(x.metrics["accuracy"] for x in case.seen.evaluations)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        ),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 6)],
            [3],
        ),
        lambda optimizer: el.Schedule(lr_scheduler.MultiStepLR(optimizer, [1, 2]), every="1ep"),
        lambda optimizer: {"plateau": plateau(optimizer), "warm-up": lr_scheduler.LinearLR(optimizer, 0.1)},
    ],
)
@pytest.mark.parametrize("stop", [2, 3])
def test_learning_rates_after_a_restart_are_those_of_the_undisturbed_training(
    tmp_path: Path, schedule: Any, stop: int
) -> None:
    undisturbed = Case(schedule=schedule, eval_every="1ba")
    undisturbed.trainer.fit("9ba")
    rates = [end.lrs for end in undisturbed.seen.steps]
    assert len(set(rates)) > 2
    first = Case(schedule=schedule, eval_every="1ba", checkpoint=el.Checkpoint(tmp_path))
    first.trainer.fit(f"{stop}ba")
    resumed = Case(schedule=schedule, eval_every="1ba", checkpoint=el.Checkpoint(tmp_path))
    resumed.trainer.fit("9ba")
    assert [end.lrs for end in (*first.seen.steps, *resumed.seen.steps)] == rates
    assert resumed.trainer.history == undisturbed.trainer.history
    assert resumed.hash == undisturbed.hash


def test_a_step_tells_its_learning_rates_and_the_norm_of_its_gradients() -> None:
    case = Case(clip_norm=None)
    case.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})
    case.trainer.fit("4ba")
    assert [end.lrs for end in case.seen.steps] == [(0.05, 0.5)] * 3 + [(0.025, 0.25)]
    assert [end.grad_norm for end in case.seen.steps] == [None] * 4

    measured, plain, clipped = Case(clip_norm=math.inf), Case(clip_norm=None), Case(clip_norm=0.1)
    for case in (measured, plain, clipped):
        case.trainer.fit("1ba")
    (norm,) = [end.grad_norm for end in measured.seen.steps]
    assert norm is not None
    squares = [p.grad.square().sum() for p in measured.model.parameters() if p.grad is not None]
    assert norm == pytest.approx(float(sum(squares)) ** 0.5)
    assert measured.hash == plain.hash != clipped.hash
    assert clipped.seen.steps[0].grad_norm == norm, "before clipping"


def test_tokens_weigh_by_their_number() -> None:
    def only_first_class(sample: Any) -> float:
        return float((sample[1] == 0).sum()) + 1e-9

    def loss(output: Tensor, target: Tensor) -> Tensor:
        mask = (target == 0).float()
        return (nn.functional.cross_entropy(output, target, reduction="none") * mask).sum() / mask.sum().clamp(min=1)

    def first_loss(micro: int) -> float:
        case = Case(micro=micro, weight_fn=only_first_class, loss_fn=loss, metrics={}, eval_loader=None)
        case.model[1], case.model[3] = nn.Identity(), nn.Identity()
        case.trainer.fit("1ba")
        return case.seen.steps[0].loss

    assert first_loss(12) == pytest.approx(first_loss(5))


def test_a_micro_batch_that_is_not_a_pair_needs_forward() -> None:
    class Named(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"x": INPUTS[index], "y": TARGETS[index]}

    def train(**options: Any) -> float:
        run = Run(Engine(World(), torch.device("cpu")))
        model = nn.Linear(6, 3)
        loader = el.ElasticLoader(Named(), el.GlobalBatch(4, 2))
        trainer = el.Trainer(
            run, model, torch.optim.SGD(model.parameters()), loader, loss_fn=nn.functional.cross_entropy, **options
        )
        trainer.fit(1)
        return trainer.loss or 0.0

    with pytest.raises(UsageError, match="a micro-batch is a dict, not a pair"):
        train()
    assert train(forward=lambda model, sample: (model(sample["x"]), sample["y"])) > 0


def test_the_progress_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Case(callbacks=[el.Progress(every=2)], checkpoint=el.Checkpoint(tmp_path)).trainer.fit("3ba")
    Case(callbacks=[el.Progress(every=2)], checkpoint=el.Checkpoint(tmp_path)).trainer.fit("4ba")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "started: world size 1, 3 micro-batches of 4 each, restart 0"
    assert [line.split(" loss ")[0] for line in lines[1:]] == [
        "step 1",
        "step 2",
        "evaluation at step 3",
        "resumed at step 3: world size 1, 3 micro-batches of 4 each, restart 0",
        "step 4",
        "evaluation at step 4",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int8"}, r"precision='int8'.*\n.*fp32, bf16, fp16"),
        ({"clip_norm": 0.0}, "clip_norm=0 is not above 0"),
        ({"eval_loader": [1]}, r"Trainer\(eval_loader=...\) is a list"),
        ({"metrics": {"loss": _accuracy}}, "the name 'loss'"),
        ({"eval_every": "often"}, "every='often' is not an interval"),
        ({"eval_every": "0ba"}, "every='0ba' is not an interval"),
        ({"schedule": plateau, "eval_loader": None}, "needs the metric 'loss'; it has no eval_loader"),
        ({"schedule": lambda x: el.Schedule(plateau(x), metric="f1")}, "metric 'f1'; it has loss, accuracy"),
        ({"schedule": lambda x: el.Schedule(plateau(x), every="1ep")}, "stepped after each evaluation"),
        ({"schedule": lambda x: el.Schedule(lr_scheduler.StepLR(x, 1), metric="loss")}, "StepLR takes no metric"),
        ({"schedule": lambda x: el.Schedule(lr_scheduler.StepLR(x, 1), every="1min")}, "every='1min' is a duration"),
        ({"schedule": lambda x: el.Schedule(lr_scheduler.StepLR)}, r"Trainer\(scheduler=...\) is the class StepLR"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Case(**options)


# Out of memory


class Greedy(nn.Module):
    """Needs memory for each sample of a micro-batch."""

    def __init__(self, mebibytes: int) -> None:
        super().__init__()
        self.numbers = mebibytes * 2**18
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        activations = torch.ones(len(x), self.numbers)
        return self.linear(x) + activations[:, :1]


@pytest.fixture
def little_memory() -> Iterator[Callable[[int], None]]:
    """Limits how much more memory the process may map: the allocator's real refusal, not an imitation."""
    limits = resource.getrlimit(resource.RLIMIT_AS)

    def limit(beyond: int) -> None:
        gc.collect()
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + beyond, limits[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_AS, limits)


def _greedy(
    checkpoint: el.Checkpoint | None, micro: int | str = "auto", mebibytes: int = 64
) -> tuple[el.Trainer, Recorder]:
    torch.manual_seed(0)
    run, model, seen = Run(Engine(World(), torch.device("cpu"))), Greedy(mebibytes), Recorder()
    loader = el.ElasticLoader(_data(0, 32), el.GlobalBatch(16, micro), seed=5)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = el.Trainer(
        run, model, optimizer, loader, loss_fn=nn.functional.cross_entropy, checkpoint=checkpoint, callbacks=[seen]
    )
    return trainer, seen


def test_micro_batches_are_halved_until_they_fit(little_memory: Callable[[int], None], tmp_path: Path) -> None:
    undisturbed, _ = _greedy(None, micro=4)
    undisturbed.fit("3ba")

    trainer, seen = _greedy(el.Checkpoint(tmp_path, every=1))
    little_memory(400 * 2**20)
    trainer.fit("2ba")
    assert [(incident.kind, incident.step) for incident in seen.incidents] == [("out of memory", 0)] * 2
    assert trainer.loader.batch == el.GlobalBatch(16, 4)
    assert [end.samples for end in seen.steps] == [16, 16]

    resumed, seen = _greedy(el.Checkpoint(tmp_path, every=1))
    resumed.fit("3ba")
    assert seen.rounds[0].micro == 4
    assert seen.incidents == []
    # Neither the steps that were given up nor the restart have left a trace.
    assert el.weights_sha256(resumed.model) == el.weights_sha256(undisturbed.model)


def test_a_sample_that_does_not_fit_is_the_end(little_memory: Callable[[int], None]) -> None:
    # Far more than the limit: a thread of an earlier test that ends now gives its stack and its arena back.
    trainer, _ = _greedy(None, mebibytes=1024)
    little_memory(200 * 2**20)
    with pytest.raises(MemoryError, match="step 1: a rank has no memory even for a micro-batch of 1 sample"):
        trainer.fit("1ba")


def test_a_given_micro_batch_is_not_halved(little_memory: Callable[[int], None]) -> None:
    trainer, _ = _greedy(None, micro=16)
    little_memory(700 * 2**20)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        trainer.fit("1ba")


def test_the_loop_form_does_not_know_auto() -> None:
    model = nn.Linear(6, 3)
    loader = el.ElasticLoader(_data(), el.GlobalBatch(16, "auto"))
    with pytest.raises(ValueError, match=r"only el\.Trainer finds out"):
        Run(Engine(World(), torch.device("cpu"))).steps(loader, model, torch.optim.SGD(model.parameters()), until=1)


def test_an_evaluation_of_a_subclass_replaces_the_trainers_own() -> None:
    class Own(el.Trainer):
        def evaluate(self, loader: el.Loader | None = None) -> dict[str, float]:
            return {**super().evaluate(loader), "own": 1.0}

    case = Case()
    own = Own(
        case.run,
        case.model,
        case.optimizer,
        case.loader,
        loss_fn=nn.functional.cross_entropy,
        eval_loader=el.ElasticLoader(_data(32), el.GlobalBatch(5, 2), shuffle=False),
    )
    own.fit("1ep")
    assert [(x.step, x.metrics["own"]) for x in own.history] == [(3, 1.0)]

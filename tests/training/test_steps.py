"""The step of one process: its loss, its weights, its errors, and that a failed one changes nothing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from elastic_launch.batch import GlobalBatch
from elastic_launch.errors import REPEATS_NOTE, UsageError
from elastic_launch.training.checkpoints.checkpoint import Checkpoint
from elastic_launch.training.checkpoints.manager import weights_sha256
from elastic_launch.training.checkpoints.resumed import Outcome
from elastic_launch.training.data.loader import ElasticLoader, epochs_of
from elastic_launch.training.engine import Engine
from elastic_launch.training.gradients.accumulation import Gradients, check_model
from elastic_launch.training.passes import Share
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run
from elastic_launch.training.steps import Step
from elastic_launch.training.together import OptimizerSteps
from elastic_launch.training.transaction import NonFiniteLossError, StepRules, Transaction

INPUTS = torch.randn(22, 3, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(22, 1, generator=torch.Generator().manual_seed(2))


def _loader(micro: int, size: int = 8) -> ElasticLoader:
    return ElasticLoader(TensorDataset(INPUTS, TARGETS), GlobalBatch(size, micro), shuffle=False)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def _mse(step: Step, sample: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(step.model(sample[0]), sample[1])


def _train(
    micro: int, exact: bool, backward: Callable[[Step, Any], None], until: str = "1ep", model: nn.Module | None = None
) -> tuple[nn.Module, list[float]]:
    run, model = Run(Engine(World(), torch.device("cpu"))), model or _model()
    losses = []
    for step in run.steps(_loader(micro), model, torch.optim.SGD(model.parameters(), lr=0.1), until=until, exact=exact):
        for sample in step:
            backward(step, sample)
        step.update()
        losses.append(step.loss)
    return model, losses


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("micro", [1, 3, 8])
def test_accumulation_is_the_step_on_the_whole_global_batch(micro: int, exact: bool) -> None:
    """Also in the short last batch of 6 samples."""
    model, losses = _train(micro, exact, lambda step, sample: step.backward(_mse(step, sample)))
    expected = _model()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for loss, start in zip(losses, range(0, 22, 8), strict=True):
        optimizer.zero_grad()
        whole = nn.functional.mse_loss(expected(INPUTS[start : start + 8]), TARGETS[start : start + 8])
        whole.backward()
        optimizer.step()
        assert loss == pytest.approx(whole.item(), rel=1e-5)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("exact", [False, True])
def test_weights_make_the_mean_over_what_they_count(exact: bool) -> None:
    """As with tokens: each sample counts as often as its weight says, in whichever micro-batch it is."""
    counts = torch.arange(1.0, 9.0)

    def backward(step: Step, sample: tuple[Tensor, Tensor]) -> None:
        mine = torch.stack([counts[(INPUTS[:8] == x).all(dim=1)][0] for x in sample[0]])
        error = ((step.model(sample[0]) - sample[1]).squeeze(1) ** 2 * mine).sum() / mine.sum()
        step.backward(error, weight=float(mine.sum()))

    model, losses = _train(3, exact, backward, until="1ba")
    expected = _model()
    whole = ((expected(INPUTS[:8]) - TARGETS[:8]).squeeze(1) ** 2 * counts).sum() / counts.sum()
    whole.backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    assert losses == [pytest.approx(whole.item(), rel=1e-5)]
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("masked", [[0], [1], [2], [0, 2], [1, 2]])
def test_a_micro_batch_of_weight_0_counts_as_a_loss_of_0_whatever_its_own_is(masked: list[int], exact: bool) -> None:
    def trained(value: float) -> tuple[str, list[float]]:
        def backward(step: Step, sample: tuple[Tensor, Tensor]) -> None:
            count = 0 if any((sample[0][0] == INPUTS[3 * place]).all() for place in masked) else len(sample[0])
            step.backward(_mse(step, sample) * (1.0 if count else value), weight=count)

        model, losses = _train(3, exact, backward)
        return weights_sha256(model), losses

    assert trained(float("nan")) == trained(float("inf")) == trained(0.0)


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_in_which_all_weights_are_0_updates_nothing(exact: bool) -> None:
    def trained(until: int, first: float) -> tuple[str, list[bool]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        run, skipped = Run(Engine(World(), torch.device("cpu"))), []
        for step in run.steps(_loader(4), model, optimizer, until=f"{until}ba", exact=exact):
            weight = first if step.number == 1 else 1.0
            for sample in step:
                step.backward(_mse(step, sample) / weight if weight else _mse(step, sample) * torch.nan, weight=weight)
            step.update(clip_norm=1.0)
            skipped.append(step.skipped)
            assert (step.loss == 0) == step.skipped
        return weights_sha256(model), skipped

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    assert trained(1, 0.0) == (weights_sha256(model), [True])
    assert trained(2, 0.0)[1] == [True, False]
    assert trained(1, 1.0)[0] != weights_sha256(model)


@pytest.mark.parametrize("enabled", [False, True])
def test_gradients_that_are_read_in_a_step_of_weight_0_change_nothing_for_the_scaler(enabled: bool) -> None:
    def trained(*, read: bool) -> tuple[str, list[bool], dict[str, Any]]:
        model, scaler = _model(), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=enabled)
        optimizer, skipped = torch.optim.Adam(model.parameters(), lr=0.1), []
        run = Run(Engine(World(), torch.device("cpu")))
        for step in run.steps(_loader(4), model, optimizer, until="4ba", scaler=scaler):
            for sample in step:
                step.backward(_mse(step, sample), weight=float(step.number != 2))
            if read:
                assert (step.grad_norm() == 0) == (step.number == 2)
            step.update(clip_norm=1.0)
            skipped.append(step.skipped)
        return weights_sha256(model), skipped, scaler.state_dict()

    assert trained(read=True) == trained(read=False)
    assert trained(read=True)[1] == [False, True, False, False]


@pytest.mark.parametrize("early", [False, True])
def test_a_script_may_unscale_gradients_itself(early: bool) -> None:
    """As the manual of torch says; ``early``: also gradients of its own, before those of the step are complete."""

    def trained(scaler: torch.amp.GradScaler | None) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)  # the other gradients only count for the norm
        run = Run(Engine(World(), torch.device("cpu")))
        for step in run.steps(_loader(4), model, optimizer, until="4ba", scaler=scaler):
            for number, sample in enumerate(step):
                if scaler is not None and early and number == 0:
                    scaler.scale(_mse(step, sample)).backward()  # type: ignore[no-untyped-call]
                    scaler.unscale_(optimizer)
                    model.zero_grad()
                step.backward(_mse(step, sample))
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model[1].parameters(), 0.1)
            step.update(clip_norm=0.12)
            assert step.clipped_norm is not None
            seen.append(float(step.clipped_norm))
        return [parameter.detach() for parameter in model.parameters()]

    seen: list[float] = []
    expected = trained(None)
    torch.testing.assert_close(trained(torch.amp.GradScaler("cpu", init_scale=1024.0)), expected)
    assert seen[4:] == pytest.approx(seen[:4])


def test_a_loss_that_is_scaled_twice_is_refused() -> None:
    model, scaler = _model(), torch.amp.GradScaler("cpu")
    optimizer, run = torch.optim.SGD(model.parameters(), lr=0.1), Run(Engine(World(), torch.device("cpu")))
    step = next(loop := run.steps(_loader(4), model, optimizer, until="1ba", scaler=scaler))
    loss = scaler.scale(_mse(step, next(iter(step))))
    with pytest.raises(UsageError, match=r"scaler\.scale\(\) has scaled, and would scale it again"):
        step.backward(loss)
    loop.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("exact", [False, True])
def test_a_loss_that_is_not_a_number_names_its_place_and_changes_nothing(exact: bool) -> None:
    model = _model()
    before = [parameter.clone() for parameter in model.parameters()]

    def backward(step: Step, sample: tuple[Tensor, Tensor]) -> None:
        loss = _mse(step, sample)
        step.backward(loss * float("nan") if (sample[0] == INPUTS[4]).all(dim=1).any() else loss)

    with pytest.raises(
        NonFiniteLossError, match=r"nan in step 1, micro-batch 1, on rank 0\.\n.*items 3, 4, 5\. Newest.*clip_norm"
    ) as raised:
        _train(3, exact, backward, model=model)
    again = [f"{REPEATS_NOTE}The loss is nan in step 1, micro-batch 1."]
    assert getattr(raised.value, "__notes__", []) == (again if exact else [])
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("backward", "message"),
    [
        (lambda step, sample: step.backward(step.model(sample[0])), r"a loss of shape \(3, 1\)"),
        (lambda step, sample: step.backward(_mse(step, sample).detach()), "no gradient leads from this loss"),
        (lambda step, sample: None, "ended without step.backward"),
        (lambda step, sample: [step.backward(_mse(step, sample)) for _ in "ab"], "exactly once in each pass"),
        (
            lambda step, sample: step.backward(_mse(step, sample), weight=1.0 if len(sample[0]) == 3 else None),
            "a weight for some micro-batches only",
        ),
    ],
)
def test_a_step_used_wrongly_raises_an_error_with_a_hint(backward: Callable[[Step, Any], None], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _train(3, False, backward)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_negative_or_not_finite_is_an_error_although_the_sum_is_positive(bad: float) -> None:
    def backward(step: Step, sample: Any) -> None:
        step.backward(_mse(step, sample), weight=5.0 if len(sample[0]) == 3 else bad)

    with pytest.raises(UsageError, match=rf"micro-batch \d has weight={bad:g}\.\n.*step\.backward\(weight=.*weight_fn"):
        _train(3, False, backward)


@pytest.mark.parametrize("exact", [False, True])
def test_a_backward_pass_that_failed_does_not_count_as_done(exact: bool) -> None:
    """Otherwise a script that continues after it would update with half of the gradients."""

    def fails(gradient: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    def backward(step: Step, sample: Any) -> None:
        loss = _mse(step, sample)
        loss.register_hook(fails)
        with contextlib.suppress(RuntimeError):
            step.backward(loss)

    with pytest.raises(RuntimeError, match="out of memory") as raised:
        _train(4, exact, backward)
    (note,) = raised.value.__notes__
    assert note.startswith("  "), "an agent takes the last line that is not indented for the exception"
    assert note.endswith("went on: step 1: micro-batch 0 ended without step.backward(loss).")


def test_a_backward_pass_that_other_ranks_wait_for_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its means are already posted, and a second time they would be combined with other ranks' gradients."""

    def fails(gradient: Tensor) -> Tensor:
        raise RuntimeError("no such graph")

    def backward(step: Step, sample: Any) -> None:
        loss = _mse(step, sample)
        handle = loss.register_hook(fails)
        with contextlib.suppress(RuntimeError):
            step.backward(loss)
        handle.remove()
        step.backward(loss)

    _train(4, True, backward)
    monkeypatch.setattr(Gradients, "talks_in_between", True)
    with pytest.raises(RuntimeError, match="no such graph") as raised:
        _train(4, False, backward)
    assert "cannot be retried" in raised.value.__notes__[0]


@pytest.mark.parametrize("exact", [False, True])
def test_a_script_that_goes_on_after_a_broken_exchange_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    """The exchange breaks when another rank is killed: a restart helps, and an error of usage would prevent it."""

    def breaks(*_: Any) -> None:
        raise RuntimeError("Connection reset by peer")

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = Run(Engine(World(), torch.device("cpu"))).steps(_loader(4), model, optimizer, until="4ba", exact=exact)
    step = next(steps)
    monkeypatch.setattr(Gradients, "wait", breaks)
    with contextlib.suppress(RuntimeError):
        for sample in step:
            step.backward(_mse(step, sample))
        step.update()
    with pytest.raises(RuntimeError, match="Connection reset by peer"):
        next(steps)


@pytest.mark.parametrize("caught", [False, True])
def test_an_error_of_the_dataset_names_the_samples_also_if_the_script_catches_it(caught: bool) -> None:
    class Broken(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise OSError("cannot read image")
            return super().__getitem__(index)

    loader = ElasticLoader(Broken(torch.randn(8, 3), torch.randn(8, 1)), GlobalBatch(8, 2), shuffle=False)
    model = _model()
    steps = Run(Engine(World(), torch.device("cpu"))).steps(
        loader, model, torch.optim.SGD(model.parameters(), lr=0.1), until=1
    )
    step = next(steps)

    def train() -> None:
        with contextlib.suppress(OSError if caught else KeyError):
            for sample in step:
                step.backward(_mse(step, sample))
        next(steps)

    with pytest.raises(OSError, match="cannot read image") as raised:
        train()
    loaded, *others = raised.value.__notes__
    assert "micro-batch 2 of step 1 was loaded. The micro-batch has the dataset's items 4, 5." in loaded
    assert len(others) == caught


def test_a_step_without_update_is_an_error() -> None:
    model = _model()
    steps = Run(Engine(World(), torch.device("cpu"))).steps(
        _loader(8), model, torch.optim.SGD(model.parameters(), lr=0.1), until="2ba"
    )
    next(steps)
    with pytest.raises(UsageError, match=r"step 1 ended without step\.update"):
        next(steps)


def test_parameters_without_a_gradient_keep_none_in_exact_mode() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.sometimes, self.never = (nn.Linear(3, 1) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) + (self.sometimes(x) if (x == INPUTS[0]).all(dim=1).any() else 0)

    model = Half()
    _train(3, True, lambda step, sample: step.backward(_mse(step, sample)), until="1ba", model=model)
    assert model.never.weight.grad is None
    assert model.sometimes.weight.grad is not None
    assert model.used.weight.grad is not None


@pytest.mark.parametrize(
    ("module", "message"),
    [(nn.SyncBatchNorm(3), "SyncBatchNorm"), (nn.Embedding(3, 2, sparse=True), "sparse gradients")],
)
def test_what_cannot_be_exact_is_refused_by_name(module: nn.Module, message: str) -> None:
    with pytest.raises(UsageError, match=f"^0 .*{message}"):
        check_model(nn.Sequential(module))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_a_torchscript_module_is_refused_in_exact_mode_by_name() -> None:
    with pytest.raises(UsageError, match=r"^0 is a TorchScript module"):
        check_model(nn.Sequential(torch.jit.script(nn.Linear(3, 2))))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@pytest.mark.parametrize("whole", [False, True])
def test_a_torchscript_module_is_trained_as_the_python_module_is(whole: bool) -> None:
    def trained(make: Callable[[nn.Module], nn.Module]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        inner = make(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
        model = inner if whole else nn.Sequential(inner, nn.Linear(1, 1))
        _train(2, False, lambda step, sample: step.backward(_mse(step, sample)), model=model)
        return dict(model.state_dict())

    torch.testing.assert_close(trained(torch.jit.script), trained(lambda module: module))


@pytest.mark.parametrize("exact", [False, True])
def test_unchanged_buffers_stay_as_they_are(exact: bool) -> None:
    """The mean of equal numbers, taken in floating point, is not always that number: 0.1 / 3 three times is not 0.1."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.register_buffer("mask", torch.tensor([float("-inf"), 0.1, 0.3]))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    model = Masked()
    before = model.mask.clone()
    _train(3, exact, lambda step, sample: step.backward(_mse(step, sample)), model=model)
    assert torch.equal(model.mask, before)


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_of_one_micro_batch_is_that_of_plain_pytorch_to_the_bit(exact: bool) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    ours, _ = _train(8, exact, lambda step, sample: step.backward(_mse(step, sample)), until="2ba", model=model())
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for start in (0, 8):
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(INPUTS[start : start + 8]), TARGETS[start : start + 8]).backward()
        optimizer.step()
    assert weights_sha256(ours) == weights_sha256(plain)


def test_a_gradient_that_comes_in_parts_is_added_up_first() -> None:
    """As from reentrant activation checkpointing: one backward pass, several accumulations."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.head = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(self.linear, x.requires_grad_(), use_reentrant=True)
            return self.head(x)

    def train(exact: bool, micro: int = 1) -> nn.Module:
        torch.manual_seed(0)
        model, _ = _train(
            micro, exact, lambda step, sample: step.backward(_mse(step, sample)), until="2ba", model=Twice()
        )
        return model

    for ours, theirs in zip(train(True).parameters(), train(False).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_gradients_that_share_their_memory_are_added_one_by_one(exact: bool, micro: int) -> None:
    """Autograd may give both terms of a sum the same gradient object."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * (self.a[None] + self.b[None])).sum(1, keepdim=True)

    def backward(step: Step, sample: tuple[Tensor, Tensor]) -> None:
        step.backward(_mse(step, sample))

    model, _ = _train(micro, exact, backward, until="1ba", model=Sum())
    expected = Sum()
    nn.functional.mse_loss(expected(INPUTS[:8]), TARGETS[:8]).backward()
    assert_stepped_alike(model, expected)


def assert_stepped_alike(model: nn.Module, expected: nn.Module) -> None:
    """A model has made the step of plain PyTorch that the gradients of another one ask for."""
    with torch.no_grad():
        for parameter in expected.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("exact", [False, True])
def test_what_the_script_does_to_gradients_in_the_loop_changes_nothing(exact: bool) -> None:
    """The script cannot access them until the loop has ended, even if autograd adds to them in place."""
    model = _model()
    seen = []

    def backward(step: Step, sample: tuple[Tensor, Tensor]) -> None:
        step.backward(_mse(step, sample))
        seen.extend(parameter.grad for parameter in model.parameters())
        model.zero_grad(set_to_none=False)

    _train(3, exact, backward, until="1ba", model=model)
    expected, _ = _train(3, exact, lambda step, sample: step.backward(_mse(step, sample)), until="1ba")
    assert seen == [None] * 6
    assert weights_sha256(model) == weights_sha256(expected)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("how", ["default", "exact", "checked"])
def test_a_backward_pass_of_the_scripts_own_counts_nothing(how: str, zeros: bool) -> None:
    """As that for an adversarial input; if a micro-batch is computed again, too."""

    def trained(*, own: bool) -> str:
        run, model = Run(Engine(World(), torch.device("cpu"))), _model()
        options: Any = {"exact": how != "default", "verify": how == "checked"}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in run.steps(_loader(3), model, optimizer, until="4ba", **options):
            for x, y in step:
                inputs = x.clone().requires_grad_()
                loss = _mse(step, (inputs, y))
                if own:
                    loss.backward()  # type: ignore[no-untyped-call]
                    model.zero_grad(set_to_none=not zeros)
                gradient = inputs.grad if own else torch.autograd.grad(loss, inputs)[0]
                assert gradient is not None
                step.backward(_mse(step, (x + gradient.sign(), y)))
            step.update()
        return weights_sha256(model)

    assert trained(own=True) == trained(own=False)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("where", ["before", "after"])
def test_gradients_that_the_script_leaves_beside_the_steps_are_refused(where: str, exact: bool) -> None:
    """They may be meant to count, or not: in plain PyTorch they would."""

    def backward(step: Step, sample: tuple[Tensor, Tensor]) -> None:
        own = _mse(step, sample)
        if where == "before":
            own.backward()  # type: ignore[no-untyped-call]
        step.backward(_mse(step, sample))
        if where == "after":
            own.backward()  # type: ignore[no-untyped-call]

    for micro in (3, 8):  # the next micro-batch notices it, or the end of the step
        with pytest.raises(UsageError, match=r"run itself has left a gradient in weight"):
            _train(micro, exact, backward)


def test_a_gradient_that_a_hook_of_the_scripts_has_replaced_counts() -> None:
    """The hook sees the gradient of each micro-batch, as at any number of ranks."""

    def halved(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad / 2

    model, expected = _model(), _model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halved)
    _train(4, False, lambda step, sample: step.backward(_mse(step, sample)), until="1ba", model=model)
    for rows in (slice(0, 4), slice(4, 8)):
        (nn.functional.mse_loss(expected(INPUTS[rows]), TARGETS[rows]) / 4).backward()
    assert_stepped_alike(model, expected)


@pytest.mark.parametrize("exact", [False, True])
def test_a_buffer_that_a_module_reassigns_is_part_of_the_step(exact: bool) -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.register_buffer("ema", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.ema = 0.5 * self.ema + 0.5 * len(x)
            return self.linear(x)

    model = Averaging()
    buffer = model.ema
    _train(3, exact, lambda step, sample: step.backward(_mse(step, sample)), until="1ba", model=model)
    # Micro-batches of 3, 3 and 2, each from the step's start.
    assert model.ema is buffer
    assert float(buffer) == pytest.approx((1.5 + 1.5 + 1) / 3)


def _transaction(
    loader: ElasticLoader, optimizer: torch.optim.Optimizer, share: Share, done: Sequence[Outcome] = ()
) -> Transaction:
    """A step that no loop owns."""
    owner: Any = SimpleNamespace(engine=Engine(World(), torch.device("cpu")))
    return Transaction(owner, StepRules(OptimizerSteps(optimizer)), epochs_of(loader), 0, share, done)


def test_giving_up_where_others_would_wait_is_refused() -> None:
    class Talking(Gradients):
        @property
        def talks_in_between(self) -> bool:
            return True

    model, loader = _model(), _loader(8)
    optimizer = torch.optim.SGD(model.parameters())
    share = Share(epochs_of(loader).plan(0, 1, 0), iter([]), Talking(model, optimizer, 1, 0))
    with pytest.raises(UsageError, match="backward passes have sent gradients"):
        _transaction(loader, optimizer, share).give_up()


@pytest.mark.parametrize("rank", [0, 1], ids=["idle", "busy"])
def test_an_update_before_the_loop_over_the_step_comes_too_early(rank: int) -> None:
    """Of two ranks the first has no micro-batch, so it has none left either."""
    model, loader = _model(), _loader(8)
    optimizer = torch.optim.SGD(model.parameters())
    share = Share(epochs_of(loader).plan(0, 2, rank), iter([]), Gradients(model, optimizer, 1, 0))
    assert share.plan.grad_accum == rank
    step = Step(_transaction(loader, optimizer, share))
    with pytest.raises(UsageError, match=r"step\.update\(\) came before the loop over the step"):
        step.update()
    assert not step.updated


def test_an_update_within_the_loop_over_the_step_says_after_how_many_micro_batches() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters())
    for step in Run(Engine(World(), torch.device("cpu"))).steps(_loader(2), model, optimizer, until="1ba"):
        for sample in step:
            step.backward(_mse(step, sample))
            with pytest.raises(UsageError, match=r"step\.update\(\) came after 1 of 4 micro-batches"):
                step.update()
            break
        break


def _by_break(step: Step) -> Iterator[Any]:
    for sample in step:
        yield sample
        break


def _by_zip(step: Step) -> Iterator[Any]:
    for _, sample in zip(range(1), step, strict=False):
        yield sample


def _by_next(step: Step) -> Iterator[Any]:
    yield next(iter(step))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("left", [_by_break, _by_zip, _by_next])
def test_a_loop_over_the_step_that_is_left_at_its_last_micro_batch_is_noticed(
    left: Callable[[Step], Iterator[Any]], exact: bool
) -> None:
    """Without an error, the model would not be trained, or its buffers would not follow."""
    model = nn.Sequential(nn.BatchNorm1d(3), _model())
    optimizer = torch.optim.SGD(model.parameters())
    steps = Run(Engine(World(), torch.device("cpu"))).steps(_loader(8), model, optimizer, until="1ba", exact=exact)
    step = next(steps)
    for sample in left(step):
        step.backward(_mse(step, sample))
    with pytest.raises(UsageError, match="came before the loop over the step had ended"):
        step.update()
    assert not step.updated


def test_a_stop_holds_for_the_next_training_too() -> None:
    run, model = Run(Engine(World(), torch.device("cpu"))), _model()
    optimizer = torch.optim.SGD(model.parameters())
    done = 0
    for _ in range(2):
        for step in run.steps(_loader(8), model, optimizer, until="3ba"):
            for sample in step:
                step.backward(_mse(step, sample))
            step.update()
            done += 1
            run.request_stop()
    assert done == 1
    assert run.stopped


def test_numbers_after_the_loop_do_not_depend_on_those_before_it() -> None:
    """A rank may draw in the head of a step, or have no micro-batches, and another rank not."""

    def drawn() -> tuple[float, float, float]:
        return torch.randn(()).item(), random.gauss(0, 1), np.random.standard_normal()

    def after(micro: int, *, head: bool) -> list[tuple[float, float, float]]:
        run, model, found = Run(Engine(World(), torch.device("cpu"))), _model(), []
        for step in run.steps(_loader(micro), model, torch.optim.SGD(model.parameters()), until="2ba"):
            if head:
                drawn()
            for sample in step:
                drawn()
                step.backward(_mse(step, sample))
            found.append(drawn())
            step.update()
        return found

    expected = after(8, head=False)
    assert after(4, head=True) == after(8, head=True) == expected
    loader, model = _loader(8), _model()
    optimizer = torch.optim.SGD(model.parameters())
    share = Share(epochs_of(loader).plan(0, 1, 0), iter([]), Gradients(model, optimizer, 1, 0))
    left_out = _transaction(loader, optimizer, share, done=[(0.0, {})])
    assert not [*left_out.micro_batches()]
    assert drawn() == expected[0]
    assert expected[0] != expected[1]


def test_the_end_of_a_training_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    """In a process that has trained, and in one that has restored the end; after another step they are others."""

    def drawn(until: str, before: int) -> tuple[float, float, float]:
        run, model = Run(Engine(World(), torch.device("cpu"))), _model()
        optimizer = torch.optim.SGD(model.parameters())
        torch.manual_seed(before)
        random.seed(before)
        np.random.seed(before)
        np.random.standard_normal()
        for step in run.steps(_loader(8), model, optimizer, until=until, checkpoint=Checkpoint(tmp_path, every=1)):
            for sample in step:
                step.backward(_mse(step, sample) * (1 + random.random() * torch.rand(())))
            step.update()
            np.random.standard_normal(step.number)
        run._engine.close()
        return torch.randn(()).item(), random.gauss(0, 1), np.random.standard_normal()

    trained = drawn("2ba", 0)
    assert drawn("2ba", 1) == trained
    assert len({*trained, *drawn("3ba", 0)}) == 6


@pytest.mark.parametrize("exact", [False, True])
def test_a_buffer_that_gets_its_first_value_in_a_micro_batch_is_refused(exact: bool) -> None:
    class Centered(nn.Module):
        def __init__(self, *, persistent: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.register_buffer("center", None, persistent=persistent)

        def forward(self, x: Tensor) -> Tensor:
            if self.center is None:
                self.center = torch.zeros(3)
            return self.linear(x - self.center)

    def train(model: nn.Module) -> None:
        _train(4, exact, lambda step, sample: step.backward(_mse(step, sample)), until="1ba", model=model)

    with pytest.raises(UsageError, match="The buffer 'center' got its first value in a micro-batch"):
        train(Centered(persistent=True))
    train(Centered(persistent=False))
    model = Centered(persistent=True)
    model(torch.zeros(1, 3))
    train(model)

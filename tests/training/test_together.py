"""Models and optimizers that are trained together, in one loop; and trainings that cannot be combined."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SCRIPTS, Agent, Job, run_script, wait_for
from tensor_reads import Reads
from torch import Tensor, nn
from torch.nn.functional import softplus

import elastic_launch as el
from elastic_launch import faults, snapshot
from elastic_launch.errors import ElasticLaunchError, UsageError
from elastic_launch.snapshot.storage import owner
from elastic_launch.training.data.loader import epochs_of
from elastic_launch.training.engine import Engine
from elastic_launch.training.flips import Flips
from elastic_launch.training.gradients.accumulation import ExactGradients, Gradients
from elastic_launch.training.ranks.replicas import replicated
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run
from elastic_launch.training.together import Optimizers
from elastic_launch.training.transaction import Recovered

ALTERNATING = str(SCRIPTS / "guards" / "alternating.py")
REAL = torch.randn(32, 4, generator=torch.Generator().manual_seed(1)) + 2


def _run() -> Run:
    return Run(Engine(World(), torch.device("cpu")))


def _loader(micro: int = 4) -> el.ElasticLoader:
    return el.ElasticLoader(REAL, el.GlobalBatch(16, micro), shuffle=False)


class Gan:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.g, self.d = nn.Linear(4, 4), nn.Linear(4, 1)
        self.models = {"g": self.g, "d": self.d}
        self.optimizers = {name: torch.optim.Adam(model.parameters(), 0.05) for name, model in self.models.items()}

    def loss_d(self, x: Tensor) -> Tensor:
        return softplus(-self.d(x)).mean() + softplus(self.d(self.g(x.flip(1)).detach())).mean()

    def loss_g(self, x: Tensor) -> Tensor:
        return softplus(-self.d(self.g(x.flip(1)))).mean()

    def train(self, until: str, **options: Any) -> list[float]:
        losses = []
        for step in _run().steps(_loader(), self.models, self.optimizers, until=until, **options):
            for x in step:
                step.backward(self.loss_d(x))
            step.update(optimizer="d")
            for x in step:
                step.backward(self.loss_g(x))
            step.update(optimizer="g", clip_norm=0.1)
            losses.append(step.loss)
        return losses

    @property
    def hashes(self) -> list[str]:
        return [el.weights_sha256(model) for model in self.models.values()]


@pytest.mark.parametrize("exact", [False, True])
def test_a_gan_in_one_loop_is_that_of_a_plain_loop(exact: bool) -> None:
    ours, plain = Gan(), Gan()
    losses = ours.train("6ba", exact=exact)
    for number in range(6):
        x = REAL[number % 2 * 16 :][:16]
        for name, loss_fn in (("d", plain.loss_d), ("g", plain.loss_g)):
            plain.g.zero_grad()
            plain.d.zero_grad()
            loss = loss_fn(x)
            loss.backward()
            if name == "g":
                nn.utils.clip_grad_norm_(plain.g.parameters(), 0.1)
            plain.optimizers[name].step()
        assert losses[number] == pytest.approx(loss.item(), rel=1e-4)
    for mine, theirs in zip(ours.models.values(), plain.models.values(), strict=True):
        torch.testing.assert_close(list(mine.parameters()), list(theirs.parameters()), rtol=1e-4, atol=1e-5)


def test_both_models_and_both_optimizers_are_restored(tmp_path: Path) -> None:
    whole, first, second = Gan(), Gan(), Gan()
    whole.train("6ba", exact=True)
    first.train("3ba", exact=True, checkpoint=el.Checkpoint(tmp_path, every=100))
    second.train("6ba", exact=True, checkpoint=el.Checkpoint(tmp_path, every=100))
    assert second.hashes == whole.hashes
    assert second.hashes[0] != second.hashes[1]


def test_one_model_with_two_optimizers_is_updated_by_both_at_once() -> None:
    model = Gan().g
    before = [parameter.clone() for parameter in model.parameters()]
    optimizers = {"w": torch.optim.SGD([model.weight], 0.1), "b": torch.optim.Adam([model.bias], 0.1)}
    for step in _run().steps(_loader(), model, optimizers, until="1ba"):
        for x in step:
            step.backward(step.model(x).square().mean())
        step.update()
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_second_pass_has_the_same_samples_and_other_random_numbers() -> None:
    gan, seen = Gan(), []
    for step in _run().steps(_loader(), gan.models, gan.optimizers, until="1ba"):
        for name in gan.models:
            for x in step:
                seen.append((x, torch.rand(1)))
                step.backward(gan.loss_d(x) + gan.loss_g(x))
            step.update(optimizer=name)
    assert torch.equal(torch.cat([x for x, _ in seen[:4]]), REAL[:16])
    assert all(torch.equal(one[0], other[0]) for one, other in zip(seen[:4], seen[4:], strict=True))
    assert len({float(number) for _, number in seen}) == 8


@pytest.mark.parametrize(
    ("models", "optimizers", "message"),
    [
        ([nn.Linear(1, 1)], {}, r"run.steps\(model=...\) is a list"),
        ({}, {}, r"run.steps\(model=...\) is a dict of nothing"),
        ({"a": 3}, {}, r"run.steps\(model=...\) is a dict of int"),
        ({1: nn.Linear(1, 1)}, {}, r"the names are \[1\]"),
        ({"a.b": nn.Linear(1, 1)}, {}, r'can\'t contain "\."'),
        (nn.Linear(1, 1), (), r"run.steps\(optimizer=...\) is a tuple"),
    ],
)
def test_an_object_that_is_not_a_model_or_optimizer_is_named(models: Any, optimizers: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _run().steps(_loader(), models, optimizers, until=1)


def test_passes_and_updates_that_do_not_belong_together_say_so() -> None:
    gan, loops = Gan(), []

    def first_step(optimizers: Any) -> Any:
        loops.append(_run().steps(_loader(), gan.models, optimizers, until=1))
        step = next(loops[-1])
        for x in step:
            step.backward(gan.loss_d(x))
        return step

    step = first_step(gan.optimizers)
    with pytest.raises(UsageError, match=r"optimizer='e'\): the optimizers of this loop are 'g', 'd'"):
        step.update(optimizer="e")
    with pytest.raises(UsageError, match=r"began before step\.update"):
        next(iter(step))
    step.update()
    with pytest.raises(UsageError, match="came a second time"):
        step.update()
    alone = first_step(gan.optimizers["d"])
    alone.update()
    with pytest.raises(UsageError, match="already iterated over, and has only one optimizer"):
        next(iter(alone))


def test_a_pass_without_an_update_is_an_error() -> None:
    gan = Gan()
    steps = _run().steps(_loader(), gan.models, gan.optimizers, until="2ba")
    step = next(steps)
    for x in step:
        step.backward(gan.loss_d(x))
    step.update(optimizer="d")
    for x in step:
        step.backward(gan.loss_g(x))
    with pytest.raises(UsageError, match=r"step 1 ended without step\.update"):
        next(steps)


def test_two_loops_at_once_are_refused_and_one_after_the_other_are_not(tmp_path: Path) -> None:
    run, gan = _run(), Gan()
    loops = [
        run.steps(_loader(), gan.models[name], gan.optimizers[name], until="2ba", checkpoint=el.Checkpoint(tmp_path))
        for name in ("g", "d")
    ]
    next(loops[0])
    with pytest.raises(UsageError, match=r"Two loops over steps at once(.|\n)*run\.steps\(loader, {"):
        next(loops[1])
    with pytest.raises(UsageError, match=r"run\.boundary\(1\) was called within run\.steps"):
        run.boundary(1)
    with pytest.raises(UsageError, match=r"run\.resume\(\) was called within run\.steps"):
        run.resume(el.Checkpoint(tmp_path))
    assert run.boundary() is False
    loops[0].close()  # type: ignore[attr-defined]
    assert next(run.steps(_loader(), gan.d, gan.optimizers["d"], until="2ba")).number == 1


def test_another_model_does_not_get_what_an_earlier_training_has_saved(tmp_path: Path) -> None:
    run = _run()

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        saving = el.Checkpoint(tmp_path, every=1)
        for step in run.steps(_loader(), model, optimizer, until="2ba", checkpoint=saving):
            for x in step:
                step.backward(model(x).square().mean())
            step.update()

    model = nn.Linear(4, 4)
    train(model)
    train(model)
    with pytest.raises(UsageError, match=f"{tmp_path} has the checkpoints of another training of this script"):
        train(nn.Linear(4, 4))


def test_a_later_loop_takes_no_directory_again(tmp_path: Path) -> None:
    """Else states of the same run's earlier loops, which a restart may find in memory, would be of another run."""
    run, models = _run(), {name: nn.Linear(4, 4) for name in "ab"}

    def train(name: str, until: int) -> bytes:
        model, saving = models[name], el.Checkpoint(tmp_path / name, every=100)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in run.steps(_loader(), model, optimizer, until=f"{until}ba", checkpoint=saving):
            for x in step:
                step.backward(model(x).square().mean())
            step.update()
        return (tmp_path / name / owner.OWNER).read_bytes()

    marks = [train("a", 2), train("b", 2)]
    assert train("b", 3) == marks[1]
    assert train("a", 3) == marks[0]
    saved = [info.meta["branch"] for info in snapshot.find(tmp_path / "a")]
    assert len({(branch["epoch"], branch["run"]) for branch in saved}) == 1
    assert len(saved) == 2


def test_trainers_that_take_turns_each_resume_where_they_were(tmp_path: Path) -> None:
    def trainer(run: Run, name: str) -> el.Trainer:
        model = Gan().g
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return el.Trainer(
            run,
            model,
            optimizer,
            _loader(),
            forward=lambda model, x: (model(x), x),
            loss_fn=nn.functional.mse_loss if name == "a" else nn.functional.l1_loss,
            checkpoint=el.Checkpoint(tmp_path / name, every=100),
        )

    run = _run()
    pair = [trainer(run, name) for name in "ab"]
    for until in ("2ba", "5ba"):
        for each in pair:
            each.fit(until)
    assert [each.step for each in pair] == [5, 5]
    for each, name in zip(pair, "ab", strict=True):
        alone = trainer(_run(), name)
        alone._checkpoint = None
        alone.fit("5ba")
        assert el.weights_sha256(alone.model) == el.weights_sha256(each.model)


@pytest.mark.slow
def test_a_gan_that_is_killed_three_times_has_the_undisturbed_weights(job: Job) -> None:
    script = str(SCRIPTS / "guards" / "gan.py")
    alone = re.search(r"hashes (\w+ \w+)", run_script(script, str(job.directory / "alone")))
    assert alone is not None
    faults = '[{"rank": 1, "step": 7}, {"rank": 0, "round": 2, "step": 13}, {"rank": 1, "round": 3, "step": 18}]'
    command = [script, str(job.directory / "killed")]
    agent = job.launch("--standalone", "--nproc", "2", command=command, env={"ELASTIC_LAUNCH_FAULTS": faults})
    assert agent.wait(100) == 0, agent.output
    assert f"hashes {alone[1]} restarts 3" in agent.output


@pytest.mark.parametrize("change", [lambda batch: batch["x"].mul_(2), lambda batch: batch.update(x=batch["x"] * 2)])
def test_a_micro_batch_that_the_first_pass_has_changed_is_not_given_to_the_second(change: Any) -> None:
    gan = Gan()
    data = [{"x": row} for row in REAL]
    steps = _run().steps(el.ElasticLoader(data, el.GlobalBatch(16, 4)), gan.models, gan.optimizers, until=1)
    step = next(steps)
    for batch in step:
        step.backward(gan.loss_d(batch["x"]))
        change(batch)
    step.update(optimizer="d")
    with pytest.raises(UsageError, match=r"step 1: the script changed micro-batch 0 in place in an earlier pass"):
        next(iter(step))


class Rows:
    """Rows in an array, which a pass may change in place without a trace."""

    def __init__(self, x: Any) -> None:
        self.x = x


@pytest.mark.parametrize(
    "collate", [lambda rows: {"x": torch.stack(rows).numpy()}, lambda rows: Rows(torch.stack(rows))]
)
def test_what_may_have_changed_without_a_trace_is_given_to_each_pass_as_it_was(collate: Any) -> None:
    gan, seen = Gan(), list[float]()
    loader = el.ElasticLoader([*REAL], el.GlobalBatch(16, 4), collate_fn=collate)
    steps = _run().steps(loader, gan.models, gan.optimizers, until=1)
    step = next(steps)
    for name, loss in (("d", gan.loss_d), ("g", gan.loss_g)):
        for batch in step:
            if isinstance(batch, Rows):
                batch.x = x = batch.x * 2
            else:
                batch["x"] *= 2
                x = torch.from_numpy(batch["x"])
            seen.append(float(x.sum()))
            step.backward(loss(x))
        step.update(optimizer=name)
    assert seen[:4] == seen[4:]


def test_what_cannot_be_given_to_each_pass_as_it_was_is_refused() -> None:
    gan = Gan()
    loader = el.ElasticLoader([*REAL], el.GlobalBatch(16, 4), collate_fn=lambda rows: (row for row in rows))
    steps = _run().steps(loader, gan.models, gan.optimizers, until=1)
    step = next(steps)
    with pytest.raises(UsageError, match=r"step 1: micro-batch 0 cannot be copied \(TypeError: .*\), and each pass"):
        next(iter(step))


@pytest.mark.parametrize("together", [False, True])
def test_an_optimizer_that_the_script_also_steps_is_refused(together: bool) -> None:
    """A line left over from a plain loop would apply the gradients twice."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    models, optimizers = ({"a": model}, {"a": optimizer}) if together else (model, optimizer)
    for step in _run().steps(_loader(), models, optimizers, until=2):  # type: ignore[arg-type]
        for x in step:
            step.backward(model(x).mean())
            optimizer.step()  # does nothing: there are no gradients yet
        if step.number == 2:
            with pytest.raises(UsageError, match=r"step\(\) between a step's micro-batches and step\.update"):
                optimizer.step()
            break
        step.update()
    del step
    optimizer.step()  # the loop has ended


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", [["--exact"], pytest.param([], marks=pytest.mark.soak)], ids=["exact", "default"])
def test_trainers_that_take_turns_come_to_the_same_weights_through_kills(job: Job, mode: list[str]) -> None:
    """Workers are killed from outside, at any moment; in default mode the world stays the same."""

    def launch(name: str) -> Agent:
        flags = ["--standalone", "--nproc", "2", "--max-restarts", "4"]
        return job.launch(*flags, name=name, command=[ALTERNATING, str(job.directory / name), *mode])

    undisturbed = launch("undisturbed")
    assert undisturbed.wait(100) == 0, undisturbed.output
    moments, began = random.Random(len(mode)), time.monotonic()
    killed = launch("killed")

    def workers(number: int) -> list[int]:
        events = [event for event in job.events() if event["clock"] > began]
        come = [event for event in events if event["event"] in ("worker_started", "worker_kept")]
        return [event["pid"] for event in come if event["round"] == number]

    for number in (1, 2, 3):
        wait_for("the next workers", lambda number=number: len(workers(number)) == 2, 60)
        time.sleep(moments.uniform(0.3, 1.2))
        os.kill(moments.choice(workers(number)), signal.SIGKILL)
    assert killed.wait(100) == 0, killed.output
    (hashes,) = set(re.findall(r"hashes (.*) restarts 0", undisturbed.output))
    assert set(re.findall(r"hashes (.*) restarts 3", killed.output)) == {hashes}


class Elsewhere:
    """A round that ends in a pass, and the next one, in which other ranks may be further."""

    def __init__(self, step: el.Step, passes: list[tuple[float, dict[str, float]]], loop: Any) -> None:
        self.updated: list[int] = []
        self.recovered, self._step, self._passes, self._loop = 0, step._transaction, passes, loop
        owner = step._transaction._loop
        self.engine = self.rounds = self.groups = self
        self.saver, self.agreement, self.positions = owner.engine.saver, owner.engine.agreement, owner.positions
        self.trainings = owner.engine.trainings
        self._step._loop = self._step._rounds = self  # type: ignore[assignment]

    is_over = False

    def note_exchanges(self) -> None: ...

    def check_exchanges(self) -> None: ...

    def updates(self) -> None: ...

    def disconnect(self) -> None: ...

    def confirm(self, gpus: Any) -> None: ...

    def caused(self, error: RuntimeError) -> bool:
        return "Connection closed" in str(error)

    def pass_updated(self, passes: int) -> None:
        self.updated.append(passes)

    def in_pass(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check_over(self) -> None: ...

    def meet_replica(self) -> None: ...

    def recover(self, error: RuntimeError, passes: Any, *, in_pass: bool) -> Recovered:
        self.recovered += 1
        share = replace(self._step.share, batches=epochs_of(_loader()).epoch_from(0, 1, 0))
        return Recovered(share, passes=self._passes[len(passes) :] and self._passes)


def _broken(
    monkeypatch: pytest.MonkeyPatch, gan: Gan, passes: list[tuple[float, dict[str, float]]]
) -> tuple[el.Step, Elsewhere]:
    """A step whose next exchange fails, once; others have done these passes."""
    loop = _run().steps(_loader(), gan.models, gan.optimizers, until=1, exact=True)
    step = next(loop)
    elsewhere = Elsewhere(step, passes, loop)
    wait, left = ExactGradients.wait, [1]

    def breaks(self: ExactGradients, table: Any) -> None:
        if left:
            left.clear()
            raise RuntimeError("Connection closed by peer")
        wait(self, table)

    monkeypatch.setattr(ExactGradients, "wait", breaks)
    return step, elsewhere


def test_a_pass_that_others_have_done_is_left_out_and_its_result_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gan = Gan()
    before = gan.hashes
    step, elsewhere = _broken(monkeypatch, gan, [(0.5, {})])
    for x in step:
        step.backward(gan.loss_d(x))
    assert step.gradients() == {}
    assert math.isnan(step.grad_norm("d"))
    step.update(optimizer="d")
    assert (step.loss, gan.hashes, elsewhere.updated) == (0.5, before, [1])
    for x in step:
        step.backward(gan.loss_g(x))
    step.update(optimizer="g")
    assert gan.hashes[1] == before[1]
    assert gan.hashes[0] != before[0]


def test_a_step_that_has_moved_once_does_not_do_so_again_and_blames_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    gan = Gan()
    step, elsewhere = _broken(monkeypatch, gan, [(0.5, {})])
    for x in step:
        step.backward(gan.loss_d(x))
    step.update(optimizer="d")
    with pytest.raises(ElasticLaunchError, match=r"a second time(.|\n)*made in different rounds") as raised:
        step.update(optimizer="g")
    assert not isinstance(raised.value, UsageError), "the run would end by it"
    monkeypatch.setattr(ExactGradients, "wait", lambda *_: (_ for _ in ()).throw(RuntimeError("Connection closed")))

    def second_pass() -> None:
        for x in step:
            step.backward(gan.loss_g(x))

    with pytest.raises(RuntimeError, match="Connection closed"):
        second_pass()
    assert elsewhere.recovered == 1


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_those_of_the_global_batch_and_can_be_changed(exact: bool, scaled: bool) -> None:
    gan, plain = Gan(), Gan()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    for step in _run().steps(_loader(), gan.models, gan.optimizers, until="1ba", exact=exact, scaler=scaler):
        with pytest.raises(UsageError, match="too early or too late"):
            step.gradients()
        for x in step:
            step.backward(gan.loss_g(x))
        plain.loss_g(REAL[:16]).backward()
        found = step.gradients("g")
        assert list(found) == ["g.weight", "g.bias"]
        for name, parameter in plain.g.named_parameters():
            torch.testing.assert_close(found[f"g.{name}"], parameter.grad)
        norm = nn.utils.get_total_norm([p.grad for p in plain.g.parameters() if p.grad is not None])
        assert step.grad_norm("g") == pytest.approx(float(norm), rel=1e-5)
        if scaled:
            with pytest.raises(UsageError, match="which optimizer steps next"):
                step.gradients()
        else:
            assert list(step.gradients()) == ["g.weight", "g.bias", "d.weight", "d.bias"]
        found["g.weight"].zero_()
        before = gan.g.weight.detach().clone()
        step.update(optimizer="g", clip_norm=0.01)
        assert torch.equal(gan.g.weight, before)
        with pytest.raises(UsageError, match="too early or too late"):
            step.grad_norm()


def test_a_norm_is_that_which_is_clipped_and_a_shared_parameter_counts_once() -> None:
    shared = nn.Linear(4, 1)
    optimizers = {"a": torch.optim.SGD(shared.parameters(), 1.0), "b": torch.optim.SGD([shared.weight], 1.0)}
    for step in _run().steps(_loader(), shared, optimizers, until="1ba"):
        for x in step:
            step.backward(shared(x).square().mean() * 100)
        norm = step.grad_norm()
        step.update(clip_norm=norm / 2)
        grads = [p.grad for p in shared.parameters() if p.grad is not None]
        assert float(nn.utils.get_total_norm(grads)) == pytest.approx(norm / 2, rel=1e-5)


def test_the_states_of_two_optimizers_with_a_parameter_in_common_are_all_compared() -> None:
    model = nn.Linear(4, 1)
    members = {name: torch.optim.SGD([model.weight], 0.1, momentum=0.9) for name in "ab"}
    for x in REAL:
        model(x).backward()
        for each in members.values():
            each.step()
        break
    names = [name for name, _ in replicated(model, Optimizers(members))()]
    assert names[-2:] == ["optimizer's momentum_buffer of 'weight'", "optimizer's momentum_buffer (b) of 'weight'"]


def test_entries_beside_those_of_the_parameters_are_all_in_the_merged_state() -> None:
    """MADGRAD counts its steps there."""
    members = {name: torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1) for name in "ab"}
    for number, each in enumerate(members.values()):
        each.state["k"] = torch.tensor([number])
    assert Optimizers(members).state == {"k": torch.tensor([0]), "k (b)": torch.tensor([1])}


def test_a_planned_flip_takes_a_state_with_entries_beside_those_of_the_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state["sum"] = torch.ones(3)
    planned = [faults.Fault(step=0, rank=0, do="flip", of="optimizer")]
    monkeypatch.setattr(faults, "flips", lambda step: planned)
    Flips().begin(0, 0, Gradients(model, optimizer, 1, 0), optimizer)
    assert int((optimizer.state["sum"] != 1).sum()) == 1


class Sam(torch.optim.SGD):
    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class Searching(torch.optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (torch.optim.LBFGS, "LBFGS goes through the batch several times in a step, by a closure"),
        (Searching, "Searching goes through the batch several times in a step, by a closure"),
        (Sam, "Sam has two steps for each batch"),
    ],
)
@pytest.mark.parametrize("together", [False, True])
def test_an_optimizer_of_several_passes_is_refused_before_the_first_step(
    kind: Any, message: str, together: bool
) -> None:
    model = nn.Linear(4, 1)
    optimizer = kind(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=message):
        _run().steps(_loader(), model, {"a": optimizer} if together else optimizer, until=1)


def test_a_closure_is_refused_wherever_the_script_gives_one() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in _run().steps(_loader(), model, optimizer, until=1):
        for x in step:
            for call in (lambda x=x: optimizer.step(lambda: model(x).mean()), lambda: optimizer.step(closure=float)):
                with pytest.raises(UsageError, match=r"called SGD\.step\(closure\)(.|\n)*step\.update\(\)"):
                    call()
            step.backward(model(x).mean())
        step.update()


def test_the_guides_sharpness_aware_minimization_is_that_of_a_plain_loop() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "two-step-optimizers.md").read_text()
    (code,) = re.findall(r"```python\n(class Ascent.*?)\n\n\noptimizers = ", guide, re.DOTALL)
    (loop,) = re.findall(r"\n(optimizers = \{\"ascent\".*?)\n```", guide, re.DOTALL)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    class Short:
        def steps(self, loader: Any, *args: Any, until: str, **options: Any) -> Any:
            return _run().steps(loader, *args, until="4ba", **options)

    data = [(x, x.sum()[None]) for x in REAL]
    loader = el.ElasticLoader(data, el.GlobalBatch(16, 4), shuffle=False)
    space = {"torch": torch, "model": model(), "loader": loader, "run": Short(), "loss_fn": nn.functional.mse_loss}
    exec(code + "\n" + loop, space)

    plain = model()
    descent = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(4):
        x = REAL[number % 2 * 16 :][:16]
        plain.zero_grad()
        nn.functional.mse_loss(plain(x), x.sum(1, keepdim=True)).backward()
        start = [p.detach().clone() for p in plain.parameters()]
        gradients = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        with torch.no_grad():
            for p, gradient in zip(plain.parameters(), gradients, strict=True):
                p.add_(gradient * 0.05 / norm)
        plain.zero_grad()
        nn.functional.mse_loss(plain(x), x.sum(1, keepdim=True)).backward()
        with torch.no_grad():
            for p, old in zip(plain.parameters(), start, strict=True):
                p.copy_(old)
        descent.step()
    torch.testing.assert_close(list(space["model"].parameters()), list(plain.parameters()), rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]


def test_a_gradient_is_not_unscaled_for_two_optimizers() -> None:
    shared, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = {name: torch.optim.SGD(shared.parameters(), 0.1) for name in "ab"}
    step = next(loop := _run().steps(_loader(), shared, optimizers, until=1, scaler=scaler))
    for x in step:
        step.backward(shared(x).square().mean())
    with pytest.raises(UsageError, match="unscale its gradient twice"):
        step.update()
    loop.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("fused", "expected"), [(True, 0), (False, 2)])
def test_a_step_with_a_scaler_reads_nothing_that_the_scaler_does_not_wait_for(fused: bool, expected: int) -> None:
    """An optimizer that is not fused waits for the overflow itself; besides, one parameter is in no optimizer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    scaler, overflows = torch.amp.GradScaler("cpu", init_scale=2.0**10), [False]
    model[1].weight.register_hook(lambda gradient: gradient * (math.inf if overflows[0] else 1.0))
    optimizer, skipped = torch.optim.SGD(model[1].parameters(), 0.1, fused=fused), []
    for step in _run().steps(_loader(), model, optimizer, until="4ba", scaler=scaler):
        overflows[0] = step.number == 2
        for x in step:
            step.backward(model(x).square().mean())
        before = model[1].weight.detach().clone()
        with Reads() as reads:
            step.update()
        assert len(reads.addresses) == expected
        skipped.append(step.skipped)
        assert torch.equal(before, model[1].weight) == step.skipped
    assert skipped == [False, True, False, False]


def test_an_optimizer_that_gets_no_gradient_in_its_pass_is_named(caplog: pytest.LogCaptureFixture) -> None:
    gan = Gan()
    for step in _run().steps(_loader(), gan.models, gan.optimizers, until="2ba"):
        for name in ("g", "d"):  # in the wrong order: what the first pass trains is d alone
            for x in step:
                step.backward(gan.loss_d(x))
            step.update(optimizer=name)
    assert [record.message[:55] for record in caplog.records] == [
        "step.update(optimizer='g'): none of its parameters has "
    ]

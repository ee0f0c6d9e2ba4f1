"""Models that cannot be trained, and objects added too late to be restored: refused by name, with a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from harness import SCRIPTS, Job
from torch import nn

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.training.engine import Engine
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run

REFUSED = str(SCRIPTS / "guards" / "refused.py")


@pytest.fixture
def run() -> Run:
    return Run(Engine(World(), torch.device("cpu")))


def _steps(run: Run, model: nn.Module) -> Iterable[el.Step]:
    loader = el.ElasticLoader(torch.arange(16) % 8, el.GlobalBatch(8, 4))
    return run.steps(loader, model, torch.optim.SGD(model.parameters(), 0.1), until=1)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_changes_its_weight_in_the_forward_pass(run: Run, kind: type[nn.Module]) -> None:
    made = kind(8, 4, max_norm=1.5)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=rf"'1' is an {kind.__name__} with max_norm(.|\n)*renorm\(2, 0, 1\.5\)"):
        _steps(run, nn.Sequential(nn.Identity(), made))


def test_the_remedy_does_what_max_norm_does() -> None:
    weight = torch.randn(8, 4) * 3
    kept = nn.Embedding.from_pretrained(weight.clone(), max_norm=1.5)
    used = kept(torch.arange(8))
    torch.testing.assert_close(weight.renorm(2, 0, 1.5), used)


def test_a_model_that_is_wrapped_or_sharded(run: Run) -> None:
    """With stand-ins that need no process group; the test under the launcher uses the real DDP and fully_shard."""
    with pytest.raises(UsageError, match=r"The model is wrapped in DataParallel(.|\n)*model\.module"):
        _steps(run, nn.DataParallel(nn.Linear(4, 4)))
    module = {"__module__": "torch.distributed.fsdp.fully_sharded_data_parallel"}
    sharded = nn.Sequential(type("FullyShardedDataParallel", (nn.Linear,), module)(4, 4))
    with pytest.raises(UsageError, match=r"The module '0' is sharded by FullyShardedDataParallel"):
        _steps(run, sharded)
    with pytest.raises(UsageError, match=r"The module '0' is sharded by FullyShardedDataParallel"):
        run.register("model", sharded)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_was_made_in_inference_mode(run: Run, persistent: bool) -> None:
    model = nn.Linear(4, 4)
    with torch.inference_mode():
        model.register_buffer("mean", torch.zeros(4), persistent=persistent)
    with pytest.raises(UsageError, match=r"mean was made in torch\.inference_mode\(\)(.|\n)*torch\.no_grad\(\)"):
        next(iter(_steps(run, model)))


def test_objects_may_be_registered_after_the_state_was_restored_and_functions_not(run: Run, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    loader = el.ElasticLoader(torch.randn(16, 4), el.GlobalBatch(8, 4))
    steps = run.steps(loader, model, torch.optim.SGD(model.parameters(), 0.1), until=1)
    run.register("early", nn.Linear(1, 1))
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    run.resume(el.Checkpoint(tmp_path))
    run.register("late", nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"run\.on_restore\(\) came after run\.resume\(\)"):
        run.on_restore(lambda: None)


def test_what_is_registered_between_making_a_loop_and_its_first_step_is_saved(run: Run, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    loader = el.ElasticLoader(torch.randn(16, 4), el.GlobalBatch(8, 4))
    checkpoint = el.Checkpoint(tmp_path)
    steps = run.steps(loader, model, torch.optim.SGD(model.parameters(), 0.1), until="1ba", checkpoint=checkpoint)
    run.register("extra", nn.Linear(1, 1))
    for step in steps:
        for x in step:
            step.backward(step.model(x).square().mean())
        step.update()
    (info,) = tmp_path.glob("step-1.*")
    assert "extra" in (info / "state.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(x, marks=pytest.mark.soak) for x in ("max_norm", "hybrid", "late"))]
)
def test_under_the_launcher_it_is_the_root_cause(job: Job, kind: str) -> None:
    command = [REFUSED, kind, str(job.directory / "checkpoints")]
    agent = job.launch("--standalone", "--nproc", "2", command=command)
    assert agent.wait(60) == 93, agent.output
    said = {
        "max_norm": "with max_norm",
        "ddp": "wrapped in Dist",
        "hybrid": "is a DTensor with the placements",
        "late": "'optimizer') came after",
    }
    assert said[kind] in agent.output.partition("root cause")[2]


class Recurrent(nn.Module):
    """Keeps the hidden state itself, or gets it from the script; or has an encoder whose state a decoder gets."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.encoder = nn.GRU(1, 2)
        self.decoder = nn.GRUCell(1, 2)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        out, hidden = self.encoder(x, self.kept if self.kind == "kept" else state)
        if self.kind == "kept":
            self.kept = hidden.detach()
        for _ in range(2 if self.kind == "decoder" else 0):
            hidden = self.decoder(x[0], hidden[0])[None]
        return out.mean() + hidden.mean(), hidden


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", ["kept", "given", "given in the next step", "decoder"])
def test_a_hidden_state_that_is_carried_to_the_next_micro_batch(run: Run, kind: str, exact: bool) -> None:
    model, state = Recurrent(kind), None
    batch = el.GlobalBatch(2, 2 if kind == "given in the next step" else 1)
    loader = el.ElasticLoader(torch.ones(8, 3, 1), batch, collate_fn=lambda found: torch.stack(found, 1))
    steps = run.steps(loader, model, torch.optim.SGD(model.parameters(), 0.1), until=1, exact=exact)

    def train() -> None:
        nonlocal state
        for step in steps:
            for x in step:
                loss, hidden = model(x, state)
                state = hidden.detach() if kind.startswith("given") else None
                step.backward(loss)
            step.update()

    if exact and kind != "decoder":
        who = "the module 'encoder'" if kind == "kept" else "the model"
        with pytest.raises(UsageError, match=f"{who} is called with a tensor that it has returned in an earlier micro"):
            train()
    else:
        train()
        assert not model._forward_hooks, "no step pays for it any more"

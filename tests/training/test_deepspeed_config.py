"""What a DeepSpeed configuration gets from a Trainer, and what it may not contradict."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.training import deepspeed_config as config

BATCH = el.GlobalBatch(64, micro=8)


@pytest.mark.parametrize(("world_size", "passes"), [(1, 8), (2, 4), (3, 3), (8, 1), (9, 1)])
def test_an_empty_configuration_is_completed_for_each_world(world_size: int, passes: int) -> None:
    full = config.completed(config.checked({}), BATCH, world_size, "fp32", None)
    assert full == {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": passes}


def test_precision_and_clipping_are_those_of_the_trainer() -> None:
    full = config.completed({}, BATCH, 2, config.precision_of({}, "bf16"), 0.5)
    assert full["bf16"] == {"enabled": True}
    assert full["gradient_clipping"] == 0.5


def test_precision_and_clipping_may_be_those_of_the_configuration() -> None:
    given = config.checked({"fp16": {"enabled": True, "initial_scale_power": 8}, "gradient_clipping": 2.0})
    precision, clip_norm = config.precision_of(given, None), config.clip_norm_of(given, None)
    assert (precision, clip_norm) == ("fp16", 2.0)
    full = config.completed(given, BATCH, 2, precision, clip_norm)
    assert full["fp16"] == {"enabled": True, "initial_scale_power": 8}
    assert full["zero_optimization"] == {"stage": 1}  # without it, the loss would not be scaled


def test_a_plain_optimizer_is_clipped_by_the_step() -> None:
    assert "gradient_clipping" not in config.completed({"gradient_clipping": 2.0}, BATCH, 2, "fp32", 2.0)


def test_what_is_auto_is_left_out() -> None:
    given = config.checked({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"})
    assert config.completed(given, BATCH, 2, "fp32", None)["gradient_accumulation_steps"] == 4


@pytest.mark.parametrize(
    ("given", "both"),
    [
        ({"train_batch_size": 128}, ["train_batch_size is 128", "GlobalBatch(64, micro=8)"]),
        ({"train_micro_batch_size_per_gpu": 4}, ["train_micro_batch_size_per_gpu is 4", "GlobalBatch(64, micro=8)"]),
        ({"gradient_accumulation_steps": 2}, ["gradient_accumulation_steps is 2", "on 2 ranks, which needs 4"]),
        ({"gradient_clipping": 2.0}, ["gradient_clipping is 2.0", "clip_norm=1"]),
        ({"fp16": {"enabled": True}}, ["fp16 is enabled", "precision='bf16'"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["enables bf16 and fp16"]),
        ({"optimizer": {"type": "Adam"}}, ["'optimizer' is not supported", "Give the optimizer to the Trainer"]),
        ({"zero_optimization": {"stage": 3}}, ["zero_optimization.stage is 3", "Set it to 2", "fully_shard"]),
        ({"zero_optimization": {"round_robin_gradients": True}}, ["'round_robin_gradients' of zero_optimization"]),
        ({"pipeline": {}}, ["'pipeline' is not supported"]),
        ({"zero_optimization": 1}, ["'zero_optimization' is an int"]),
        ("ds.json", ["deepspeed_config=...) is a str"]),
    ],
)
def test_a_value_that_contradicts_the_trainer_is_an_error_that_names_both(given: Any, both: list[str]) -> None:
    def complete() -> None:
        chosen = config.checked(given)
        precision, clip_norm = config.precision_of(chosen, "bf16"), config.clip_norm_of(chosen, 1.0)
        config.completed(chosen, BATCH, 2, precision, clip_norm)

    with pytest.raises(UsageError) as raised:
        complete()
    for part in both:
        assert part in str(raised.value)


def test_fp16_without_zero_is_refused() -> None:
    given = config.checked({"zero_optimization": {"stage": 0}})
    with pytest.raises(UsageError, match="does not scale the loss"):
        config.completed(given, BATCH, 2, "fp16", None)


def trainer(batch: el.GlobalBatch = BATCH, **options: Any) -> el.Trainer:
    model = torch.nn.Linear(2, 1)
    data = TensorDataset(torch.zeros(64, 2), torch.zeros(64, 1))
    with el.session() as run:
        made = el.Trainer(
            run,
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            el.ElasticLoader(data, batch),
            loss_fn=torch.nn.functional.mse_loss,
            deepspeed_config={},
            **options,
        )
        made.fit(1)
    return made


@pytest.mark.parametrize("options", [{"exact": True}, {"weight_fn": len}, {"batch": el.GlobalBatch(64, micro="auto")}])
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any]) -> None:
    name = 'micro="auto"' if "batch" in options else next(iter(options))
    with pytest.raises(UsageError) as raised:
        trainer(**options)
    assert f"does not support {name}" in str(raised.value)


def test_a_missing_deepspeed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("deepspeed") is not None:
        monkeypatch.setitem(__import__("sys").modules, "deepspeed", None)
    with pytest.raises(UsageError, match="deepspeed is not installed"):
        trainer()

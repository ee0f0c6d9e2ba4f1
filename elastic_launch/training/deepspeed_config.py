"""DeepSpeed's configuration of a ``Trainer``: completed by the trainer's arguments, and checked against them.

A key is passed on only if its effect on the training is known here: one that shards, steps, scales or saves in another
way would make a checkpoint wrong without a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_launch.batch import GlobalBatch
from elastic_launch.errors import UsageError
from elastic_launch.training.kinds import check_kind

_HALF = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16",)}
"""The sections of DeepSpeed's configuration that choose each precision."""

_PASSED = {
    *("activation_checkpointing", "comms_logger", "communication_data_type", "csv_monitor", "dump_state"),
    *("flops_profiler", "gradient_predivide_factor", "memory_breakdown", "prescale_gradients", "steps_per_print"),
    *("tensorboard", "wall_clock_breakdown", "wandb", "zero_allow_untested_optimizer"),
}
"""Keys that reach DeepSpeed as they are."""

_COMPARED = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("bf16", "bfloat16", "data_types", "fp16", "zero_optimization"),
}

_ZERO = {
    *("stage", "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "overlap_comm"),
    *("reduce_bucket_size", "reduce_scatter"),
}
"""Keys of ``zero_optimization`` that reach DeepSpeed as they are."""

_INSTEAD = {
    "optimizer": "Give the optimizer to the Trainer.",
    "scheduler": "Give the scheduler to the Trainer.",
    "elasticity": "The global batch is kept by the Trainer at any world size.",
}


def checked(config: Any) -> dict[str, Any]:
    """Return the configuration without the keys whose value is ``"auto"``; refuse keys that are not supported."""
    where = "Trainer(deepspeed_config=...)"
    check_kind(where, config, Mapping, "Give a dict as in DeepSpeed's documentation; {} has all defaults.")
    chosen: dict[str, Any] = {key: value for key, value in config.items() if value != "auto"}
    for key in chosen:
        if key not in _PASSED | _COMPARED:
            hint = _INSTEAD.get(key, "Its effect on the training and its checkpoints is unknown: leave it out.")
            raise UsageError(f"{where}: {key!r} is not supported.", hint)
    zero = chosen.get("zero_optimization", {})
    check_kind(f"{where}: 'zero_optimization'", zero, Mapping, 'Give a dict: {"stage": 1}.')
    for key, value in zero.items():
        if key not in _ZERO:
            raise UsageError(f"{where}: {key!r} of zero_optimization is not supported.", "Leave it out.")
        if key == "stage" and value not in (0, 1, 2):
            raise UsageError(
                f"{where}: zero_optimization.stage is {value!r}, and stages 0, 1 and 2 are supported: each rank must "
                "have whole parameters.",
                "Set it to 2; to divide parameters, too, leave deepspeed_config out and shard the model by "
                "fully_shard.",
            )
    return chosen


def precision_of(config: Mapping[str, Any], precision: str | None) -> str:
    """Return the precision of the configuration, or that of the trainer, which may be None; refuse two that differ."""
    chosen = [
        (name, key) for name, keys in _HALF.items() for key in keys if dict(config.get(key, {})).get("enabled", False)
    ]
    if not chosen:
        return precision or "fp32"
    if len(chosen) > 1:
        raise UsageError(f"Trainer(deepspeed_config=...) enables {chosen[0][1]} and {chosen[1][1]}.", "Enable one.")
    ((name, key),) = chosen
    if precision not in (None, name):
        _conflict(f"{key} is enabled", f"precision={precision!r}")
    return name


def clip_norm_of(config: Mapping[str, Any], clip_norm: float | None) -> float | None:
    """Return the maximum norm of the gradients in the configuration, or that of the trainer; refuse two that differ."""
    theirs = config.get("gradient_clipping", 0) or None  # 0 means none
    if None not in (theirs, clip_norm) and theirs != clip_norm:
        _conflict(f"gradient_clipping is {theirs}", f"clip_norm={clip_norm:g}")
    return clip_norm if theirs is None else theirs


def completed(
    config: Mapping[str, Any], batch: GlobalBatch, world_size: int, precision: str, clip_norm: float | None
) -> dict[str, Any]:
    """Return the configuration for a world, with what it leaves to the trainer.

    Args:
        config: what :func:`checked` returned.
        batch: has a number as its micro-batch size.
        clip_norm: the trainer's; None: it has none.
    """
    micro_batches = batch.micro_batches()
    micro, passes = len(micro_batches[0]), -(-len(micro_batches) // world_size)
    here = f"GlobalBatch({batch.size}, micro={micro})"
    wanted: dict[str, tuple[float, str]] = {
        "train_batch_size": (batch.size, here),
        "train_micro_batch_size_per_gpu": (micro, here),
        "gradient_accumulation_steps": (passes, f"{here} on {world_size} ranks, which needs {passes}"),
    }
    for key, (value, source) in wanted.items():
        if key in config and config[key] != value:
            _conflict(f"{key} is {config[key]}", source)
    full = {key: value for key, value in config.items() if key != "bfloat16"}
    # Not the global batch: where it does not divide by the ranks, DeepSpeed would refuse it.
    full.pop("train_batch_size", None)
    full |= {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": passes}
    if precision != "fp32":
        section: Mapping[str, Any] = next((config[key] for key in _HALF[precision] if key in config), {})
        full[precision] = {**section, "enabled": True}
    zero = dict(config.get("zero_optimization", {}))
    if precision == "fp16" and not zero.setdefault("stage", 1):
        # Its step divides the gradients by a scale that only ZeRO's backward pass multiplies the loss by.
        raise UsageError(
            "Trainer(deepspeed_config=...): without ZeRO, DeepSpeed's fp16 does not scale the loss.",
            'Use {"zero_optimization": {"stage": 1}}, or bf16.',
        )
    if zero:
        full["zero_optimization"] = zero
    if precision == "fp32" and not zero.get("stage"):
        full.pop("gradient_clipping", None)  # a plain optimizer: the step clips, and knows the norm
    elif clip_norm is not None:
        full["gradient_clipping"] = clip_norm
    return full


def _conflict(theirs: str, ours: str) -> None:
    raise UsageError(
        f"In Trainer(deepspeed_config=...) {theirs}, and the Trainer has {ours}.",
        "Give the value once: what the configuration leaves out is taken from the Trainer.",
    )

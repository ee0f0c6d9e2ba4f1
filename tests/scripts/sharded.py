"""Train small sharded models in exact mode: ``sharded.py RESULT``, the hash of the weights by kind.

In a world of one process, ``RESULT`` also has the hashes of the same models without sharding, as ``KIND whole``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import elastic_launch as el

torch.manual_seed(1)
DATA = torch.utils.data.TensorDataset(torch.randn(46, 5), torch.randint(3, (46,)))


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.narrow(torch.relu(self.wide(self.norm(x))))
        return y


class Experts(nn.Module):
    """Each micro-batch uses one of two experts, and none the third."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.experts[int(x.sum() > 0)](x)
        return y


def by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() > 1 else None


def trained(run: el.Run, kind: str, *, whole: bool = False) -> str:
    torch.manual_seed(0)
    # FSDP cuts columns only into equal shards, here at worlds of 1 to 4.
    width, inner = (12, 24) if kind == "columns" else (7, 11)
    blocks: list[nn.Module] = [Block(width, inner) for _ in range(2)]
    if kind == "experts":
        blocks[1] = Experts(width)
    ends = nn.Linear(5, width), nn.Linear(width, 3)
    model = nn.Sequential(ends[0], *blocks, nn.Dropout(0.2), nn.BatchNorm1d(width), ends[1])
    if kind == "frozen":
        model[1].wide.requires_grad_(False)
    if kind == "a layer twice":
        model[2] = model[1]
    if kind == "bf16":
        model[4] = nn.Identity()
    if not whole:
        mesh = init_device_mesh("cpu", (run.world_size,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind == "bf16" else MixedPrecisionPolicy()
        columns: Any = {"reshard_after_forward": False, "shard_placement_fn": by_columns} if kind == "columns" else {}
        for block in {model[1], model[2]}:
            fully_shard(block, mesh=mesh, mp_policy=policy, **columns)
        if kind != "only blocks":
            fully_shard(model, mesh=mesh, mp_policy=policy)
    scale = nn.Parameter(torch.ones(()))  # only the optimizer has it
    optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=0.01)
    # At worlds of 3, "few" leaves a rank without a micro-batch.
    loader = el.ElasticLoader(DATA, el.GlobalBatch(16, micro=8 if kind == "few" else 2))

    def measure(sample: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(model(sample[0]).float(), sample[1])}

    held_out = el.ElasticLoader(DATA, el.GlobalBatch(16, micro=8), shuffle=False)
    evaluator = el.Evaluator(held_out, measure, every="2ba")
    for step in run.steps(loader, model, optimizer, until="5ba", exact=True, evaluator=evaluator):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(model(x).float() * scale, y), weight=2.0 * len(x))
        assert step.grad_norm() > 0
        step.update(clip_norm=0.3)
    return f"{el.weights_sha256(model)[:16]} {evaluator.history[-1].metrics['loss']}"


with el.session(threads=1) as run:
    found = {}
    for kind in ("plain", "frozen", "a layer twice", "only blocks", "columns", "bf16", "few", "experts"):
        found[kind] = trained(run, kind)
        if run.world_size == 1 and kind != "bf16":
            found[f"{kind} whole"] = trained(run, kind, whole=True)
    if run.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))

"""Train small sharded models in exact mode: ``sharded.py RESULT``, the hash of the weights by kind.

In a world of one process, ``RESULT`` also has the hashes of the same models without sharding, as ``KIND whole``.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import elastic_launch as el

torch.manual_seed(1)
DATA = torch.utils.data.TensorDataset(torch.randn(46, 5), torch.randint(3, (46,)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(7), nn.Linear(7, 11), nn.Linear(11, 7)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.narrow(torch.relu(self.wide(self.norm(x))))
        return y


def trained(run: el.Run, kind: str, *, whole: bool = False) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), Block(), Block(), nn.Dropout(0.2), nn.BatchNorm1d(7), nn.Linear(7, 3))
    if kind == "frozen":
        model[1].wide.requires_grad_(False)
    if kind == "a layer twice":
        model[2] = model[1]
    if kind == "bf16":
        model[4] = nn.Identity()
    if not whole:
        mesh = init_device_mesh("cpu", (run.world_size,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind == "bf16" else MixedPrecisionPolicy()
        for block in {model[1], model[2]}:
            fully_shard(block, mesh=mesh, mp_policy=policy)
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
    for kind in ("plain", "frozen", "a layer twice", "only blocks", "bf16", "few"):
        found[kind] = trained(run, kind)
        if run.world_size == 1 and kind != "bf16":
            found[f"{kind} whole"] = trained(run, kind, whole=True)
    if run.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))

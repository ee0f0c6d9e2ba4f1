"""A small transformer whose parameters and optimizer state are divided among the ranks, on any number of them.

    elastic-launch --standalone --nproc 2 examples/fsdp/train.py --checkpoint runs/fsdp --exact

FSDP2 (``fully_shard``) shards the model, block by block; ``--shard zero`` leaves the model whole and divides the
optimizer's state (``ZeroRedundancyOptimizer``), and ``--shard none`` divides nothing. The gradients' norm, over all
shards, is limited, and activations are computed again in the backward pass instead of being kept. In exact mode all
three end with the same weights, at any number of ranks and after any faults.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint

import elastic_launch as el

TOKENS, LENGTH, WIDTH = 11, 12, 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of the whole training")
    parser.add_argument("--checkpoint", required=True, help="directory or URL to save to and to resume from")
    parser.add_argument("--every", default="20", help="interval of checkpoints: steps, or a duration such as 30s")
    parser.add_argument("--shard", choices=["fsdp", "zero", "none"], default="fsdp")
    parser.add_argument("--exact", action="store_true", help="bitwise the same weights at every world size")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, by FSDP's policy")
    parser.add_argument("--keep-activations", action="store_true", help="do not compute them again")
    parser.add_argument("--compile", metavar="BACKEND", help="torch.compile the blocks: inductor, aot_eager, ...")
    parser.add_argument("--result", type=Path, help="file to which rank 0 writes the result as JSON")
    return parser.parse_args()


class Block(nn.Module):
    """A block of the transformer."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))


class Sorter(nn.Module):
    """Learns to sort a sequence of numbers."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.tokens(numbers) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))


def get_batch(step: int, micro: el.MicroBatch) -> tuple[Tensor, Tensor]:
    numbers = torch.randint(TOKENS, (len(micro), LENGTH))
    return numbers, numbers.sort().values


def loss_fn(output: Tensor, sorted_numbers: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, sorted_numbers.flatten())


def main() -> None:
    args = arguments()
    with el.session() as run:
        # All ranks must build the same model: from it each keeps its shards.
        torch.manual_seed(0)
        model = Sorter(recompute=not args.keep_activations).to(run.device)
        if args.compile:
            for block in model.blocks:
                block.compile(backend=args.compile)  # in place: parameters keep their names
        if args.shard == "fsdp":
            mesh = init_device_mesh(run.device.type, (run.world_size,))
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        if args.shard == "zero":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        trainer = el.Trainer(
            run,
            model,
            optimizer,
            el.FunctionLoader(get_batch, el.GlobalBatch(64, micro=8), seed=0),
            loss_fn=loss_fn,
            clip_norm=1.0,
            exact=args.exact,
            checkpoint=el.Checkpoint(args.checkpoint, every=args.every),
            callbacks=[el.Progress(every=20)],
        )
        trainer.fit(f"{args.steps}ba")
        weights = el.weights_sha256(model)[:16]  # on all ranks, as each has a part of them
        if run.rank == 0:
            result = {"hash": weights, "loss": trainer.loss, "worlds": run.worlds}
            result |= {"restarts": run.restarts, "resumed": run.resumed_step}
            print(json.dumps(result), flush=True)
            if args.result is not None:
                args.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()

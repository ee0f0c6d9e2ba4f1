"""A small transformer that is divided within replicas, of which there may be any number.

    elastic-launch --standalone --nproc 4 --replica-size 2 examples/mesh/train.py --checkpoint runs/mesh --exact

``--shard`` ranks divide the parameters and the optimizer's state (FSDP2, ``fully_shard``), and ``--tensor`` ranks
compute each micro-batch together (``parallelize_module``). Together they are a replica, on one node; all replicas have
the same weights, and processes of whole replicas are kept through faults. With ``--tensor 1`` exact mode gives the
weights of the undivided model, else one hash for each ``--tensor``, at any number of replicas.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import elastic_launch as el

TOKENS, LENGTH, WIDTH, HEADS = 11, 12, 32, 4

PLAN = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "value": ColwiseParallel(),
    "out": RowwiseParallel(),
    "wide": ColwiseParallel(),
    "narrow": RowwiseParallel(),
}
"""How the ranks of the mesh's tensor dimension divide a block: by heads, and by the wide layer's columns."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of the whole training")
    parser.add_argument("--checkpoint", required=True, help="directory or URL to save to and to resume from")
    parser.add_argument("--every", default="20", help="interval of checkpoints: steps, or a duration such as 30s")
    parser.add_argument("--shard", type=int, default=2, help="ranks that divide parameters and optimizer state")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that compute a micro-batch together")
    parser.add_argument("--exact", action="store_true", help="bitwise the same weights at any number of replicas")
    parser.add_argument("--result", type=Path, help="file to which rank 0 writes the result as JSON")
    args = parser.parse_args()
    if HEADS % args.tensor:
        parser.error(f"--tensor {args.tensor}: {HEADS} heads cannot be divided among that many ranks")
    return args


class Block(nn.Module):
    """A block of the transformer; of what it is given, each tensor rank computes some heads and some columns."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        # A rank has as many heads as its part of the layers' outputs has.
        heads = (layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in self.layers())
        attended = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))

    def layers(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.query, self.key, self.value


class Sorter(nn.Module):
    """Learns to sort a sequence of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
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
        # All ranks must build the same model: from it each keeps its part.
        torch.manual_seed(0)
        model = Sorter().to(run.device)
        mesh = run.mesh(shard=args.shard, tensor=args.tensor)
        for block in model.blocks:
            if args.tensor > 1:
                parallelize_module(block, mesh["tensor"], PLAN)
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        trainer = el.Trainer(
            run,
            model,
            torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False),  # its tensors are on two meshes
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

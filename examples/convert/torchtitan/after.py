"""Train a transformer sharded by FSDP2, with the parts of a loop of torchtitan's kind."""

import argparse

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import elastic_launch as el

VOCAB, SEQ_LEN, DIM = 64, 32, 32


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Embedding(SEQ_LEN, DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.output = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(SEQ_LEN, device=tokens.device)
        for layer in self.layers:
            h = layer(h, src_mask=mask, is_causal=True)
        return self.output(h.flatten(0, 1))


def build_dataset():
    text = (torch.arange(16640) // 7 * 13 + torch.arange(16640) % 5).remainder(VOCAB)
    rows = text[: 16640 // (SEQ_LEN + 1) * (SEQ_LEN + 1)].view(-1, SEQ_LEN + 1)
    return TensorDataset(rows[:, :-1], rows[:, 1:])


def main(run, args):
    torch.manual_seed(42)
    mesh = init_device_mesh(run.device.type, (run.world_size,))
    model = Transformer().to(run.device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    dataset = build_dataset()
    dataloader = el.ElasticLoader(dataset, el.GlobalBatch(args.global_batch_size, micro=args.local_batch_size), seed=42)
    saved = {"checkpoint": el.Checkpoint(args.folder, every=args.interval), "scheduler": lr_scheduler}

    for step in run.steps(dataloader, model, optimizer, until=f"{args.steps}ba", exact=True, **saved):
        for tokens, labels in step:
            pred = model(tokens.to(run.device))
            step.backward(F.cross_entropy(pred, labels.to(run.device).flatten()))
        grad_norm = step.grad_norm()
        step.update(clip_norm=1.0)
        lr_scheduler.step()
        if step.number % args.log_freq == 0 and run.rank == 0:
            print(f"step {step.number}: loss {step.loss:.4f} norm {grad_norm:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--interval", type=int, default=20)
    parser.add_argument("--log_freq", type=int, default=10)
    parser.add_argument("--local_batch_size", type=int, default=4)
    parser.add_argument("--global_batch_size", type=int, default=16)
    args = parser.parse_args()
    with el.session() as run:
        main(run, args)

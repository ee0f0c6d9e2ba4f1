"""Train a transformer sharded by FSDP2, with the parts of a loop of torchtitan's kind."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


class TrainState:
    """What the checkpoint has besides the model and the optimizer."""

    step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict):
        self.step = int(state_dict["step"])


class App:
    """Model and optimizer, as torch.distributed.checkpoint saves them."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict):
        model, optimizer = state_dict["model"], state_dict["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def batch_generator(sampler, dataloader, step, per_epoch):
    """Batches from that of a step on, without end."""
    epoch, skip = divmod(step, per_epoch)
    while True:
        sampler.set_epoch(epoch)
        for number, batch in enumerate(dataloader):
            if number >= skip:
                yield batch
        epoch, skip = epoch + 1, 0


def main(args):
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    mesh = init_device_mesh(device.type, (world_size,))
    model = Transformer().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    dataset = build_dataset()
    sampler = DistributedSampler(dataset, drop_last=True)
    accumulation = args.global_batch_size // (args.local_batch_size * world_size)
    dataloader = DataLoader(dataset, batch_size=args.local_batch_size, sampler=sampler, drop_last=True)
    train_state, app = TrainState(), App(model, optimizer)
    states = {"app": app, "lr_scheduler": lr_scheduler, "train_state": train_state}
    saved = sorted(Path(args.folder).glob("step-*/.metadata"), key=lambda path: int(path.parent.name[5:]))
    if saved:
        dcp.load(states, checkpoint_id=saved[-1].parent)
    batches = batch_generator(sampler, dataloader, train_state.step * accumulation, len(dataloader))

    while train_state.step < args.steps:
        train_state.step += 1
        optimizer.zero_grad()
        loss = torch.zeros((), device=device)
        for _ in range(accumulation):
            tokens, labels = next(batches)
            pred = model(tokens.to(device))
            micro_loss = F.cross_entropy(pred, labels.to(device).flatten()) / accumulation
            micro_loss.backward()
            loss += micro_loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        if train_state.step % args.log_freq == 0:
            dist.all_reduce(loss)
            grad_norm = grad_norm.full_tensor()
            if rank == 0:
                print(f"step {train_state.step}: loss {loss.item() / world_size:.4f} norm {grad_norm:.4f}", flush=True)
        if train_state.step % args.interval == 0:
            dcp.save(states, checkpoint_id=Path(args.folder) / f"step-{train_state.step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--interval", type=int, default=20)
    parser.add_argument("--log_freq", type=int, default=10)
    parser.add_argument("--local_batch_size", type=int, default=4)
    parser.add_argument("--global_batch_size", type=int, default=16)
    main(parser.parse_args())

"""Train a small GPT on random pieces of one long array, as nanoGPT's train.py does."""

import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir = sys.argv[1]
batch_size, block_size = 4, 32
gradient_accumulation_steps = 6  # of all processes together
max_iters, eval_interval, eval_iters = 60, 20, 6
learning_rate, min_lr, warmup_iters, grad_clip = 1e-2, 1e-3, 10, 1.0


class GPT(nn.Module):
    def __init__(self, vocab_size=64, n_embd=32):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.block = nn.TransformerEncoderLayer(n_embd, 4, 4 * n_embd, 0.1, batch_first=True, norm_first=True)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1], device=idx.device)
        logits = self.lm_head(self.block(x, src_mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(data):
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters)))
    return min_lr + coeff * (learning_rate - min_lr)


def main():
    rank, local_rank, world_size = (int(os.environ[x]) for x in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    assert gradient_accumulation_steps % world_size == 0
    torch.manual_seed(1337)
    data = (torch.arange(20000) // 7 * 13 + torch.arange(20000) % 5).remainder(64)
    train_data, val_data = data[:18000], data[18000:]
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    iter_num, best_val_loss = 0, 1e9
    if os.path.exists(os.path.join(out_dir, "ckpt.pt")):
        checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
    raw_model = model
    model = DDP(model)
    torch.manual_seed(1337 + rank)

    @torch.no_grad()
    def estimate_loss():
        raw_model.eval()
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(val_data)
            losses[k] = raw_model(X.to(device), Y.to(device)).item()
        raw_model.train()
        return losses.mean().item()

    while iter_num < max_iters:
        lr = get_lr(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        for micro_step in range(gradient_accumulation_steps // world_size):
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps // world_size - 1
            X, Y = get_batch(train_data)
            loss = model(X.to(device), Y.to(device)) / (gradient_accumulation_steps // world_size)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1
        if iter_num % eval_interval == 0 and rank == 0:
            val_loss = estimate_loss()
            print(f"step {iter_num}: val loss {val_loss:.4f}, lr {lr:.2e}", flush=True)
            if val_loss < best_val_loss:
                best_val_loss = val_loss
                checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
                checkpoint |= {"iter_num": iter_num, "best_val_loss": best_val_loss}
                os.makedirs(out_dir, exist_ok=True)
                torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a small GPT on random pieces of one long array, as nanoGPT's train.py does."""

import math
import sys
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import elastic_launch as el

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


def get_batch(data, step, micro):
    ix = torch.randint(len(data) - block_size, (len(micro),))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters)))
    return min_lr + coeff * (learning_rate - min_lr)


def main(run):
    device = run.device
    torch.manual_seed(1337)
    data = (torch.arange(20000) // 7 * 13 + torch.arange(20000) % 5).remainder(64)
    train_data, val_data = data[:18000], data[18000:]
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    batch = el.GlobalBatch(gradient_accumulation_steps * batch_size, micro=batch_size)
    loader = el.FunctionLoader(partial(get_batch, train_data), batch, seed=1337)
    val_batch = el.GlobalBatch(eval_iters * batch_size, micro=batch_size)
    val_loader = el.FunctionLoader(partial(get_batch, val_data), val_batch, steps_per_epoch=1)
    checkpoint = el.Checkpoint(out_dir, every="1min", keep_best=el.Best("loss"))

    def estimate_loss(batch):
        X, Y = batch
        return {"loss": model(X.to(device), Y.to(device))}

    def report(evaluation):
        if run.rank == 0:
            val_loss, lr = evaluation.metrics["loss"], get_lr(evaluation.step - 1)
            print(f"step {evaluation.step}: val loss {val_loss:.4f}, lr {lr:.2e}", flush=True)

    evaluator = el.Evaluator(val_loader, estimate_loss, every=f"{eval_interval}ba", on_result=report)
    saved = {"checkpoint": checkpoint, "evaluator": evaluator}
    for step in run.steps(loader, model, optimizer, until=f"{max_iters}ba", exact=True, **saved):
        lr = get_lr(step.position.step)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        for X, Y in step:
            step.backward(model(X.to(device), Y.to(device)))
        step.update(clip_norm=grad_clip)


if __name__ == "__main__":
    with el.session() as run:
        main(run)

"""Fine-tune a small Llama of transformers by LoRA: the base is frozen, and checkpoints have the adapters alone.

    elastic-launch --standalone --nproc 2 examples/lora/train.py --checkpoint runs/lora

The base has random weights here; take ``from_pretrained`` instead. With ``--fsdp`` the model is divided among the ranks
by FSDP2. The weights are the same to the bit with and without it, at any number of ranks and after any faults.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import elastic_launch as el

TOKENS, LENGTH = 32, 16


class LoRA(nn.Module):
    """A linear layer that is frozen, plus a product of two small matrices that is trained."""

    def __init__(self, base: nn.Linear, rank: int = 4, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


def build_model() -> LlamaForCausalLM:
    """A model whose queries and values have adapters; all ranks and all restarts must get the same base."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, num_hidden_layers=2, **shape)).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoRA(layer.self_attn.v_proj)
    return model


def get_batch(step: int, micro: el.MicroBatch) -> Tensor:
    """Sequences that count on from some number."""
    return (torch.randint(TOKENS, (len(micro), 1)) + torch.arange(LENGTH)) % TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of the whole training")
    parser.add_argument("--checkpoint", required=True, help="directory or URL to save to and to resume from")
    parser.add_argument("--fsdp", action="store_true", help="shard the model")
    parser.add_argument("--result", type=Path, help="file to which rank 0 writes the result as JSON")
    args = parser.parse_args()
    with el.session() as run:
        model = build_model().to(run.device)
        if args.fsdp:
            mesh = init_device_mesh(run.device.type, (run.world_size,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        loader = el.FunctionLoader(get_batch, el.GlobalBatch(32, micro=8), seed=0)
        checkpoint = el.Checkpoint(args.checkpoint, every=20, skip_frozen=True)
        for step in run.steps(loader, model, optimizer, until=f"{args.steps}ba", checkpoint=checkpoint, exact=True):
            for tokens in step:
                tokens = tokens.to(run.device)
                step.backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss)
            step.update(clip_norm=1.0)
        weights = el.weights_sha256(model)[:16]  # on all ranks, as each may have a part of them
        if run.rank == 0:
            result = {"hash": weights, "loss": step.loss, "worlds": run.worlds, "resumed": run.resumed_step}
            print(json.dumps(result), flush=True)
            if args.result is not None:
                args.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()

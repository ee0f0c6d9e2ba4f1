"""Train a small language model, character by character, on this project's own documentation.

    elastic-launch --standalone --nproc 2 examples/gpt/train.py --checkpoint runs/gpt

Uses el.Trainer: evaluation, metrics, a learning-rate schedule and checkpoints, all of which continue after a restart.
With --exact the final weights are bitwise identical at any number of workers.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import elastic_launch as el

TEXTS = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
CONTEXT = 64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--until", default="300ba", help='length of training: epochs ("2ep") or steps ("300ba")')
    parser.add_argument("--global-batch", type=int, default=64, help="sequences in each optimizer step, of all workers")
    parser.add_argument("--micro-batch", default="16", help="sequences in each forward and backward pass, or auto")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--exact", action="store_true", help="the same weights to the bit at any number of workers")
    parser.add_argument("--checkpoint", help="directory or URL to save to and to resume from")
    parser.add_argument("--every", default="1min", help="interval of checkpoints: steps, or a duration such as 30s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=200, help="characters to write in the end")
    parser.add_argument("--result", type=Path, help="file to which rank 0 writes the result as JSON")
    return parser.parse_args()


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Windows of CONTEXT characters, and the same windows shifted by one character."""

    def __init__(self, characters: Tensor) -> None:
        self._characters = characters

    def __len__(self) -> int:
        return (len(self._characters) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._characters[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


class Model(nn.Module):
    """A decoder of transformer layers."""

    def __init__(self, vocabulary: int, width: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = self.token(tokens) + self.place[:length]
        return self.head(self.layers(hidden, mask=self.mask[:length, :length], is_causal=True))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=-1) == target).float().mean()


def write(model: Model, alphabet: str, length: int) -> str:
    """Generate text, always choosing the most probable character."""
    tokens = torch.tensor([[alphabet.index("T"), alphabet.index("h")]], device=model.place.device)
    model.eval()
    with torch.no_grad():
        for _ in range(length):
            chosen = model(tokens[:, -CONTEXT:])[0, -1].argmax()
            tokens = torch.cat([tokens, chosen.view(1, 1)], dim=1)
    return "".join(alphabet[index] for index in tokens[0].tolist())


def main() -> None:
    args = arguments()
    text = "".join(path.read_text() for path in TEXTS)
    alphabet = "".join(sorted(set(text)))
    characters = torch.tensor([alphabet.index(character) for character in text])
    held_out = len(characters) // 10
    with el.session() as run:
        torch.manual_seed(args.seed)
        model = Model(len(alphabet)).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        micro = args.micro_batch if args.micro_batch == "auto" else int(args.micro_batch)
        loader = el.ElasticLoader(Text(characters[held_out:]), el.GlobalBatch(args.global_batch, micro), seed=args.seed)
        evaluation = el.ElasticLoader(Text(characters[:held_out]), el.GlobalBatch(64, 16), shuffle=False)
        trainer = el.Trainer(
            run,
            model,
            optimizer,
            loader,
            loss_fn=loss_fn,
            metrics={"accuracy": accuracy},
            scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50)),
            precision=args.precision,
            clip_norm=1.0,
            eval_loader=evaluation,
            eval_every="100ba",
            checkpoint=el.Checkpoint(args.checkpoint, every=args.every) if args.checkpoint else None,
            exact=args.exact,
            callbacks=[el.Progress(every=20)],
        )
        trainer.fit(args.until)
        last = trainer.evaluate()
        if run.rank == 0:
            print(write(model, alphabet, args.sample), flush=True)
            result = {
                "steps": trainer.step,
                "loss": last["loss"],
                "accuracy": round(last["accuracy"], 4),
                "bits_per_character": round(last["loss"] / math.log(2), 4),
                "evaluations": [[x.step, x.metrics["loss"]] for x in trainer.history],
                "micro_batch": trainer.loader.batch.micro,
                "weights_sha256": el.weights_sha256(model),
                "worlds": run.worlds,
                "restarts": run.restarts,
                "resumed_step": run.resumed_step,
            }
            print(json.dumps(result), flush=True)
            if args.result:
                args.result.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

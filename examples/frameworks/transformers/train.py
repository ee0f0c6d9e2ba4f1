"""Train a tiny GPT-2 with transformers' Trainer: a plain script for torchrun and similar launchers.

    elastic-launch --standalone --nproc 2 examples/frameworks/transformers/train.py --dir runs/transformers

After a restart it resumes from the Trainer's own newest checkpoint.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


def counting(samples: int = 256, length: int = 16) -> TensorDataset:
    """Sequences that count on from some number, modulo 32."""
    return TensorDataset((torch.arange(samples)[:, None] + torch.arange(length)) % 32)


def collate(samples: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([sample[0] for sample in samples])
    return {"input_ids": tokens, "labels": tokens}


def newest(directory: Path) -> str | None:
    """The newest complete checkpoint: the Trainer writes its own state last."""
    states = directory.glob("checkpoint-*/trainer_state.json")
    found = sorted((state.parent for state in states), key=lambda path: int(path.name.rpartition("-")[2]))
    return str(found[-1]) if found else None


def main(callbacks: list[TrainerCallback] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/transformers"), help="shared by all nodes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            str(args.dir),
            max_steps=args.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            save_steps=args.every,
            logging_steps=args.every,
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            report_to="none",
        ),
        data_collator=collate,
        train_dataset=counting(),
        callbacks=callbacks,
    )
    checkpoint = newest(args.dir)
    if checkpoint and trainer.is_world_process_zero():
        print(f"resumed from {checkpoint}", flush=True)
    done = trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.is_world_process_zero():
        print(f"done: steps {done.global_step}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()  # left to the interpreter's exit it aborts now and then


if __name__ == "__main__":
    main()

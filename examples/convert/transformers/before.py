"""Fine-tune a small BERT to classify sequences, as transformers' run_glue_no_trainer.py does."""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_scheduler


def examples(count, seed):
    """Sequences of different lengths; the label is the class of the first token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 16, (count,), generator=generator).tolist()
    tokens = [torch.randint(1, 65, (length,), generator=generator) for length in lengths]
    return [{"input_ids": ids, "labels": int(ids[0] - 1) // 16} for ids in tokens]


def collate(batch):
    ids = torch.nn.utils.rnn.pad_sequence([x["input_ids"] for x in batch], batch_first=True)
    labels = torch.tensor([x["labels"] for x in batch])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    set_seed(0)
    config = BertConfig(
        vocab_size=65, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=4
    )
    model = BertForSequenceClassification(config)
    train_dataset, eval_dataset = examples(512, seed=1), examples(128, seed=2)
    train_dataloader = DataLoader(train_dataset, shuffle=True, collate_fn=collate, batch_size=8)
    eval_dataloader = DataLoader(eval_dataset, collate_fn=collate, batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    num_training_steps = args.num_train_epochs * len(train_dataloader) // 2
    lr_scheduler = get_scheduler("linear", optimizer, num_training_steps // 10, num_training_steps)
    lr_scheduler = accelerator.prepare(lr_scheduler)
    starting_epoch = 0
    while os.path.isdir(os.path.join(args.output_dir, f"epoch_{starting_epoch}")):
        starting_epoch += 1
    if starting_epoch:
        accelerator.load_state(os.path.join(args.output_dir, f"epoch_{starting_epoch - 1}"))

    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        correct = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += (predictions == references).sum().item()
        accelerator.print(f"epoch {epoch}: accuracy {correct / len(eval_dataset):.3f}", flush=True)
        accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(args.output_dir, is_main_process=accelerator.is_main_process)
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    main(parser.parse_args())

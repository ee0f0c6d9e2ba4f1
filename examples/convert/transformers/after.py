"""Fine-tune a small BERT to classify sequences, as transformers' run_glue_no_trainer.py does."""

import argparse
import os

import torch
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

import elastic_launch as el


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


def main(run, args):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=65, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=4
    )
    model = BertForSequenceClassification(config).to(run.device).train()
    train_dataset, eval_dataset = examples(512, seed=1), examples(128, seed=2)
    train_dataloader = el.ElasticLoader(train_dataset, el.GlobalBatch(32, micro=8), collate_fn=collate)
    eval_dataloader = el.ElasticLoader(eval_dataset, el.GlobalBatch(32, micro=8), shuffle=False, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    num_training_steps = args.num_train_epochs * train_dataloader.steps_per_epoch
    lr_scheduler = get_scheduler("linear", optimizer, num_training_steps // 10, num_training_steps)
    checkpoint = el.Checkpoint(os.path.join(args.output_dir, "checkpoints"), every="5min")

    def measure(batch):
        outputs = model(**{name: value.to(run.device) for name, value in batch.items()})
        return {"accuracy": (outputs.logits.argmax(dim=-1).cpu() == batch["labels"]).float().mean()}

    def report(evaluation):
        if run.rank == 0:
            print(f"epoch {evaluation.epoch - 1}: accuracy {evaluation.metrics['accuracy']:.3f}", flush=True)

    evaluator = el.Evaluator(eval_dataloader, measure, metrics=["accuracy"], on_result=report)
    saved = {"checkpoint": checkpoint, "scheduler": lr_scheduler, "evaluator": evaluator}
    for step in run.steps(train_dataloader, model, optimizer, until=args.num_train_epochs, exact=True, **saved):
        for batch in step:
            step.backward(model(**{name: value.to(run.device) for name, value in batch.items()}).loss)
        step.update(clip_norm=1.0)
        lr_scheduler.step()
    if run.rank == 0:
        model.save_pretrained(args.output_dir)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    args = parser.parse_args()
    with el.session() as run:
        main(run, args)

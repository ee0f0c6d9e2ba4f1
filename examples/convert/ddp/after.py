"""Train a small network on several devices, as PyTorch's multigpu_torchrun.py does."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el


def load_train_objs():
    torch.manual_seed(0)
    inputs = torch.randn(2048, 20)
    train_set = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return train_set, model, optimizer


def main(run, total_epochs, save_every, batch_size, snapshot_path):
    device = run.device
    train_set, model, optimizer = load_train_objs()
    model.to(device)
    train_data = el.ElasticLoader(train_set, el.GlobalBatch(batch_size, micro=8))
    checkpoint = el.Checkpoint(snapshot_path, every=save_every * train_data.steps_per_epoch)

    for step in run.steps(train_data, model, optimizer, until=total_epochs, checkpoint=checkpoint, exact=True):
        for source, targets in step:
            step.backward(F.cross_entropy(model(source.to(device)), targets.to(device)))
        step.update()
        if run.rank == 0 and step.number % train_data.steps_per_epoch == 0:
            print(f"Epoch {step.position.epoch} | loss {step.loss:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--snapshot_path", default="snapshots")
    args = parser.parse_args()
    with el.session() as run:
        main(run, args.total_epochs, args.save_every, args.batch_size, args.snapshot_path)

"""Train a small network on several devices, as PyTorch's multigpu_torchrun.py does."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import elastic_launch as el


def ddp_setup():
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl")
        return torch.device("cuda", local_rank)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def load_train_objs():
    torch.manual_seed(0)
    inputs = torch.randn(2048, 20)
    train_set = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return train_set, model, optimizer


def main(total_epochs, save_every, batch_size, snapshot_path):
    device = ddp_setup()
    train_set, model, optimizer = load_train_objs()
    model.to(device)
    epochs_run = 0
    if os.path.exists(snapshot_path):
        snapshot = torch.load(snapshot_path, map_location=device)
        model.load_state_dict(snapshot["MODEL_STATE"])
        optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        epochs_run = snapshot["EPOCHS_RUN"]
        print(f"Resuming training from snapshot at epoch {epochs_run}", flush=True)
    model = DDP(model)
    plan = el.GlobalBatch(batch_size, micro=4).plan(dist.get_world_size(), dist.get_rank())
    train_data = DataLoader(train_set, batch_size, sampler=DistributedSampler(train_set, 1, 0), drop_last=True)

    for epoch in range(epochs_run, total_epochs):
        train_data.sampler.set_epoch(epoch)
        for step, (source, targets) in enumerate(train_data):
            optimizer.zero_grad()
            for micro, weight in zip(plan.micro_batches, plan.weights, strict=True):
                torch.manual_seed((epoch * len(train_data) + step) * plan.total + micro.index)
                model.require_backward_grad_sync = micro is plan.micro_batches[-1]
                part = slice(micro.start, micro.stop)
                loss = F.cross_entropy(model(source[part].to(device)), targets[part].to(device))
                (loss * weight * dist.get_world_size()).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"Epoch {epoch} | loss {loss.item():.4f}", flush=True)
        if dist.get_rank() == 0 and epoch % save_every == 0:
            snapshot = {"MODEL_STATE": model.module.state_dict(), "OPTIMIZER_STATE": optimizer.state_dict()}
            torch.save({**snapshot, "EPOCHS_RUN": epoch + 1}, snapshot_path)
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--snapshot_path", default="snapshot.pt")
    args = parser.parse_args()
    main(args.total_epochs, args.save_every, args.batch_size, args.snapshot_path)

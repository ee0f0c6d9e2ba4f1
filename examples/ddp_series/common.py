"""The model, data and loop of all scripts in the series: a tiny model on synthetic data."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("total_epochs", type=int, help="epochs of the whole training")
    parser.add_argument("save_every", type=int, help="epochs from one save to the next")
    parser.add_argument("--batch_size", "--batch-size", type=int, default=32, help="of each process")
    return parser


def join(local_rank: int, local_world_size: int) -> torch.device:
    """Join the process group that the environment describes, and return the device to train on."""
    if torch.cuda.device_count() >= local_world_size:
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl")
        return torch.device("cuda", local_rank)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def join_launched() -> torch.device:
    """Join the process group in a process that a launcher has started."""
    return join(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(20, 1).to(device)


def data(batch_size: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """2048 samples, of which each rank gets its share."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(2048, 20, generator=generator)
    dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    return DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset))


def train_epoch(
    epoch: int,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[torch.Tensor, ...]],
) -> None:
    assert isinstance(loader.sampler, DistributedSampler)
    loader.sampler.set_epoch(epoch)
    device = next(model.parameters()).device
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
    print(f"[rank {dist.get_rank()}] epoch {epoch} | steps {len(loader)} | loss {loss.item():.4f}", flush=True)

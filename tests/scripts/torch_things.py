"""Does things with torch and prints the results, which must be the same in a forked and an executed worker."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def draw():
    """Random numbers of a process that has set no seed."""
    import numpy

    print(torch.get_num_threads(), torch.get_default_dtype())
    print(torch.initial_seed(), torch.rand(1).item(), numpy.random.random(), file=sys.stderr)


def threads():
    """A sum that uses all threads, which a fork of a process with an OpenMP pool cannot compute."""
    torch.set_num_threads(2)
    print(torch.ones(2_000_000).sum().item(), torch.get_num_threads())


def compiled():
    @torch.compile(backend="aot_eager")
    def f(x):
        return torch.sin(x) + 1

    print(f(torch.zeros(3)).tolist())


def inducted():
    """By the default backend, whose processes compile, and whose compiler is the system's."""

    @torch.compile
    def f(x):
        return torch.sin(x) + torch.cos(x)

    x = torch.arange(8.0, requires_grad=True)
    f(x).sum().backward()
    print([round(value, 4) for value in x.grad.tolist()])


def loader():
    for context in (None, "fork", "spawn", "forkserver"):
        workers = 2 if context else 0
        data = TensorDataset(torch.arange(8.0))
        batches = DataLoader(data, batch_size=4, num_workers=workers, multiprocessing_context=context)
        print(context, [batch[0].tolist() for batch in batches])


def spawned():
    torch.multiprocessing.spawn(_child, nprocs=2)
    print("joined")


def _child(index):
    print("child", torch.full((2,), float(index)).sum().item())


def step():
    """Two steps of DDP in a group of one."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    print([parameter.tolist() for parameter in model.parameters()])
    del model, optimizer
    dist.destroy_process_group()


def recorded():
    """torch's own error file."""
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        raise RuntimeError("recorded")

    try:
        main()
    except RuntimeError:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"]) as file:
            print("recorded" in file.read())


if __name__ == "__main__":
    for thing in sys.argv[1:]:
        globals()[thing]()

"""Without a launcher: the script starts its processes itself, and sets the address at which they meet.

    python examples/ddp_series/by_hand.py 3 1 --processes 2

These are all the variables of a launcher's environment. Nothing restarts a process here: when one dies, all end.
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import arguments, data, join, network, train_epoch
from torch.nn.parallel import DistributedDataParallel


def work(rank: int, port: int, processes: int, total_epochs: int, save_every: int, batch_size: int, path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(processes))
    device = join(rank, processes)
    model = DistributedDataParallel(network(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = data(batch_size)
    for epoch in range(total_epochs):
        train_epoch(epoch, model, optimizer, loader)
        if rank == 0 and (epoch + 1) % save_every == 0:
            torch.save(model.module.state_dict(), path)
            print(f"epoch {epoch} | weights saved to {path}", flush=True)
    del model, optimizer  # neither must outlive the process group
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--processes", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--checkpoint", default="checkpoint.pt", help="file to save the weights to")
    args = parser.parse_args()
    shared = (free_port(), args.processes, args.total_epochs, args.save_every, args.batch_size, args.checkpoint)
    mp.spawn(work, args=shared, nprocs=args.processes)


if __name__ == "__main__":
    main()

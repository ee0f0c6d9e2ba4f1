"""Part 3: several nodes, which need not share a directory: rank 0 has the snapshot, and sends it to the others.

Run the first command on the node called node0, and the second on any number of other nodes, now or later:

    elastic-launch --nnodes 1:4 --nproc 2 --rdzv-endpoint node0:29400 examples/ddp_series/several_nodes.py 10 1
    elastic-launch --nnodes 1:4 --nproc 2 --rdzv-endpoint node0:29400 examples/ddp_series/several_nodes.py 10 1

There are three differences from part 2. Each node has a local rank 0, so rank 0, not local rank 0, saves. Rank 0 also
loads, because another node's file may be missing or old. And the number of ranks may change with each round:
DistributedSampler then distributes the samples anew.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from common import arguments, data, join_launched, network, train_epoch
from fault_tolerant import save
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"))
    args = parser.parse_args()
    device = join_launched()
    inner = network(device)
    # Without momentum SGD has no state; DDP broadcasts the parameters on creation, so only the epoch is missing.
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.01)
    done = torch.zeros(1, dtype=torch.int64, device=device)
    if dist.get_rank() == 0 and args.snapshot.exists():
        state = torch.load(args.snapshot, map_location=device, weights_only=True)
        inner.load_state_dict(state["model"])
        done += state["epochs"]
        print(f"resumes at epoch {state['epochs']}, world size {dist.get_world_size()}", flush=True)
    dist.broadcast(done, src=0)
    model = DistributedDataParallel(inner)
    loader = data(args.batch_size)
    for epoch in range(int(done), args.total_epochs):
        train_epoch(epoch, model, optimizer, loader)
        if dist.get_rank() == 0 and (epoch + 1) % args.save_every == 0:
            save(args.snapshot, model, optimizer, epoch + 1)
    del model, optimizer  # neither must outlive the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Part 3: several nodes, which need not share a directory: rank 0 has the snapshot, and gives it to the others.

The first of these goes on the node called node0, the second on any number of others, now or later:

    elastic-launch --nnodes 1:4 --nproc 2 --rdzv-endpoint node0:29400 examples/ddp_series/several_nodes.py 10 1
    elastic-launch --nnodes 1:4 --nproc 2 --rdzv-endpoint node0:29400 examples/ddp_series/several_nodes.py 10 1

There are three differences to part 2. Local ranks repeat from node to node, so rank 0, not local rank 0, saves. It
loads, too: another node's file may be missing, or left from long ago. And the number of ranks is another in each round:
DistributedSampler shares the samples out anew.
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
    # Without momentum it has no state: the parameters, which DDP broadcasts when it is made, and the epoch are all.
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

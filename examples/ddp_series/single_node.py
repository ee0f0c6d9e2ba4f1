"""Part 1: several processes on one node. The launcher starts them and gives each its rank.

elastic-launch --standalone --nproc 2 examples/ddp_series/single_node.py 3 1
"""

import torch
import torch.distributed as dist
from common import arguments, data, join_launched, network, train_epoch
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--checkpoint", default="checkpoint.pt", help="file to save the weights to")
    args = parser.parse_args()
    device = join_launched()
    model = DistributedDataParallel(network(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = data(args.batch_size)
    for epoch in range(args.total_epochs):
        train_epoch(epoch, model, optimizer, loader)
        if dist.get_rank() == 0 and (epoch + 1) % args.save_every == 0:
            torch.save(model.module.state_dict(), args.checkpoint)
            print(f"epoch {epoch} | weights saved to {args.checkpoint}", flush=True)
    del model, optimizer  # neither must outlive the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

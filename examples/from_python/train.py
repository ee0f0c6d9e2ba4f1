"""Launch a function of this script on this node's workers: ``python train.py [NODES]``.

Start it on several nodes, or several times on one host, with the maximum number of nodes; they meet at the endpoint.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elastic_launch.api import LaunchConfig, elastic_launch


def train(steps: int, rate: float) -> float:
    """Fit a line, and return this worker's last loss."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(steps):
        x = torch.rand(64, 1)
        loss = torch.nn.functional.mse_loss(model(x), 3 * x + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = float(loss)
    dist.barrier()
    return last


def main() -> None:
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=nodes,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:29400" if nodes > 1 else "",
        run_id="from-python",
    )
    losses = elastic_launch(config, train)(200, 0.5)
    for rank, loss in sorted(losses.items()):
        print(f"rank {rank}: loss {loss:.6f}")


if __name__ == "__main__":
    main()

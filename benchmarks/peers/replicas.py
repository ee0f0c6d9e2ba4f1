"""The training of ../workload.py under torchft: each process is a replica group of its own."""

import os
import time
from datetime import timedelta

import torch
import workload
from hangs import hanging
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main() -> None:
    options = workload.parser()
    options.add_argument("--timeout", type=float, required=True, help="seconds for collectives and quorums")
    args = options.parse_args()
    timeout = timedelta(seconds=args.timeout)
    network = workload.model()
    optimizer = torch.optim.SGD(network.parameters(), lr=workload.LEARNING_RATE)

    def load(state: dict[str, dict[str, object]]) -> None:
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": network.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{os.environ['REPLICA_GROUP_ID']}",
        timeout=timeout,
        quorum_timeout=timeout,
        init_sync=False,  # all replicas begin with the same weights
    )
    model = DistributedDataParallel(manager, network)
    wrapped = Optimizer(manager, optimizer)
    inputs, targets = workload.examples()
    with workload.noting(args.file) as write:
        note = hanging(write, args.file.parent)
        while manager.current_step() < args.steps:
            wrapped.zero_grad()
            before, rank, world = manager.current_step(), manager.participating_rank(), manager.num_participants()
            picked = torch.Generator().manual_seed(before + 1)
            chosen = torch.randint(workload.SAMPLES, (workload.GLOBAL_BATCH,), generator=picked)[(rank or 0) :: world]
            loss = nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])
            loss.backward()
            wrapped.step()
            if manager.current_step() > before:
                # A quorum counts as a round.
                os.environ["RANK"] = str(-1 if rank is None else rank)
                os.environ["WORLD_SIZE"] = str(world)
                os.environ["ELASTIC_LAUNCH_ROUND"] = str(manager._quorum_id)
                note(manager.current_step(), loss=loss.item())
            time.sleep(args.sleep)


if __name__ == "__main__":
    main()

"""The training of ../workload.py with this project's library, as ../elastic_workload.py; it can be made to hang."""

import time

import torch
import workload
from hangs import hanging

import elastic_launch as el


def main() -> None:
    args = workload.parser().parse_args()
    with workload.noting(args.file) as write, el.session() as run:
        note = hanging(write, args.file.parent)
        network = workload.model()
        optimizer = torch.optim.SGD(network.parameters(), lr=workload.LEARNING_RATE)
        batch = el.GlobalBatch(workload.GLOBAL_BATCH, micro=workload.GLOBAL_BATCH // 2)
        data = torch.utils.data.TensorDataset(*workload.examples())
        loader = el.ElasticLoader(data, batch, seed=workload.SEED)
        for step in run.steps(loader, network, optimizer, until=f"{args.steps}ba"):
            for inputs, targets in step:
                step.backward(torch.nn.functional.mse_loss(step.model(inputs), targets))
            step.update()
            note(step.number, loss=step.loss)
            time.sleep(args.sleep)


if __name__ == "__main__":
    main()

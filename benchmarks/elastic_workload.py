"""The same training as workload.py, with this project's library: it logs the same, and loses less."""

# ruff: noqa: E402
import time

BEGAN = time.monotonic()

import torch
from workload import GLOBAL_BATCH, LEARNING_RATE, SEED, examples, model, noting, parser, prepare

import elastic_launch as el

IMPORTED = time.monotonic()


def main() -> None:
    options = parser()
    options.add_argument("--checkpoint", help="directory of durable checkpoints")
    options.add_argument("--every", default="5s", help="between durable checkpoints")
    args = options.parse_args()
    with noting(args.file) as note:
        note(0, mark="begin", clock=BEGAN)
        note(0, mark="imported", clock=IMPORTED)
        with el.session() as run:
            note(0, mark="initialized")
            prepare(args)
            network = model(args.compile)
            optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
            data = torch.utils.data.TensorDataset(*examples())
            # So that each of four ranks has samples: one without compiles no model, but may have to in another world.
            loader = el.ElasticLoader(data, el.GlobalBatch(GLOBAL_BATCH, micro=GLOBAL_BATCH // 4), seed=SEED)
            checkpoint = el.Checkpoint(args.checkpoint, every=args.every) if args.checkpoint else None
            restored = False

            def work(step: el.Step) -> None:
                for inputs, targets in step:
                    step.backward(torch.nn.functional.mse_loss(step.model(inputs), targets))
                step.update()

            until, rehearse = f"{args.steps}ba", work if args.compile else None
            for step in run.steps(loader, network, optimizer, checkpoint=checkpoint, until=until, rehearse=rehearse):
                if not restored:
                    note(0, mark="restored")
                    restored = True
                work(step)
                note(step.number, loss=step.loss)
                time.sleep(args.sleep)


if __name__ == "__main__":
    main()

"""The same training as workload.py, with this project's library: it logs the same, and loses less."""

# ruff: noqa: E402
import time

BEGAN = time.monotonic()

import json
from contextlib import ExitStack
from pathlib import Path

import torch
from workload import GLOBAL_BATCH, SEED, examples, model, noting, parser, prepare

import elastic_launch as el

IMPORTED = time.monotonic()


LIVE = {"default": None, "no": False, "confirmed": "confirmed"}


def main() -> None:
    options = parser()
    options.add_argument("--live", choices=LIVE, default="default", help="the session's argument")
    options.add_argument("--exact", action="store_true")
    options.add_argument("--micro", type=int, default=GLOBAL_BATCH // 4, help="samples in a micro-batch")
    options.add_argument("--result", type=Path, help="file for the hash of the final weights")
    options.add_argument("--checkpoint", help="directory of durable checkpoints")
    options.add_argument("--every", default="5s", help="between durable checkpoints")
    args = options.parse_args()
    with noting(args.file) as note:
        note(0, mark="begin", clock=BEGAN)
        note(0, mark="imported", clock=IMPORTED)
        with ExitStack() as stack:
            run = stack.enter_context(el.session(live=LIVE[args.live]))
            note(0, mark="initialized")
            prepare(args)
            network = model(args.compile).to(run.device)
            optimizer = torch.optim.SGD(network.parameters(), lr=args.rate)
            data = torch.utils.data.TensorDataset(*examples())
            # So that each of four ranks has samples: one without compiles no model, but may have to in another world.
            loader = el.ElasticLoader(data, el.GlobalBatch(GLOBAL_BATCH, micro=args.micro), seed=SEED)
            checkpoint = el.Checkpoint(args.checkpoint, every=args.every) if args.checkpoint else None
            restored = False

            def work(step: el.Step) -> None:
                for inputs, targets in step:
                    inputs, targets = inputs.to(run.device), targets.to(run.device)
                    step.backward(torch.nn.functional.mse_loss(step.model(inputs), targets))
                step.update()

            how = {"until": f"{args.steps}ba", "rehearse": work if args.compile else None, "exact": args.exact}
            hurry = args.file.with_name("hurry")
            for step in run.steps(loader, network, optimizer, checkpoint=checkpoint, **how):
                if not restored:
                    note(0, mark="restored")
                    restored = True
                work(step)
                note(step.number, loss=step.loss)
                if args.sleep and not hurry.exists():
                    time.sleep(args.sleep)
            if args.result and run.rank == 0:
                args.result.write_text(json.dumps({"hash": el.weights_sha256(network)}))


if __name__ == "__main__":
    main()

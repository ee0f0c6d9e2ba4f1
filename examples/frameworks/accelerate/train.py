"""Fit a line in a loop with accelerate: a plain script for torchrun and similar launchers.

    elastic-launch --standalone --nproc 2 examples/frameworks/accelerate/train.py --dir runs/accelerate

After a restart it resumes from the newest state that accelerate has saved.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def newest(directory: Path) -> int:
    """Steps of the newest state, 0 if there is none."""
    return max((int(path.name.removeprefix("step-")) for path in directory.glob("step-*")), default=0)


def main(drain_callback: Callable[..., Callable[[], None]] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/accelerate"), help="shared by all nodes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    inputs = torch.linspace(-1, 1, 256)[:, None]
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.Adam(model.parameters(), lr=0.05),
        DataLoader(TensorDataset(inputs, 3 * inputs + 1), batch_size=8, shuffle=True),
    )

    def save(step: int) -> None:
        """Save under a temporary name and rename, since a worker may be killed at any moment."""
        target, unfinished = args.dir / f"step-{step}", args.dir / f"unfinished-{step}"
        accelerator.save_state(str(unfinished))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process and not target.exists():
            unfinished.rename(target)
        accelerator.wait_for_everyone()

    step = newest(args.dir)
    if step:
        accelerator.load_state(str(args.dir / f"step-{step}"))
        accelerator.print(f"resumed at step {step}", flush=True)
    drain = drain_callback(accelerator, save, step, args.steps) if drain_callback else None
    while step < args.steps:
        epoch, place = divmod(step, len(loader))
        loader.set_epoch(epoch)
        for inputs, targets in accelerator.skip_first_batches(loader, place):
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            step += 1
            if step % args.every == 0:
                save(step)
            if drain:
                drain()
            if step == args.steps:
                break
    accelerator.print(f"done: steps {step}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()

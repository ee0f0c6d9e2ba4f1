"""Train on a WebDataset, tar files that can only be read from the beginning, at any number of workers.

    python examples/streaming/train.py shards --make
    elastic-launch --standalone --nproc 2 examples/streaming/train.py shards --exact

The first command writes scikit-learn's digits to tar files and counts their samples. With --exact the final weights are
bitwise identical at any number of workers and after any restart: compare weights_sha256 in the result.
"""

import argparse
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from torch import Tensor, nn
from webdataset.tariterators import group_by_keys, tar_file_expander

import elastic_launch as el

SHARD_LENGTHS = (200, 150, 250)  # in turn: shards need not be equally long


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory of the shards")
    parser.add_argument("--make", action="store_true", help="write the shards, and do not train")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--exact", action="store_true", help="the same weights to the bit at any number of workers")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes that load, for each worker")
    parser.add_argument("--checkpoint", help="directory or URL to save to and to resume from")
    parser.add_argument("--step-time", type=float, default=0.0, help="least seconds per step, to watch a run")
    parser.add_argument("--result", type=Path, help="file to which rank 0 writes the result as JSON")
    return parser.parse_args()


def make_shards(directory: Path) -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    directory.mkdir(parents=True, exist_ok=True)
    first, shards = 0, []
    while first < len(labels):
        path = directory / f"digits-{len(shards):03}.tar"
        stop = min(len(labels), first + SHARD_LENGTHS[len(shards) % len(SHARD_LENGTHS)])
        with path.open("wb") as file, webdataset.TarWriter(file, mtime=0) as writer:
            for number in range(first, stop):
                image = images[number].astype(np.float32)
                writer.write({"__key__": f"{number:05}", "image.npy": image, "cls": int(labels[number])})
        shards.append(path)
        first = stop
    counts = el.count_shards(shards, read_tar, directory / "shards.json")
    print(f"{len(shards)} shards of {min(counts)} to {max(counts)} samples in {directory}")


def read_tar(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all samples of a shard, without decoding them: those that are skipped are not needed.

    webdataset.WebDataset would give each process of a loader other shards; these functions of webdataset only read.
    """
    with path.open("rb") as file:
        yield from group_by_keys(tar_file_expander([{"url": str(path), "stream": file}]))


def decode(sample: dict[str, Any]) -> tuple[Tensor, int]:
    """Called only for the samples that are used; random numbers are the same in any process."""
    image = torch.from_numpy(np.load(io.BytesIO(sample["image.npy"]))) / 16
    return image + 0.05 * torch.randn(image.shape), int(sample["cls"])


def main() -> None:
    args = arguments()
    if args.make:
        make_shards(args.directory)
        return
    with el.session() as run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        stream = el.ShardedStream(
            sorted(args.directory.glob("*.tar")),
            open=read_tar,
            lengths=args.directory / "shards.json",
            decode=decode,
            buffer=300,
            lanes=2,
        )
        options = {"num_workers": args.loader_workers, "persistent_workers": args.loader_workers > 0}
        loader = el.ElasticLoader(stream, el.GlobalBatch(48, micro=8), seed=0, **options)
        checkpoint = el.Checkpoint(args.checkpoint, every="30s") if args.checkpoint else None
        loss = float("nan")
        for step in run.steps(
            loader, model, optimizer, checkpoint=checkpoint, until=f"{args.epochs}ep", exact=args.exact
        ):
            began = time.monotonic()
            for images, labels in step:
                step.backward(nn.functional.cross_entropy(step.model(images.to(run.device)), labels.to(run.device)))
            step.update()
            loss = step.loss
            if run.rank == 0 and step.number % 20 == 0:
                print(f"step {step.number} loss {loss:.4f}", flush=True)
            time.sleep(max(0.0, args.step_time - (time.monotonic() - began)))
        if run.rank == 0:
            result = {"loss": loss, "weights_sha256": el.weights_sha256(model)}
            result |= {"worlds": run.worlds, "restarts": run.restarts, "resumed_step": run.resumed_step}
            print(json.dumps(result), flush=True)
            if args.result:
                args.result.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

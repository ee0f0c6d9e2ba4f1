"""A training by el.Trainer on several ranks, one of which may have less memory; rank 0 writes what it saw."""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it on first use; here before address space is counted
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.training.callbacks import CheckpointEnd, Evaluation, Incident, RoundStart, StepEnd


class Net(nn.Module):
    """Allocates 1 GiB of address space, not of memory, for each sample of a micro-batch."""

    def __init__(self, greedy: bool) -> None:
        super().__init__()
        # A bias before BatchNorm has a gradient of rounding errors only, which AdamW blows up.
        first = nn.Linear(6, 16, bias=False)
        self.body = nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
        self.register_buffer("phases", torch.tensor([0.5 + 0.7j, 1j]))
        self._greedy = greedy

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x)
        if self._greedy and self.training:
            torch.empty(len(x), 2**28)
        return output


class Recorder(el.Callback):
    def __init__(self, stop_after: int, step_time: float, run: el.Run) -> None:
        self.seen: dict[str, list[object]] = {name: [] for name in ("rounds", "losses", "evaluations", "incidents")}
        self.seen["checkpoints"] = []
        self._stop_after, self._step_time, self._run = stop_after, step_time, run

    def on_round(self, start: RoundStart) -> None:
        self.seen["rounds"].append([start.world_size, start.micro, start.resumed_step, start.reason])

    def on_step(self, end: StepEnd) -> None:
        self.seen["losses"].append([end.step, end.loss, end.metrics])
        time.sleep(self._step_time)
        # The last rank alone asks for it; all stop.
        if end.step == self._stop_after and self._run.rank == self._run.world_size - 1:
            self._run.request_stop()

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.seen["evaluations"].append([evaluation.step, evaluation.metrics])

    def on_incident(self, incident: Incident) -> None:
        self.seen["incidents"].append([incident.kind, incident.step, incident.cause])

    def on_checkpoint(self, end: CheckpointEnd) -> None:
        self.seen["checkpoints"].append(end.step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--micro", default="4")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--default-mode", action="store_true")
    parser.add_argument("--poor-rank", type=int, default=-1)
    parser.add_argument("--stop-after", type=int, default=-1)
    parser.add_argument("--every", default="2")
    parser.add_argument("--step-time", type=float, default=0.0)
    parser.add_argument("--unseeded", action="store_true", help="each rank builds another model")
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()
    with el.session() as run:
        # Deterministic mode fills what torch.empty gives; here that would be GiBs of real memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        inputs = torch.randn(70, 6, generator=torch.Generator().manual_seed(3))
        targets = inputs[:, :3].argmax(dim=1)
        torch.manual_seed(100 + run.rank if args.unseeded else 0)
        model = Net(greedy=args.poor_rank >= 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        recorder = Recorder(args.stop_after, args.step_time, run)
        micro = args.micro if args.micro == "auto" else int(args.micro)
        trainer = el.Trainer(
            run,
            model,
            optimizer,
            el.ElasticLoader(TensorDataset(inputs[:50], targets[:50]), el.GlobalBatch(24, micro), seed=5),
            loss_fn=nn.functional.cross_entropy,
            metrics={"accuracy": lambda output, target: (output.argmax(dim=1) == target).float().mean()},
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
            precision=args.precision,
            clip_norm=1.0,
            eval_loader=el.ElasticLoader(TensorDataset(inputs[50:], targets[50:]), el.GlobalBatch(9, 2), shuffle=False),
            checkpoint=el.Checkpoint(args.checkpoint, every=args.every) if args.checkpoint else None,
            exact=not args.default_mode,
            callbacks=[recorder],
        )
        if run.rank == args.poor_rank:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 9 * 2**30, resource.RLIM_INFINITY))
        trainer.fit("3ep")
        args.result.with_suffix(f".{run.rank}").write_text(el.weights_sha256(model))
        if run.rank == 0:
            seen = recorder.seen | {
                "hash": el.weights_sha256(model),
                "weights": [p.flatten().tolist() for p in model.parameters()],
                "micro": trainer.loader.batch.micro,
                "step": trainer.step,
                "stopped": run.stopped,
                "worlds": run.worlds,
                "history": [x.step for x in trainer.history],
            }
            args.result.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

"""Each event and each failure as a plain sentence, for what people read. No code reads a sentence."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from elastic_launch.events import types as ev
from elastic_launch.events.types import counted, listed
from elastic_launch.failure import Failure, Hang, StallPlace

_ORDERS = {
    "drain": "round {round} is to end after the same step on all ranks",
    "break": "round {round} is broken",
    "evicted": "this node is put out of round {round}",
    "left_out": "the run goes on without this node",
    "end": "the run is to end",
}


def sentence(event: ev.Event) -> str:
    """Return what happened; a leader's decision is said as the leader's agent prints it, if it does."""
    return event.line() or _ended(event) or _of_workers(event) or _of_training(event) or _of_node(event)


def ending(exit_code: int) -> str:
    """Return ``exit code 3`` or ``signal 9 (SIGKILL)``."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {-exit_code} ({signal.Signals(-exit_code).name})"
    except ValueError:
        return f"signal {-exit_code}"


def worker_failed(failure: Failure) -> str:
    """Return which worker failed, and how, in one line."""
    if failure.rank < 0:
        who = f"local rank {failure.local_rank} on node {failure.node_id}, started ahead of a round"
    else:
        who = f"rank {failure.rank} on node {failure.node_id}"
    return f"{who}: {how_failed(failure)}"


def how_failed(failure: Failure) -> str:
    """Return how a worker failed, in one line."""
    if failure.hang is not None:
        return _hung(failure.hang, failure.host)
    how = ending(failure.exit_code)
    if failure.named:
        how += ", which --fatal-exit-codes names"
    elif failure.kind == "out of memory":
        killed = "it" if failure.exit_code == -signal.SIGKILL else "a child of it"
        how += f"; the kernel killed {killed} for lack of memory"
    if failure.alive or (failure.stopped and failure.error):
        how = ""
    if failure.supposed:
        how = "printed before it was stopped"
    how = ", ".join(filter(None, (how, _after(failure.ended_before))))
    timer = f"its timer {failure.timer!r} expired" if failure.timer else ""
    return ": ".join(filter(None, (timer, how, failure.error)))


def standing(worker: StallPlace) -> str:
    """Return where a worker stands still, such as ``waiting for its data loader at train.py:3 in load``."""
    at = f" at {worker.frame}" if worker.frame else ""
    match worker.state:
        case "stopped":
            return f"stopped (SIGSTOP){at}"
        case "loader":
            return f"waiting for its data loader{at}"
        case "exchange":
            collective = f" in {worker.collective}" if worker.collective else ""
            return f"waiting for other ranks{collective}{at}"
        case "unknown":
            return "at an unknown place"
    return at.strip() or "in its code"


def ranks(numbers: Sequence[int]) -> str:
    """Return ``rank 1`` or ``ranks 1, 2``."""
    return f"rank{'s' if len(numbers) > 1 else ''} {listed(sorted(numbers))}"


def _hung(hang: Hang, host: str) -> str:
    apart = f", {ranks(hang.others)} {standing(hang.there)}" if hang.there is not None else ""
    return f"hangs in {hang.doing} on host {host}, {standing(hang.at)}{apart}; no progress for {hang.seconds:.0f} s"


def _after(done: Sequence[int]) -> str:
    """Return which ranks had ended, while others still needed them; empty if there are none."""
    if not done:
        return ""
    others = f" and {len(done) - 1} more" if len(done) > 1 else ""
    return f"after rank {min(done)}{others} had ended with exit code 0"


def _ended(event: ev.Event) -> str:
    """Return what the leader's agent leaves to another line, or to the run's summary."""
    match event:
        case ev.NodeLost(node=node, cause=cause, broke=number, next=following):
            return f"node {node} lost ({cause}), and with it round {number}; {following}"
        case ev.NodeLeft(node=node, cause=cause, broke=number, next=following):
            return f"node {node} leaves ({cause}), which ends round {number}; {following}"
        case ev.HangFound(round=number, cause=cause, collectives=collectives):
            # If no rank stands out, the cause has them.
            more = f"; {collectives}" if collectives and collectives not in cause else ""
            return f"round {number} stands still: {cause}{more}"
        case ev.RunEnded(code=code, cause=cause, restarts=restarts, rounds=rounds, lasted_s=seconds):
            spent = f"{counted(rounds, 'round')}, {counted(restarts, 'restart')}, {seconds:.1f} s"
            return f"the run ended with exit code {code}: {cause} ({spent})"
        case ev.NodeEnded(code=code, cause=cause):
            return f"this node's part of the run ended with exit code {code}: {cause}"
    return ""


def _of_workers(event: ev.Event) -> str:
    match event:
        case ev.WorkerStarted(round=0, local_rank=local, pid=pid):
            return f"worker of local rank {local} started ahead of a round (pid {pid})"
        case ev.WorkerStarted(round=number, rank=rank, pid=pid, start_s=seconds):
            return f"rank {rank} started in round {number} (pid {pid}), in {seconds:.2f} s"
        case ev.WorkerKept(round=number, rank=rank, pid=pid):
            return f"a worker kept its process (pid {pid}) and is rank {rank} in round {number}"
        case ev.WorkerAhead(local_rank=local, pid=pid, took_s=seconds):
            ready = f"is ready for a place, after {seconds:.2f} s"
            return f"the worker of local rank {local} started ahead (pid {pid}) {ready}"
        case ev.WorkerPlaced(round=number, rank=rank, pid=pid):
            return f"a worker that had started ahead (pid {pid}) is rank {rank} in round {number}"
        case ev.WorkerExited(round=number, rank=rank, local_rank=local, pid=pid, exit_code=code):
            who = f"rank {rank} of round {number}" if number else f"the worker of local rank {local} started ahead"
            how = "was stopped and ended" if event.stopped else "ended"
            return f"{who} (pid {pid}) {how} with {ending(code)} after {event.ran_s:.1f} s"
    return ""


def _of_training(event: ev.Event) -> str:
    match event:
        case ev.TrainingBegun(round=number, rank=rank, step=step, total=total, restore_s=seconds):
            of = f" of {total}" if total else ""
            more = (
                f", {event.uncompared} steps past the last comparison of the ranks' states" if event.uncompared else ""
            )
            took = f"restored in {seconds:.2f} s{more}"
            return f"rank {rank} begins to train in round {number} after step {step}{of}; {took}"
        case ev.FirstStep(round=number, step=step):
            return f"the first step of round {number} is done: step {step}"
        case ev.RoundProgress(round=number, step=step, trained_s=seconds):
            return f"round {number} has come to step {step} after {seconds:.1f} s of training"
        case ev.RoundSteps(round=number, first=first, last=last, trained_s=seconds):
            return f"round {number} trained from step {first} to step {last} in {seconds:.1f} s"
        case ev.SnapshotsLeftOut(round=number, cause=cause):
            return f"no snapshots in memory from now on, in round {number}: {cause}"
        case ev.CheckpointSaved(step=step, path=path):
            return f"checkpoint of step {step} saved" + (f" in {path}" if path else " by a worker")
    return ""


def _of_node(event: ev.Event) -> str:
    match event:
        case ev.OrderReceived(order="form", round=number, cause=cause, workers=workers):
            why = "" if cause == "first" else f", because: {cause}"
            return f"order: round {number} begins, with {counted(workers, 'worker')} of this node{why}"
        case ev.OrderReceived(order=order, round=number, cause=cause, kind=kind):
            what = _ORDERS.get(order, order).format(round=number)
            return f"order: {what}: {cause}" + (f" ({kind})" if kind else "")
        case ev.LinkChanged(up=True, cause=cause):
            return f"the link to the leader is up: {cause}"
        case ev.LinkChanged(cause=cause):
            return f"the link to the leader is down: {cause}"
        case ev.NoticeReceived(source=source, kind=kind, cause=cause, seconds=seconds, leaves=leaves):
            left = "" if seconds is None else f", {seconds:g} s left"
            then = "this node leaves the run" if leaves else "this node stays in the run"
            return f"notice of {kind} by {source}: {cause}{left}; {then}"
    return ""

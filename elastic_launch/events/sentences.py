"""Each event as a plain sentence, for the lists that people read."""

from __future__ import annotations

import signal

from elastic_launch.events import types as ev
from elastic_launch.events.types import counted

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

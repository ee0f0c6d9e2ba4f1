"""Each event and each failure as a plain sentence, for what people read. No code reads a sentence."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

from elastic_launch.events import types as ev
from elastic_launch.events.types import counted, listed
from elastic_launch.failure import Failure, Hang, SplitCollective, StallPlace

MOST_PLACES = 4
"""Places of the code, and collectives, that a sentence names."""


def sentence(event: ev.Event) -> str:
    """Return what happened in one line: which node, why, and, of a leader's decision, what happens next."""
    return SENTENCES[type(event)](event)


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
    if failure.rank is None:
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


def all_hang(
    doing: str, places: Sequence[tuple[StallPlace, Sequence[int]]], collectives: Sequence[SplitCollective]
) -> str:
    """Return where the ranks of a round stand of which none stands out."""
    where = [f"{ranks(there)} {standing(place)}" for place, there in places]
    shown = where[:MOST_PLACES] + ["..."] * (len(where) > MOST_PLACES)
    found = "; ".join([*shown, *map(divided, collectives[:MOST_PLACES])])
    return f"the round hangs in {doing}, and no rank stands out: {found}"


def divided(found: SplitCollective) -> str:
    """Return which ranks wait in a collective, and what the others have begun."""
    others = [f"{ranks(other.ranks)} began {other.what} instead" for other in found.instead]
    if found.behind:
        others.append(f"{ranks(found.behind)} {'has' if len(found.behind) == 1 else 'have'} not begun it")
    wait = "waits" if len(found.there) == 1 else "wait"
    which = f"{found.what}, number {found.number} of group {found.group}"
    return f"{ranks(found.there)} {wait} in {which}, {', '.join(others)}"


def _hung(hang: Hang, host: str) -> str:
    apart = f", {ranks(hang.others)} {standing(hang.there)}" if hang.there is not None else ""
    return f"hangs in {hang.doing} on host {host}, {standing(hang.at)}{apart}; no progress for {hang.seconds:.0f} s"


def _after(done: Sequence[int]) -> str:
    """Return which ranks had ended, while others still needed them; empty if there are none."""
    if not done:
        return ""
    others = f" and {len(done) - 1} more" if len(done) > 1 else ""
    return f"after rank {min(done)}{others} had ended with exit code 0"


def _lost(event: ev.NodeLost) -> str:
    more = f", and with it round {event.broke}" if event.broke else ""
    return f"node {event.node} lost ({event.cause}){more}; {event.next}"


def _left(event: ev.NodeLeft) -> str:
    more = f", which ends round {event.broke}" if event.broke else ""
    return f"node {event.node} leaves ({event.cause}){more}; {event.next}"


def _differs(event: ev.NodeDiffers) -> str:
    known = (("other arguments", event.arguments), ("other limits", event.limits))
    return f"node {event.node} came with {'; and with '.join(f'{what}: {of}' for what, of in known if of)}"


def _drill_ended(event: ev.DrillEnded) -> str:
    if not event.missing:
        return f"drill: {'all ' if event.planned > 1 else ''}{counted(event.planned, 'fault')} happened"
    happened = f"{event.planned - len(event.missing)} of {counted(event.planned, 'fault')}"
    return f"drill: {happened} happened; not fault {', '.join(map(str, event.missing))}"


def _broken(event: ev.RoundBroken) -> str:
    following = f"; {event.next}" if event.next else ""
    after = f" after {event.lasted_s:.1f} s" if event.lasted_s is not None else ""
    return f"round {event.round} broken{after}: {event.cause}{following}"


def _hang_found(event: ev.HangFound) -> str:
    # If no rank stands out, the cause has the collectives.
    more = map(divided, event.collectives[:MOST_PLACES] if event.ranks else ())
    return f"round {event.round} stands still: {'; '.join([event.cause, *more])}"


def _draining(event: ev.RoundDraining) -> str:
    limit = "" if event.seconds is None else f", within {round(event.seconds, 1):g} s"
    return f"round {event.round} drains: {event.cause}; its workers stop after the same step{limit}"


def _charged(event: ev.RestartCharged) -> str:
    back = f", {event.refilled} given back" if event.refilled else ""
    flag = f"--max-restarts {event.max_restarts - event.refilled}"
    kind = "lack of memory" if event.kind == "out of memory" else event.kind
    why = f", since the training has not advanced in {event.idle} restarts" if event.idle else ""
    delay = f" in {event.delay_s:g} s, as workers failed soon after their start again" if event.delay_s else ""
    following = f"; {event.next}{delay}" if event.next else ""
    return f"restart {event.restarts} of {event.max_restarts} ({flag}{back}), charged for a {kind}{why}{following}"


def _checked(event: ev.NodeChecked) -> str:
    what = f"CPU and {event.devices} GPUs" if event.devices > 1 else "CPU and GPU" if event.devices else "CPU"
    figures = f"{event.compute_gflop_s:g} GFLOP/s, memory {event.memory_gb_s:g} GB/s, disk {event.disk_mb_s:g} MB/s"
    return f"node check passed: {what}; {figures}"


def _straggles(event: ev.StragglerFound) -> str:
    what = "waits longer for data" if event.phase == "data" else "computes longer"
    load = f"with a load of {event.load:.1f} per CPU"
    if event.pressure is not None:
        load = f"tasks waited for a CPU in {event.pressure:.0%} of the last 10 s"
    why = f"; its host is overloaded, {load}" if event.host == "overloaded" else ""
    return (
        f"rank {event.rank} on node {event.node} is slow: it {what}, and needs {event.ratio:.1f} times as long "
        f"for its part of a step as the other ranks, which wait for it{why}"
    )


def _corrupt(event: ev.CorruptionFound) -> str:
    who = f"{ranks(event.ranks)} on node {listed(event.nodes)} computed a wrong result" if event.ranks else ""
    who = who or "ranks computed different results, and it is not known which one is right"
    back = (
        f"; {counted(event.suspect, 'step')} before it, which may be wrong, will be done again" if event.suspect else ""
    )
    return f"silent corruption: step {event.step} was not applied: {who} for a micro-batch{back}"


def _ordered(event: ev.OrderReceived) -> str:
    if event.order == "form":
        why = "" if event.cause == "first" else f", because: {event.cause}"
        return f"order: round {event.round} begins, with {counted(event.workers, 'worker')} of this node{why}"
    what = _ORDERS.get(event.order, event.order).format(round=event.round)
    return f"order: {what}: {event.cause}" + (f" ({event.kind})" if event.kind else "")


def _noticed(event: ev.NoticeReceived) -> str:
    left = "" if event.seconds is None else f", {event.seconds:g} s left"
    then = "this node leaves the run" if event.leaves else "this node stays in the run"
    return f"notice of {event.kind} by {event.source}: {event.cause}{left}; {then}"


def _started(event: ev.WorkerStarted) -> str:
    if not event.round:
        return f"worker of local rank {event.local_rank} started ahead of a round (pid {event.pid})"
    return f"rank {event.rank} started in round {event.round} (pid {event.pid}), in {event.start_s:.2f} s"


def _exited(event: ev.WorkerExited) -> str:
    ahead = f"the worker of local rank {event.local_rank} started ahead"
    who = f"rank {event.rank} of round {event.round}" if event.round else ahead
    how = "was stopped and ended" if event.stopped else "ended"
    return f"{who} (pid {event.pid}) {how} with {ending(event.exit_code)} after {event.ran_s:.1f} s"


def _begun(event: ev.TrainingBegun) -> str:
    of = f" of {event.total}" if event.total else ""
    more = f", {event.uncompared} steps past the last comparison of the ranks' states" if event.uncompared else ""
    where = f"in round {event.round} after step {event.step}{of}"
    return f"rank {event.rank} begins to train {where}; restored in {event.restore_s:.2f} s{more}"


SENTENCES: dict[type[ev.Event], Callable[[Any], str]] = {
    ev.NodeJoined: lambda e: f"node {e.node} joined from {e.address} with {counted(e.workers, 'worker')}; {e.next}",
    ev.NodeLost: _lost,
    ev.NodeExcluded: lambda e: (
        f"node {e.node} is left out for {e.seconds:g} s, as long as there are enough others: "
        + (f"its workers have caused the last {e.faults} faults" if e.faults else "it has computed wrong")
    ),
    ev.NewcomerLeftOut: lambda e: (
        f"node {e.node} is left out, at no cost to the run: {e.cause.rstrip('.')}; the others go on, and its host may "
        f"join again after {e.seconds:g} s"
    ),
    ev.AdmissionClosed: lambda e: (
        f"no further nodes take part, as long as there are enough: {e.cause}. A restart of the run is likely to "
        "fail, too: mend the script or its environment before"
    ),
    ev.FaultLanded: lambda e: f"drill: fault {e.fault} happens on node {e.node} at step {e.step}",
    ev.DrillEnded: _drill_ended,
    ev.NodeLeft: _left,
    ev.NodeRefused: lambda e: f"node {e.node} refused: {e.cause}",
    ev.JoinBlocked: lambda e: (
        f"node {e.node} waits: it cannot connect to node {e.member} ({e.address}, port {e.port}: {e.cause}). "
        "Nodes must be able to connect to each other on all ports; it tries again every 10 s"
    ),
    ev.NodeDiffers: _differs,
    ev.RoundFormed: lambda e: (
        f"round {e.round} formed in {e.form_s:.2f} s: world size {e.world_size} on "
        f"{counted(len(e.nodes), 'node')} ({listed(e.nodes)})"
    ),
    ev.RoundBroken: _broken,
    ev.HangFound: _hang_found,
    ev.CauseFound: lambda e: f"round {e.round} was broken by {e.cause}",
    ev.RoundDraining: _draining,
    ev.RoundDrained: lambda e: f"round {e.round} drained in {e.drain_s:.2f} s after step {e.step}; {e.next}",
    ev.RestartCharged: _charged,
    ev.ResizeSkipped: lambda e: (
        f"no resize for node {listed(e.nodes)}: of about {e.remaining_s:.0f} s left it would save {e.saved_s:.1f} s, "
        f"and it costs {e.cost_s:.1f} s"
    ),
    ev.LeaderElected: lambda e: (
        f"node {e.node} leads the run (term {e.term})" + ("" if e.cause == "first" else f": {e.cause}")
    ),
    ev.Parked: lambda e: (
        f"parked with {counted(e.nodes, 'node')}, {e.min_nodes} needed; "
        f"goes on when they are there, ends in {e.min_wait_s:g} s otherwise"
    ),
    ev.RunResized: lambda e: f"the run is resized to {e.min_nodes}:{e.max_nodes} nodes, from {e.had_min}:{e.had_max}",
    ev.RunEnded: lambda e: (
        f"the run ended with exit code {e.code}: {e.cause} "
        f"({counted(e.rounds, 'round')}, {counted(e.restarts, 'restart')}, {e.lasted_s:.1f} s)"
    ),
    ev.OrderReceived: _ordered,
    ev.LinkChanged: lambda e: f"the link to the leader is {'up' if e.up else 'down'}: {e.cause}",
    ev.WorkersHeld: lambda e: f"the leader has answered: the workers go on after {e.seconds:.1f} s",
    ev.NoticeReceived: _noticed,
    ev.NodeChecked: _checked,
    ev.CorruptionFound: _corrupt,
    ev.StragglerFound: _straggles,
    ev.WorkerStarted: _started,
    ev.WorkerKept: lambda e: f"a worker kept its process (pid {e.pid}) and is rank {e.rank} in round {e.round}",
    ev.WorkerAhead: lambda e: (
        f"the worker of local rank {e.local_rank} started ahead (pid {e.pid}) is ready for a place, "
        f"after {e.took_s:.2f} s"
    ),
    ev.WorkerPlaced: lambda e: f"a worker that had started ahead (pid {e.pid}) is rank {e.rank} in round {e.round}",
    ev.WorkerExited: _exited,
    ev.TrainingBegun: _begun,
    ev.FirstStep: lambda e: f"the first step of round {e.round} is done: step {e.step}",
    ev.RoundProgress: lambda e: f"round {e.round} has come to step {e.step} after {e.trained_s:.1f} s of training",
    ev.RoundSteps: lambda e: f"round {e.round} trained from step {e.first} to step {e.last} in {e.trained_s:.1f} s",
    ev.SnapshotsLeftOut: lambda e: f"no snapshots in memory from now on, in round {e.round}: {e.cause}",
    ev.CheckpointSaved: lambda e: (
        f"checkpoint of step {e.step} saved" + (f" in {e.path}" if e.path else " by a worker")
    ),
    ev.NodeEnded: lambda e: f"this node's part of the run ended with exit code {e.code}: {e.cause}",
}
"""What makes the sentence of each event."""

_ORDERS = {
    "drain": "round {round} is to end after the same step on all ranks",
    "break": "round {round} is broken",
    "evicted": "this node is put out of round {round}",
    "left_out": "the run goes on without this node",
    "end": "the run is to end",
}

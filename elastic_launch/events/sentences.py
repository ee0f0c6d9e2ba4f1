"""Each event and each failure as a plain sentence, for what people read. No code reads a sentence."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

from elastic_launch.events import facts as f
from elastic_launch.events import types as ev
from elastic_launch.events.types import counted, listed
from elastic_launch.failure import Doing, Failure, Hang, SplitCollective, StallPlace
from elastic_launch.secret import HINT_NO_TOKEN, HINT_TOKEN
from elastic_launch.shared_progress import Activity
from elastic_launch.system.plain_text import clipped, one_line

MOST_PLACES = 4
"""Places of the code, and collectives, that a sentence names."""

MOST_DIFFERENCES, DIFFERENCE_BYTES = 5, 200
"""Differences between two commands that a sentence names, and bytes of each of their parts."""

VALUE_BYTES = 300
"""Bytes of a difference between the arguments of two workers."""


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


def occupation(found: Doing) -> str:
    """Return what a worker does, such as ``step 41``."""
    match found.activity:
        case Activity.UNWATCHED:
            return "the end of its script" if found.ends else "its script"
        case Activity.FORMING:
            return "the forming of the round"
        case Activity.RESTORE:
            return "the restoring of its state"
        case Activity.CHECKPOINT:
            return f"the checkpoint after step {found.step}"
        case Activity.EVALUATION:
            return f"the evaluation after step {found.step}"
        case Activity.PAUSE:
            return f"the announced {found.pause or 'pause'} after step {found.step}"
    return f"step {found.step + 1}"


def ranks(numbers: Sequence[int]) -> str:
    """Return ``rank 1`` or ``ranks 1, 2``."""
    return f"rank{'s' if len(numbers) > 1 else ''} {listed(sorted(numbers))}"


def divided(found: SplitCollective) -> str:
    """Return which ranks wait in a collective, and what the others have begun."""
    others = [f"{ranks(other.ranks)} began {other.what} instead" for other in found.instead]
    if found.behind:
        others.append(f"{ranks(found.behind)} {'has' if len(found.behind) == 1 else 'have'} not begun it")
    wait = "waits" if len(found.there) == 1 else "wait"
    which = f"{found.what}, number {found.number} of group {found.group}"
    return f"{ranks(found.there)} {wait} in {which}, {', '.join(others)}"


def why(cause: f.RunCause | f.NodeCause | f.Reason) -> str:
    """Return a fact as text, such as why a round, a node's part or a run ended; what others have said, as it is."""
    if isinstance(cause, str):
        return cause
    return _MADE[type(cause)](cause) if type(cause) in _MADE else _worded(cause)


def refused(misfit: f.Misfit, node: str = "") -> tuple[str, str]:
    """Return why a node is refused, and the remedy."""
    run_id, theirs, ours = misfit.run_id, misfit.theirs, misfit.ours
    match misfit.what:
        case "version":
            return (
                f"node {node} speaks version {theirs} of the protocol, the run's leader version {ours}.",
                "Install the same version of elastic-launch on all nodes.",
            )
        case "run":
            return (
                f"node {node} belongs to run {run_id!r}, this endpoint serves another run.",
                "Give both the same --rdzv-id, or another --rdzv-endpoint.",
            )
        case "earlier":
            return (
                f"node {node} belongs to an earlier run {run_id!r}, which has ended.",
                "Start it again to join the present one.",
            )
        case "command":
            return (
                f"node {node} came with the command `{theirs}`, run {run_id!r} executes `{ours}`.",
                "Give the same script, module or program, --replica-size and --rdzv-backend on all nodes, or another "
                "--rdzv-id and --rdzv-endpoint for another run.",
            )
        case "no token":
            return "the token is missing: the run has one, this node has none.", HINT_TOKEN
        case "token":
            return "this node has a token, the run has none.", HINT_NO_TOKEN
        case "alone":
            return (
                "this endpoint is one of several that keep the record of a run, and was given alone.",
                f"Give all of them: --rdzv-endpoint {ours}.",
            )
    whose = f"node {node} is not one of the nodes of run {run_id!r} at this endpoint"
    other = "Give another --rdzv-endpoint, such as another port, for another run"
    if misfit.differs is None:
        return f"{whose}: it has one node (--nnodes 1), which trains.", f"{other}."
    return (
        f"{whose}: it came with other arguments, {command_differs(misfit.differs)}, and neither has an id.",
        f"{other}; or, if the arguments of one run's nodes differ, the same --rdzv-id to all.",
    )


def command_differs(found: f.CommandDiffers) -> str:
    """Return in which arguments a node's command differs from the run's."""
    parts = [_argument_differs(*pair) for pair in found.parts[:MOST_DIFFERENCES]]
    if len(found.parts) > MOST_DIFFERENCES:
        parts.append(f"{len(found.parts) - MOST_DIFFERENCES} more")
    return ", ".join(parts) or "they are too long to be shown"


def limits_differ(theirs: str, ours: str) -> str:
    """Return how a node's limits differ from those of the run."""
    return f"{clipped(one_line(theirs), DIFFERENCE_BYTES)}; those of the run hold: {ours}"


def last_saved(found: f.LastSaved | None) -> str:
    """Return where the final state is; empty if that is not known."""
    if found is None:
        return ""
    lost = f"{counted(found.lost, 'step')}{'' if found.step is None else ' since then'} lost"
    lost += f": {why(found.why)}" if found.why else ""
    which = of_training(found.training)
    if found.step is None:
        return f"nothing{which} is saved, {lost}"
    place = f" in {found.path}" if found.path else ""
    saved = f"step {found.step}{which} {'was the last to be' if found.failed else 'is'} saved{place}"
    again = "; run the same command to continue" if found.continues and not found.failed else ""
    return saved + (f"; {lost}" if found.lost else "") + again


def next_up(outlook: f.Outlook) -> str:
    """Return what happens next."""
    return _worded(outlook)


def warning(fact: f.NodeWarning) -> str:
    """Return what a node's user is warned of."""
    if isinstance(fact, f.LeaderLost):
        return _leader_lost(fact)
    followed = ": the others may train without this node; its workers are killed"
    return f"{_worded(fact)}{followed if isinstance(fact, f.Isolation) else ''}"


def after_ahead(following: f.AfterAhead) -> str:
    """Return what follows the end of a worker that was started ahead."""
    return _AFTER_AHEAD[following]


def _leader_lost(fact: f.LeaderLost) -> str:
    until = "a leader can be elected" if fact.elects else "an agent is back at the endpoint"
    match fact.node:
        case "finished":
            gone, waits = ("is gone", f"waits until {until}") if fact.gone else ("cannot be reached", "waits")
            return f"the leader {gone} ({fact.reason}); this node has finished and {waits}"
        case "drains":
            return f"{fact.reason}; the workers still stop after the same step"
        case "waits" if not fact.gone:
            return f"waiting for the endpoint: {fact.reason}"
        case "waits":
            return f"parked: the leader is gone ({fact.reason}); this node goes on when {until}"
        case "stops":
            return f"parking: the leader is gone ({fact.reason}); this node goes on when {until}"
    return f"{fact.reason}; the workers {'stay stopped' if fact.node == 'stays stopped' else 'train on'}"


def _argument_differs(ours: str, theirs: str) -> str:
    ours, theirs = (clipped(one_line(text), DIFFERENCE_BYTES) for text in (ours, theirs))
    if not ours:
        return f"`{theirs}` in addition"
    return f"`{theirs}` instead of `{ours}`" if theirs else f"without `{ours}`"


def _named(nodes: Sequence[str]) -> str:
    return f"node {', '.join(nodes)}"


def _hangs(cause: f.RoundHangs) -> str:
    where = [f"{ranks(there)} {standing(place)}" for place, there in cause.places]
    shown = where[:MOST_PLACES] + ["..."] * (len(where) > MOST_PLACES)
    found = "; ".join([*shown, *map(divided, cause.collectives[:MOST_PLACES])])
    return f"the round hangs in {occupation(cause.doing)}, and no rank stands out: {found}"


def _resize(cause: f.Resize) -> str:
    if cause.most is not None:
        return f"resize: at most {counted(cause.most, 'node')}"
    waiting = ((cause.joining, "waits to join"), (cause.back, "has workers back"))
    return f"resize: {', '.join(f'{_named(nodes)} {what}' for nodes, what in waiting if nodes)}"


def _other_arguments(cause: f.WorkerArguments) -> str:
    differs = f"it has {cause.name} {cause.theirs}, the run has {cause.name} {cause.ours}"
    differs = clipped(one_line(differs), VALUE_BYTES) if cause.name else ""
    differs = differs or "its script has other arguments than the run's nodes"
    return f"node {cause.node} has other arguments than the run: {differs}"


def _user_stop(cause: f.UserStop) -> str:
    if cause.step is None:
        return f"stopped by {cause.by}"
    unsaved = cause.unsaved or "no node has reported a checkpoint of it"
    kept = "its state saved" if cause.saved else f"its state not saved: {unsaved}"
    return f"stopped by {cause.by} after step {cause.step}, {kept}"


def _fails_again(cause: f.FailsAgain) -> str:
    how = "a worker said so" if cause.told else "the script cannot run as it is"
    if cause.same_step:
        how = "the same step has failed in the same way twice"
    elif cause.mistake is not None:
        mistake = f"{cause.mistake.exception} at {cause.mistake.frame}"
        how = f"{mistake} ended both rounds as they began: fix it, and run the same command again"
    return f"a restart would fail again ({how})"


def _spent(cause: f.RestartsSpent) -> str:
    back = f", and {cause.refilled} given back" if cause.refilled else ""
    spent = f"{'all restarts spent' if cause.most else 'no restart allowed'} (--max-restarts {cause.most}{back})"
    return f"no progress in {cause.idle} rounds, {spent}" if cause.idle else spent


def _closed_by(cause: f.ClosedBy) -> str:
    if cause.host:
        return f"a worker has failed in the same way on host {cause.host}"
    return "a worker failed as it restored the state"


def _took_memory(cause: f.TookMemory) -> str:
    killed = f"{'a child of a worker' if cause.child else 'a worker'} (pid {cause.pid})"
    rests = "all but the newest are freed"
    freed = rests if cause.rests else "they are freed once the next round has restored the state"
    used = f"{cause.used / 2**30:.2f} GiB"
    return f"the kernel killed {killed} for lack of memory while snapshots used {used}; {freed}"


def _drain_failed(cause: f.DrainFailed) -> str:
    what = f"{_named(cause.nodes)} did not stop in time" if cause.nodes else "some had finished, others had not"
    if cause.stopped:
        what = f"{_named(cause.nodes)} stopped its workers without an agreed step"
    return f"{why(cause.drain)}; {what}"


_MADE: dict[type, Callable[[Any], str]] = {
    Failure: worker_failed,
    f.MemberLost: lambda c: f"node {c.node} lost: {why(c.how)}",
    f.MemberLeaves: lambda c: f"node {c.node} leaves ({c.reason})",
    f.DrainFailed: _drain_failed,
    f.Resize: _resize,
    f.FormedSince: lambda c: f"round {c.round} has been formed since",
    f.RoundHangs: _hangs,
    f.WorkerArguments: _other_arguments,
    f.WorkersFinished: lambda _: "all workers finished",
    f.UserStop: _user_stop,
    f.TooFewNodes: lambda c: f"{c.there} of at least {c.least} nodes (--nnodes) after --min-wait {c.seconds:g} s",
    f.FailsAgain: _fails_again,
    f.NoNewStep: lambda c: f"no new step in {counted(c.restarts, 'restart')} (--max-idle-restarts {c.most})",
    f.RestartsSpent: _spent,
    f.NotRestarted: lambda c: f"{_MADE[type(c.why)](c.why)}: {why(c.cause)}",
    f.ClosedBy: _closed_by,
    f.TookMemory: _took_memory,
}
"""What makes the text of each fact that :data:`_TEXTS` has not."""

_TEXTS: dict[type, dict[str, str]] = {
    f.Loss: {
        "closed": "its connection closed",
        "silent": "silent for {seconds:.1f} s",
        "late": "its workers were not stopped within {seconds:g} s, the sum of its shutdown timeout and return_after",
        "replaced": "a newer agent with the node id {node} took its place",
    },
    f.OfMembers: {
        "stopped": "node {nodes} stopped its workers",
        "told": "a worker on node {nodes} was told to stop",
        "back": "node {nodes} came back without its workers",
        "new leader": "node {nodes} came to the new leader without its workers",
        "missing": "node {nodes} did not come to the new leader",
        "not started": "node {nodes} did not start its workers within join_timeout",
        "ended early": "the workers of node {nodes} ended with exit code 0 before their first step, while others train",
    },
    f.NodeEnd: {
        "never": "the run is over, and this node never took part in it",
        "unknown": "the workers of this node have finished; it is not known whether all others have: {error}",
        "failed": "a worker of this node has failed",
        "late": "the workers have not stopped in time",
    },
    f.NotSaved: {
        "itself": "the script saves its state itself",
        "none": "the script saves no checkpoints",
        "no time": "there was no time left",
        "incomplete": "no checkpoint was complete",
    },
    f.Outside: {
        "barred": "nodes of this host could not do what the others do: the run leaves them out for "
        "{seconds:.0f} s more",
        "anew": "the run has begun anew without it",
        "over": "round {round} is over for it",
    },
    f.Isolation: {
        "frozen": "this node was frozen for {seconds:.1f} s",
        "silent": "no sign of the leader for {seconds:.1f} s",
        "leads": "the store has not shown for {seconds:.1f} s that this node still leads",
        "led": "this node no longer leads",
    },
    f.Succeeded: {
        "led": "this node led before",
        "left": "leader {leader} left",
        "gone": "leader {leader} lost: its process is gone",
        "unreachable": "leader {leader} lost: it could not be reached for {seconds:.1f} s",
    },
    f.NotInTime: {
        "leave": "the workers of local rank {local_ranks} have not left the round in time; they are killed",
        "ahead": "the worker of local rank {local_ranks} that was started ahead has not come to its first use of the "
        "world in time; it is killed",
        "save": "the last checkpoint is not in durable storage: there was no time left",
        "serve": "the next round has not restored: there was no time left",
        "exit": "the workers have stopped, but not exited in time; they are killed",
        "serve, exit": "the workers have stopped, but not exited in time, and the next round has not restored this "
        "node's snapshot; they are killed",
        "drain": "the workers have not stopped in time; the round ends without a drain",
        "drain, killed": "the workers have not stopped in time; they are killed",
    },
    f.Outlook: {
        "ended": "the run has ended",
        "ends": "the run ends",
        "waits": "waiting for nodes: {nodes} of at least {of}",
        "gathers": "the first round forms at {of} nodes or {seconds:g} s without an arrival",
        "forms": "a round forms",
        "forms again": "a new round forms",
        "trains": "training goes on",
        "full": "round is full, {nodes} spare",
        "too late": "the run ends before a resize pays",
        "resizes": "training is resized",
        "starts ahead": "training is resized once workers have started there",
    },
}
"""The texts of facts by what they say, with their fields."""


def _worded(fact: Any) -> str:
    shown = {name: ", ".join(map(str, x)) if isinstance(x, tuple) else x for name, x in vars(fact).items()}
    return _TEXTS[type(fact)][fact.what].format(**shown)


_AFTER_AHEAD: dict[f.AfterAhead, str] = {
    "again": "another one starts",
    "next round": "another one starts with its next round",
    "never": "workers of this node no longer start ahead",
    "lacking": "this node takes part only if the run lacks nodes",
    "asks": "the leader decides whether this node takes part",
}


def _hung(hang: Hang, host: str) -> str:
    apart = f", {ranks(hang.others)} {standing(hang.there)}" if hang.there is not None else ""
    standstill = f"{standing(hang.at)}{apart}; no progress for {hang.seconds:.0f} s"
    return f"hangs in {occupation(hang.doing)} on host {host}, {standstill}"


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


def of_training(number: int) -> str:
    """Return which of the script's trainings it is; empty for the first one, which mostly is the only one."""
    return f" of the script's training {number + 1}" if number else ""


def _begun(event: ev.TrainingBegun) -> str:
    of = (f" of {event.total}" if event.total else "") + of_training(event.training)
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
        "fail, too: fix the script or its environment first"
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
        f"no resize for node {listed(e.nodes)}: with about {e.remaining_s:.0f} s left, it would save {e.saved_s:.1f} s "
        f"and cost {e.cost_s:.1f} s"
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
    ev.FirstStep: lambda e: f"the first step of round {e.round} is done: step {e.step}{of_training(e.training)}",
    ev.RoundProgress: lambda e: (
        f"round {e.round} has come to step {e.step}{of_training(e.training)} after {e.trained_s:.1f} s of training"
    ),
    ev.RoundSteps: lambda e: (
        f"round {e.round} trained from step {e.first} to step {e.last}{of_training(e.training)} in {e.trained_s:.1f} s"
    ),
    ev.SnapshotsLeftOut: lambda e: f"no snapshots in memory from now on, in round {e.round}: {e.cause}",
    ev.CheckpointSaved: lambda e: (
        f"checkpoint of step {e.step}{of_training(e.training)} saved" + (f" in {e.path}" if e.path else " by a worker")
    ),
    ev.NodeEnded: lambda e: f"this node's part of the run ended with exit code {e.code}: {e.cause}",
}
"""What makes the sentence of each event."""

_ORDERS = {
    "drain": "round {round} is to end after the same step on all ranks",
    "break": "round {round} is broken",
    "evicted": "this node is removed from round {round}",
    "left_out": "the run goes on without this node",
    "end": "the run is to end",
}

"""What a node says about itself: to those who observe it, and to the leader with each beat."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_agents.policy_types import View
from elastic_agents.workers.control import Control
from elastic_launch.observe.present import Present
from elastic_launch.rendezvous.record import Round
from elastic_launch.rendezvous.wire.messages import Beat, ProgressBeat
from elastic_launch.shared_progress import WorkerProgress


def present(
    view: View,
    formed: Round,
    rank: int,
    control: Control,
    *,
    held: bool,
    snapshot: int | None,
    budget: tuple[int, int] | None,
    outlook: str,
    checkpoint: tuple[int, float] | None,
    unconfirmed: float | None,
) -> Present:
    """Return how this node's part of the run is.

    Args:
        formed: the current or last round.
        rank: this node's, among the members of that round.
        held: whether the guard has stopped the workers.
        snapshot: steps in the newest snapshot in this node's memory.
        budget: restarts charged, and their limit; None until the leader has said so.
        checkpoint: steps in the run's newest durable checkpoint, and its age in seconds.
        unconfirmed: see :class:`Present`.
    """
    timer = control.step_timer
    number, step = timer.reached
    trained, trained_s = timer.trained
    remaining = timer.remaining()
    reports = control.reports(number)
    steps_s, durations = control.steps()
    return Present(
        phase="held" if held and view.alive else view.phase.value,
        round=view.round,
        nodes=view.nodes,
        world_size=formed.world_size,
        workers=len(view.alive | view.suspended),
        step=step if number else None,
        total=timer.total,
        remaining=remaining if remaining >= 0 else None,
        trained=trained,
        trained_s=trained_s,
        snapshot=snapshot,
        restarts=budget[0] if budget else None,
        max_restarts=budget[1] if budget else None,
        members=tuple((member.node_id, member.workers) for member in formed.members),
        loss=_loss_in(reports),
        batch=max((report.batch for report in reports), default=0),
        passes=max((report.passes for report in reports), default=0),
        lr=next((report.lr for report in reports if report.lr is not None), None),
        ranks=tuple(mine.rank for mine in formed.ranks_of(rank)) if formed.members else (),
        outlook=outlook,
        checkpoint=checkpoint[0] if checkpoint else None,
        checkpoint_age=checkpoint[1] if checkpoint else None,
        steps_s=steps_s,
        durations=durations,
        unconfirmed=unconfirmed,
    )


def beat(control: Control, snapshot: int | None) -> Beat | ProgressBeat:
    """Return what a beat tells the leader: how far the workers are, once they train."""
    timer = control.step_timer
    number, step = timer.reached
    if not number:
        return Beat()
    left = timer.remaining()
    loss = _loss_in(control.reports(number))
    return ProgressBeat(number, step, snapshot, timer.step_seconds, left if left >= 0 else None, loss)


def _loss_in(reports: Iterable[WorkerProgress]) -> float | None:
    """Return the loss of the last step; None if no worker has reported one."""
    return next((report.loss for report in reports if report.loss is not None), None)

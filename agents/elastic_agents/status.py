"""What a node says about itself: to those who observe it, and to the leader with each beat."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_agents.host_watch import HostWatch
from elastic_agents.node_state import NodeState
from elastic_agents.snapshots.snapshot_store import SnapshotStore
from elastic_agents.workers.control import Control
from elastic_agents.workers.round_workers import RoundWorkers
from elastic_launch.observe.present import Present
from elastic_launch.rendezvous.node.membership import Membership
from elastic_launch.rendezvous.wire.messages import Beat, ProgressBeat
from elastic_launch.shared_progress import WorkerProgress
from elastic_launch.system.host_load import HostLoad


def present(
    state: NodeState,
    control: Control,
    membership: Membership,
    snapshot_store: SnapshotStore,
    workers: RoundWorkers,
    host: HostWatch,
) -> Present:
    """Return how this node's part of the run is."""
    view, formed, timer, saved = state.view, state.formed, control.step_timer, membership.checkpoint
    number, step = timer.reached
    trained, trained_s = timer.trained
    reports = control.reports(number)
    steps_s, durations = control.steps()
    of_round = timer.of_round(view.round)
    told = view.round > 0  # until then others may have used up what this node's own flags allow
    return Present(
        phase="held" if workers.held and view.alive else view.phase.value,
        round=view.round,
        nodes=len(view.members),
        world_size=formed.world_size,
        workers=len(view.alive | view.suspended),
        step=step if number else None,
        total=timer.total,
        remaining=timer.remaining(),
        trained=trained,
        trained_s=trained_s,
        snapshot=snapshot_store.newest_step,
        restarts=state.restarts if told else None,
        # Since the round formed, restarts may have been given back.
        max_restarts=max(state.max_restarts, membership.max_restarts or 0) if told else None,
        members=tuple((member.node_id, member.workers) for member in formed.members),
        loss=_loss_in(reports),
        batch=max((report.batch for report in reports), default=0),
        passes=max((report.passes for report in reports), default=0),
        lr=next((report.lr for report in reports if report.lr is not None), None),
        ranks=tuple(mine.rank for mine in formed.ranks_of(state.rank)) if formed.members else (),
        outlook=membership.outlook if state.member else "",
        parked=membership.parked and state.member,
        checkpoint=None if saved is None else saved[1],
        checkpoint_age=None if saved is None else control.clock.now() - saved[2],
        steps_s=steps_s,
        durations=durations,
        unconfirmed=membership.unconfirmed,
        round_steps=(of_round[1] if of_round else 0) if number else None,
        load=host.last(),
    )


def beat(control: Control, snapshot: tuple[int, int] | None, load: HostLoad | None) -> Beat | ProgressBeat:
    """Return what a beat tells the leader: how far the workers are, once they train, and the host's load if given.

    ``snapshot``: training and steps of the node's newest one.
    """
    timer = control.step_timer
    number, _ = timer.reached
    if not number:
        return Beat(load)
    loss = _loss_in(control.reports(number))
    training, step = timer.position
    of, kept = (0, None) if snapshot is None else snapshot
    return ProgressBeat(number, step, kept, timer.step_seconds, timer.remaining(), loss, load, training, of)


def _loss_in(reports: Iterable[WorkerProgress]) -> float | None:
    """Return the loss of the last step; None if no worker has reported one."""
    return next((report.loss for report in reports if report.loss is not None), None)

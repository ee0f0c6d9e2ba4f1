"""How a node's part of a run is at a moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Present:
    """One node's part of a run at a moment; times in seconds.

    Attributes:
        phase: what its agent does: ``starting``, ``waiting`` for a round, ``running``, ``held``, ``draining`` ...
        round: number of the current or last round; 0 before the first.
        nodes, world_size: nodes and workers in it.
        workers: this node's workers in it that run, suspended ones included.
        step: optimizer steps done; None until a worker reports that it trains.
        total: steps of the whole training; 0 if that is not known.
        remaining: until the training ends at the present pace; None if that is not known.
        trained: steps of all rounds in which this agent's workers took part, repeated ones included.
        trained_s: how long these took.
        snapshot: steps in the newest snapshot in this node's memory; None if there is none.
        restarts, max_restarts: restarts charged, and the budget; None until this node's first round says so.
        members: the nodes of the current or last round, each with its number of workers.
        loss: loss of the last step; None if no worker has reported one.
        batch, passes: samples of a step, and the most forward and backward passes of a worker of this node in it; 0 if
            that is not known.
        lr: learning rate of the first parameter group; None if no worker has reported it.
        ranks: this node's ranks in the current or last round.
        outlook: what the leader says happens next; empty if this node has no link to it.
        checkpoint, checkpoint_age: steps in the run's newest durable checkpoint that a leader has told of, and seconds
            since it was written; None if it has told of none.
        unconfirmed: seconds for which it has not been confirmed that this node is a member, if its workers train on all
            the same; None otherwise.
        steps_s, durations: seconds of all steps of this node's workers, and numbers of these steps by duration, see
            :data:`elastic_launch.shared_progress.STEP_BOUNDS`; the last are longer than all.
    """

    phase: str
    round: int = 0
    nodes: int = 0
    world_size: int = 0
    workers: int = 0
    step: int | None = None
    total: int = 0
    remaining: float | None = None
    trained: int = 0
    trained_s: float = 0.0
    snapshot: int | None = None
    restarts: int | None = None
    max_restarts: int | None = None
    members: tuple[tuple[str, int], ...] = ()
    loss: float | None = None
    batch: int = 0
    passes: int = 0
    lr: float | None = None
    ranks: tuple[int, ...] = ()
    outlook: str = ""
    checkpoint: int | None = None
    checkpoint_age: float | None = None
    steps_s: float = 0.0
    durations: tuple[int, ...] = ()
    unconfirmed: float | None = None

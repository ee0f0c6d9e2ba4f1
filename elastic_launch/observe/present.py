"""How a node's part of a run is at a moment."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_launch.failure import Suspect
from elastic_launch.system.host_load import HostLoad


@dataclass(frozen=True, slots=True)
class HowEnded:
    """How a run, or a node's part of it, has ended: what the console says last."""

    code: int  # the launcher's exit code
    cause: str
    run: bool  # whether the run is over; if not, this node's part of it
    saved: str = ""  # where the state is and what was lost; empty if another node says so, or if that is not known
    root_cause: str = ""  # the failure that ended the run, in several lines; empty if no worker failed
    suspects: tuple[Suspect, ...] = ()  # whose failure that is

    def line(self) -> str:
        """Return it in one line."""
        what = "the run" if self.run else "this node's part of the run"
        return f"{what} has ended with exit code {self.code}: {self.cause}"


@dataclass(frozen=True, slots=True)
class Present:
    """One node's part of a run at a moment; times in seconds, None if unknown."""

    phase: str  # what its agent does: ``starting``, ``waiting`` for a round, ``running``, ``held`` and others
    round: int = 0  # number of the current or last round; 0 before the first
    nodes: int = 0  # in it
    world_size: int = 0  # workers in it
    workers: int = 0  # this node's workers in it that run, suspended ones included
    step: int | None = None  # optimizer steps done; None until a worker reports that it trains
    total: int = 0  # steps of the whole training; 0 if that is not known
    remaining: float | None = None  # until the training ends at the present pace; None if that is not known
    trained: int = 0  # steps of all rounds in which this agent's workers took part, repeated ones included
    trained_s: float = 0.0  # how long these took
    snapshot: int | None = None  # steps in the newest snapshot in this node's memory; None if there is none
    restarts: int | None = None  # charged; None until this node's first round says so
    max_restarts: int | None = None  # the budget, likewise
    members: tuple[tuple[str, int], ...] = ()  # the nodes of the current or last round, each with its number of workers
    loss: float | None = None  # loss of the last step; None if no worker has reported one
    batch: int = 0  # samples of a step; 0 if that is not known
    passes: int = 0  # the most forward and backward passes of a worker of this node in a step
    lr: float | None = None  # learning rate of the first parameter group; None if no worker has reported it
    ranks: tuple[int, ...] = ()  # this node's ranks in the current or last round
    outlook: str = ""  # what the leader says happens next; empty if this node has no link to it
    checkpoint: int | None = None  # steps in the run's newest durable checkpoint that a leader has told of
    checkpoint_age: float | None = None  # since it was written
    steps_s: float = 0.0  # of all steps of this node's workers
    durations: tuple[int, ...] = ()  # numbers of these by duration, see shared_progress.STEP_BOUNDS; last, the longer
    end: HowEnded | None = None  # None until it has ended
    unconfirmed: float | None = None  # since membership was last confirmed, if the workers train all the same
    round_steps: int | None = None  # done in the current or last round; None until a worker reports that it trains
    parked: bool = False  # whether the run waits for nodes, as its leader says
    load: HostLoad | None = None  # how busy its host is; None if that is not known

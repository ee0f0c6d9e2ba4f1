"""What a node knows of itself and its run: the policy's view, its round, and what the leader has said."""

from __future__ import annotations

from elastic_agents import policy_types as v
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.record import Round
from elastic_launch.rendezvous.wire import messages as m

MemberOrder = m.Form | m.DrainRound | m.Break | m.Evicted | m.LeftOut | m.RunEnd
"""Orders to a member about its rounds."""


class NodeState:
    """Written by the agent's thread only; other threads may read single attributes.

    Attributes:
        view: the policy's.
        formed: the current or last round.
        rank: this node's, among the members of that round.
        hosting: whether this node hosts the run's leader.
        member: whether this node is a member of the run, as far as it knows.
        leader: where the run's leader was when this node last reached it.
        unlimited: the round that the leader drains without a limit of time, by its last order of this kind; 0: none.
        restarts: restarts charged to the run's budget so far.
        max_restarts: the run's limit.
        failure: the run's root cause, if a worker's failure ended the run, or this node's part.
        finished_round: the round that this node's workers have finished, 0 if it was in none that counts.
        run_over: the leader has said that the run is over.
        saver: the node that is to save then; empty if the leader has named none.
        replaced: the run goes on without this node.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self.view = v.View()
        self.formed = Round()
        self.rank = 0
        self.hosting = False
        self.member = False
        self.leader = ""
        self.unlimited = 0
        self.restarts, self.max_restarts = 0, config.limits.max_restarts
        self.failure: Failure | None = None
        self.finished_round = 0
        self.run_over = False
        self.saver = ""
        self.replaced = False

    def ordered(self, order: MemberOrder) -> None:
        """Record what an order of the leader says of this node and the run."""
        self.run_over = isinstance(order, m.RunEnd)
        self.member = not isinstance(order, m.Evicted | m.LeftOut)
        self.replaced = isinstance(order, m.LeftOut) or (isinstance(order, m.Evicted) and order.final)
        match order:
            case m.RunEnd(restarts=restarts, failure=failure, saver=saver):
                self.restarts, self.failure, self.saver = max(self.restarts, restarts), failure, saver
            case m.LeftOut(failure=failure):
                self.failure = failure
            case m.DrainRound(round=number, seconds=seconds):
                self.unlimited = number if seconds is None else 0
            case m.Break() | m.Evicted():
                self.finished_round = 0
            case m.Form(restarts=restarts, max_restarts=most):
                self.restarts, self.max_restarts = restarts, most

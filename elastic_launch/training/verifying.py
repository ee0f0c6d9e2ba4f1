"""Verified steps of a round: what this rank computes again, and what all ranks have found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from elastic_launch import snapshot
from elastic_launch.contract import Differs
from elastic_launch.errors import ElasticLaunchError, UsageError
from elastic_launch.training.checkpoints.resumed import fingerprint
from elastic_launch.training.data.epochs import Epochs
from elastic_launch.training.gradients.accumulation import Bits, ExactGradients
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks.checksum import checksums
from elastic_launch.training.ranks.digest import digest
from elastic_launch.training.ranks.exchange import bytes_of_all, numbers_of_all
from elastic_launch.training.ranks.replicas import ranks_text
from elastic_launch.training.ranks.same_arguments import OthersDifferError
from elastic_launch.training.ranks.world import World
from elastic_launch.training.verification import Assignment, Digests, Dispute, assigned, due, groups_of
from elastic_launch.training.wrapped import tensors_in


class Verifier:
    """Says what the ranks of a round compute again, and exchanges what they find.

    Args:
        share: the share of the steps that are verified.
        machines_at: a step in which all ranks compute the same micro-batch; None: none.
        goes_on: whether this process was in a round before, and can go on in another one.
    """

    def __init__(self, epochs: Epochs, world: World, share: float, machines_at: int | None, *, goes_on: bool) -> None:
        self.world = world
        self._goes_on = goes_on
        self._epochs = epochs
        self._share = share
        self._machines_at = machines_at
        self._nodes = [node for (node,) in numbers_of_all(world, [world.node_rank])]
        self._last: tuple[int, Assignment] = -1, Assignment({}, {})

    def assignment(self, step: int) -> Assignment:
        """Return what each rank computes again in a step, which counts from 0; empty in most."""
        machines = step == self._machines_at
        if not machines and not due(self._epochs.seed, step, self._share):
            return Assignment({}, {})
        if step != self._last[0]:
            count = self.world.world_size
            plans = [self._epochs.plan(step, count, rank).micro_batches for rank in range(count)]
            slices = [range(plan[0].index, plan[-1].index + 1) if plan else range(0) for plan in plans]
            self._last = step, assigned(self._epochs.seed, step, slices, self._nodes, machines=machines)
        return self._last[1]

    def beside(self, step: int) -> int | None:
        """Return which micro-batch of a step this rank gets besides its own; None: none."""
        found = self.assignment(step)
        author = found.authors.get(self.world.rank)
        return None if author is None else found.micros[author]

    def exchange(self, check: StepCheck) -> tuple[dict[int, Digests], dict[int, Digests]]:
        """Return what each rank has found for its own micro-batch, and for the one that it has computed again."""
        mine = [number for each in (check.own, check.again) for number in (each.samples, each.result)]
        found = dict(enumerate(numbers_of_all(self.world, mine)))
        own = {rank: Digests(*numbers[:2]) for rank, numbers in found.items()}
        return own, {rank: Digests(*numbers[2:]) for rank, numbers in found.items()}

    def exchange_second(self, disputes: tuple[Dispute, ...], mine: Mapping[int, int]) -> list[dict[int, int]]:
        """Return, for each dispute, what its ranks have found in the end; ``mine`` is this rank's, by place."""
        all_numbers = numbers_of_all(self.world, [mine.get(place, 0) for place in range(len(disputes))])
        return [{rank: all_numbers[rank][place] for rank in each.ranks} for place, each in enumerate(disputes)]

    def refuse_machines(
        self, where: str, assignment: Assignment, again: Mapping[int, Digests], link: AgentLink
    ) -> None:
        """Refuse machines that computed another result for the same micro-batch; called by all ranks.

        Raises:
            UsageError: naming them, if none has trained with the others before.
            OthersDifferError: instead, in a process that goes on.
            ElasticLaunchError: instead, in the others: newcomers that differ are left out.
        """
        mine = " ".join(fingerprint().values()).encode()
        machines = [each.decode() for each in bytes_of_all(self.world, mine)]
        any_goes_on = any(goes_on for (goes_on,) in numbers_of_all(self.world, [int(self._goes_on)]))
        groups = groups_of(again, assignment.authors)
        lowest = {rank: group[0] for group in groups for rank in group}
        link.say_noted(Differs(tuple(lowest.get(rank, groups[0][0]) for rank in range(self.world.world_size))))
        named = [f"{ranks_text(each)}: {', '.join({machines[rank]: None for rank in each})}" for each in groups]
        message = (
            f"verify=: {where}: as the round began, all ranks computed the same micro-batch, with different "
            f"results: {'; '.join(named) if len(groups) > 1 else 'one gave two results'}."
        )
        if self._goes_on:
            raise OthersDifferError(message)
        error = ElasticLaunchError if any_goes_on else UsageError
        raise error(
            message,
            "Give all nodes the same CPU and GPU types, versions and numbers of threads. If they are the same, a "
            "machine has computed wrong results from the start, or a result depends on more than the micro-batch.",
        )


NONE = Digests(0, 0)


class StepCheck:
    """What this rank finds in a verified step.

    Attributes:
        assignment: what each rank computes again.
        micro: the index of this rank's own micro-batch that another one computes again; None: none is.
        own, again: what was found for it, and for the other's.
    """

    def __init__(self, assignment: Assignment, rank: int, gradients: ExactGradients) -> None:
        self.assignment = assignment
        self.micro = assignment.micros.get(rank)
        self.own = self.again = NONE
        self.bits = Bits()
        self._samples = 0
        self._gradients = gradients

    @contextmanager
    def recorded(self, sample: Any) -> Iterator[None]:
        """The context in which this rank computes its own micro-batch that is checked."""
        self._samples = digest_of(sample)
        with self._gradients.recording(self.bits):
            yield

    def computed(self, loss: Tensor) -> None:
        """Take the loss of that micro-batch; waits for the device."""
        self.bits.loss = checksums([loss])
        self.own = Digests(self._samples, self.bits.number())


def digest_of(sample: Any) -> int:
    """Return a number for a micro-batch as the loader gives it."""
    try:
        return int(digest(sample)[:15], 16)
    except snapshot.UnsupportedStateError:  # of an object of the script's: its tensors are compared
        return int(digest([tensor.detach() for tensor in tensors_in(sample)])[:15], 16)

"""Checks that all ranks were given the same arguments, before anything depends on them.

A rank with another seed or dataset would load samples that are not its own; a rank without a checkpoint would leave the
others waiting. Each rank sees only its own arguments, so nothing else would detect this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from elastic_launch.contract import Differs
from elastic_launch.errors import UsageError
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks.exchange import are_same, bytes_of_all
from elastic_launch.training.ranks.world import World

LONGEST = 4096
"""Bytes of arguments up to which they are given to the agent as they are; of longer ones it gets a checksum."""

MOST_RANKS = 8192
"""Most ranks of which the agent learns how they differ: a message to it has a limit."""


class OthersDifferError(RuntimeError):
    """Others of a round were given other arguments than this process, which goes on in the next round."""


def told(given: Mapping[str, object]) -> str:
    """Return arguments as the agents of the ranks compare them."""
    text = _text(given)
    return text if len(text) <= LONGEST else hashlib.sha256(text.encode()).hexdigest()


def _text(given: Mapping[str, object]) -> str:
    return json.dumps({name: str(value) for name, value in given.items()})


def check_same(
    world: World, given: Mapping[str, object], link: AgentLink | None = None, *, goes_on: bool = False
) -> None:
    """Compare the arguments of all ranks; called by all ranks.

    Args:
        given: arguments by the names used in errors; compared as text.
        link: to the agent, which learns which ranks differ; None: it does not.
        goes_on: whether this process has trained with its arguments, and can go on in another round.

    Raises:
        UsageError: on all ranks, naming the first difference and the rank that has it.
        OthersDifferError: instead, in a process that goes on.
    """
    if world.world_size == 1:
        return
    text = _text(given).encode()
    if all(are_same([len(text), int.from_bytes(hashlib.sha256(text).digest()[:7], "big")])):
        return
    texts, lowest = bytes_of_all(world, text), dict[bytes, int]()
    if link is not None and len(texts) <= MOST_RANKS:
        link.say_noted(Differs(tuple(lowest.setdefault(one, rank) for rank, one in enumerate(texts))))
    message = f"The ranks were given different arguments: {_difference([json.loads(one) for one in texts])}."
    if goes_on:
        raise OthersDifferError(message)
    raise UsageError(
        message,
        "Give all ranks the same. Each takes its own part of every global batch, and which of them reads and writes "
        "checkpoints is decided here.",
    )


def _difference(found: list[dict[str, str]]) -> str:
    first = found[0]
    for rank, other in enumerate(found):
        for name in dict.fromkeys([*first, *other]):
            if first.get(name) != other.get(name):
                return f"rank {rank} has {name} {other.get(name, 'none')}, rank 0 has {first.get(name, 'none')}"
    raise AssertionError("their digests differ")

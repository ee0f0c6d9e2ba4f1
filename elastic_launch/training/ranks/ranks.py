"""Ranks and sizes: from the process group once it is joined, before that from the environment.

A process that was started ahead waits for its place here, unless it only asks for its local rank or for the number of
workers on its node. A variable that is not a number, is missing although there are several ranks, or contradicts the
process group is a UsageError.
"""

from __future__ import annotations

import os

from torch import distributed
from torch.distributed import ProcessGroup

from elastic_launch.contract import ENV_FIRST_ON_NODE, ENV_LOCAL_RANK, UNPLACED
from elastic_launch.errors import UsageError
from elastic_launch.training.ranks.place import find_place


def is_available() -> bool:
    """Return whether torch was built with its distributed package."""
    return distributed.is_available()


def is_initialized() -> bool:
    """Return whether this process has joined a process group."""
    find_place()
    return is_available() and distributed.is_initialized()


def get_world_size() -> int:
    """Return the number of processes in the job; 1 without a launcher."""
    if is_initialized():
        return _agreed("WORLD_SIZE", distributed.get_world_size())
    size = _variable("WORLD_SIZE")
    return 1 if size is None else size


def get_global_rank(group: ProcessGroup | None = None) -> int:
    """Return this process' rank among all processes, from 0, or its rank in a group."""
    if is_initialized():
        return distributed.get_rank(group) if group is not None else _agreed("RANK", distributed.get_rank())
    return _place("RANK")


def get_local_rank() -> int:
    """Return this process' rank among the processes of its node, from 0."""
    return _place("LOCAL_RANK")


def rank_on_node() -> int:
    """Return the rank on the node even if every worker's local rank is 0 (``--virtual-local-rank``: one GPU each)."""
    return _place(ENV_LOCAL_RANK) if os.environ.get(ENV_LOCAL_RANK) else get_local_rank()


def first_on_node() -> bool:
    """Return whether this process has the lowest rank on its node, which need not be 0 in a round of our agents.

    Before a process that was started ahead has a place, it is local rank 0.
    """
    told = os.environ.get(ENV_FIRST_ON_NODE, UNPLACED)
    return rank_on_node() == 0 if told == UNPLACED else told == "1"


def get_local_world_size() -> int:
    """Return the number of processes on this node; 1 without a launcher."""
    return _place("LOCAL_WORLD_SIZE", alone=1)


def get_node_rank() -> int:
    """Return the rank of this node among the nodes, from 0.

    It is torchrun's GROUP_RANK or, if that is not set, Composer's NODE_RANK: a cluster may have set the latter for the
    host, whose rank in an elastic round may differ.
    """
    find_place()
    return _place("GROUP_RANK" if os.environ.get("GROUP_RANK") else "NODE_RANK")


def joined(name: str) -> bool:
    """Return whether there is a process group.

    Raises:
        UsageError: if there are several ranks and no process group.
    """
    if is_initialized():
        return True
    size = get_world_size()
    if size > 1:
        raise UsageError(
            f"dist.{name}: the world has {size} ranks, and this process has not joined their process group.",
            "Call elastic_launch.dist.initialize_dist(), or enter elastic_launch.session(), before.",
        )
    return False


def _variable(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise UsageError(f"{name}={text} in the environment is not a rank or a size.", "Give a number.")
    return int(text) if text else None


def _place(name: str, alone: int = 0) -> int:
    """Read a variable that may be missing only in a world of one process."""
    value = _variable(name)
    if value is not None:
        return value
    # A default of 0 would make every process the first of its node.
    size = get_world_size()
    if size > 1:
        raise UsageError(
            f"The environment describes a world of {size} ranks without {name}.",
            f"Start the script by elastic-launch or torchrun, or set {name}.",
        )
    return alone


def _agreed(name: str, joined: int) -> int:
    value = _variable(name)
    if value not in (None, joined):
        raise UsageError(
            f"{name}={value} in the environment, but the process group that was joined says {joined}.",
            "Join the group that the launcher describes, or unset the variable.",
        )
    return joined

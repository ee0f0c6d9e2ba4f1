"""What agent and worker both know: the environment of a worker.

The names without prefix and those with ``TORCHELASTIC_`` are torchrun's, as documented at
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables; ``NODE_RANK`` is Composer's.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ENV_ROUND", "ENV_START_REASON", "Placement", "worker_environment"]

ENV_ROUND = "ELASTIC_LAUNCH_ROUND"
"""Number of the round under which the worker runs, from 1."""

ENV_START_REASON = "ELASTIC_LAUNCH_START_REASON"
"""Why this worker was started: ``first`` or the cause for which the last round ended."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one worker stands in a round.

    Attributes:
        rank: global rank, 0 to world_size - 1.
        local_rank: rank among the workers of its node.
        group_rank: rank of its node in the round.
        world_size: workers in the round.
        local_world_size: workers on its node.
        group_world_size: nodes in the round.
        master_addr, master_port: where the round's worker store listens.
    """

    rank: int
    local_rank: int
    group_rank: int
    world_size: int
    local_world_size: int
    group_world_size: int
    master_addr: str
    master_port: int


def worker_environment(
    placement: Placement,
    *,
    run_id: str,
    role: str,
    restarts: int,
    max_restarts: int,
    round_number: int,
    reason: str,
    error_file: str,
    nccl_async_error_handling: str = "1",
) -> dict[str, str]:
    """Return the variables that the agent adds to a worker's environment.

    Args:
        restarts: budgeted restarts so far; never falls within a run.
        error_file: where ``torch.distributed.elastic``'s ``@record`` writes an exception.
    """
    return {
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "GROUP_RANK": str(placement.group_rank),
        "NODE_RANK": str(placement.group_rank),
        "ROLE_RANK": str(placement.rank),
        "ROLE_NAME": role,
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "GROUP_WORLD_SIZE": str(placement.group_world_size),
        "ROLE_WORLD_SIZE": str(placement.world_size),
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": str(placement.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": nccl_async_error_handling,
        ENV_ROUND: str(round_number),
        ENV_START_REASON: reason,
    }

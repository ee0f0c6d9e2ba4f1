"""How workers are started: their group, a worker's place in the round, its command and its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic_agents.workers.numa import bound
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.config.torch_options import visible_device
from elastic_launch.contract import (
    ENV_LOCAL_RANK,
    ENV_STACKS,
    NoPlacement,
    Place,
    Placement,
    ahead_environment,
    worker_environment,
)
from elastic_launch.rendezvous.record import Round
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.addresses import early_address, has_usable_name, interface_of
from elastic_launch.secret import without_secrets
from elastic_launch.system.plain_text import clipped, one_line

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerGroup
    from torch.distributed.elastic.rendezvous import RendezvousHandler


AHEAD = "started ahead of a place in a round"
"""The start reason of a worker that has no place yet; it learns why the last round ended with its place."""

NAME_TIMEOUT = 1.0
"""Seconds to wait for the address of this host's name."""

LONGEST_REASON = 8192
"""Maximum bytes of a worker's ``ELASTIC_LAUNCH_START_REASON``."""


def group_of(config: LaunchConfig, handler: RendezvousHandler) -> WorkerGroup:
    """Return a node's workers as torch describes them; without ranks so far."""
    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec

    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc,
        rdzv_handler=handler,
        entrypoint=config.command.argv[0],
        args=config.command.argv[1:],
        max_restarts=config.limits.max_restarts,
        local_addr=config.local_addr,
    )
    return WorkerGroup(spec)


def place(group: WorkerGroup, formed: Round, config: LaunchConfig) -> list[Placement]:
    """Assign a round's ranks to a group's workers, and return the placements of those in the round, by local rank.

    Workers that have no part in the round get the rank -1, as torch's have before their first round.
    """
    me = next(rank for rank, member in enumerate(formed.members) if member.node_id == config.node_id)
    first_member = formed.members[0]
    master_addr, master_port = first_member.address, first_member.store_port
    if config.kind.fixed_ranks and config.endpoint is not None:
        master_addr, master_port = config.endpoint.host, config.endpoint.port
    master_addr, master_port = config.options.master_addr or master_addr, config.options.master_port or master_port
    role = formed.members[me].role
    of_role = sum(member.workers for member in formed.members if member.role == role)
    mine = formed.ranks_of(me)
    placed = [
        Placement(
            rank=ranks.rank,
            local_rank=ranks.local_rank,
            group_rank=me,
            world_size=formed.world_size,
            local_world_size=len(mine),
            group_world_size=len(formed.members),
            master_addr=master_addr,
            master_port=master_port,
            role_rank=ranks.role_rank,
            role_world_size=of_role,
            first_on_node=ranks is mine[0],
            replica_size=config.replica_size,
        )
        for ranks in mine
    ]
    # torch annotates none of these beyond their initial None.
    for name in ("group_rank", "group_world_size", "master_addr", "master_port"):
        setattr(group, name, getattr(placed[0], name))
    by_local_rank = {placement.local_rank: placement for placement in placed}
    for worker in group.workers:
        found = by_local_rank.get(worker.local_rank)
        worker.global_rank, worker.role_rank = (-1, -1) if found is None else (found.rank, found.role_rank)
        worker.world_size, worker.role_world_size = formed.world_size, of_role
    return placed


def arguments(config: LaunchConfig, placement: Placement | NoPlacement) -> list[str]:
    """Return a worker's command."""
    program, *rest = config.command.argv
    # torchrun's only macro; its own substitution would also turn $$ into $, which breaks shell scripts.
    command = [program, *(text.replace("${local_rank}", str(placement.local_rank)) for text in rest)]
    mode = config.options.numa_binding
    return bound(command, placement.local_rank, mode) if mode else command


def environment(
    config: LaunchConfig, shared: Mapping[str, str], form: m.Form, placement: Placement, *, error_file: str, socket: str
) -> dict[str, str]:
    """Return a worker's environment: what all workers of the node share, and what the contract adds."""
    env = dict(shared)
    env.update(
        worker_environment(
            placement,
            run_id=config.run_id,
            run_number=form.origin,
            role=config.role,
            restarts=form.restarts,
            max_restarts=form.max_restarts,
            round_number=form.round.number,
            reason=_reason(form),
            error_file=error_file,
            socket=socket,
            nccl_async_error_handling=env["TORCH_NCCL_ASYNC_ERROR_HANDLING"],
        )
    )
    if config.hang_timeout:
        env[ENV_STACKS] = "1"
    if config.options.virtual_local_rank:
        env["LOCAL_RANK"] = "0"
        env |= visible_device(placement.local_rank, env)
        env[ENV_LOCAL_RANK] = str(placement.local_rank)
    return env


def environment_ahead(
    config: LaunchConfig,
    shared: Mapping[str, str],
    ahead: NoPlacement,
    *,
    restarts: int,
    error_file: str,
    socket: str,
) -> dict[str, str]:
    """Return the environment of a worker that is started ahead of a place in a round."""
    form = m.Form(0, Round(0), restarts, AHEAD, max_restarts=config.limits.max_restarts)
    local_rank, size = ahead.local_rank, config.replica_size
    any_place = Placement(0, local_rank, 0, 1, 1, 1, "", 0, 0, 1, first_on_node=False, replica_size=size)
    env = environment(config, shared, form, any_place, error_file=error_file, socket=socket)
    return ahead_environment(env, workers=config.nproc)


def place_of(config: LaunchConfig, form: m.Form, placement: Placement) -> Place:
    """Return the message with a waiting worker's place in a round; :meth:`Control.place` fills in the slots."""
    if config.options.virtual_local_rank:
        placement = replace(placement, local_rank=0)  # as in its environment
    return Place(
        round=form.round.number,
        run_number=form.origin,
        placement=placement,
        restarts=form.restarts,
        max_restarts=form.max_restarts,
        reason=_reason(form),
        use=None,
        sequence=0,
        fetching=False,
    )


def _reason(form: m.Form) -> str:
    """Why the last round ended; with a NUL, or if it is too long, no process starts."""
    return clipped(one_line(form.cause), LONGEST_REASON)


def shared_environment(config: LaunchConfig) -> dict[str, str]:
    """Return the variables that all workers of a node share, whatever the round: the agent's, less its secrets.

    To be called at the agent's start: what its libraries and plug-ins set later is not meant for the workers.
    """
    env = without_secrets(os.environ)
    env.update(config.drill.drill())
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if config.nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: one thread pool per core, not per worker
    if config.limits.max_nodes > 1 and "GLOO_SOCKET_IFNAME" not in env:
        # gloo advertises the address of the host's name. Other nodes cannot reach a loopback one.
        name = interface_of(early_address(config))
        if name and not has_usable_name(NAME_TIMEOUT):
            env["GLOO_SOCKET_IFNAME"] = name
    return env

"""Ranks within roles, as torch's own agent assigns them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerGroup, WorkerSpec

from elastic_agents.workers.placement import environment, place, place_of, placements
from elastic_launch.config.launch_config import Command, LaunchConfig
from elastic_launch.config.torch_options import TorchOptions
from elastic_launch.contract import round_environment
from elastic_launch.rendezvous.record import Member, Round
from elastic_launch.rendezvous.wire import messages as m


def spec_of(member: Member) -> WorkerSpec:
    return WorkerSpec(role=member.role, local_world_size=member.workers, rdzv_handler=None, entrypoint="x")  # type: ignore[arg-type]


def torchs(members: list[Member]) -> list[list[tuple[int, ...]]]:
    """The ranks that torch's agents agree on, with one agent per node in its own thread."""
    store, size = HashStore(), len(members)
    store.set_timeout(timedelta(seconds=60))

    def ranks(rank: int) -> list[tuple[int, ...]]:
        found = SimpleElasticAgent._assign_worker_ranks(None, store, rank, size, spec_of(members[rank]))  # type: ignore[arg-type]
        return [(x.global_rank, x.world_size, x.role_rank, x.role_world_size) for x in found]

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(ranks, range(size)))


@pytest.mark.parametrize("roles", ["a2", "a2 a1", "a2 b1", "a1 b2 a3 c1 b1"])
def test_ranks_within_roles_are_torchs(roles: str) -> None:
    members = [Member(f"n{index}", "i", int(role[1:]), "host", 1, role[0]) for index, role in enumerate(roles.split())]
    config = LaunchConfig(Command(("x",), ("x",)))
    ours = []
    for member in members:
        group = WorkerGroup(spec_of(member))
        place(group, Round(1, tuple(members)), replace(config, node_id=member.node_id))
        ours.append([(x.rank, x.world_size, x.role_rank, x.role_world_size) for x in placements(group)])
    assert ours == torchs(members)


@pytest.mark.parametrize("virtual", [False, True])
def test_a_kept_worker_gets_the_variables_that_a_new_one_gets(virtual: bool) -> None:
    """Other than its own error file, socket and device, which stay."""
    config = LaunchConfig(Command(("x",), ("x",)), nproc=2, options=TorchOptions(virtual_local_rank=virtual))
    members = tuple(Member(name, "i", 2, "host", 1) for name in ("first", config.node_id))
    group = WorkerGroup(spec_of(members[1]))
    form = m.Form(1, Round(3, members), 2, "rank 0\0 crashed", max_restarts=5)
    place(group, form.round, config)
    placement = placements(group)[1]
    shared = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "CUDA_VISIBLE_DEVICES": "4,5"}
    new = environment(config, shared, form, placement, error_file="", socket="")
    told = place_of(config, form, placement)
    kept = round_environment(
        told.placement,
        told.round,
        restarts=told.restarts,
        max_restarts=told.max_restarts,
        reason=told.reason,
    )
    assert kept == {name: new[name] for name in kept}
    assert (kept["RANK"], kept["LOCAL_RANK"]) == ("3", "0" if virtual else "1")

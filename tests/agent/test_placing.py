"""Ranks within roles, as torch's own agent assigns them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerGroup, WorkerSpec

from elastic_agents.workers.placement import environment, environment_ahead, place, place_of
from elastic_launch.config.launch_config import Command, LaunchConfig
from elastic_launch.config.torch_options import TorchOptions
from elastic_launch.contract import ENV_AHEAD, ENV_ROUND, ENV_SOCKET, UNPLACED, NoPlacement, round_environment
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
        found = place(group, Round(1, tuple(members)), replace(config, node_id=member.node_id))
        ours.append([(x.rank, x.world_size, x.role_rank, x.role_world_size) for x in found])
    assert ours == torchs(members)


def test_a_node_may_take_part_with_some_of_its_workers() -> None:
    """A local rank is a device: it stays the worker's own."""
    config = LaunchConfig(Command(("x",), ("x",)), nproc=4)
    members = (Member("first", "i", 2, "host", 1), Member(config.node_id, "i", 2, "host", 1, slots=(1, 3)))
    group = WorkerGroup(replace(spec_of(members[1]), local_world_size=4))
    found = place(group, Round(1, members), config)
    assert (group.group_rank, group.group_world_size, group.master_addr) == (1, 2, "host")
    assert [x.global_rank for x in group.workers] == [-1, 2, -1, 3]
    assert [(x.rank, x.local_rank, x.role_rank, x.first_on_node) for x in found] == [(2, 1, 2, True), (3, 3, 3, False)]
    assert {(x.world_size, x.local_world_size, x.role_world_size) for x in found} == {(4, 2, 4)}
    found = place(group, Round(2, (members[0], replace(members[1], workers=4, slots=()))), config)
    assert [(x.rank, x.local_rank) for x in found] == [(2, 0), (3, 1), (4, 2), (5, 3)]


@pytest.mark.parametrize("virtual", [False, True])
def test_a_worker_that_starts_ahead_has_its_local_rank_and_no_place(virtual: bool) -> None:
    config = LaunchConfig(Command(("x",), ("x",)), nproc=2, options=TorchOptions(virtual_local_rank=virtual))
    shared = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "CUDA_VISIBLE_DEVICES": "4,5"}
    env = environment_ahead(config, shared, NoPlacement(1), restarts=2, error_file="e", socket="@s")
    assert env[ENV_AHEAD] == "1"
    assert {env[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", ENV_ROUND)} == {UNPLACED}
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == (("0", "5") if virtual else ("1", "4,5"))
    assert (env["LOCAL_WORLD_SIZE"], env["TORCHELASTIC_RESTART_COUNT"], env[ENV_SOCKET]) == ("2", "2", "@s")


@pytest.mark.parametrize("virtual", [False, True])
def test_a_kept_worker_gets_the_variables_that_a_new_one_gets(virtual: bool) -> None:
    """Other than its own error file, socket and device, which stay."""
    config = LaunchConfig(Command(("x",), ("x",)), nproc=2, options=TorchOptions(virtual_local_rank=virtual))
    members = tuple(Member(name, "i", 2, "host", 1) for name in ("first", config.node_id))
    group = WorkerGroup(spec_of(members[1]))
    form = m.Form(1, Round(3, members), 2, "rank 0\0 crashed", max_restarts=5, origin="5eed")
    placement = place(group, form.round, config)[1]
    shared = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "CUDA_VISIBLE_DEVICES": "4,5"}
    new = environment(config, shared, form, placement, error_file="", socket="")
    told = place_of(config, form, placement)
    kept = round_environment(
        told.placement,
        told.round,
        run_number=told.run_number,
        restarts=told.restarts,
        max_restarts=told.max_restarts,
        reason=told.reason,
    )
    assert kept == {name: new[name] for name in kept}
    assert (kept["RANK"], kept["LOCAL_RANK"]) == ("3", "0" if virtual else "1")


def test_each_worker_learns_its_replica() -> None:
    """Replicas are consecutive ranks of one node, also if the node takes part with some of its replicas only."""
    config = LaunchConfig(Command(("x",), ("x",)), nproc=7, replica_size=2)
    members = (Member("first", "i", 2, "host", 1), Member(config.node_id, "i", 4, "host", 1, slots=(0, 1, 4, 5)))
    found = place(WorkerGroup(replace(spec_of(members[1]), local_world_size=6)), Round(1, members), config)
    names = [f"ELASTIC_LAUNCH_REPLICA{name}" for name in ("", "_RANK", "S", "_SIZE")]
    envs = [round_environment(each, 1, run_number="5eed", restarts=0, max_restarts=3, reason="") for each in found]
    assert [[env[name] for name in ("LOCAL_RANK", "RANK", *names)] for env in envs] == [
        ["0", "2", "1", "0", "3", "2"],
        ["1", "3", "1", "1", "3", "2"],
        ["4", "4", "2", "0", "3", "2"],
        ["5", "5", "2", "1", "3", "2"],
    ]
    shared = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    ahead = environment_ahead(config, shared, NoPlacement(4), restarts=0, error_file="", socket="")
    assert [ahead[name] for name in names] == [UNPLACED] * 3 + ["2"]
    told = place_of(config, m.Form(1, Round(1, members), 0, "first"), found[2]).placement
    assert round_environment(told, 1, run_number="5eed", restarts=0, max_restarts=3, reason="") == envs[2], (
        "a kept worker"
    )

"""Which world a process is in, and parsing of durations."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from elastic_launch.errors import UsageError
from elastic_launch.training.durations import Interval, total_steps
from elastic_launch.training.ranks.world import World, can_abort, join, variables_restored

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_no_launcher_is_one_process() -> None:
    assert World.of({}) == World()
    assert World.of(MASTER).alone


def test_a_launchers_world() -> None:
    environ = {**MASTER, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    more = {"ELASTIC_LAUNCH_ROUND": "3", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert World.of(environ | more) == World(5, 8, 1, 4, 1, 3, 2, alone=False, first_on_node=False)


@pytest.mark.parametrize(("size", "expected"), [("2", (2, 2, 1, 4)), ("1", (1, 5, 0, 8)), (None, (1, 5, 0, 8))])
def test_a_process_learns_its_replica(size: str | None, expected: tuple[int, ...]) -> None:
    environ = {**MASTER, "RANK": "5", "WORLD_SIZE": "8"}
    world = World.of(environ if size is None else {**environ, "ELASTIC_LAUNCH_REPLICA_SIZE": size})
    assert (world.replica_size, world.replica, world.replica_rank, world.replicas) == expected


def test_the_first_worker_of_a_node_need_not_have_the_local_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node takes part with some of its workers only; each keeps the GPU of its local rank."""
    environ = {**MASTER, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "1"}
    world = World.of({**environ, "ELASTIC_LAUNCH_FIRST_ON_NODE": "1", "ELASTIC_LAUNCH_RUN_NUMBER": "1"})
    assert world.first_on_node
    assert not World.of({**environ, "LOCAL_RANK": "0", "ELASTIC_LAUNCH_FIRST_ON_NODE": "0"}).first_on_node
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert world.device().index == 2
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert world.device().type == "cpu"


def test_a_process_that_cannot_know_its_gpu_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a bare srun all processes of a node would take the first GPU."""
    environ = {**MASTER, "RANK": "1", "WORLD_SIZE": "2"}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UsageError, match="Rank 1 of 2 cannot tell which GPU"):
        World.of(environ).device()
    assert World.of({**environ, "SLURM_LOCALID": "1", "LOCAL_WORLD_SIZE": "2"}).device().index == 1
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert World.of(environ).device().type == "cpu"


@pytest.mark.parametrize(
    "of_rank",
    [
        lambda i: {"SLURM_LOCALID": i, "SLURM_GPUS_PER_TASK": "a100:1"},
        lambda i: {"SLURM_LOCALID": i, "SLURM_STEP_GPUS": "0,1,2,3"},
        lambda i: {"SLURM_LOCALID": i, "CUDA_VISIBLE_DEVICES": "0"},
        lambda i: {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0", "CUDA_VISIBLE_DEVICES": i},
        lambda i: {"LOCAL_RANK": i, "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": i},
    ],
    ids=["gpus per task", "gpus of the step", "srun's device", "virtual local rank", "own device"],
)
def test_processes_that_see_one_gpu_each_train_on_it(
    of_rank: Callable[[str], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    worlds = [World.of({**MASTER, "WORLD_SIZE": "4", "RANK": str(i), **of_rank(str(i))}) for i in range(4)]
    assert [str(world.device()) for world in worlds] == ["cuda:0"] * 4


@pytest.mark.parametrize("agent", [{}, {"ELASTIC_LAUNCH_RUN_NUMBER": "1", "CUDA_VISIBLE_DEVICES": "0"}])
def test_more_workers_than_gpus_train_on_the_cpu_and_one_of_them_says_so(
    agent: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for rank in range(2):
        first = {"ELASTIC_LAUNCH_FIRST_ON_NODE": str(int(rank == 0))} if agent else {}
        local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        world = World.of({**MASTER, "RANK": str(rank), "WORLD_SIZE": "2", **local, **agent, **first})
        assert world.device().type == "cpu"
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "training on the CPU: this node has 2 workers and 1 GPU(s)"
    ]


def test_a_rank_without_a_gpu_does_not_train_on_the_cpu_while_the_nodes_first_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    environ = {**MASTER, "WORLD_SIZE": "2"}
    assert World.of({**environ, "RANK": "0", "SLURM_LOCALID": "0"}).device().type == "cuda"
    with pytest.raises(UsageError, match=r"Rank 1 has local rank 1, but sees 1 GPU.s., and LOCAL_WORLD_SIZE"):
        World.of({**environ, "RANK": "1", "SLURM_LOCALID": "1"}).device()


STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize("tasks", [STEP, {"OMPI_COMM_WORLD_SIZE": "4"}, {"PMI_SIZE": "4"}])
def test_one_of_several_tasks_does_not_train_alone_where_they_were_to_meet(
    tasks: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match=r"one of several tasks \(\w+=4\) .* without RANK and WORLD_SIZE") as error:
        World.of({**MASTER, **tasks})
    assert error.value.hint.startswith("Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE")
    assert World.of(tasks) == World()
    for name, value in tasks.items():
        monkeypatch.setenv(name, value)
    join(World())
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == ["each of several tasks"]


@pytest.mark.parametrize(
    "environ",
    [
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"},
        {**STEP, "SLURM_STEP_ID": "4294967291"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
    ids=["a step of one task", "a batch script", "a batch script's step", "mpirun of one"],
)
def test_a_task_of_its_own_trains_alone(environ: dict[str, str]) -> None:
    assert World.of({**MASTER, **environ}).alone


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({**MASTER, "RANK": "x", "WORLD_SIZE": "2"}, "RANK=x"),
        ({**MASTER, "RANK": "2", "WORLD_SIZE": "2"}, "not one of the 2 ranks"),
    ],
)
def test_half_a_world_is_an_error(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        World.of(environ)


@pytest.mark.parametrize(("until", "steps"), [(3, 30), ("3", 30), ("3ep", 30), ("7ba", 7), (" 2 ep ", 20), (0, 0)])
def test_lengths_of_training(until: int | str, steps: int) -> None:
    assert total_steps(until, steps_per_epoch=10) == steps


@pytest.mark.parametrize("until", ["", "ep", "-1", "1.5ep", "3 hours", True])
def test_an_invalid_length_is_refused(until: int | str) -> None:
    with pytest.raises(UsageError, match="is not a length of training"):
        total_steps(until, 10)


@pytest.mark.parametrize(
    ("every", "steps", "seconds"),
    [
        (50, 50, None),
        ("50", 50, None),
        ("50ba", 50, None),
        ("30s", None, 30),
        ("5min", None, 300),
        ("0.5h", None, 1800),
    ],
)
def test_intervals(every: int | str, steps: int | None, seconds: float | None) -> None:
    assert Interval.parse(every) == Interval(steps, seconds)


@pytest.mark.parametrize("every", [0, -1, "0s", "", "1.5", "5 parsecs"])
def test_an_invalid_interval_is_refused(every: int | str) -> None:
    with pytest.raises(UsageError, match="is not an interval"):
        Interval.parse(every)


def test_an_interval_is_due_by_its_own_measure() -> None:
    assert Interval.parse(5).due(5, 0.0)
    assert not Interval.parse(5).due(4, 1e9)
    assert Interval.parse("5s").due(0, 5.0)
    assert not Interval.parse("5s").due(10**9, 4.9)


@pytest.mark.parametrize(
    ("variable", "value", "can"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", True),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", True),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", False),
        ("TORCH_NCCL_DESYNC_DEBUG", "1", False),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", False),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", True),
    ],
)
def test_a_process_can_abort_communicators_unless_the_users_variables_have_torch_end_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, can: bool
) -> None:
    assert can_abort()
    monkeypatch.setenv(variable, value)
    assert can_abort() is can


def test_variables_that_joining_sets_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    with variables_restored():
        os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0")
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ

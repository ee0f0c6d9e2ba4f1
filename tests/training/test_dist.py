"""``elastic_launch.dist``: each of its names outside a job, and in a real job of two."""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from harness import SCRIPTS, free_port, job_in
from torch import distributed
from torch.utils.data import DistributedSampler, TensorDataset

import elastic_launch
from elastic_launch import dist
from elastic_launch.errors import ElasticLaunchError, UsageError
from elastic_launch.training.ranks.world import World

SCRIPT = str(SCRIPTS / "dist_names.py")
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR")
SAMPLES = TensorDataset(torch.arange(5))


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PLACES, "MASTER_PORT", "ELASTIC_LAUNCH_ROUND"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def joined() -> Iterator[None]:
    """A process group of this process alone, made by hand."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


# Outside a job.


def _unchanged(operation: Callable[..., None], *arguments: Any) -> list[int]:
    tensor = torch.tensor([1, 2])
    operation(tensor, *arguments)
    return tensor.tolist()


def _gathered() -> list[Any]:
    tensor = torch.tensor([1, 2])
    parts = dist.all_gather(tensor)
    parts[0][0] = 9
    return [part.tolist() for part in parts] + [tensor.tolist()]


def _objects() -> list[Any]:
    items = [1, {"a": 2}]
    dist.broadcast_object_list(items)
    return items


def _initialized() -> bool:
    dist.initialize_dist()
    dist.initialize_dist("cpu", 5.0)
    return dist.is_initialized()


def _sampled() -> list[Any]:
    sampler = dist.get_sampler(SAMPLES)
    return [type(sampler), list(sampler), sorted(dist.get_sampler(SAMPLES, shuffle=True, drop_last=True))]


def _first() -> str:
    with dist.run_local_rank_zero_first():
        return "entered"


def _downloaded(path: Path) -> bool:
    with dist.local_rank_zero_download_and_wait(path):
        path.touch()
    return path.exists()


def _waited(path: Path) -> list[Path]:
    with dist.busy_wait_for_local_rank_zero(path):
        assert not path.exists()
    return list(path.iterdir())


_NAME = "._signal_file_node0_" + "".join(Random(0).choices(string.ascii_letters + string.digits, k=6))
_WRITTEN = "local rank zero done"

OUTSIDE: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "get_world_size": (lambda _: dist.get_world_size(), 1),
    "get_global_rank": (lambda _: dist.get_global_rank(), 0),
    "get_local_rank": (lambda _: dist.get_local_rank(), 0),
    "get_local_world_size": (lambda _: dist.get_local_world_size(), 1),
    "get_node_rank": (lambda _: dist.get_node_rank(), 0),
    "is_available": (lambda _: dist.is_available(), True),
    "is_initialized": (lambda _: dist.is_initialized(), False),
    "initialize_dist": (lambda _: _initialized(), False),
    "barrier": (lambda _: dist.barrier(), None),
    "all_reduce": (lambda _: _unchanged(dist.all_reduce), [1, 2]),
    "broadcast": (lambda _: _unchanged(dist.broadcast, 0), [1, 2]),
    "all_gather": (lambda _: _gathered(), [[9, 2], [1, 2]]),
    "all_gather_object": (lambda _: dist.all_gather_object("x"), ["x"]),
    "broadcast_object_list": (lambda _: _objects(), [1, {"a": 2}]),
    "get_sampler": (lambda _: _sampled(), [DistributedSampler, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]),
    "run_local_rank_zero_first": (lambda _: _first(), "entered"),
    "local_rank_zero_download_and_wait": (lambda path: _downloaded(path / "file"), True),
    "busy_wait_for_local_rank_zero": (lambda path: _waited(path / "signals"), []),
    "get_node_signal_file_name": (lambda _: dist.get_node_signal_file_name(Random(0)), _NAME),
    "write_signal_file": (lambda path: Path(dist.write_signal_file("a", path / "b")).read_text(), _WRITTEN),
}


@pytest.mark.parametrize("name", dist.__all__)
def test_a_name_outside_a_job(name: str, tmp_path: Path) -> None:
    use, expected = OUTSIDE[name]
    assert use(tmp_path) == expected


# Inside a job of two: what rank 0 gets, what rank 1 gets.

_ERROR = "OSError: no room on the disk"
_TOLD = f"ElasticLaunchError: Rank %d, which was to run first, failed in dist.run_local_rank_zero_first: {_ERROR}"
_MATRIX = [[0.0, 2.0], [1.0, 3.0]]
_SHIFTED = [[10.0, 12.0], [11.0, 13.0]]
# Ranks take turns, and the first sample fills up.
_SHUFFLED, _SHUFFLED_1 = (
    [*order, order[0]]
    for order in (torch.randperm(5, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (0, 1))
)
_LATE = f"ElasticLaunchError: Local rank 0 failed in dist.busy_wait_for_local_rank_zero: {_ERROR}"

INSIDE: dict[str, tuple[Any, Any]] = {
    "get_world_size": (2, 2),
    "get_global_rank": ([0, -1], [1, 0, [7, 1]]),
    "get_local_rank": (0, 1),
    "get_local_world_size": (2, 2),
    "get_node_rank": (0, 0),
    "is_available": (True, True),
    # A session leaves the group only if it has joined it: here initialize_dist had.
    "is_initialized": ([False, True, True],) * 2,
    "initialize_dist": ([True, "gloo", 2],) * 2,
    "barrier": (True, True),
    "all_reduce": tuple([[[3, 10], None], [[2, 5], None], [[2, 25], None], [[3, rest], [3, rest]]] for rest in (1, 2)),
    "broadcast": tuple([[1, 1], [[2, rest], [2, rest]]] for rest in (1, 2)),
    "all_gather": (
        {"parts of 1": _SHIFTED, "mine": _MATRIX, "scalars": [0, 1], "gradient": False},
        {"parts of 1": _MATRIX, "mine": _SHIFTED, "scalars": [0, 1], "gradient": False},
    ),
    "all_gather_object": ([{"rank": 0}, {"rank": 1}],) * 2,
    "broadcast_object_list": ([[0, {"of": 0}], [1, {"of": 1}]],) * 2,
    "get_sampler": (
        [[0, 2, 4], [0, 2], [3], _SHUFFLED[0::2], _SHUFFLED_1[0::2]],
        [[1, 3, 0], [1, 3], [3], _SHUFFLED[1::2], _SHUFFLED_1[1::2]],
    ),
    "run_local_rank_zero_first": (
        [False, _ERROR, _TOLD % 1],
        [True, _TOLD % 0, _ERROR],
    ),
    "local_rank_zero_download_and_wait": (False, True),
    "busy_wait_for_local_rank_zero": ([[True, []], _ERROR], [[True, []], _LATE]),
    "get_node_signal_file_name": (_NAME, _NAME),
    "write_signal_file": (["made/here/signal", _WRITTEN],) * 2,
}


@pytest.fixture(scope="module")
def job_of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of a real launch got, by name."""
    for job in job_in(tmp_path_factory.mktemp("job")):
        agent = job.launch("--standalone", "--nproc", "2", command=[SCRIPT, str(job.work)])
        assert agent.wait(90) == 0, agent.output
        results = [json.loads((job.work / f"{rank}.json").read_text()) for rank in (0, 1)]
    return results


@pytest.mark.parametrize("name", dist.__all__)
def test_a_name_in_a_job_of_two(name: str, job_of_two: list[dict[str, Any]]) -> None:
    assert tuple(result[name] for result in job_of_two) == INSIDE[name]


def test_every_name_is_checked_outside_and_inside() -> None:
    assert set(OUTSIDE) == set(INSIDE) == set(dist.__all__)


COMPOSERS = """
all_gather all_gather_object all_gather_object_list_hpu all_reduce barrier broadcast broadcast_object_list
busy_wait_for_local_rank_zero get_global_rank get_local_rank get_local_world_size get_node_rank
get_node_signal_file_name get_sampler get_world_size initialize_dist is_available is_initialized
local_rank_zero_download_and_wait run_local_rank_zero_first write_signal_file
"""
"""The functions of Composer's module (0.33), those included that it does not export."""


def test_composers_functions_are_here_but_for_that_of_one_device() -> None:
    assert set(COMPOSERS.split()) - set(dist.__all__) == {"all_gather_object_list_hpu"}


def test_no_rank_hangs_when_the_first_one_fails(tmp_path: Path) -> None:
    for job in job_in(tmp_path):
        flags = ["--standalone", "--nproc", "2", "--max-restarts", "0"]
        agent = job.launch(*flags, command=[SCRIPT, str(job.work), "--fail"])
        assert agent.wait(60) == 1, agent.output
        # Whichever of the two ends first, the summary tells what went wrong.
        assert _ERROR in agent.output.partition("root cause:")[2], agent.output
        assert "rank 1 entered" not in agent.output


# Where the world comes from.


@pytest.mark.parametrize(
    ("name", "environ", "value"),
    [
        ("get_world_size", {"WORLD_SIZE": "8"}, 8),
        ("get_global_rank", {"WORLD_SIZE": "8", "RANK": "5"}, 5),
        ("get_local_rank", {"LOCAL_RANK": "3"}, 3),
        ("get_local_world_size", {"LOCAL_WORLD_SIZE": "4"}, 4),
        ("get_node_rank", {"NODE_RANK": "2"}, 2),
        ("get_node_rank", {"GROUP_RANK": "1", "NODE_RANK": "2"}, 1),
    ],
)
def test_a_place_is_read_from_the_environment(
    name: str, environ: dict[str, str], value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, text in environ.items():
        monkeypatch.setenv(variable, text)
    assert getattr(dist, name)() == value


@pytest.mark.parametrize("name", ["get_global_rank", "get_local_rank", "get_local_world_size", "get_node_rank"])
def test_a_place_that_a_world_of_several_lacks_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"world of 2 ranks without \w*(RANK|SIZE)"):
        getattr(dist, name)()


def test_an_invalid_local_rank_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "-1")
    with pytest.raises(UsageError, match="LOCAL_RANK=-1"):
        dist.get_local_rank()


@pytest.mark.usefixtures("joined")
def test_an_environment_that_contradicts_the_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UsageError, match=r"WORLD_SIZE=2 in the environment, but the process group .* says 1"):
        dist.get_world_size()
    with pytest.raises(UsageError, match=r"RANK=1 in the environment, but the process group .* says 0"):
        dist.get_global_rank()


def _enter(context: Any) -> None:
    with context:
        raise AssertionError("the body was entered")


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("barrier", dist.barrier),
        ("all_reduce", lambda: dist.all_reduce(torch.ones(1))),
        ("broadcast", lambda: dist.broadcast(torch.ones(1), 0)),
        ("all_gather", lambda: dist.all_gather(torch.ones(1))),
        ("all_gather_object", lambda: dist.all_gather_object(1)),
        ("broadcast_object_list", lambda: dist.broadcast_object_list([1])),
        ("run_local_rank_zero_first", lambda: _enter(dist.run_local_rank_zero_first())),
        ("get_node_signal_file_name", dist.get_node_signal_file_name),
    ],
)
def test_several_ranks_without_a_group_are_asked_to_join(
    name: str, use: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=rf"dist\.{name}: the world has 2 ranks(.|\n)*initialize_dist\(\)"):
        use()


# Joining.


@pytest.mark.parametrize("device", ["tpu", "mps", "", torch.device("meta")])
def test_a_device_without_a_backend_is_refused(device: str | torch.device) -> None:
    with pytest.raises(UsageError, match="no backend for such a device"):
        dist.initialize_dist(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("device", ["gpu", "cuda", torch.device("cuda:0")])
def test_a_gpu_that_is_not_there_is_refused(device: str | torch.device) -> None:
    with pytest.raises(UsageError, match="0 GPUs were found for 1 processes"):
        dist.initialize_dist(device)


@pytest.mark.usefixtures("joined")
def test_an_existing_group_must_support_the_device() -> None:
    group = distributed.group.WORLD
    dist.initialize_dist("cpu")
    dist.initialize_dist()
    assert distributed.group.WORLD is group
    with pytest.raises(UsageError, match=r"has the backends cpu:gloo,cuda:gloo, none for cuda"):
        dist.initialize_dist("gpu")


def test_half_a_world_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="without RANK, MASTER_ADDR, MASTER_PORT"):
        dist.initialize_dist()


def test_an_unknown_reduction_is_refused_outside_a_job_already() -> None:
    with pytest.raises(UsageError, match="reduce_operation='MEAN'"):
        dist.all_reduce(torch.ones(1), "MEAN")


@pytest.mark.parametrize(("end", "joined_at_the_end"), [("pass", False), ("raise OSError", True)])
def test_the_group_is_left_when_the_interpreter_exits_without_an_error(end: str, joined_at_the_end: bool) -> None:
    code = (
        "import atexit; from elastic_launch import dist; atexit.register(lambda: print(dist.is_initialized()))\n"
        f"dist.initialize_dist('cpu'); assert dist.is_initialized(); {end}"
    )
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env={**os.environ, **world}
    )
    assert done.stdout.strip() == str(joined_at_the_end), done.stderr
    assert "AssertionError" not in done.stderr


# Who runs first.


@pytest.mark.usefixtures("joined")
def test_the_first_ones_own_error_reaches_its_caller() -> None:
    with pytest.raises(SystemExit, match="3"), dist.run_local_rank_zero_first():
        sys.exit(3)


def test_another_local_rank_gives_up_on_a_file_that_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ElasticLaunchError, match=r"Local rank 1 waited 0 s for .*file"):
        _enter(dist.local_rank_zero_download_and_wait(tmp_path / "file", timeout=0))


@pytest.mark.parametrize(
    ("rank", "more", "first"),
    [
        ("4", {}, True),
        ("5", {}, False),
        ("5", {"WORLD_SIZE": "9"}, True),
        ("5", {"GROUP_RANK": "0"}, True),
        ("5", {"ELASTIC_LAUNCH_FIRST_ON_NODE": "1"}, True),
    ],
    ids=["first", "second", "other numbers of workers", "more workers before", "our agent"],
)
def test_one_worker_of_a_node_goes_first_though_torchrun_gives_all_the_local_rank_0(
    rank: str, more: dict[str, str], first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"RANK": rank, "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    environ |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **more}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert World.of(environ).first_on_node == first
    dist.write_signal_file("signal", tmp_path)
    assert (tmp_path / "signal").exists() == first


def test_a_signal_file_may_be_gone_when_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "barrier", lambda: [file.unlink() for file in tmp_path.iterdir()])
    with dist.busy_wait_for_local_rank_zero(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_local_rank_zero_must_make_the_file(tmp_path: Path) -> None:
    with (
        pytest.raises(ElasticLaunchError, match=r"has not made .*file"),
        dist.local_rank_zero_download_and_wait(tmp_path / "file"),
    ):
        pass


# The package.


def test_the_package_returns_the_module_and_imports_torch_only_for_it() -> None:
    code = (
        "import sys, elastic_launch as el; assert 'torch' not in sys.modules\n"
        "from elastic_launch import dist; assert el.dist is dist is sys.modules['elastic_launch.training.dist']\n"
        "assert 'torch' in sys.modules and 'dist' in dir(el)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert elastic_launch.dist is dist

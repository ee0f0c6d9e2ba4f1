"""Tests of the interface to torch's NUMA binding; finding a GPU's CPUs is torch's task, and needs a GPU."""

from __future__ import annotations

import pytest
import torch.numa.binding

from elastic_agents.workers.numa import bound, check_binding
from elastic_agents.workers.placement import arguments
from elastic_launch.config.launch_config import Command, LaunchConfig
from elastic_launch.config.torch_options import TorchOptions
from elastic_launch.contract import NoPlacement
from elastic_launch.errors import UsageError


def config(mode: str | None) -> LaunchConfig:
    return LaunchConfig(
        Command(("python", "train.py"), ("train.py",)), nproc=2, options=TorchOptions(numa_binding=mode)
    )


def test_a_worker_is_run_by_numactl_on_the_cpus_that_torch_names(monkeypatch: pytest.MonkeyPatch) -> None:
    # The index is gpu_index until torch 2.13, device_index from 2.14 on.
    def cpus(*, numa_options: torch.numa.binding.NumaOptions, **index: int) -> set[int]:
        assert numa_options.affinity_mode.value == "exclusive"
        (first,) = (8 * gpu for gpu in index.values())
        return {first, first + 1}

    monkeypatch.setattr(torch.numa.binding, "_get_validated_logical_cpus_to_bind_to", cpus)
    assert bound(["python", "train.py"], 1, "exclusive") == ["numactl", "--physcpubind=8-9", "python", "train.py"]
    check_binding(config("exclusive"))


def test_without_a_mode_torch_is_not_called() -> None:
    assert arguments(config(None), NoPlacement(7)) == ["python", "train.py"]
    check_binding(config(None))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_first_worker_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UsageError, match="--numa-binding node is not possible for local rank 0") as caught:
        check_binding(config("node"))
    assert not isinstance(caught.value.__cause__, TypeError), "torch is asked as this version of it wants"
    assert not caplog.records

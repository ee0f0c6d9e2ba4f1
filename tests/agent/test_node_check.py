"""``--node-check``: what it finds before a node joins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_agents.probes import node_check
from elastic_agents.probes.node_check import NodeCheckError, check_node, probe
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import ExitCode
from elastic_launch.events.sentences import sentence


def test_a_healthy_node_passes_and_its_figures_are_known(tmp_path: Path) -> None:
    checked = check_node(LaunchConfig(log_dir=tmp_path))
    assert checked.devices == torch.cuda.device_count()
    assert min(checked.memory_gb_s, checked.compute_gflop_s, checked.disk_mb_s) > 0
    assert sentence(checked).startswith("node check passed: CPU")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_cannot_be_written_is_found() -> None:
    with pytest.raises(NodeCheckError, match="/proc/nowhere cannot be written") as caught:
        check_node(LaunchConfig(log_dir=Path("/proc/nowhere")))
    assert caught.value.exit_code == ExitCode.STARTUP_FAILURE
    assert "Repair or replace" in caught.value.hint


def test_a_test_that_hangs_ends_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "LIMIT", 0.01)
    with pytest.raises(NodeCheckError, match="has not ended within"):
        check_node(LaunchConfig(log_dir=tmp_path))


@pytest.mark.parametrize(
    ("faulty", "answers", "found"),
    [
        ("equal", [False], "memory of cpu does not keep"),
        ("equal", [True, True, False], "cpu computes different products"),
        ("allclose", [False], "cpu computes wrong products"),
    ],
)
def test_faulty_hardware_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faulty: str, answers: list[bool], found: str
) -> None:
    """The comparison is replaced, since the hardware cannot be."""
    left = iter(answers)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch, faulty, lambda *args, **options: next(left))
    with pytest.raises(SystemExit, match=found):
        probe(str(tmp_path))

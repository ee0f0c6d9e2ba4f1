"""A worker's part in planned changes where a framework has the loop; see integration/test_frameworks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Agent

from elastic_launch.contract import ENV_ROUND
from elastic_launch.integrations.drain import Drain

RANKS = """
import os, signal, sys
import torch.distributed as dist
from elastic_launch.integrations.drain import Drain

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
drain = Drain()
drain.begin(0)
steps = 0
while True:
    steps += 1
    if rank == 1 and steps == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    if drain.boundary(steps):
        break
code = drain.leave()
dist.destroy_process_group()
print(steps, code)
"""


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_ROUND, raising=False)


def test_sigterm_stops_after_the_step_and_sets_the_exit_code() -> None:
    drain = Drain()
    drain.begin(4, total=9)
    assert not drain.boundary(5)
    os.kill(os.getpid(), signal.SIGTERM)
    assert drain.boundary(6)
    assert drain.leave() == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_after_the_last_step_there_is_nothing_to_stop() -> None:
    drain = Drain()
    drain.begin(0, total=1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert not drain.boundary(1, end=True)
    drain.end()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_training_does_not_inherit_the_stop_of_the_first() -> None:
    drain = Drain()
    drain.begin(0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert drain.boundary(1)
    drain.begin(0)
    assert not drain.stops
    assert not drain.boundary(1)
    drain.end()


@pytest.mark.usefixtures("forking")
def test_what_one_rank_is_sent_stops_all_after_the_same_step(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    commands = [[str(script), str(rank), str(tmp_path / "store")] for rank in range(2)]
    ranks = [Agent(command, tmp_path, f"rank{command[1]}", forked=True, script=True) for command in commands]
    assert [rank.wait(60) for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    assert [rank.output.strip() for rank in ranks] == ["4 143", "4 143"], "one boundary later than asked"


def test_the_integrations_import_no_framework_before_they_are_used() -> None:
    script = (
        "import sys, elastic_launch as el\n"
        "assert sorted(dir(el.integrations))[:2] == ['accelerate', 'drain']\n"
        "print(sorted(set(sys.modules) & {'torch', 'transformers', 'lightning', 'accelerate', 'pytorch_lightning'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.strip() == "[]"

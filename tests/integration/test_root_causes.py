"""The root cause shown to the user, and what ends a run without progress: real workers, real exceptions."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Job

SLOW_EXIT = """
import atexit, os, time
import torch
from torch import distributed as dist
dist.init_process_group("gloo")
data = torch.ones(4)
dist.all_reduce(data)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() == 0:
        atexit.register(time.sleep, 60)
        atexit.register(dist.destroy_process_group)  # before the sleep, and once the exception is reported
        raise ValueError("the loss is not finite")
    dist.all_reduce(data)
dist.destroy_process_group()  # an executed worker that keeps it may abort as it exits
"""

UNEQUAL = """
import torch
from torch import distributed as dist
dist.init_process_group("gloo")
for _ in range(2 + (dist.get_rank() == 0)):
    dist.all_reduce(torch.ones(4))
"""

NO_GROUP = """
import atexit, os, sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        atexit.register(time.sleep, 60)
        raise ValueError("the loss is not finite")
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    time.sleep(0.2)  # an exception shortly before the stop may follow from it, so it would not count
    raise ConnectionResetError("Connection reset by peer")
"""

INTERRUPTED = "import torch\nraise KeyboardInterrupt('enough')\n"

OF_A_HELPER = """
import os, signal
if os.fork() == 0:
    os.setsid()
    import a_module_that_is_not_installed
os.wait()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""

WRONG = """
import torch
def main():
    torch.nn.Linear(4, 2)(torch.ones(3, 5))
main()
"""

ODD = """
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("\\0\\x1b[31m\\x07" + "\\N{PARTY POPPER}" * 400_000)
assert os.environ["ELASTIC_LAUNCH_START_REASON"].isprintable()
"""

WAYS = pytest.mark.parametrize(
    "flags", [pytest.param((), id="forked"), pytest.param(("--no-warm",), id="executed", marks=pytest.mark.soak)]
)


def script(directory: Path, text: str) -> list[str]:
    path = directory / "script.py"
    path.write_text(text)
    return [str(path)]


@pytest.mark.timeout(300)
@WAYS
def test_the_cause_is_the_first_failure_not_the_first_exit(job: Job, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A rank that raises and takes long to exit, as it frees its memory, is the root cause, not one of its peers."""
    agent = job.launch("--standalone", "--nproc", "2", *flags, command=script(tmp_path, SLOW_EXIT))
    assert agent.wait(60) == 0
    (broken,) = job.events("round_broken")
    assert "rank 1" in broken["cause"], "its peer ended first"
    assert broken["next"] == ""
    (found,) = job.events("cause_found")
    assert (found["round"], found["kind"]) == (1, "crash")
    assert found["cause"].startswith("rank 0 on node")
    assert found["cause"].endswith(": ValueError: the loss is not finite")
    assert len(job.events("restart_charged")) == 1
    assert job.events("round_formed")[1]["cause"] == found["cause"]
    assert job.events("round_formed")[1]["form_s"] < 30, "nobody waits for it to end"


def test_an_executed_worker_without_a_process_group_that_had_printed_a_traceback_is_the_likely_cause(
    job: Job, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    command = [*script(tmp_path, NO_GROUP), str(seen)]
    agent = job.launch("--standalone", "--nproc", "2", "--no-warm", command=command)
    agent.says("ValueError: the loss is not finite")
    seen.touch()
    assert agent.wait(60) == 0
    assert "Connection reset by peer" in job.event("round_broken")["cause"]
    (found,) = job.events("cause_found")
    assert found["cause"].startswith("rank 0 on node")
    assert found["cause"].endswith(": printed before it was stopped: ValueError: the loss is not finite")


@pytest.mark.timeout(300)
@pytest.mark.executed
def test_a_run_that_ends_shows_the_first_failure_with_its_traceback(job: Job, tmp_path: Path) -> None:
    agent = job.launch("--standalone", "--nproc", "2", "--max-restarts", "0", command=script(tmp_path, SLOW_EXIT))
    assert agent.wait(60) == 1
    said = agent.output.split("root cause: ")[1]
    assert said.startswith("rank 0 on node")
    assert "raise ValueError(" in said
    assert "Connection closed by peer" not in said
    assert agent.output.count("a round forms") == 1, "the first"


@pytest.mark.timeout(300)
def test_a_rank_of_another_node_that_ended_too_early_is_named(job: Job, tmp_path: Path) -> None:
    command = script(tmp_path, UNEQUAL)
    agents = [job.node(name, "--max-restarts", "0", nnodes="2:2", command=command) for name in "ab"]
    assert [agent.wait(60) for agent in agents] == [1, 1]
    assert "exit code 1, after rank 1 had ended with exit code 0: " in job.event("run_ended")["cause"]
    assert "all ranks must make the same number of steps" in agents[0].output


@WAYS
def test_a_keyboard_interrupt_that_a_script_raises_costs_a_restart(
    job: Job, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """As under torchrun. It is a failure of the script itself, not a signal from a scheduler."""
    agent = job.launch("--standalone", "--max-restarts", "1", *flags, command=script(tmp_path, INTERRUPTED))
    assert agent.wait(60) == 91
    assert "signal 2 (SIGINT): KeyboardInterrupt: enough" in agent.output.split("root cause")[-1]
    assert [charged["kind"] for charged in job.events("restart_charged")] == ["crash"]
    assert len(job.events("round_formed")) == 2


@WAYS
def test_the_exception_of_a_process_that_the_script_has_forked_is_not_the_scripts(
    job: Job, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    agent = job.launch("--standalone", "--max-restarts", "1", *flags, command=script(tmp_path, OF_A_HELPER))
    assert agent.wait(60) == 0, agent.output
    assert job.event("round_broken")["cause"].endswith(": signal 9 (SIGKILL)")
    assert [charged["kind"] for charged in job.events("restart_charged")] == ["crash"]


def test_an_exception_with_any_text_costs_one_restart(job: Job, tmp_path: Path) -> None:
    """Emoji take twelve bytes each on a link, a NUL cannot be in an environment, and escapes move a cursor."""
    agent = job.launch("--standalone", "--max-restarts", "1", command=script(tmp_path, ODD))
    assert agent.wait(60) == 0
    assert len(job.events("restart_charged")) == 1
    ours = [line for line in agent.output.splitlines() if "[elastic-launch]" in line]
    assert any("ValueError" in line and "more characters]" in line for line in ours)
    assert all(line.isprintable() for line in ours)


WRONG_TWICE = (
    "a restart would fail again (RuntimeError at script.py:4 in main ended both rounds as they began: "
    "fix it, and run the same command again): rank "
)


@WAYS
def test_a_mistake_in_a_script_is_tried_twice(job: Job, tmp_path: Path, flags: tuple[str, ...]) -> None:
    agent = job.launch("--standalone", "--nproc", "2", *flags, command=script(tmp_path, WRONG))
    assert agent.wait(60) == 93
    assert job.event("run_ended")["cause"].startswith(WRONG_TWICE)
    assert agent.output.count(WRONG_TWICE) == 1
    assert len(job.events("restart_charged")) == 1
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in agent.output.split("root cause: ")[1]


@pytest.mark.timeout(300)
def test_a_mistake_in_a_script_is_tried_twice_on_two_nodes(job: Job, tmp_path: Path) -> None:
    command = script(tmp_path, WRONG)
    agents = [job.node(name, nnodes="2", command=command) for name in "ab"]
    assert [agent.wait(60) for agent in agents] == [93, 93]
    assert [agent.output.count(WRONG_TWICE) for agent in agents] == [1, 1]
    assert len(job.events("restart_charged")) == 1

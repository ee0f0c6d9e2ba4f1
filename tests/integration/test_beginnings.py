"""How an agent starts: as one process with its warm server where possible; the user sees the process they started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from harness import LEAN, LOOP, Agent, Job, asked, free_port, tree, wait_for

pytestmark = pytest.mark.executed

TOKEN = "0123456789abcdef-a-token-of-tests"
WAYS = ((LEAN, "import torch"), (("--no-warm",), "import yaml"))
"""Flags, and the script's imports: with workers that are forked, and with workers that are executed."""
SHARED = 50
"""MiB: what two processes share that part after torch's import; it is 100, or next to nothing."""


def _script(job: Job, imports: str) -> list[str]:
    path = job.directory / "script.py"
    loop = Path(LOOP).read_text().replace("import json\n", f"{imports}\nimport json\n", 1)
    path.write_text(loop)
    return [str(path), str(job.work)]


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0 ").decode().split("\0")


def _shared(agent: Agent) -> int:
    """MiB that were written by an agent, or by the process that it was forked from, and that it shares."""
    lines = Path(f"/proc/{agent.process.pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("Shared_Dirty:"))


def _parts(agent: Agent) -> bool:
    """Whether it is the re-executed process, and has not forked its server yet."""
    return "warm.fork_bootstrap" in " ".join(_command(agent.process.pid)) and len(tree(agent.process.pid)) == 1


@pytest.mark.parametrize(
    ("imports", "shares"),
    [
        ("import numpy, torch", True),
        pytest.param("import yaml\nimport torch", False, marks=pytest.mark.slow),
        pytest.param("import torch, yaml", True, marks=pytest.mark.soak),
    ],
)
def test_torch_is_imported_once_where_the_script_has_nothing_before_it(job: Job, imports: str, shares: bool) -> None:
    """The re-executed process looks like what was started."""
    agent = job.launch("--nproc", "2", *LEAN, command=_script(job, imports))
    assert isinstance(agent.process, subprocess.Popen)
    command = agent.process.args
    workers = job.world(2)
    wait_for("the server to learn what comes first", lambda: (_shared(agent) > SHARED) == shares)
    assert isinstance(command, list)
    assert _command(agent.process.pid) == command
    for worker in workers:
        assert Path(f"/proc/{worker['pid']}/cmdline").read_bytes().split(b"\0")[-3:-1] == [
            *map(os.fsencode, command[-2:])
        ]
    # Before, torch may have given the process its own name.
    assert Path(f"/proc/{agent.process.pid}/comm").read_text().strip() == Path(command[0]).name[:15]
    assert {os.getsid(worker["pid"]) for worker in workers} == {worker["pid"] for worker in workers}
    job.finish()
    assert agent.wait() == 0
    assert "import for themselves" not in agent.output
    assert agent.output.count("logs in") == 2  # at the begin and at the end


def test_a_warm_server_that_dies_while_workers_train_is_replaced_at_once(job: Job) -> None:
    agent = job.launch(*LEAN, "--max-restarts", "1", command=_script(job, "import numpy"))
    job.world(1)
    killed = 0
    for pid in tree(agent.process.pid):  # the server, and what it has forked ahead
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if "imports-" in os.readlink(f"/proc/{pid}/fd/1"):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    assert killed
    agent.says("the warm server is gone; another one is started")
    assert len(job.events("round_formed")) == 1, "only now: no worker has started since"
    job.tell("exit-0", "1")
    job.world(1, after=1)
    job.finish()
    assert agent.wait() == 0
    assert "import for" not in agent.output


def test_a_file_of_imports_that_cannot_be_opened_in_time_delays_no_worker(job: Job) -> None:
    log = job.logs / "run" / "imports-a.log"
    log.parent.mkdir(parents=True, mode=0o700)
    os.mkfifo(log)  # opening it hangs, as on a file system that does not answer
    agent = job.launch("--rdzv-id", "run", "--node-id", "a", *LEAN, command=_script(job, "import torch"))
    job.world(1)
    job.finish()
    assert agent.wait() == 0
    assert "import for themselves" not in agent.output


@pytest.mark.slow
def test_an_interpreter_with_options_of_its_own_is_kept(job: Job) -> None:
    program = ["-X", "utf8", "-m", "elastic_launch", *LEAN, "--log-dir", str(job.logs), *_script(job, "import torch")]
    agent = job.program(program)
    job.world(1)
    assert _command(agent.process.pid)[1:] == program
    job.finish()
    assert agent.wait() == 0
    assert "import for themselves" not in agent.output


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGXCPU, 128 + signal.SIGXCPU, marks=pytest.mark.soak),
    ],
)
def test_a_signal_during_torchs_import_is_handled(job: Job, number: signal.Signals, code: int) -> None:
    message = job.directory / "message"
    message.touch()
    agent = job.launch(
        *(*LEAN, "--signals-to-handle", f"TERM,INT,{number.name}"),
        command=_script(job, "import torch"),
        env={"ELASTIC_LAUNCH_TERMINATION_LOG": str(message)},
    )
    wait_for("the import", lambda: _parts(agent))
    agent.signal(number)
    assert agent.wait() == code
    assert not job.started()
    first = f"{number.name} received: this node leaves once torch is imported"
    # A node that is told to leave early enough does not join at all.
    assert first in agent.output.partition("joined from")[0], agent.output
    assert f"exit code {code}" in agent.output
    assert message.read_text().startswith(f"exit code {code}")


def test_the_health_port_is_answered_while_torch_is_imported(job: Job) -> None:
    slow = _fake_torch(
        job,
        f"""
        import pathlib, time
        while not pathlib.Path({str(job.work / "imported")!r}).exists():
            time.sleep(0.01)
        raise OSError("that was all")
    """,
    )
    port = free_port()
    agent = job.launch("--health-port", f"127.0.0.1:{port}", command=_script(job, "import torch"), env=slow)
    wait_for("the import", lambda: _parts(agent))
    assert asked(f"http://127.0.0.1:{port}/livez") == (200, "starting")
    assert asked(f"http://127.0.0.1:{port}/readyz") == (503, "starting")
    job.tell("imported")
    assert agent.wait() == 1
    assert "that was all" in agent.output


def test_torch_is_not_blamed_for_a_connection_to_the_health_port_during_its_import(job: Job) -> None:
    port = free_port()
    agent = job.launch(*LEAN, "--health-port", f"127.0.0.1:{port}", command=_script(job, "import torch"))
    wait_for("the import", lambda: _parts(agent))
    with socket.create_connection(("127.0.0.1", port), timeout=20) as silent:
        silent.sendall(b"GET")
        job.world(1)
    wait_for("its workers to train", lambda: asked(f"http://127.0.0.1:{port}/readyz") == (200, "running"))
    job.finish()
    assert agent.wait() == 0
    assert "not loaded ahead" not in agent.output


def test_a_token_gets_to_the_agent_and_nowhere_else(job: Job) -> None:
    options = {"env": {"ELASTIC_LAUNCH_TOKEN": TOKEN}, "command": _script(job, "import torch")}
    first = job.node("a", *LEAN, nnodes="2", **options)
    second = job.node("b", *LEAN, nnodes="2", **options)
    job.world(2)
    for pid in (*tree(first.process.pid), *tree(second.process.pid)):
        with contextlib.suppress(OSError):  # ended meanwhile
            for what in ("environ", "cmdline"):
                assert TOKEN.encode() not in Path(f"/proc/{pid}/{what}").read_bytes()
        assert not [place for place in _open(pid) if "memfd:elastic-launch " in place]
    job.finish()
    assert (first.wait(), second.wait()) == (0, 0)


@pytest.mark.parametrize(("flags", "imports"), [WAYS[0], pytest.param(*WAYS[1], marks=pytest.mark.slow)])
def test_what_a_shell_has_opened_for_the_agent_is_not_for_its_workers(
    job: Job, flags: tuple[str, ...], imports: str
) -> None:
    lock = job.directory / "lock"
    prefix = ("sh", "-c", f'exec 9>{lock}; exec "$@"', "sh")
    agent = job.launch(*flags, command=_script(job, imports), prefix=prefix)
    job.world(1)
    agent_itself, *others = tree(agent.process.pid)
    assert str(lock) in _open(agent_itself)
    assert len(others) >= 2
    assert not [pid for pid in others if str(lock) in _open(pid)]
    job.finish()
    assert agent.wait() == 0


@pytest.mark.parametrize(
    ("closing", "way"),
    [
        ("<&- >&- 2>&-", 0),
        pytest.param(">&-", 0, marks=pytest.mark.soak),
        pytest.param("2>&-", 1, marks=pytest.mark.soak),
        pytest.param(">/dev/full 2>&1", 0, marks=pytest.mark.slow),
        pytest.param("<&- >&- 2>&-", 1, marks=pytest.mark.slow),
    ],
)
def test_nowhere_to_print_to_stops_no_launch(job: Job, closing: str, way: int) -> None:
    flags, imports = WAYS[way]
    prefix = ("sh", "-c", f'exec "$@" {closing}', "sh")
    command, env = _script(job, imports), {"PYTHONUNBUFFERED": ""}
    agent = job.launch("--nproc", "2", *flags, command=command, prefix=prefix, env=env)
    job.world(2)
    job.finish()
    assert agent.wait() == 0


def test_an_agent_started_with_sigchld_ignored_sees_its_workers_exits(job: Job) -> None:
    code = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    prefix = (sys.executable, "-c", code)
    agent = job.launch(*LEAN, "--max-restarts", "0", command=_script(job, "import torch"), prefix=prefix)
    job.world(1)
    job.tell("exit-0", "7")
    assert agent.wait() == 7


def test_an_error_of_torchs_import_is_shown_unchanged(job: Job) -> None:
    broken = _fake_torch(job, "raise OSError('libnothing.so: cannot open shared object file')")
    agent = job.launch(*LEAN, command=_script(job, "import torch"), env=broken)
    assert agent.wait() == 1
    assert agent.output.rstrip().endswith("OSError: libnothing.so: cannot open shared object file")


@pytest.mark.slow
def test_an_agent_that_cannot_be_reexecuted_continues_unchanged(job: Job) -> None:
    # One string of a command may have 128 KiB (execve(2)), and the settings hold all of a worker's.
    agent = job.launch(*LEAN, command=[*_script(job, "import torch"), *["x" * 1000] * 140])
    job.world(1)
    assert _command(agent.process.pid)[1:3] == ["-m", "elastic_launch"]
    assert not [place for place in _open(agent.process.pid) if "memfd:elastic-launch " in place]
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143
    assert agent.output.count("logs in") == 2


def _fake_torch(job: Job, text: str) -> dict[str, str]:
    """Return an environment in which torch is a different package, installed normally."""
    place = job.directory / "site-packages"
    place.mkdir()
    (place / "torch.py").write_text(textwrap.dedent(text))
    return {"PYTHONPATH": str(place)}


def _open(pid: int) -> list[str]:
    """The open files of a process, if it exists."""
    found = []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found.append(os.readlink(link))
    return found


def test_a_second_job_with_the_endpoint_of_a_first_one_is_refused(job: Job) -> None:
    first = job.node("a", nnodes="1")
    job.world(1)
    second = job.node("b", nnodes="1")
    assert second.wait(60) == 95, second.output
    (line,) = (line for line in second.output.splitlines() if "exit code 95" in line)
    assert "node b is not one of the nodes of run 'none' at this endpoint: it has one node (--nnodes 1)" in line
    assert "Give another --rdzv-endpoint" in line
    job.finish()
    assert first.wait() == 0, first.output


def test_a_launch_removes_the_files_of_runs_that_are_over(job: Job) -> None:
    flags = ["--standalone", "--keep-runs", "1"]
    job.launch(*flags, "--rdzv-id", "first", name="first")
    job.world(1)
    second = job.launch(*flags, "--rdzv-id", "second", name="second")
    second.says("round 1 formed")
    assert (job.logs / "first" / "run.json").exists(), "it is alive"
    job.finish()
    assert [agent.wait() for agent in job.agents] == [0, 0]
    third = job.launch(*flags, "--rdzv-id", "third", name="third")
    third.says("the files of 2 old runs are removed (--keep-runs 1)")
    assert third.wait() == 0
    assert {path.name for path in job.logs.iterdir()} == {"third", "latest"}

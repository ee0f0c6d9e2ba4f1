"""The environment of a worker's programs, and processes that a session waits for or ends."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import alive, wait_for

import elastic_launch as el
from elastic_launch.contract import FOR_WORKERS, ahead_environment
from elastic_launch.training import children
from elastic_launch.training.children import Background
from elastic_launch.training.ranks.world import ASYNC_ERROR_HANDLING, variables_restored

Start = Callable[..., subprocess.Popen[Any]]

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1000)"


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def popen(command: Any, **options: Any) -> subprocess.Popen[Any]:
        started.append(subprocess.Popen(command, **options))
        return started[-1]

    yield popen
    for process in started:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def test_what_a_launcher_sets_is_left_out_and_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FOR_WORKERS | children._OTHERS:  # torch sets some in a process that runs its launcher, as a test may
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    of_worker = dict.fromkeys(FOR_WORKERS, "1")
    others = dict.fromkeys(
        ["PET_NNODES", "ELASTIC_LAUNCH_FAULTS", "ELASTIC_LAUNCH_DRILL", "TORCHELASTIC_TIMER_FILE"], "2"
    )
    of_user = {"OMP_NUM_THREADS": "3", "TORCHELASTIC_ENABLE_FILE_TIMER": "1", "ELASTIC_LAUNCH_TORCHRUN": "1"}
    for name, value in {**of_worker, **others, **of_user}.items():
        monkeypatch.setenv(name, value)
    wanted = {name: value for name, value in before.items() if not name.startswith("PET_")} | of_user
    assert el.clean_environment() == {**wanted, ASYNC_ERROR_HANDLING: "1"}
    assert os.environ["RANK"] == "1"
    assert ahead_environment(of_worker, workers=2).keys() == FOR_WORKERS


@pytest.mark.parametrize("given", [None, "1", "0"])
def test_what_a_session_sets_is_as_before_it(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.delenv(ASYNC_ERROR_HANDLING, raising=False)
    if given is not None:
        monkeypatch.setenv(ASYNC_ERROR_HANDLING, given)
    with variables_restored():
        os.environ[ASYNC_ERROR_HANDLING] = "0"
        assert el.clean_environment().get(ASYNC_ERROR_HANDLING) == given
    assert el.clean_environment().get(ASYNC_ERROR_HANDLING) == given


@pytest.mark.parametrize(("given", "found"), [("sleep 1", "a str"), (subprocess.Popen, "the class Popen")])
def test_what_is_not_a_popen_is_refused(given: Any, found: str) -> None:
    with el.session() as run, pytest.raises(el.UsageError, match=f"is {found}"):
        run.background(given)


def test_a_process_with_a_session_of_its_own_is_refused_and_ended(start: Start) -> None:
    process = start(["sleep", "1000"], start_new_session=True)
    with pytest.raises(el.UsageError, match="has a session of its own"), el.session() as run:
        run.background(process)
    assert not alive(process.pid)


@pytest.mark.parametrize("wait", ["soon", -1, True, "0s"])
def test_what_is_not_a_duration_is_refused_and_the_process_ended(start: Start, wait: Any) -> None:
    process = start(["sleep", "1000"])
    with pytest.raises(el.UsageError, match="is not a duration"), el.session() as run:
        run.background(process, wait)
    assert not alive(process.pid)


def test_a_session_ends_once_its_processes_have(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with el.session() as run:
        process = run.background(start("sleep 1; exit 3", shell=True))
        other = run.background(start(["sleep", "0.5"]), "10min")
    assert (process.returncode, other.returncode) == (3, 0)
    said = [record.getMessage() for record in caplog.records]
    name = f"background process {process.pid} (sleep 1; exit 3)"
    assert said == [
        f"the session's end waits for up to 600 s for background process {other.pid} (sleep 0.5)",
        f"the session's end waits for {name}",
        f"{name} has ended with exit code 3",
    ]


def test_a_process_that_has_failed_before_is_reported_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    process = start(["false"])
    process.wait()
    with el.session() as run:
        run.background(process)
        run.background(start(["true"]))
    (said,) = [record.getMessage() for record in caplog.records if "has ended" in record.getMessage()]
    assert said == f"background process {process.pid} (false) has ended with exit code 1"


def test_a_server_is_ended_at_once_and_first(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start(["sleep", "1000"])
    with el.session() as run:
        run.background(start(f"while kill -0 {server.pid}; do sleep 0.1; done", shell=True, stderr=subprocess.DEVNULL))
        run.background(server, wait=0)
    assert server.returncode == -15
    assert not [record for record in caplog.records if "has" in record.getMessage()]


def test_a_process_that_ignores_sigterm_is_killed(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_TERMINATION", 0.2)
    process = start([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
    process.stdout.readline()
    with el.session() as run:
        run.background(process, 0.1)
    wait_for("the end of the process", lambda: not alive(process.pid))
    assert caplog.messages[-1].endswith("has not ended within 0.1 s, and is terminated")


@pytest.mark.parametrize("group", [None, 0])
@pytest.mark.parametrize("error", [None, ValueError])
def test_what_a_process_has_started_ends_with_it(
    start: Start, error: type[Exception] | None, group: int | None
) -> None:
    """As the commands of a pipeline do, of which only the shell is known."""
    command = "sleep 1000 & echo $!; (sleep 1000 & echo $!; wait) | cat"
    with contextlib.suppress(ValueError), el.session() as run:
        shell = start(command, shell=True, stdout=subprocess.PIPE, process_group=group)
        run.background(shell, wait=0)
        pids = [int(shell.stdout.readline()) for _ in range(2)]
        if error is not None:
            raise error
    assert shell.returncode == (-15 if error is None else -9)
    wait_for("their end", lambda: not any(map(alive, pids)))


GRACEFUL = """
import signal, subprocess, sys, time
helper = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"])
def save(*_):
    assert helper.poll() is None, "the helper has been ended before"
    helper.kill(), helper.wait()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
while True: time.sleep(0.05)
"""


def test_what_a_process_needs_to_end_in_order_outlives_its_sigterm(start: Start) -> None:
    background = Background()
    process = start([sys.executable, "-c", GRACEFUL], stdout=subprocess.PIPE)
    assert process.stdout.read(1)
    background.add(process, 0)
    with background:
        pass
    assert process.returncode == 0


def test_processes_end_although_this_one_has_more_files_open_than_select_takes(start: Start) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    held = [os.dup(null) for _ in range(1100)]
    try:
        background, process = Background(), start(["sleep", "1000"])
        background.add(process, 0)
        with pytest.raises(KeyError), background:
            raise KeyError
    finally:
        for each in (null, *held):
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process.returncode == -signal.SIGKILL


def test_a_stop_ends_all_processes_that_are_waited_for(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    stopped: list[str] = []
    background = Background(lambda: bool(stopped), lambda: stopped.append("told"))
    uploads = [start(["sleep", "1000"]), start(["sleep", "1000"])]
    background.add(uploads[0], "10min")
    background.add(uploads[1], None)
    threading.Timer(0.3, stopped.append, ["stop"]).start()
    with pytest.raises(SystemExit) as ended, background:
        pass
    assert ended.value.code == 143
    assert [each.returncode for each in uploads] == [-15, -15]
    assert stopped == ["stop", "told"]
    assert caplog.messages[-1].startswith("the run is stopped before the end of background process ")


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_process_is_killed_if_an_exception_leaves_the_session(start: Start, error: type[BaseException]) -> None:
    process = start([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
    process.stdout.readline()
    began = time.monotonic()

    def train() -> None:
        with el.session() as run:
            run.background(process)
            raise error

    with pytest.raises(error):
        train()
    assert process.returncode == -9
    assert time.monotonic() - began < children._TERMINATION


def test_a_fork_that_leaves_the_session_ends_no_process(start: Start) -> None:
    background, process = Background(), start(["sleep", "1000"])
    background.add(process, None)
    pid = os.fork()
    if not pid:
        try:
            background.__exit__(SystemExit, None, None)
            background.__exit__(None, None, None)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert process.poll() is None

"""Starting, ending and reading from real processes."""

from __future__ import annotations

import errno
import os
import queue
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from harness import alive, freeze, state_of, wait_for

from elastic_agents.console import Consoles
from elastic_agents.workers import guard as guard_module
from elastic_agents.workers import processes as processes_module
from elastic_agents.workers import sessions
from elastic_agents.workers.guard import Guard
from elastic_agents.workers.output import TAIL_LINES, OutputPump, Stream
from elastic_agents.workers.processes import ExecProcesses, StartRequest, ignores
from elastic_agents.workers.sessions import empty_sessions, kill_sessions, resume, session_members, stop_sessions
from elastic_launch.clock import MonotonicClock
from elastic_launch.config.output import Route

Exits = queue.SimpleQueue[tuple[int, int]]


@pytest.fixture
def exits() -> Exits:
    return queue.SimpleQueue()


@pytest.fixture
def processes(exits: Exits) -> Iterator[ExecProcesses]:
    processes = ExecProcesses(lambda pid, code: exits.put((pid, code)))
    yield processes
    processes.close()


def _shell(command: str) -> StartRequest:
    return StartRequest(["/bin/sh", "-c", command], {"PATH": os.environ["PATH"]}, 1, 2)


def test_exits_are_reported_with_their_codes_and_signals(processes: ExecProcesses, exits: Exits) -> None:
    plain = processes.start(_shell("exit 3"))
    assert exits.get(timeout=10) == (plain, 3)
    sleeper = processes.start(_shell("exec sleep 600"))
    processes.signal(sleeper, signal.SIGTERM)
    assert exits.get(timeout=10) == (sleeper, -signal.SIGTERM)


def test_signalling_a_reaped_process_does_nothing(processes: ExecProcesses, exits: Exits) -> None:
    pid = processes.start(_shell("exit 0"))
    exits.get(timeout=10)
    processes.signal(pid, signal.SIGKILL)
    assert exits.empty()


def test_a_group_gets_a_signal_and_a_process_that_ignores_it_is_known(
    processes: ExecProcesses, exits: Exits, tmp_path: Path
) -> None:
    program = "trap '' HUP; trap 'exit 3' INT; touch begun; sleep 600"
    pid = processes.start(StartRequest(["bash", "-c", f"cd {tmp_path}; {program}"], os.environ, 1, 2))
    wait_for("its traps", (tmp_path / "begun").exists)
    found = {number.name: ignores(pid, number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGWINCH)}
    assert found == {"SIGHUP": True, "SIGINT": False, "SIGWINCH": True}
    wait_for("the sleep", lambda: len(session_members({pid})) == 2)
    processes.signal_group(pid, signal.SIGINT)
    assert exits.get(timeout=60) == (pid, 3)  # the shell waits for the sleep
    processes.signal_group(pid, signal.SIGINT)
    assert not ignores(pid, signal.SIGHUP), "it is reaped"


WRAPPED = """
sh -c 'trap "sleep 0.3; touch saved; exit 0" TERM HUP; touch begun; while :; do sleep 0.05; done'
echo never
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("shell", ["sh", "bash", "bash that cleans up"])
def test_a_shell_that_a_signal_ends_counts_as_running_until_its_script_has_saved(
    processes: ExecProcesses, exits: Exits, tmp_path: Path, number: signal.Signals, shell: str
) -> None:
    trap = "trap 'touch cleaned' EXIT; " if "cleans" in shell else ""
    command = [shell.partition(" ")[0], "-c", f"cd {tmp_path}; {trap}{WRAPPED}"]
    pid = processes.start(StartRequest(command, os.environ, 1, 2))
    wait_for("the script", (tmp_path / "begun").exists)
    processes.terminate(pid, number)
    assert exits.get(timeout=60) == (pid, -number)
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "cleaned").exists() == bool(trap)


FORWARDS = """
trap 'kill -TERM $child; wait $child; exit 7' TERM
trap 'touch cleaned' EXIT
sh -c 'trap "echo >> signals" TERM; touch begun; while [ ! -e signals ]; do sleep 0.05; done; sleep 0.3' & child=$!
wait $child
"""


def test_a_wrapper_that_passes_the_signal_on_gets_it_alone(
    processes: ExecProcesses, exits: Exits, tmp_path: Path
) -> None:
    pid = processes.start(StartRequest(["bash", "-c", f"cd {tmp_path}; {FORWARDS}"], os.environ, 1, 2))
    wait_for("the script", (tmp_path / "begun").exists)
    processes.terminate(pid, signal.SIGTERM)
    assert exits.get(timeout=60) == (pid, 7)
    assert (tmp_path / "signals").read_text() == "\n", "once"
    assert (tmp_path / "cleaned").exists()


def test_a_script_that_does_not_end_is_killed_with_its_shell(
    processes: ExecProcesses, exits: Exits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_module, "has_group", lambda leader: True)  # as if some of it were unkillable
    ignoring = "trap '' TERM; touch begun; while :; do sleep 0.05; done"
    pid = processes.start(_shell(f'cd {tmp_path}; sh -c "{ignoring}"; echo never'))
    wait_for("the script", (tmp_path / "begun").exists)
    processes.terminate(pid, signal.SIGTERM)
    wait_for("the shell's end", lambda: state_of(pid) == "Z")
    processes.terminate(pid, signal.SIGTERM)  # its group still has its number
    with pytest.raises(queue.Empty):
        exits.get(timeout=0.3)
    processes.signal(pid, signal.SIGKILL)
    assert exits.get(timeout=60) == (pid, -signal.SIGTERM)
    wait_for("the script's end", lambda: not session_members({pid}))


def test_a_python_program_is_terminated_without_what_it_has_started(
    processes: ExecProcesses, exits: Exits, tmp_path: Path
) -> None:
    """A loader's processes would end before it, which would then fail."""
    code = (
        f"import subprocess, time; subprocess.Popen(['sleep', '600']); open({str(tmp_path / 'begun')!r}, 'w').close()"
    )
    pid = processes.start(StartRequest([sys.executable, "-c", f"{code}; time.sleep(600)"], os.environ, 1, 2))
    wait_for("its child", (tmp_path / "begun").exists)
    processes.terminate(pid, signal.SIGTERM)
    assert exits.get(timeout=60) == (pid, -signal.SIGTERM)
    assert len(session_members({pid})) == 1
    assert kill_sessions({pid}) == []


def test_a_command_that_cannot_be_executed_raises(processes: ExecProcesses) -> None:
    with pytest.raises(FileNotFoundError):
        processes.start(StartRequest(["/no/such/program"], {}, 1, 2))


def test_a_process_leads_a_session_that_is_killed_as_a_whole(
    processes: ExecProcesses, exits: Exits, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    pid = processes.start(_shell(f"sleep 600 & (sleep 600 & echo $! >> {pids}; wait) & echo $! >> {pids}; wait"))
    wait_for("the grandchildren", lambda: pids.exists() and len(pids.read_text().split()) == 2)
    # The shell, its sleeper, the subshell and that one's sleeper.
    wait_for("the whole session", lambda: len(session_members({pid})) == 4)
    assert kill_sessions({pid}) == []
    assert session_members({pid}) == []
    assert exits.get(timeout=10) == (pid, -signal.SIGKILL)


def test_a_session_is_empty_when_its_last_process_has_ended(
    processes: ExecProcesses, exits: Exits, tmp_path: Path
) -> None:
    left = processes.start(_shell(f"sleep 600 & echo $! > {tmp_path / 'pid'}"))
    ended = processes.start(_shell("exit 0"))
    assert {exits.get(timeout=30)[0] for _ in range(2)} == {left, ended}
    assert empty_sessions({left, ended}) == {ended}
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    wait_for("its end", lambda: empty_sessions({left, ended}) == {left, ended})


def test_hidden_processes_do_not_prevent_finding_ones_own(
    processes: ExecProcesses, exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other users' are under /proc with hidepid=1 (proc(5)): they are listed, and cannot be opened.

    Nor asked for their session, where a security module forbids it.
    """
    pid = processes.start(_shell("sleep 600"))

    def hiding(path: str, *mode: Any, **how: Any) -> Any:
        if path == "/proc/1/stat":
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        return open(path, *mode, **how)

    def forbidding(pid: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(sessions, "open", hiding, raising=False)
    monkeypatch.setattr(os, "getsid", forbidding)
    assert pid in session_members({pid})
    assert kill_sessions({pid}) == []
    assert exits.get(timeout=30) == (pid, -signal.SIGKILL)


def test_without_descriptors_no_process_counts_as_gone(processes: ExecProcesses, exits: Exits) -> None:
    pid = processes.start(_shell("sleep 600"))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))  # what is open stays so
    try:
        with pytest.raises(OSError, match="Too many open files"):
            kill_sessions({pid}, timeout=0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert alive(pid)
    assert kill_sessions({pid}) == []
    assert exits.get(timeout=30) == (pid, -signal.SIGKILL)


def test_the_guard_kills_the_sessions_of_an_agent_that_dies(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "from pathlib import Path\n"
        "from elastic_agents.workers.guard import Guard\n"
        "guard = Guard()\n"
        "kept, gone = (subprocess.Popen(['sleep', '600'], start_new_session=True).pid for _ in 'ab')\n"
        "guard.add(kept); guard.add(gone); guard.remove(gone)\n"
        f"guard.add_directory(Path({str(tmp_path / 'local')!r}))\n"
        "print(kept, gone, flush=True)\n"
        "sys.stdin.read()\n"
    )
    (tmp_path / "local" / "round_1" / "0").mkdir(parents=True)
    (tmp_path / "local" / "round_1" / "0" / "error.json").touch()
    (tmp_path / "local" / "link").symlink_to(tmp_path)
    agent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    assert agent.stdin is not None
    guarded, released = map(int, agent.stdout.readline().split())
    try:
        agent.kill()
        agent.wait()
        wait_for("the guarded session's end", lambda: not alive(guarded))
        wait_for("the directory's end", lambda: not (tmp_path / "local").exists())
        assert tmp_path.exists()
        assert alive(released)
    finally:
        os.kill(released, signal.SIGKILL)
        agent.stdin.close()
        agent.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_guard_that_dies_or_stops_is_replaced(number: signal.Signals) -> None:
    """Before, an agent that was killed after its guard left its workers running."""
    code = (
        "import os, subprocess, sys, time\n"
        "from elastic_agents.workers.guard import Guard\n"
        "guard = Guard()\n"
        "kept, gone = (subprocess.Popen(['sleep', '600'], start_new_session=True).pid for _ in 'ab')\n"
        "guard.add(kept); guard.add(gone)\n"
        "first = guard.pids[0]\n"
        f"os.kill(first, {int(number)})\n"
        "began = time.monotonic()\n"
        "for _ in range(20000):\n"
        "    guard.add(gone); guard.remove(gone)\n"
        "assert time.monotonic() - began < 60, 'it waits for the guard'\n"
        "while guard.pids[0] == first:\n"
        "    time.sleep(0.01)\n"
        "guard.add(gone); guard.remove(gone)\n"
        "print(kept, gone, flush=True)\n"
        "sys.stdin.read()\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    assert agent.stdin is not None
    guarded, released = map(int, agent.stdout.readline().split())
    try:
        agent.kill()
        agent.wait()
        wait_for("the guarded session's end", lambda: not alive(guarded))
        assert alive(released)
    finally:
        os.kill(released, signal.SIGKILL)
        agent.stdin.close()
        agent.stdout.close()


def test_workers_die_with_an_agent_that_is_killed_before_a_dead_guard_is_replaced() -> None:
    code = (
        "import os, signal, subprocess, sys, threading\n"
        "from elastic_agents.workers import guard as module\n"
        "guard = module.Guard()\n"
        "kept = subprocess.Popen(['sh', '-c', 'sleep 600 & wait'], start_new_session=True).pid\n"
        "guard.add(kept)\n"
        "module._start = threading.Event().wait\n"  # a process takes its time to start
        "print(kept, flush=True)\n"
        "os.kill(getattr(guard, 'pids', [getattr(guard, 'pid', 0)])[0], signal.SIGKILL)\n"
        "sys.stdin.read()\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    assert agent.stdin is not None
    guarded = int(agent.stdout.readline())
    time.sleep(0.03)
    agent.kill()
    agent.wait()
    try:
        wait_for("the guarded session's end", lambda: empty_sessions({guarded}))
    finally:
        kill_sessions({guarded})
        agent.stdin.close()
        agent.stdout.close()


@pytest.fixture
def sessions_of_two() -> Iterator[list[int]]:
    """Two sessions, of which the first has two processes."""
    commands = (["sh", "-c", "sleep 600 & wait"], ["sleep", "600"])
    started = [subprocess.Popen(command, start_new_session=True) for command in commands]
    sids = [process.pid for process in started]
    wait_for("its child", lambda: len(session_members({sids[0]})) == 2)
    yield sids
    kill_sessions(set(sids))
    for process in started:
        process.wait()


def _states(sids: list[int]) -> list[str]:
    return [state_of(pid) for pid in session_members(set(sids))]


def test_stopping_sessions_spares_what_was_stopped_before(sessions_of_two: list[int]) -> None:
    own = sessions_of_two[1]
    freeze(own)
    told: list[list[int]] = []
    stop_sessions(set(sessions_of_two), told.append)
    assert _states(sessions_of_two) == ["T"] * 3
    assert told[0] == told[1] == session_members({sessions_of_two[0]})
    assert resume(told[0], {*sessions_of_two})
    wait_for("its processes", lambda: _states(sessions_of_two[:1]) == ["S"] * 2)
    assert state_of(own) == "T"


def test_processes_of_other_sessions_are_not_resumed(sessions_of_two: list[int]) -> None:
    freeze(*sessions_of_two)
    assert not resume([sessions_of_two[0], 2**22 + 1], {sessions_of_two[1]})
    assert [state_of(sid) for sid in sessions_of_two] == ["T", "T"]


def test_the_guard_stops_sessions_when_the_lease_is_over(sessions_of_two: list[int]) -> None:
    times: list[float] = []
    held: set[int] = set()

    def stopped(at: float, pids: tuple[int, ...]) -> None:
        """Called more than once: for what is about to be stopped, and again when it was."""
        held.update(pids)
        times.append(at)

    with closing(Guard(stopped)) as guard:
        for sid in sessions_of_two:
            guard.add(sid)
        until = MonotonicClock().now() + 1.0
        guard.lease(until)
        wait_for("the stop", lambda: _states(sessions_of_two) == ["T"] * 3, 60)
        wait_for("its report", lambda: held == set(session_members(set(sessions_of_two))))
        assert until <= min(times) <= MonotonicClock().now()
        guard.lease(MonotonicClock().now() + 600)

        def run_on() -> bool:
            """Resume them, as the agent does after each report: the guard's other process may be late."""
            reports = len(times)
            resume(held, {*sessions_of_two})
            time.sleep(0.5)
            return "T" not in _states(sessions_of_two) and len(times) == reports

        wait_for("sessions that run on", run_on)


def test_what_the_guard_has_stopped_is_killed_if_the_agent_dies(sessions_of_two: list[int]) -> None:
    code = (
        "import sys\n"
        "from elastic_agents.workers.guard import Guard\n"
        "from elastic_launch.clock import MonotonicClock\n"
        "guard = Guard()\n"
        f"for sid in {sessions_of_two}:\n"
        "    guard.add(sid)\n"
        "guard.lease(MonotonicClock().now() + 1.0)\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        freeze(agent.pid)
        wait_for("the stop", lambda: _states(sessions_of_two) == ["T"] * 3)
        agent.kill()
    wait_for("their end", lambda: not session_members(set(sessions_of_two)))


def test_a_guard_process_that_is_replaced_has_the_lease(sessions_of_two: list[int]) -> None:
    stopped: queue.SimpleQueue[tuple[float, tuple[int, ...]]] = queue.SimpleQueue()
    with closing(Guard(lambda at, pids: stopped.put((at, pids)))) as guard:
        guard.add(sessions_of_two[1])
        until = MonotonicClock().now() + 4.0
        guard.lease(until)
        before = guard.pids
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_for("others", lambda: not {*before} & {*guard.pids})
        at, pids = stopped.get(timeout=60)
        assert at >= until
        assert pids == (sessions_of_two[1],)


def test_a_guard_that_is_stopped_does_not_keep_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "PATIENCE", 0.2)
    guard = Guard()
    pids = guard.pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    guard.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_dismissed_guard_kills_no_process() -> None:
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    guard = Guard()
    guard.add(sleeper.pid)
    guard.close()
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()


def test_orphans_of_unknown_sessions_are_reaped_and_awaited_children_are_not(
    exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_module, "SWEEP_EVERY", 0.2)
    mine = subprocess.Popen(["sh", "-c", "exit 7"])  # in this process's own session
    stranger = subprocess.Popen(["sh", "-c", "exit 7"], start_new_session=True)
    processes = ExecProcesses(lambda pid, code: exits.put((pid, code)))
    wait_for("the stranger to be reaped", lambda: not Path(f"/proc/{stranger.pid}").exists())
    processes.close()
    assert mine.wait() == 7
    assert stranger.wait() == 0  # as subprocess has it for a status that is lost


@pytest.fixture
def pump() -> Iterator[OutputPump]:
    with closing(Consoles()) as consoles, closing(OutputPump(consoles)) as pump:
        yield pump


def _written(pump: OutputPump, path: Path, data: bytes) -> Stream:
    console = os.open(os.devnull, os.O_WRONLY)
    stream, sink = pump.open(console, Route(path=path))
    with os.fdopen(sink, "wb") as file:
        file.write(data)
    assert stream.ended.wait(10)
    assert pump.flush()
    os.close(console)
    return stream


def test_output_is_kept_whole_in_the_file_and_its_end_in_memory(pump: OutputPump, tmp_path: Path) -> None:
    data = b"".join(b"line %d\n" % i for i in range(100_000)) + b"no end of line"
    stream = _written(pump, tmp_path / "log", data)
    assert (tmp_path / "log").read_bytes() == data
    expected = [f"line {i}" for i in range(100_000 - TAIL_LINES + 1, 100_000)] + ["no end of line"]
    assert [line for _, line in stream.tail()] == expected


def test_lines_without_end_are_bounded_in_memory(pump: OutputPump, tmp_path: Path) -> None:
    stream = _written(pump, tmp_path / "log", b"ValueError: " + b"x" * 5_000_000 + b"y\n")
    ((_, line),) = stream.tail()
    assert len(line) <= 2000
    assert line.startswith("ValueError: xxx")
    assert line.endswith("xxxy")
    assert line.count(" [...] ") == 1
    assert (tmp_path / "log").stat().st_size == 5_000_014


def test_a_file_that_cannot_be_written_stops_nothing(pump: OutputPump, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    stream = _written(pump, tmp_path / "file" / "as" / "directory", b"a\nb\n")
    assert [line for _, line in stream.tail()] == ["a", "b"]


def test_streams_that_daemons_hold_are_all_given_up_after_one_timeout(tmp_path: Path) -> None:
    """One after the other they would take longer than a test may."""
    with closing(Consoles()) as consoles, closing(OutputPump(consoles)) as pump:
        opened = [pump.open(2, Route(path=tmp_path / "log")) for _ in range(130)]
    assert all(stream.ended.is_set() for stream, _ in opened)
    for _, sink in opened:
        os.close(sink)


def test_a_console_whose_reader_is_gone_stops_nothing(pump: OutputPump, tmp_path: Path) -> None:
    source, console = os.pipe()
    os.close(source)
    stream, sink = pump.open(console, Route(path=tmp_path / "log"))
    os.write(sink, b"still here\n")
    os.close(sink)
    assert stream.ended.wait(10)
    assert pump.flush()
    os.close(console)
    assert (tmp_path / "log").read_bytes() == b"still here\n"


SHARED = """
import sys, time
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=1000)
print(block.name, flush=True)
time.sleep(600)
"""


def test_a_resource_tracker_that_the_guard_has_stopped_ends_once_its_session_is_killed() -> None:
    command = [sys.executable, "-c", SHARED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as worker:
        assert worker.stdout is not None
        block = Path("/dev/shm", worker.stdout.readline().decode().strip().lstrip("/"))
        assert block.exists()
        stop_sessions({worker.pid}, lambda pids: None)
        assert kill_sessions({worker.pid}) == []
        wait_for("the removal of what was shared", lambda: not block.exists())
        wait_for("the end of the tracker", lambda: empty_sessions({worker.pid}))


def test_a_resource_tracker_that_has_no_command_line_yet_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the moment in which it is executed, which lasts on a busy machine."""
    hidden = iter(range(4))

    def read_proc(path: str, read: Callable[[str], str] = sessions.read_proc) -> str:
        return "" if path.endswith("/cmdline") and next(hidden, None) is not None else read(path)

    command = [sys.executable, "-c", SHARED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as worker:
        assert worker.stdout is not None
        block = Path("/dev/shm", worker.stdout.readline().decode().strip().lstrip("/"))
        worker.kill()
        worker.wait()
        monkeypatch.setattr(sessions, "read_proc", read_proc)
        assert kill_sessions({worker.pid}) == []
        assert next(hidden, None) is None
        wait_for("the removal of what was shared", lambda: not block.exists())


def test_a_process_that_never_has_a_command_line_is_killed(
    processes: ExecProcesses, exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = processes.start(_shell("exec sleep 600"))
    monkeypatch.setattr(sessions, "read_proc", lambda path: "")
    assert kill_sessions({pid}) == []
    assert exits.get(timeout=10) == (pid, -signal.SIGKILL)

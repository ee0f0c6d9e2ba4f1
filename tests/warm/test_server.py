"""The warm server: what it loads, what it leaves out and why, and what happens when it dies."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event

import pytest
from harness import alive, wait_for
from warm_processes import Starter, config_for, warm_starter, write

from elastic_agents.warm import processes
from elastic_agents.warm.processes import WarmProcesses
from elastic_agents.workers.processes import StartRequest

FORKED = "import sys, os\nprint(int('yaml' in sys.modules))"
LOADED = "print('yaml' in sys.modules, 'odd' in sys.modules)"
NATIVE = """
import _thread, threading
begun, never = _thread.allocate_lock(), _thread.allocate_lock()
begun.acquire(), never.acquire()
def wait():
    with open(f"/proc/self/task/{{threading.get_native_id()}}/comm", "w") as name:
        name.write("{}")
    begun.release()
    never.acquire()
_thread.start_new_thread(wait, ())
begun.acquire()
"""  # starts a thread of that name which threading does not know


def _server(starter: Starter) -> int:
    assert isinstance(starter.processes, WarmProcesses)
    return starter.processes._server.pid


def _package(directory: Path, name: str, text: str) -> str:
    """Write an installed module: anything in a directory of that name counts as installed."""
    write(directory, f"site-packages/{name}.py", text)
    return str(directory / "site-packages")


def test_a_worker_finds_loaded_what_its_script_imports(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import sys\nprint('yaml' in sys.modules)\nimport yaml")
    with warm_starter(config_for(tmp_path, script, preload=())) as starter:
        starter.learn(script)
        assert starter.run(script).stdout == "True\n"


def test_what_a_script_imports_after_it_edits_its_path_is_loaded_unless_it_is_found_there(tmp_path: Path) -> None:
    write(tmp_path, "lib/nets.py", "import sys\nLOADED = [x in sys.modules for x in ('yaml', 'safetensors', 'odd')]")
    write(tmp_path, "lib/site-packages/odd.py", "HERE = 'lib'")
    place = _package(tmp_path, "odd", "HERE = 'installed'")
    text = (
        "import os, sys, yaml\nfrom pathlib import Path\nlib = Path(__file__).parent / 'lib'\n"
        "sys.path[:0] = [str(lib), str(lib / 'site-packages')]\n"
        "import nets, safetensors, odd\nprint(nets.LOADED, odd.HERE)"
    )
    script = write(tmp_path, "script.py", text)
    with warm_starter(config_for(tmp_path, script, preload=()), {"PYTHONPATH": place}) as starter:
        starter.learn(script)
        assert starter.run(script).stdout == "[True, True, False] lib\n"


def test_what_later_workers_import_besides_is_loaded_for_those_after_them(tmp_path: Path) -> None:
    """Also by a server that replaces one that has died."""
    place = _package(tmp_path, "odd", "")
    script = write(tmp_path, "script.py", f"import sys\n{LOADED}\nimport yaml\nif sys.argv[1:]: import odd")
    with warm_starter(config_for(tmp_path, script, preload=()), {"PYTHONPATH": place}) as starter:
        starter.learn(script)
        starter.learn(script, "odd")
        assert starter.run(script).stdout == "True True\n"
        assert isinstance(starter.processes, WarmProcesses)
        server = starter.processes._server
        os.kill(server.pid, signal.SIGKILL)
        wait_for("the loss", lambda: server.lost)
        starter.prepare()
        assert starter.run(script).stdout == "True True\n"


def test_workers_that_run_have_their_imports_learned_once_they_import_no_more(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import sys, time\nprint('yaml' in sys.modules)\nimport yaml\ntime.sleep(60)")
    with warm_starter(config_for(tmp_path, script, preload=())) as starter:
        processes = starter.processes
        assert isinstance(processes, WarmProcesses)
        pid = processes.start(_request(starter, script))
        wait_for("what it has imported to be imported", lambda: processes._server.usable)
        processes.signal(pid, signal.SIGKILL)
        assert starter.wait() == (pid, -signal.SIGKILL)
        assert starter.run(write(tmp_path, "forked.py", FORKED)).stdout == "1\n"


def test_an_import_that_fails_and_may_fail_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = _package(tmp_path, "half", "raise RuntimeError('not here')")
    _package(tmp_path, "odd", "import os\ntry:\n    import half\nexcept RuntimeError:\n    pass\nPID = os.getpid()")
    script = write(tmp_path, "script.py", f"import sys\n{LOADED}\nimport yaml, odd")
    with warm_starter(config_for(tmp_path, script, preload=()), {"PYTHONPATH": place}) as starter:
        starter.learn(script)
        began = Path(f"/proc/{_server(starter)}/cmdline").read_bytes()
        assert starter.run(script).stdout == "True True\n"
        assert b'"restarts": 0' in began
    assert not caplog.records


def test_a_module_that_is_only_looked_for_is_not_imported(tmp_path: Path) -> None:
    """Nor one that a process which the worker has forked imports."""
    place = _package(tmp_path, "odd", "")
    text = f"import sys, os, importlib.util\n{LOADED}\nimport yaml\nimportlib.util.find_spec('odd')"
    text += "\npid = os.fork()\nif not pid:\n    import safetensors\n    os._exit(0)\nos.waitpid(pid, 0)"
    text += "\nprint('safetensors' in sys.modules)"
    script = write(tmp_path, "script.py", text)
    with warm_starter(config_for(tmp_path, script, preload=()), {"PYTHONPATH": place}) as starter:
        starter.learn(script)
        assert starter.run(script).stdout == "True False\nFalse\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport yaml", "the script sets OMP_NUM_THREADS, which its"),
        ("import os\nos.environ['HUB'] = '/x'\nimport hub", "the script sets HUB, which its imports read"),
        ("import deadly", "the warm server has died as it imported deadly"),
        ("import asks_for_rests", "libraries import rests by that name, and the script finds it elsewhere"),
        ("import uses_tokens", "libraries import tokens by that name, and the script finds it elsewhere"),
    ],
)
def test_workers_are_executed_where_that_is_the_only_way(
    text: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _package(tmp_path, "hub", "import os\nHOME = os.environ.get('HUB')")
    _package(tmp_path, "tokens", "")
    _package(tmp_path, "uses_tokens", "import tokens")
    _package(tmp_path, "asks_for_rests", "try:\n    import rests\nexcept ImportError:\n    rests = None")
    place = _package(tmp_path, "deadly", "import os\nif os.environ.get('RANK') is None: os.abort()")
    write(tmp_path, "mine/tokens.py", "")
    write(tmp_path, "mine/rests/any.txt", "")  # a package without __init__.py
    script = write(tmp_path, "mine/script.py", text)
    caplog.set_level(logging.INFO)
    with warm_starter(config_for(tmp_path, script, preload=()), {"PYTHONPATH": place, "RANK": "0"}) as starter:
        assert isinstance(starter.processes, WarmProcesses)
        starter.learn(script)
        pid = starter.processes.start(_request(starter, script))
        assert starter.wait() == (pid, 0)
        assert starter.processes.forked == 0
    assert reason in caplog.text


def test_a_variable_that_any_of_the_workers_sets_before_its_imports_has_all_executed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "import os, sys, time\nif os.environ['RANK'] == '1': os.environ['OMP_NUM_THREADS'] = '2'\nimport yaml\n"
    script = write(tmp_path, "script.py", f"{text}time.sleep(60)")
    caplog.set_level(logging.INFO)
    with warm_starter(config_for(tmp_path, script, preload=())) as starter:
        assert isinstance(starter.processes, WarmProcesses)
        pids = []
        for rank in "012":
            starter.env["RANK"] = rank
            pids.append(starter.processes.start(_request(starter, script)))
        reason = "the script sets OMP_NUM_THREADS, which its imports read"
        try:
            wait_for("a reason", lambda: reason in caplog.text, 20)
        finally:
            for pid in pids:
                starter.processes.signal(pid, signal.SIGKILL)
        assert {starter.wait()[0] for _ in pids} == set(pids)
        assert not starter.processes._server.usable


def test_records_of_workers_that_have_ended_take_no_descriptors(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import yaml")
    with warm_starter(config_for(tmp_path, script, preload=())) as starter:
        for _ in range(2):
            starter.learn(script)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            starter.learn(script)
        assert len(os.listdir("/proc/self/fd")) == before


def _request(starter: Starter, script: str) -> StartRequest:
    return StartRequest([sys.executable, "-u", script], starter.env, 1, 2)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "starts threads"),
        (NATIVE.format("pool"), "starts threads that do not end for a fork"),
        ("import os\nRANK = int(os.environ.get('LOCAL_RANK', 0))", "reads LOCAL_RANK, which differs between workers"),
        ("import os\nRANK = 'RANK' in os.environ", "reads RANK, which differs between workers"),
        (
            "import multiprocessing\nLOCK = multiprocessing.Lock()",
            "makes a semaphore or memory that workers would share",
        ),
        ("import socket\nPAIR = socket.socketpair()", "keeps open socket:"),
        ("import os\nLOG = open(os.path.join(os.path.dirname(__file__), 'log'), 'w')", "keeps open /"),
        (
            # As the driver's file, of which there is none here.
            "import sys\nwatch = sys.modules.get('elastic_agents.warm._import_watch', sys)\n"
            "watch.DEVICES = (__file__,)\n"
            "DEVICE = open(__file__)",
            "initializes a device",
        ),
        ("import subprocess\nCHILD = subprocess.Popen(['sleep', '60'])", "starts a process"),
    ],
)
def test_a_module_that_forks_would_change_is_left_out_and_named(
    text: str, what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = _package(tmp_path, "odd", text)
    script = write(tmp_path, "script.py", f"import sys\n{LOADED}\nimport odd, yaml")
    with warm_starter(config_for(tmp_path, script, preload=()), {"PYTHONPATH": place}) as starter:
        starter.learn(script, env={"LOCAL_RANK": "3"})
        assert starter.run(script, env={"LOCAL_RANK": "3"}).stdout == "True False\n"
    # The first of the reasons, or a later one: a lock of multiprocessing starts a process, too, from Python 3.14 on.
    assert re.search(f"odd is not loaded ahead: its import .*{re.escape(what)}", caplog.text)
    with warm_starter(config_for(tmp_path, script, preload=(), no_preload=("odd",)), {"PYTHONPATH": place}) as starter:
        starter.learn(script)
        assert starter.run(script).stdout == "True False\n"
    assert caplog.text.count("odd is not loaded ahead") == 1


def test_a_module_whose_threads_no_fork_misses_is_loaded_ahead(tmp_path: Path) -> None:
    """As pyarrow, and with it transformers beside datasets: its jemalloc starts a thread."""
    place = _package(tmp_path, "odd", NATIVE.format("jemalloc_bg_thd"))
    script = write(tmp_path, "script.py", f"import sys\n{LOADED}\nimport odd, yaml")
    with warm_starter(config_for(tmp_path, script, preload=()), {"PYTHONPATH": place}) as starter:
        starter.learn(script)
        assert starter.run(script).stdout == "True True\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import sys\nsys.settrace(lambda *_: None)", "a debugger or profiler watches each process from its start"),
        ("import sys\nsys.setprofile(lambda *_: None)", "a debugger or profiler watches each process from its start"),
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
            "the interpreter has threads from its start",
        ),
    ],
)
def test_workers_are_executed_where_something_watches_each_process(
    text: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As coverage does with its ``sitecustomize``."""
    write(tmp_path, "start/sitecustomize.py", text)
    script = write(tmp_path, "script.py", "import yaml")
    caplog.set_level(logging.INFO)
    with warm_starter(config_for(tmp_path, script), {"PYTHONPATH": str(tmp_path / "start")}) as starter:
        assert isinstance(starter.processes, WarmProcesses)
        pid = starter.processes.start(_request(starter, script))
        assert starter.wait() == (pid, 0)
        assert starter.processes.forked == 0
    assert reason in caplog.text


def test_a_worker_whose_environment_matters_at_import_is_executed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It alone: the others are forked."""
    place = _package(tmp_path, "hub", "import os\nHOME = os.environ.get('HUB')")
    script = write(tmp_path, "script.py", "import sys, hub, os\nopen(sys.argv[1], 'w').write(str(hub.HOME))")
    caplog.set_level(logging.INFO)
    with warm_starter(config_for(tmp_path, script, preload=()), {"PYTHONPATH": place, "HUB": "a"}) as starter:
        assert isinstance(starter.processes, WarmProcesses)
        starter.learn(script, os.devnull)
        found = []
        for number, env in enumerate([{}, {"HUB": "b"}, {"OMP_NUM_THREADS": "7"}, {"HF_HOME": "/x"}]):
            note = tmp_path / str(number)
            argv = [sys.executable, "-u", script, str(note)]
            starter.prepare()
            pid = starter.processes.start(StartRequest(argv, {**starter.env, **env}, 1, 2))
            assert starter.wait() == (pid, 0)
            found.append((note.read_text(), starter.processes.forked))
    assert found == [("a", 1), ("b", 1), ("a", 1), ("a", 2)]
    assert caplog.text.count("workers import for themselves: HUB differs between them and matters at import") == 1


def test_torch_checks_for_gpus_by_nvml_in_the_server_and_as_usual_in_the_worker(
    tmp_path: Path,
) -> None:
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    place = _package(tmp_path, "asks", f"import os\nSEEN = os.environ.get({name!r})")
    script = write(tmp_path, "script.py", f"import asks, os\nprint(asks.SEEN, os.environ.get({name!r}))")
    with warm_starter(config_for(tmp_path, script, preload=()), {"PYTHONPATH": place}) as starter:
        starter.learn(script)
        assert starter.run(script).stdout == "1 None\n"


def test_a_module_that_cannot_be_imported_raises_in_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = _package(tmp_path, "broken", "half = 1\nimport json\nraise RuntimeError('no licence')")
    script = write(tmp_path, "script.py", "import yaml, broken")
    with warm_starter(config_for(tmp_path, script, preload=()), {"PYTHONPATH": place}) as starter:
        starter.learn(script)
        ended = starter.run(script)
    assert (ended.code, ended.stderr.splitlines()[-1]) == (1, "RuntimeError: no licence")
    assert not caplog.records


def test_a_requested_module_is_preloaded_though_it_reads_a_rank(tmp_path: Path) -> None:
    place = _package(tmp_path, "odd", "import os\nos.environ.get('RANK')")
    script = write(tmp_path, "script.py", "import sys\nprint('odd' in sys.modules)")
    with warm_starter(config_for(tmp_path, script, preload=("odd",)), {"PYTHONPATH": place}) as starter:
        assert starter.run(script).stdout == "True\n"


def test_imports_may_print_what_they_like(tmp_path: Path) -> None:
    place = _package(tmp_path, "loud", "import sys\nprint('x' * 100_000)\nprint('hello', file=sys.stderr)")
    script = write(tmp_path, "script.py", "import loud\nprint('mine')")
    config = config_for(tmp_path, script, preload=())
    with warm_starter(config, {"PYTHONPATH": place}) as starter:
        starter.learn(script)
        assert starter.run(script).stdout == "mine\n"
    assert "hello" in (config.run_directory / f"imports-{config.node_id}.log").read_text()


def test_large_environments_and_odd_characters_arrive(tmp_path: Path) -> None:
    text = "import os, sys\nprint(len(os.environ['BIG']), ascii(sys.argv[1:]), os.environb[b'ODD'])"
    script = write(tmp_path, "script.py", text)
    with warm_starter(config_for(tmp_path, script)) as starter:
        env = {"BIG": "x" * 120_000, "ODD": os.fsdecode(b"\xff\n=\xc3")}
        told = starter.run(script, "ü", "\n", os.fsdecode(b"\xfe"), env=env)
    assert told.stdout == "120000 ['\\xfc', '\\n', '\\udcfe'] b'\\xff\\n=\\xc3'\n", told.stderr


def test_a_killed_server_ends_no_worker_and_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = write(tmp_path, "script.py", "import time\ntime.sleep(60)")
    with warm_starter(config_for(tmp_path, script)) as starter:
        worker = starter.start(script)
        os.kill(_server(starter), signal.SIGKILL)
        assert isinstance(starter.processes, WarmProcesses)
        server = starter.processes._server
        wait_for("the loss", lambda: server.lost)
        assert alive(worker)
        starter.processes.signal(worker, signal.SIGTERM)
        assert starter.wait() == (worker, -signal.SIGTERM)
        known: list[bool] = []
        starter.processes.when_ready(lambda: known.append(True))
        wait_for("the next server", lambda: known)
        assert starter.run(write(tmp_path, "forked.py", FORKED)).stdout == "1\n"
    assert "the warm server is gone; another one is started" in caplog.text


def test_the_loss_of_a_server_is_told_at_once_each_time(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", FORKED)
    with warm_starter(config_for(tmp_path, script)) as starter:
        processes = starter.processes
        assert isinstance(processes, WarmProcesses)
        losses: list[int] = []
        processes.when_lost(lambda: losses.append(processes._server.pid))
        for number in (1, 2):
            killed = _server(starter)
            os.kill(killed, signal.SIGKILL)
            wait_for("the loss", lambda number=number: len(losses) == number)
            assert losses[-1] == killed
            processes.replace_lost()
            assert processes._server.pid != killed
            wait_for("the next server", lambda: processes._server.usable)
        assert starter.run(script).stdout == "1\n"
    assert len(losses) == 2, "closing it does not count as a loss"


def test_a_server_that_is_lost_too_often_is_not_replaced_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MOST_REPLACED", 0)
    script = write(tmp_path, "script.py", FORKED)
    with warm_starter(config_for(tmp_path, script)) as starter:
        assert isinstance(starter.processes, WarmProcesses)
        server = starter.processes._server
        os.kill(_server(starter), signal.SIGKILL)
        wait_for("the loss", lambda: server.lost)
        for _ in range(2):
            starter.processes.replace_lost()
        assert starter.processes._server is server
    assert caplog.text.count("is gone, and was replaced 0 times: from now on, workers import for themselves") == 1


def test_a_server_that_cannot_be_replaced_is_closed_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptors that it has closed may be reused by other code by the second time."""
    script = write(tmp_path, "script.py", FORKED)
    with warm_starter(config_for(tmp_path, script)) as starter:
        assert isinstance(starter.processes, WarmProcesses)
        server = starter.processes._server
        os.kill(server.pid, signal.SIGKILL)
        wait_for("its loss", lambda: server.lost)
        monkeypatch.setattr("elastic_agents.warm.client.command", lambda settings: ["/nowhere"])
        starter.processes.when_ready(lambda: None)
        assert "there can be no warm server" in caplog.text
        reused = os.open(os.devnull, os.O_RDONLY)  # takes the lowest number that is free
        more = [os.dup(reused) for _ in range(10)]
        starter.processes.when_ready(lambda: None)
        for number in (reused, *more):
            os.close(number)


def test_where_the_server_does_not_answer_the_worker_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elastic_agents.warm.prefork.FORK_TIMEOUT", 0.3)
    script = write(tmp_path, "script.py", FORKED)
    with warm_starter(config_for(tmp_path, script)) as starter:
        server = _server(starter)
        os.kill(server, signal.SIGSTOP)
        assert isinstance(starter.processes, WarmProcesses)
        starter.prepare()
        with (tmp_path / "out").open("wb") as out:
            command = [sys.executable, "-u", script]
            pid = starter.processes.start(StartRequest(command, starter.env, out.fileno(), 2))
        assert starter.wait() == (pid, 0)
        assert (tmp_path / "out").read_text() == "0\n"
        # Its pending requests must never produce a worker: it is killed, and replaced.
        wait_for("its end", lambda: not alive(server))
        known: list[bool] = []
        starter.processes.when_ready(lambda: known.append(True))
        wait_for("the next server", lambda: known)
        monkeypatch.undo()
        assert starter.run(script).stdout == "1\n"
    assert caplog.text.count("workers import for themselves: the warm server does not answer") == 1


def test_starting_workers_does_not_wait_for_a_server_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the fix, the agent's main loop was blocked for as long as a fork may take."""
    script = write(tmp_path, "script.py", FORKED)
    with warm_starter(config_for(tmp_path, script)) as starter:
        os.kill(_server(starter), signal.SIGSTOP)
        monkeypatch.setattr("elastic_agents.warm.prefork.FORK_TIMEOUT", 1.0)
        prepared: list[float] = []
        began = time.monotonic()
        starter.processes.prepare(1, lambda: prepared.append(time.monotonic()))
        assert not prepared
        wait_for("the time that a fork may take", lambda: prepared)
        assert prepared[0] - began >= 1.0
        pid = starter.processes.start(StartRequest([sys.executable, "-u", script], starter.env, 1, 2))
        assert starter.wait() == (pid, 0)


def test_a_process_that_is_stopped_as_it_waits_for_work_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_agents.warm.prefork.ANSWER_TIMEOUT", 2.0)
    script = write(tmp_path, "script.py", FORKED)
    with warm_starter(config_for(tmp_path, script), ahead=2) as starter:
        assert isinstance(starter.processes, WarmProcesses)
        server = starter.processes._server
        parked = wait_for("processes that wait", lambda: [x.pid for x in server._idle] * (len(server._idle) == 2))
        for pid in parked:
            os.kill(pid, signal.SIGSTOP)
        starter.prepare()
        ended = starter.run(script)
        assert (ended.code, ended.stdout) == (0, "1\n")
        assert ended.pid not in parked
        assert not any(map(alive, parked))


def test_workers_start_while_the_processes_that_wait_are_asked_whether_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_agents.warm.prefork.ANSWER_TIMEOUT", 30.0)
    script = write(tmp_path, "script.py", FORKED)
    with warm_starter(config_for(tmp_path, script), ahead=3) as starter:
        assert isinstance(starter.processes, WarmProcesses)
        server = starter.processes._server
        slow, *others = wait_for(
            "processes that wait", lambda: [x.pid for x in server._idle] * (len(server._idle) == 3)
        )
        os.kill(slow, signal.SIGSTOP)
        checked = Event()
        starter.processes.prepare(1, checked.set)
        request = StartRequest([sys.executable, "-u", script], starter.env, 1, 2)
        assert {starter.processes.start(request) for _ in range(2)} == set(others)
        assert not checked.is_set()
        os.kill(slow, signal.SIGCONT)
        assert checked.wait(20)
        assert starter.processes.start(request) == slow
        assert {starter.wait() for _ in range(3)} == {(pid, 0) for pid in (slow, *others)}
        assert not server.lost


def test_processes_that_were_forked_ahead_become_workers(tmp_path: Path) -> None:
    """Signals sent to them while they waited are not the worker's, and one that has died is skipped."""
    script = write(tmp_path, "script.py", FORKED + "\nprint(os.environ['X'], len(os.listdir('/proc/self/fd')))")
    with warm_starter(config_for(tmp_path, script), ahead=3) as starter:
        by_fork = starter.run(script, env={"X": "0"})
        assert isinstance(starter.processes, WarmProcesses)
        server = starter.processes._server
        parked = wait_for("processes that wait", lambda: [x.pid for x in server._idle] * (len(server._idle) == 3))
        os.kill(parked[2], signal.SIGKILL)
        for pid in parked[:2]:
            os.kill(pid, signal.SIGTERM)
        environment = {"X": "0", "LONG": "x" * 100_000}  # more than a socket takes at once
        ended = starter.run(script, env=environment)
        assert (ended.code, ended.stdout) == (0, by_fork.stdout)
        assert ended.pid in parked[:2]
        assert not alive(parked[2])
        wait_for("as many again", lambda: len(server._idle) == 3)
    assert not any(map(alive, parked))


def test_each_process_is_reported_as_soon_as_it_waits_for_work(tmp_path: Path) -> None:
    """So the first worker begins while the second one is forked."""
    script = write(tmp_path, "script.py", FORKED)
    with warm_starter(config_for(tmp_path, script)) as starter:
        assert isinstance(starter.processes, WarmProcesses)
        server = starter.processes._server
        waiting: list[int] = []
        starter.processes.prepare(3, lambda: waiting.append(len(server._idle)))
        wait_for("three processes", lambda: len(waiting) == 3)
        assert waiting == [1, 2, 3]
        starter.processes.prepare(4, lambda: waiting.append(len(server._idle)))
        wait_for("a fourth", lambda: len(waiting) == 7)
        assert waiting[3:] == [3, 3, 3, 4]
        parked = {one.pid for one in server._idle}
        request = StartRequest([sys.executable, "-u", script], starter.env, 1, 2)
        assert {starter.processes.start(request) for _ in range(4)} == parked
        assert {starter.wait() for _ in range(4)} == {(pid, 0) for pid in parked}
        assert not _children(server.pid), "those that forked them are reaped"


def test_the_next_processes_are_forked_ahead_once_the_workers_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_agents.warm.client.REST", 3600.0)
    script = write(tmp_path, "script.py", FORKED)
    with warm_starter(config_for(tmp_path, script), ahead=2) as starter:
        assert isinstance(starter.processes, WarmProcesses)
        server = starter.processes._server
        wait_for("processes that wait before any worker begins", lambda: len(server._idle) == 2)
        assert starter.run(script).code == 0
        time.sleep(0.5)
        assert len(server._idle) == 1
        starter.processes.training()
        wait_for("as many again", lambda: len(server._idle) == 2)


def _children(parent: int) -> list[int]:
    with open(f"/proc/{parent}/task/{parent}/children") as children:
        return [int(pid) for pid in children.read().split()]


def test_neither_server_nor_workers_outlive_their_agent_though_it_has_no_guard(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import json, time\ntime.sleep(60)")
    driver = f"""
import sys, time
sys.path[:0] = {[p for p in sys.path if p]!r}
from pathlib import Path
from warm_processes import config_for, warm_starter
with warm_starter(config_for(Path({str(tmp_path)!r}), {script!r}), ahead=1) as starter:
    server = starter.processes._server
    worker = starter.start({script!r})
    while not server._idle:
        time.sleep(0.01)
    print(server.pid, server._idle[0].pid, worker, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pids = [int(pid) for pid in agent.stdout.readline().split()]
        assert all(map(alive, pids))
        agent.kill()
    wait_for("the end of the server, the worker and the process that waits for work", lambda: not any(map(alive, pids)))


def test_what_imports_do_to_the_environment_is_so_in_the_worker(tmp_path: Path) -> None:
    text = "import os\nos.environ['SET_BY_IMPORT'] = '1'\nos.environ.pop('GIVEN', None)"
    place = _package(tmp_path, "setting", text)
    found = "import os, setting\nprint(os.environ.get('SET_BY_IMPORT'), os.environ.get('GIVEN'))"
    script = write(tmp_path, "script.py", found)
    with warm_starter(config_for(tmp_path, script, preload=()), {"PYTHONPATH": place, "GIVEN": "1"}) as starter:
        starter.learn(script)
        assert starter.run(script).stdout == "1 None\n"


def test_imports_find_the_scripts_arguments(tmp_path: Path) -> None:
    place = _package(tmp_path, "curious", "import sys\nARGV = list(sys.argv)")
    script = write(tmp_path, "script.py", "import curious\nprint(curious.ARGV[1:])")
    with warm_starter(config_for(tmp_path, script, "--lr", "1", preload=()), {"PYTHONPATH": place}) as starter:
        starter.learn(script, "--lr", "1")
        assert starter.run(script, "--lr", "1").stdout == "['--lr', '1']\n"


def test_a_directory_that_comes_later_is_found(tmp_path: Path) -> None:
    late = tmp_path / "late"
    script = write(tmp_path, "script.py", "import yaml\nimport latecomer\nprint(latecomer.X)")
    with warm_starter(config_for(tmp_path, script, preload=()), {"PYTHONPATH": str(late)}) as starter:
        starter.learn(script)
        write(late, "latecomer.py", "X = 1")
        assert starter.run(script).stdout == "1\n"


def test_a_module_that_does_not_exist_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "import sys\nprint('yaml' in sys.modules)\ntry:\n    from yaml._six import x\nexcept ImportError: pass"
    script = write(tmp_path, "script.py", text)
    with warm_starter(config_for(tmp_path, script, preload=())) as starter:
        starter.learn(script)
        assert starter.run(script).stdout == "True\n"
    assert not caplog.records


def test_dead_orphans_are_reaped_while_workers_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_agents.workers.processes.SWEEP_EVERY", 0.05)
    text = "import os, subprocess, time\nos.system('sleep 0.01 &')\nos.system('sleep 0.01 &')\ntime.sleep(0.5)\n"
    text += f"open({str(tmp_path / 'died')!r}, 'w').close()\ntime.sleep(60)"
    script = write(tmp_path, "script.py", text)
    with warm_starter(config_for(tmp_path, script)) as starter:
        worker = starter.start(script)

        def orphans() -> int:
            mine = f"PPid:\t{os.getpid()}\n"
            states = (path / "status" for path in Path("/proc").iterdir() if path.name.isdecimal())
            return sum(mine in text and "Name:\tsleep\n" in text for text in map(_text, states))

        wait_for("that they have died", (tmp_path / "died").exists)
        wait_for("that they are reaped", lambda: not orphans())
        starter.processes.signal(worker, signal.SIGKILL)
        assert starter.wait() == (worker, -signal.SIGKILL)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

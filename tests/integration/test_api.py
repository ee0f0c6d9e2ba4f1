"""Runs that a Python program starts: elastic_launch.api."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import called
import pytest
import torch
from called_logs import OwnSpecs
from etcd_servers import cluster, endpoints
from harness import SCRIPTS, SLOWNESS, alive, free_port, tree, wait_for
from torch.distributed.elastic import metrics
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from elastic_agents.calls import caller as calling
from elastic_launch.api import LaunchConfig, LocalElasticAgent, elastic_launch
from elastic_launch.config.launch_config import LaunchConfig as OwnConfig
from elastic_launch.config.launch_config import Limits


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put each run's files into the test's own directory, and let workers find the functions of ``called``."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def configured(directory: Path, **options: Any) -> LaunchConfig:
    given: dict[str, Any] = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "rdzv_backend": "c10d"}
    given |= {"max_restarts": 0, "logs_specs": DefaultLogsSpecs(log_dir=str(directory / "logs"))}
    return LaunchConfig(**{**given, **options})


def test_a_function_returns_and_leaves_its_callers_process_unchanged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [number for number in signal.Signals if number not in (signal.SIGKILL, signal.SIGSTOP)]

    def own() -> tuple[object, ...]:
        handlers = [signal.getsignal(number) for number in numbers]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        limits = Path("/proc/self/limits").read_text()
        return dict(os.environ), os.getcwd(), list(sys.path), handlers, mask, limits, os.getpriority(os.PRIO_PROCESS, 0)

    configurations: list[Any] = []
    monkeypatch.setattr(metrics, "initialize_metrics", configurations.append)
    before = own()
    config = configured(tmp_path, metrics_cfg={"sink": "file"})
    results = elastic_launch(config, called.describe)("a", {"b": (1, 2)}, "rank ${local_rank}")
    assert own() == before
    assert [found.params for found in configurations] == [{"sink": "file"}]
    assert sorted(results) == [0, 1]
    for rank, found in results.items():
        assert found["args"] == ("a", {"b": (1, 2)}, f"rank {rank}")
        assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert (found["ROLE_NAME"], found["ROLE_RANK"], found["ROLE_WORLD_SIZE"]) == ("default_role", str(rank), "2")
    # A run without a name gets a unique one; nothing is printed unless this process logs.
    assert len({found["TORCHELASTIC_RUN_ID"] for found in results.values()}) == 1
    assert capfd.readouterr() == ("", "")


def test_a_failure_is_torchs_and_restarts_are_exhausted_first(tmp_path: Path) -> None:
    calls, began = tmp_path / "calls", int(time.time())
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(configured(tmp_path, max_restarts=1), called.fail)("1", "no way", str(calls))
    assert sorted({line.split()[1] for line in calls.read_text().splitlines()}) == ["0", "1"]
    assert caught.value.name == "fail"
    assert list(caught.value.failures) == [1]
    rank, failure = caught.value.get_first_failure()
    assert (rank, failure.local_rank, failure.exitcode) == (1, 1, 1)
    assert isinstance(failure.message, dict)
    assert failure.message["message"] == "ValueError: no way"
    assert "in fail" in failure.message["extraInfo"]["py_callstack"]
    assert "elastic_agents" not in failure.message["extraInfo"]["py_callstack"]
    assert began <= failure.timestamp <= time.time() + 1
    # It stays where the caller's own @record looks for it.
    assert json.loads(Path(failure.error_file).read_text())["message"] == failure.message
    assert Path(failure.error_file).is_relative_to(tmp_path / "logs")


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named_by_its_signal(tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(configured(tmp_path, nproc_per_node=1), called.end_with)("SIGKILL")
    failure = caught.value.failures[0]
    assert failure.exitcode == -signal.SIGKILL
    assert failure.message == f"Signal 9 (SIGKILL) received by PID {failure.pid}"


def test_forked_workers_have_what_the_caller_has(tmp_path: Path) -> None:
    shared = {"a": [1, 2]}
    fails = tmp_path / "failed"

    def work(more: Any) -> tuple[object, ...]:
        if os.environ["RANK"] == "1" and not fails.exists():
            fails.touch()
            raise ValueError("once")
        return shared, more(), os.environ["TORCHELASTIC_RESTART_COUNT"], signal.getsignal(signal.SIGTERM)

    config = configured(tmp_path, start_method="fork", max_restarts=1)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(elastic_launch(config, work), lambda: 3).result()
    assert found == {rank: (shared, 3, "1", signal.getsignal(signal.SIGTERM)) for rank in (0, 1)}


def test_forked_workers_do_not_collect_the_callers_garbage(tmp_path: Path) -> None:
    """To destroy a process group there would wait for threads that exist in the caller's process only."""

    class Group:
        def __del__(self) -> None:
            (tmp_path / f"destroyed-{os.getpid()}").touch()

    def work() -> int:
        gc.collect()
        return os.getpid()

    gc.disable()
    try:
        group = Group()
        group.itself = group  # type: ignore[attr-defined]
        del group
        config = configured(tmp_path, start_method="fork", nproc_per_node=1)
        worker = elastic_launch(config, work)()[0]
    finally:
        gc.enable()
    assert not (tmp_path / f"destroyed-{worker}").exists()


def reap(number: int, frame: object) -> None:
    """Wait for every child, as some programs do on SIGCHLD."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.parametrize("on_child", [signal.SIG_IGN, pytest.param(reap, marks=pytest.mark.soak)])
def test_what_the_caller_has_set_up_does_not_disturb_forked_workers(
    tmp_path: Path, on_child: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    threads = torch.get_num_threads()
    fails = tmp_path / "failed"

    def work() -> tuple[object, ...]:
        if os.environ["RANK"] == "1" and not fails.exists():
            fails.touch()
            os.kill(os.getpid(), signal.SIGUSR1)
            raise ValueError("once")
        print("computed", float(torch.ones(600, 600).mm(torch.ones(600, 600)).sum()))
        return torch.get_num_threads(), signal.getsignal(signal.SIGCHLD) is on_child

    mine, theirs = socket.socketpair()
    with mine, theirs, contextlib.ExitStack() as undo:
        for end in (mine, theirs):
            end.setblocking(False)
        undo.callback(signal.signal, signal.SIGCHLD, signal.signal(signal.SIGCHLD, on_child))
        undo.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, lambda *_: None))
        undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(theirs.fileno()))
        undo.callback(torch.set_num_threads, threads)
        torch.set_num_threads(2)
        torch.ones(600, 600).mm(torch.ones(600, 600))  # OpenMP's threads exist from now on
        found = elastic_launch(configured(tmp_path, start_method="fork", max_restarts=1), work)()
        told = mine.recv(4096) if on_child is reap else b""
        with pytest.raises(BlockingIOError):
            mine.recv(4096)
    assert found == {0: (1, True), 1: (1, True)}
    assert set(told) <= {signal.SIGCHLD}  # a worker's signals are not the caller's
    assert set(capfd.readouterr().out.splitlines()) == {"computed 216000000.0"}


def test_an_exception_while_the_agent_starts_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Enough(Exception):
        pass

    def stop(number: int, frame: object) -> None:
        raise Enough

    def execute(*args: Any, **options: Any) -> Any:
        process = started(*args, **options)
        os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.5)  # until that thread has taken it
        return process

    started = calling.started
    monkeypatch.setattr(calling, "started", execute)
    before = signal.signal(signal.SIGALRM, stop)
    over = threading.Event()
    # It takes the signal that this thread blocks, and then the handler runs here.
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        with pytest.raises(Enough):
            elastic_launch(configured(tmp_path), "sleep")("600")
        assert signal.getsignal(signal.SIGALRM) is stop
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGALRM, before)
        over.set()
        thread.join()


@pytest.mark.slow
def test_a_forked_worker_fails_and_ends_as_a_spawned_one(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    config = configured(tmp_path, start_method="fork")
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, called.fail)("1", "no way", os.devnull)
    message: Any = caught.value.failures[1].message
    assert message["message"] == "ValueError: no way"
    assert "elastic_agents" not in message["extraInfo"]["py_callstack"]
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, called.end_with)("KeyboardInterrupt")
    assert {failure.exitcode for failure in caught.value.failures.values()} == {-signal.SIGINT}
    watch = threading.Thread(target=lambda: (lingering(there), os.kill(os.getpid(), signal.SIGTERM)))
    watch.start()
    with pytest.raises(SignalException):
        elastic_launch(config, called.linger)(str(there))
    watch.join()
    assert not any(map(alive, lingering(there)))


@pytest.mark.soak
def test_results_are_those_of_the_last_round(tmp_path: Path) -> None:
    config = OwnConfig(limits=Limits(1, 1, 1), nproc=2)
    assert elastic_launch(config, called.fail_once)() == {0: "1", 1: "1"}


@pytest.mark.slow
def test_a_static_run_whose_worker_is_killed(tmp_path: Path) -> None:
    port = free_port()
    where = {"rdzv_backend": "static", "rdzv_endpoint": f"127.0.0.1:{port}", "rdzv_configs": {"rank": 0}}
    found = elastic_launch(configured(tmp_path, **where, max_restarts=1), called.kill_once)()
    assert found == {0: f"1{port}", 1: f"1{port}"}


@pytest.mark.slow
def test_a_worker_launches_workers_of_its_own(tmp_path: Path) -> None:
    found = elastic_launch(configured(tmp_path, nproc_per_node=1), called.call_again)(str(tmp_path))
    assert found == {0: ("0", {"spawn": ["0", "1"], "fork": ["0", "1"]})}


@pytest.mark.slow
def test_ways_to_end_without_a_result(tmp_path: Path) -> None:
    config = configured(tmp_path, nproc_per_node=1)
    assert elastic_launch(config, called.end_with)("SystemExit(0)") == {0: None}
    with pytest.raises(RuntimeError, match="exit code 0 before end_with returned"):
        elastic_launch(config, called.end_with)("os._exit(0)")
    config = configured(tmp_path, nproc_per_node=1, max_restarts=3)  # none of which is used
    with pytest.raises(ChildFailedError, match="a TextIOWrapper that cannot be pickled for the caller: cannot pickle"):
        elastic_launch(config, called.lock_of_pickles)(str(tmp_path / "calls"))
    with pytest.raises(ChildFailedError, match="a Unpicklable that cannot be pickled for the caller: Tried to serial"):
        elastic_launch(config, called.unpicklable)(str(tmp_path / "calls"))
    assert (tmp_path / "calls").read_text() == "00"
    with pytest.raises(RuntimeError, match="not here") as caught:
        elastic_launch(config, called.only_pickled)()
    assert caught.value.__notes__ == ["This was raised while the result of local rank 0 was unpickled."]


@pytest.mark.slow
def test_a_queue_of_multiprocessings_reaches_the_workers(tmp_path: Path) -> None:
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        elastic_launch(configured(tmp_path), called.put)(queue, 7)
        assert sorted([queue.get(), queue.get()]) == [("0", 7), ("1", 7)]
    finally:
        queue.close()
        del queue
        gc.collect()
        multiprocessing.resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_script_a_program_and_a_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text("import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(sys.argv[2])\n")
    assert elastic_launch(configured(tmp_path), str(script))(f"{out}-a-", 1) == {}
    assert elastic_launch(configured(tmp_path), sys.executable)("-u", str(script), f"{out}-b-", "${local_rank}") == {}
    found: list[object] = []
    start = elastic_launch(configured(tmp_path, nproc_per_node=1), "sh")
    thread = threading.Thread(target=lambda: found.append(start("-c", f"echo $RANK > {out}-c")))
    thread.start()
    thread.join(60 * SLOWNESS)
    assert found == [{}]
    assert "signals to this process do not reach the workers" in caplog.text
    texts = {path.name: path.read_text().strip() for path in tmp_path.glob("out-*")}
    assert texts == {"out-a-0": "1", "out-a-1": "1", "out-b-0": "0", "out-b-1": "1", "out-c": "0"}


class KeptMetrics(metrics.MetricHandler):
    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.found.append((metric_data.name, metric_data.value))


@pytest.fixture
def kept_metrics() -> Iterator[list[tuple[str, int]]]:
    handler = KeptMetrics()
    metrics.configure(handler, "torchelastic")
    yield handler.found
    metrics.configure(metrics.NullMetricHandler(), "torchelastic")


def test_an_agent_is_made_of_torchs_worker_spec(
    tmp_path: Path,
    kept_metrics: list[tuple[str, int]],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    parameters = RendezvousParameters("elastic-c10d", "", "spec", 1, 1, is_host=True)
    handler = get_rendezvous_handler(parameters)
    spec = WorkerSpec(
        "trainer", 2, handler, entrypoint=called.describe, args=("a",), max_restarts=0, monitor_interval=0.05
    )
    spec.master_addr, spec.master_port = "elsewhere", 42
    logs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), tee=Std.ALL)
    template = "[${role_name}-${local_rank}:${rank}]:"
    agent = LocalElasticAgent(spec, logs, exit_barrier_timeout=10, log_line_prefix_template=template)
    assert "exit_barrier_timeout=10 is not used" in caplog.text
    result = agent.run()
    assert (result.state, result.failures) == (WorkerState.SUCCEEDED, {})
    assert [result.return_values[rank]["ROLE_NAME"] for rank in (0, 1)] == ["trainer", "trainer"]
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    assert [result.return_values[0][name] for name in names] == ["elsewhere", "42", "True", "1"]
    assert sorted(capfd.readouterr().out.split()) == ["[trainer-0:0]:described", "[trainer-1:1]:described"]
    group = agent.get_worker_group()
    assert (group.group_rank, group.group_world_size, group.master_port) == (0, 1, 42)
    workers = [(x.global_rank, x.world_size, x.role_rank, x.role_world_size) for x in group.workers]
    assert workers == [(0, 2, 0, 2), (1, 2, 1, 2)]
    assert len({x.id for x in group.workers} - {None}) == 2
    assert agent.get_event_succeeded().metadata["group_rank"] == 0
    assert agent.get_event_succeeded().metadata["run_id"] == "spec"
    assert handler.shutdown()
    names = [name for name, _ in kept_metrics]
    assert names.count("workers.trainer.healthy") > 2  # as many as intervals, while the workers begin
    assert dict(kept_metrics)["workers.trainer.remaining_restarts"] == 0
    for name in (
        "workers.trainer.succeeded",
        "workers.trainer.run_success_no_retries",
        "SimpleElasticAgent.run.success",
    ):
        assert kept_metrics.count((name, 1)) == 1
    for name in ("_rendezvous", "_initialize_workers", "run"):
        assert names.count(f"SimpleElasticAgent.{name}.duration.ms") == 1


@pytest.mark.slow
def test_a_rendezvous_that_ends_without_enough_nodes(tmp_path: Path) -> None:
    conf, endpoint = {"min_wait": 0.5, "is_host": 1}, f"127.0.0.1:{free_port()}"
    config = configured(tmp_path, min_nodes=2, max_nodes=2, rdzv_endpoint=endpoint, rdzv_configs=conf)
    with pytest.raises(RendezvousTimeoutError):
        elastic_launch(config, called.describe)()


class Caller:
    """A program that launches a function of its own ``__main__``."""

    def __init__(self, directory: Path, function: str, *args: str, **options: Any) -> None:
        given = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "rdzv_backend": "c10d", "max_restarts": 0}
        command = [sys.executable, str(SCRIPTS / "calling.py"), function, json.dumps({**given, **options}), *args]
        env = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent), "TMPDIR": str(directory)}
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    def said(self) -> str:
        output, _ = self.process.communicate(timeout=90 * SLOWNESS)
        return output

    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.said().removeprefix("results "))
        return found


@pytest.fixture
def callers() -> Iterator[list[Caller]]:
    made: list[Caller] = []
    yield made
    for caller in made:
        caller.process.kill()
        caller.process.communicate()


@pytest.mark.slow
def test_two_programs_meet_and_each_gets_its_own_results(tmp_path: Path, callers: list[Caller]) -> None:
    where = {"max_nodes": 2, "min_nodes": 2, "rdzv_endpoint": f"127.0.0.1:{free_port()}", "run_id": "two"}
    for role, workers in (("reader", 1), ("trainer", 2)):
        callers.append(Caller(tmp_path, "place", role, **where, role=role, nproc_per_node=workers))
    reader, trainer = (caller.results() for caller in callers)
    assert sorted([*reader, *trainer]) == ["0", "1", "2"]
    assert (len(reader), len(trainer)) == (1, 2)
    # Functions of __main__ are found as multiprocessing finds them.
    assert list(reader.values()) == [["reader", "__mp_main__", next(iter(reader)), "3", "reader", "0", "1"]]
    assert [found[4:] for _, found in sorted(trainer.items())] == [["trainer", "0", "2"], ["trainer", "1", "2"]]


def lingering(directory: Path) -> list[int]:
    """Wait until both workers sleep; return their pids."""
    wait_for("both workers", lambda: len([path for path in directory.iterdir() if path.name in ("0", "1")]) == 2, 60)
    return [int((directory / rank).read_text()) for rank in "01"]


@pytest.mark.slow
def test_a_signal_to_the_caller_ends_the_workers_and_is_raised(tmp_path: Path, callers: list[Caller]) -> None:
    there = tmp_path / "there"
    there.mkdir()
    callers.append(Caller(tmp_path, "sleep", str(there)))
    workers = lingering(there)
    callers[0].process.send_signal(signal.SIGTERM)
    assert callers[0].said() == f"raised SignalException {signal.SIGTERM} True\n"
    assert [(there / f"{rank}.signal").read_text() for rank in "01"] == ["SIGTERM", "SIGTERM"]
    assert not any(map(alive, workers))


@pytest.mark.slow
def test_workers_end_with_a_caller_that_is_killed(tmp_path: Path, callers: list[Caller]) -> None:
    there = tmp_path / "there"
    there.mkdir()
    callers.append(Caller(tmp_path, "sleep", str(there)))
    workers = lingering(there)
    below = [pid for pid in tree(callers[0].process.pid) if pid != callers[0].process.pid]
    assert set(workers) < set(below)
    callers[0].process.kill()
    wait_for("the end of agent, guard and workers", lambda: not any(map(alive, below)))
    assert (there / "0.signal").read_text() == "SIGTERM"


@pytest.mark.slow
def test_a_program_that_is_killed_is_replaced_by_another(tmp_path: Path, callers: list[Caller]) -> None:
    there = tmp_path / "there"
    there.mkdir()
    where = {"max_nodes": 2, "min_nodes": 2, "rdzv_endpoint": f"127.0.0.1:{free_port()}", "run_id": "two"}

    def begin(*, is_host: bool) -> Caller:
        options = {**where, "nproc_per_node": 1, "rdzv_configs": {"is_host": is_host}}
        callers.append(Caller(tmp_path, "wait_for_another_round", str(there), **options))
        return callers[-1]

    host, killed = begin(is_host=True), begin(is_host=False)
    lingering(there)
    killed.process.kill()
    found = {**begin(is_host=False).results(), **host.results()}
    assert sorted(found) == ["0", "1"]
    assert len(set(found.values())) == 1
    assert found["0"] != "1"


@pytest.mark.slow
def test_a_worker_whose_timer_expires_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", str(tmp_path / "timers"))
    config = configured(tmp_path, max_restarts=1)
    assert elastic_launch(config, called.too_late_once)(str(tmp_path)) == {0: "done", 1: "done"}
    why = "its timer 'step' expired: signal 9 (SIGKILL)"
    assert re.fullmatch(rf"rank 1 on node \S+: {re.escape(why)}", (tmp_path / "reason").read_text())
    assert not (tmp_path / "timers").exists()


@pytest.mark.slow
def test_logs_specs_of_another_class_decide_where_output_goes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    specs = OwnSpecs(log_dir=str(tmp_path / "own"), redirects=Std.OUT)
    config = configured(tmp_path, nproc_per_node=1, logs_specs=specs, run_id="own", max_restarts=1)
    script = "test $TORCHELASTIC_RESTART_COUNT = 1 || exit 3; echo redirected $SET_BY_SPECS; echo shown >&2"
    elastic_launch(config, "sh")("-c", script)
    (kept,) = (tmp_path / "own").glob("own_*/attempt_1/0/stdout.log")
    assert kept.read_text() == "redirected\n"
    output, errors = capfd.readouterr()
    assert (output, "shown" in errors.splitlines()) == ("", True)


@pytest.mark.soak
def test_a_run_on_etcd(tmp_path: Path) -> None:
    (tmp_path / "etcd").mkdir()
    with cluster(tmp_path / "etcd") as servers:
        config = configured(tmp_path, rdzv_backend="etcd", rdzv_endpoint=endpoints(servers), run_id="once")
        assert sorted(elastic_launch(config, called.describe)("x")) == [0, 1]


def test_what_cannot_be_a_launch_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(entrypoint: Any, args: Any = (), **options: Any) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is what is tested
            elastic_launch(configured(tmp_path, **options), entrypoint)(*args)
        return re.sub(r"\s+", " ", str(caught.value))

    assert "There is no entry point" in refused(None)
    assert refused(7) == "entrypoint 7 is neither a function nor a str. Give a function, or str(path)."
    assert "entrypoint PosixPath('train.py') is neither a function nor a str." in refused(Path("train.py"))
    assert "monitor_interval 0 is not a time to wait" in refused(called.describe, monitor_interval=0)
    assert "is not supported" in refused(called.describe, rdzv_backend="carrier-pigeon")
    missing = refused(called.describe, rdzv_backend="etcd-v2", rdzv_endpoint="localhost:1")
    assert missing == "rdzv_backend etcd-v2 cannot be used: The 'etcd' module is required but not installed."
    assert "leaves no room" in refused(called.describe, rdzv_configs={"dead_after": 0.5, "beat": 1})
    assert "--start-method never is not one" in refused(called.describe, start_method="never")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").touch()
    assert refused("nope.py") == f"entrypoint 'nope.py': there is no such script in {tmp_path}. Correct the path."
    assert "entrypoint 'nope': there is no such program on PATH or in " in refused("nope")
    assert "entrypoint 'nope.py': there is no such script in" in refused(sys.executable, args=("-u", "nope.py"))
    assert f"entrypoint '{tmp_path}' is a directory" in refused(str(tmp_path))
    assert "entrypoint 'notes' is not executable. chmod +x it, or have Python" in refused("notes")
    name = "test_what_cannot_be_a_launch_is_refused_before_anything_starts.<locals>.<lambda>"
    assert f"entrypoint {name} cannot be pickled for a worker that start_method='spawn'" in refused(lambda: None)
    assert "or use start_method='fork'" in refused(lambda: None)
    args = (1, threading.Lock())
    assert "argument 2 of entrypoint fail, a lock, cannot be pickled" in refused(called.fail, args=args)


@pytest.mark.slow
def test_a_function_in_a_main_without_a_file_is_forked_or_refused(tmp_path: Path) -> None:
    code = (
        "from elastic_launch.api import *\ndef f(): print('called'); return 7\n"
        "for method in ('fork', 'spawn'):\n"
        "    config = LaunchConfig(1, 1, 1, rdzv_backend='c10d', start_method=method)\n"
        "    print(elastic_launch(config, f)(), flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.stdout == "called\n{0: 7}\n"
    assert "ValueError: f is defined in a __main__ that is not a file" in done.stderr


def test_a_worker_spec_with_another_handler_is_refused(tmp_path: Path) -> None:
    handler = get_rendezvous_handler(RendezvousParameters("static", "127.0.0.1:29500", "x", 1, 1, rank=0))
    spec = WorkerSpec("trainer", 1, handler, entrypoint=called.describe)
    with pytest.raises(ValueError, match="StaticTCPRendezvous, whose rounds only torch's own"):
        LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(tmp_path)))


def test_a_worker_spec_that_cannot_run_has_a_failed_group(tmp_path: Path) -> None:
    handler = get_rendezvous_handler(RendezvousParameters("elastic-c10d", "", "x", 1, 1))
    spec = WorkerSpec("trainer", 1, handler, entrypoint=str(tmp_path / "none"))
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(tmp_path)))
    assert agent.get_worker_group().state == WorkerState.INIT
    with pytest.raises(ValueError, match="there is no such program"):
        agent.run()
    assert agent.get_worker_group().state == WorkerState.FAILED


@pytest.mark.slow
def test_an_exception_of_the_callers_own_ends_the_run(tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def stop(number: int, frame: object) -> None:
        raise Enough

    there = tmp_path / "there"
    there.mkdir()
    before = signal.signal(signal.SIGALRM, stop)
    try:
        watch = threading.Thread(target=lambda: (lingering(there), os.kill(os.getpid(), signal.SIGALRM)))
        watch.start()
        with pytest.raises(Enough):
            elastic_launch(configured(tmp_path), called.linger)(str(there))
        watch.join()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not any(map(alive, lingering(there)))


def test_a_signal_that_is_caught_is_raised_here(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    watch = threading.Thread(target=lambda: (lingering(there), os.kill(os.getpid(), signal.SIGINT)))
    watch.start()
    with pytest.raises(SignalException) as caught:
        elastic_launch(configured(tmp_path), called.linger)(str(there))
    watch.join()
    assert caught.value.sigval == signal.SIGINT

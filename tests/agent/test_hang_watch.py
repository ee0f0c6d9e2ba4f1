"""Looking at processes from outside, and the thread that watches a node's workers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
import torch
from harness import freeze, wait_for

import elastic_launch
from elastic_agents.hangs import hang_watch, lateness, processes
from elastic_agents.hangs.collectives import last_collectives
from elastic_agents.hangs.hang_watch import HangWatch, WatchedRound, WatchedWorker
from elastic_agents.hangs.processes import (
    collectives_of,
    is_stopped,
    is_traced,
    moved,
    others_in_session,
    stacks_of,
    usage,
)
from elastic_agents.workers.frames import Frame, Stack
from elastic_agents.workers.processes import catches
from elastic_launch import collective_dump
from elastic_launch.collective_dump import REQUESTS
from elastic_launch.failure import Doing
from elastic_launch.rendezvous.wire.messages import Collective, StacksTaken, Stalled
from elastic_launch.shared_progress import Activity, SharedProgress
from elastic_launch.stack_dump import SIGNAL
from elastic_launch.system.threads import ThreadDied, VitalThread, deaths_reported_to

BEGIN = """
import os, sys, threading, time
from elastic_launch.collective_dump import dump_collectives_on_request, forget_collectives
from elastic_launch.stack_dump import dump_stacks_on_signal
dump_stacks_on_signal()
dump_collectives_on_request()
def stands(): time.sleep(600)
def spins():
    while True: pass
def forks():
    if os.fork() == 0:
        dump_stacks_on_signal()
        spins()
    stands()
def reads():
    while True: os.pread(0, 65536, 0); time.sleep(0.01)
def exchanges():
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier(dist.new_group([0], group_desc="earlier"))
    dist.destroy_process_group()
    forget_collectives()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0], group_desc="mine")
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(2, 3))
    dist.all_reduce(torch.ones(2, 3))
    dist.broadcast(torch.ones(5, dtype=torch.int64), 0, group)
    stands()
print("begun", flush=True)
"""


@contextmanager
def process(directory: Path, does: str) -> Iterator[int]:
    """A process that leads a session and writes its stacks on request, as a worker does."""
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(directory / "error.json")}
    script = directory / "script.py"
    script.write_text(BEGIN + does)
    with (
        script.open() as file,
        subprocess.Popen(
            [sys.executable, str(script)], env=env, stdin=file, stdout=subprocess.PIPE, start_new_session=True
        ) as started,
    ):
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == b"begun\n"
            yield started.pid
        finally:
            os.killpg(started.pid, signal.SIGKILL)


def moves(pid: int) -> bool:
    before = usage(pid)
    time.sleep(0.5)
    return moved(before, usage(pid))


@pytest.fixture
def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_by_py_spy", lambda pid: [])


@pytest.mark.parametrize(
    ("does", "busy"), [("stands()", False), ("spins()", True), ("forks()", True), ("reads()", True)]
)
def test_a_session_moves_if_one_of_its_processes_does_anything(tmp_path: Path, does: str, busy: bool) -> None:
    with process(tmp_path, does) as pid:
        wait_for("its state", lambda: moves(pid) is busy)


def test_the_stacks_of_a_process_and_of_one_that_it_forked_and_that_asks_for_it(
    tmp_path: Path, without_py_spy: None
) -> None:
    with process(tmp_path, "forks()") as pid:
        (other,) = wait_for("a second process", lambda: [x for x in others_in_session(pid) if catches(x, SIGNAL)])
        for process_, does in ((pid, "stands"), (other, "spins")):

            def stands(pid: int = process_, does: str = does) -> bool:
                return [frame.function for frame in stacks_of(pid, tmp_path)[-1]] == [does, "forks", "<module>"]

            wait_for("the stack", stands)


def test_a_stopped_process_is_not_signalled(tmp_path: Path, without_py_spy: None) -> None:
    with process(tmp_path, "stands()") as pid:
        assert not is_stopped(pid)
        freeze(pid)
        assert is_stopped(pid)
        assert not is_traced(pid)
        assert stacks_of(pid, tmp_path) == []


def test_a_process_without_a_handler_is_not_signalled(without_py_spy: None, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as started:
        assert stacks_of(started.pid, tmp_path) == []
        assert started.poll() is None
        started.kill()


def test_the_collectives_that_a_process_has_begun(tmp_path: Path) -> None:
    with process(tmp_path, "exchanges()") as pid:

        def found() -> tuple[Collective, ...]:
            return last_collectives(collectives_of(pid, tmp_path))

        wait_for("its collectives", lambda: len(found()) == 2, 60)
        broadcast, all_reduce = found()
        assert (broadcast.description, broadcast.number, broadcast.what) == ("mine", 1, "broadcast of Long[5]")
        assert all_reduce == Collective("0", "default_pg", 3, "all_reduce of Float[2, 3]", waits=False, backend="gloo")
        freeze(pid)
        assert found() == ()


def test_a_process_without_torch_has_begun_no_collectives(tmp_path: Path) -> None:
    with process(tmp_path, "stands()") as pid:
        dump = collectives_of(pid, tmp_path)
        assert json.loads(dump) == {"first": [], "dumps": []}
        assert last_collectives(dump) == ()


def test_a_dump_that_is_too_large_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = ModuleType("recorder")
    recorder._dump_fr_trace_json = lambda *what: b"x" * (collective_dump.LONGEST_DUMP + 1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)
    assert last_collectives(collective_dump._dump()) == ()


def test_collectives_of_nccl2_are_in_a_record_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.15.0 recorded them for a backend of this name that was written in Python."""
    entry = json.loads(
        '{"collective_seq_id": 1, "input_dtypes": ["Float"], "input_sizes": [[3]], "is_p2p": false, "pg_id": 0, '
        '"process_group": ["0", "default_pg"], "profiling_name": "nccl2:all_reduce", "retired": false, '
        '"state": "scheduled", "time_created_ns": 1}'
    )
    records = {"nccl2": {"entries": [entry], "pg_status": {"0": {}}}}
    recorder = ModuleType("recorder")

    def dump(_collectives: bool, _active: bool, name: str = "gloo") -> bytes:
        return json.dumps(records.get(name, {"pg_status": {}})).encode()

    recorder._dump_fr_trace_json = dump  # type: ignore[attr-defined]
    recorder.ProcessGroupNCCL2 = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)
    monkeypatch.setattr(collective_dump, "_first", {})
    (found,) = last_collectives(collective_dump._dump())
    assert found == Collective("0", "default_pg", 1, "all_reduce of Float[3]", waits=True, backend="nccl2")
    collective_dump.forget_collectives()
    assert last_collectives(collective_dump._dump()) == (), "the group is gone"


def test_a_process_that_does_not_answer_has_no_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "DUMP", 0.1)
    assert collectives_of(os.getpid(), tmp_path) == b"", "there is no FIFO"
    os.mkfifo(tmp_path / REQUESTS)
    assert collectives_of(os.getpid(), tmp_path) == b"", "no thread reads it"
    reader = os.open(tmp_path / REQUESTS, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert collectives_of(os.getpid(), tmp_path) == b"", "it does not answer"
    finally:
        os.close(reader)


class Reports:
    """A watch over one process, with short times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, name, value in (
            (hang_watch, "TICK", 0.02),
            (hang_watch, "WINDOW", 0.3),
            (lateness, "LEAST", {Activity.STEP: 0.5}),
            (lateness, "FORMING", 0.5),
        ):
            monkeypatch.setattr(module, name, value)
        self.progress = SharedProgress.make("test")
        self.all: list[Stalled] = []

    @contextmanager
    def watching(
        self, pid: int, directory: Path, timeout: float | None = 0.0, *, placed: bool = False, finishing: bool = False
    ) -> Iterator[HangWatch]:
        worker = WatchedWorker(3, 0, pid, directory, "logs", placed)
        with closing(self.progress), closing(HangWatch(self.progress.read, self.all.append, timeout)) as watching:
            watching.follow(WatchedRound(1, (worker,), finishing))
            yield watching

    def come(self, right: Callable[[Stalled], bool]) -> Stalled:
        return wait_for("a report", lambda: next((report for report in self.all if right(report)), None))


def test_late_workers_are_reported_and_again_and_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports(monkeypatch)
    with process(tmp_path, "stands()") as pid, reports.watching(pid, tmp_path) as watching:
        reports.progress.write(1, 6, Activity.STEP)
        report = reports.come(lambda report: not report.workers[0].moves)
        assert (report.round, report.doing, report.workers[0].state) == (1, Doing(Activity.STEP, 6), "code")
        (worker,) = report.workers
        assert (worker.rank, worker.local_rank, worker.pid, worker.log) == (3, 0, pid, "logs")
        assert worker.frame.startswith("script.py:")
        assert worker.frame.endswith(" in stands")
        assert "in <module>" in worker.stack[0]
        assert "in stands" in watching.stacks_of(1)
        assert watching.stacks_of(2) == ""
        again = reports.come(lambda other: other.seconds > report.seconds)
        assert again.seconds >= report.seconds * 1.1
        reports.progress.write(1, 7, Activity.STEP)
        assert reports.come(lambda report: not report.seconds) == Stalled(1)


def test_a_new_leader_learns_at_once_that_workers_are_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports(monkeypatch)
    monkeypatch.setattr(hang_watch, "AGAIN", 1e6)
    with process(tmp_path, "stands()") as pid, reports.watching(pid, tmp_path) as watching:
        reports.progress.write(1, 6, Activity.STEP)
        reports.come(lambda report: report.seconds > 0)
        watching.linked()
        wait_for("a second report", lambda: sum(report.seconds > 0 for report in reports.all) == 2)


def test_workers_that_are_no_longer_to_advance_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports(monkeypatch)
    with process(tmp_path, "spins()") as pid, reports.watching(pid, tmp_path) as watching:
        reports.progress.write(1, 6, Activity.STEP)
        assert reports.come(lambda report: report.seconds > 0).workers[0].moves
        watching.follow(None)
        assert reports.come(lambda report: not report.seconds) == Stalled(1)


def test_a_stopped_worker_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports(monkeypatch)
    with process(tmp_path, "stands()") as pid, reports.watching(pid, tmp_path):
        freeze(pid)
        reports.progress.write(1, 6, Activity.STEP)
        assert reports.come(lambda report: report.seconds > 0).workers[0].state == "stopped"


def test_a_worker_that_does_not_take_its_place_in_a_round_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = Reports(monkeypatch)
    reports.progress.write(0, 6, Activity.STEP)
    with process(tmp_path, "stands()") as pid, reports.watching(pid, tmp_path, placed=True):
        assert reports.come(lambda report: report.seconds > 0).doing.activity == Activity.FORMING
        reports.progress.write(1, 6, Activity.UNWATCHED)
        assert reports.come(lambda report: not report.seconds) == Stalled(1), "its script has not come to the training"


def test_a_worker_that_was_stopped_as_it_restores_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports(monkeypatch)
    with process(tmp_path, "stands()") as pid, reports.watching(pid, tmp_path):
        reports.progress.write(1, 6, Activity.RESTORE)
        with pytest.raises(AssertionError, match="a report"):
            wait_for("a report", lambda: reports.all, 0.5)
        freeze(pid)
        report = reports.come(lambda report: report.seconds > 0)
        assert (report.doing.activity, report.workers[0].state) == (Activity.RESTORE, "stopped")


def test_a_first_step_is_reported_early_if_nothing_is_done_twice_at_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = Reports(monkeypatch)
    with process(tmp_path, "stands()") as pid, reports.watching(pid, tmp_path):
        reports.progress.write(1, 6, Activity.FIRST_STEP)
        report = reports.come(lambda report: report.seconds > 0)
        assert (report.early, report.workers[0].moves, report.workers[0].state) == (True, False, "code")
        reports.progress.write(1, 7, Activity.STEP)
        assert reports.come(lambda report: not report.seconds) == Stalled(1)
        reports.all.clear()
        assert not reports.come(lambda report: report.seconds > 0).early


def test_a_first_batch_that_does_not_come_is_logged_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        return [x.getMessage() for x in caplog.records if "waits for data" in x.getMessage()]

    monkeypatch.setattr(hang_watch, "FIRST_BATCH", 0.5)
    monkeypatch.setattr(hang_watch, "STILL", 0.1)
    reports = Reports(monkeypatch)
    reads = tmp_path / "elastic_launch/training/data"
    reads.mkdir(parents=True)
    with process(reads, "stands()") as pid, reports.watching(pid, reads) as watching:
        wait_for("two lines", lambda: len(said()) == 2)
        assert re.search(
            r"rank 3 has done no step .* after round 1 began, .*; it stands at script.py:\d+ in stands", said()[0]
        )
        reports.progress.write(1, 6, Activity.FIRST_STEP)
        wait_for("a third line", lambda: len(said()) == 3)
        reports.progress.write(1, 7, Activity.STEP)
        watching.follow(WatchedRound(2, (WatchedWorker(3, 0, pid, reads, "logs"),)))
        reports.progress.write(2, 7, Activity.STEP)
        seen = len(said())
        with pytest.raises(AssertionError, match="a line"):
            wait_for("a line", lambda: len(said()) > seen, 1.0)
    caplog.clear()
    watching_code = Reports(monkeypatch).watching
    with (
        process(tmp_path, "stands()") as pid,
        watching_code(pid, tmp_path),
        pytest.raises(AssertionError, match="a line of code that reads no data"),
    ):
        wait_for("a line of code that reads no data", said, 1.0)


@pytest.mark.parametrize(("case", "logged"), [("reads on", True), ("has begun to read", False), ("evaluates", False)])
def test_only_who_waits_for_a_first_batch_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str, logged: bool
) -> None:
    """A rank that is at another line the next time, as one that downloads in a loop, still waits."""
    looks: list[int] = []
    ours = f"{Path(elastic_launch.__file__).parent}/training"

    def stacks(pid: int, directory: Path) -> list[Stack]:
        looks.append(len(looks))
        line = len(looks) if case == "reads on" else 1
        above = Frame(f"{ours}/{'evaluations' if case == 'evaluates' else 'loop'}.py", 1, "_f")
        reads = Frame(f"{ours}/data/batches.py", 1, "_fetch") if looks[-1] or case != "has begun to read" else above
        return [(Frame("data.py", line, "__getitem__"), reads, above)]

    monkeypatch.setattr(hang_watch, "stacks_of", stacks)
    monkeypatch.setattr(hang_watch, "FIRST_BATCH", 0.3)
    monkeypatch.setattr(hang_watch, "STILL", 0.1)
    with process(tmp_path, "stands()") as pid, Reports(monkeypatch).watching(pid, tmp_path):
        wait_for("three looks", lambda: len(looks) >= 3)
        assert ("waits for data" in caplog.text) is logged


def test_first_batches_are_watched_without_hangs_and_only_the_loaders_processes_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits = Frame(f"{Path(torch.__file__).parent}/utils/data/dataloader.py", 1, "_try_get_data")
    serves = Frame(f"{Path(torch.__file__).parent}/utils/data/_utils/worker.py", 1, "_worker_loop")
    ours = Frame(f"{Path(elastic_launch.__file__).parent}/training/data/epochs.py", 1, "epoch_from")
    found = {1: (Frame("serve.py", 1, "accept"),), 2: (Frame("data.py", 7, "__getitem__"), serves)}
    monkeypatch.setattr(hang_watch, "others_in_session", lambda pid: [*found])
    monkeypatch.setattr(hang_watch, "stacks_of", lambda pid, directory: [found.get(pid, (waits, ours))])
    monkeypatch.setattr(hang_watch, "FIRST_BATCH", 0.1)
    monkeypatch.setattr(hang_watch, "STILL", 0.1)
    reports = Reports(monkeypatch)
    with process(tmp_path, "stands()") as pid, reports.watching(pid, tmp_path, timeout=None):
        wait_for("a line", lambda: "waits for data" in caplog.text)
        assert "it stands at data.py:7 in __getitem__; processes of its loader: 1" in caplog.text
        reports.progress.write(1, 6, Activity.STEP)
        with pytest.raises(AssertionError, match="a report"):
            wait_for("a report", lambda: reports.all, 1.0)


@pytest.mark.parametrize("moving", ["spins", "elsewhere each time"])
def test_a_first_step_in_which_something_is_done_is_not_reported_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moving: str
) -> None:
    lines = count()
    if moving != "spins":
        monkeypatch.setattr(hang_watch, "stacks_of", lambda pid, directory: [(Frame("train.py", next(lines), "load"),)])
    reports = Reports(monkeypatch)
    with process(tmp_path, "spins()" if moving == "spins" else "stands()") as pid, reports.watching(pid, tmp_path):
        reports.progress.write(1, 6, Activity.FIRST_STEP)
        with pytest.raises(AssertionError, match="a report"):
            wait_for("a report", lambda: reports.all, 1.0)
    assert (next(lines) > 2) is (moving != "spins")


@pytest.mark.parametrize("finishing", [False, True])
def test_a_stopped_worker_whose_steps_are_not_known_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finishing: bool
) -> None:
    reports = Reports(monkeypatch)
    with process(tmp_path, "stands()") as pid, reports.watching(pid, tmp_path, finishing=finishing):
        with pytest.raises(AssertionError, match="a report"):
            wait_for("a report", lambda: reports.all, 0.5)
        freeze(pid)
        report = reports.come(lambda report: report.seconds > 0)
        assert (report.doing, report.workers[0].state, report.early) == (Doing(), "stopped", False)
        os.kill(pid, signal.SIGCONT)
        assert reports.come(lambda report: not report.seconds) == Stalled(1)


def test_a_worker_that_is_stopped_and_continued_again_and_again_is_not_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As programs do that limit the CPU of others."""
    reports = Reports(monkeypatch)
    with process(tmp_path, "spins()") as pid, reports.watching(pid, tmp_path):
        end = time.monotonic() + 2
        while time.monotonic() < end:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.05)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.01)
        assert reports.all == []


def test_workers_whose_steps_are_not_known_are_late_once_they_are_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = Reports(monkeypatch)
    with process(tmp_path, "stands()") as pid, reports.watching(pid, tmp_path, timeout=1.0):
        report = reports.come(lambda report: report.seconds > 0)
        assert (report.doing, report.asked) == (Doing(), True)


def test_a_worker_that_others_have_left_behind_is_late_once_it_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = Reports(monkeypatch)
    with process(tmp_path, "stands()") as pid, reports.watching(pid, tmp_path, timeout=1.0, finishing=True) as watching:
        report = reports.come(lambda report: report.seconds > 0)
        assert (report.doing, report.asked) == (Doing(ends=True), True)
        # One that reports steps may wait for its last checkpoint.
        watching.follow(None)
        reports.come(lambda report: not report.seconds)
        reports.all.clear()
        reports.progress.write(1, 6, Activity.STEP)
        watching.follow(WatchedRound(1, (WatchedWorker(3, 0, pid, tmp_path, "logs"),), finishing=True))
        with pytest.raises(AssertionError, match="a report"):
            wait_for("a report", lambda: reports.all, 0.8)


def test_where_no_stack_can_be_read_the_answer_names_what_could(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_watch, "stacks_of", lambda pid, directory: [])
    told: list[Stalled | StacksTaken] = []
    with closing(HangWatch(lambda rank: None, told.append)) as watching:
        watching.tell_stacks(4, (WatchedWorker(0, 0, os.getpid(), tmp_path),))
        (answer,) = wait_for("the answer", lambda: told)
    assert isinstance(answer, StacksTaken)
    assert "py-spy reads those of any worker" in answer.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_stacks_that_cannot_be_taken_are_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(worker: WatchedWorker) -> None:
        raise UnicodeError("no text")

    monkeypatch.setattr(hang_watch, "_dumps", fail)
    told: list[Stalled | StacksTaken] = []
    died: list[ThreadDied] = []
    with deaths_reported_to(died.append), closing(HangWatch(lambda rank: None, told.append)) as watching:
        watching.tell_stacks(4, (WatchedWorker(0, 0, os.getpid(), tmp_path),))
        wait_for("the answer", lambda: told)
        assert told == [StacksTaken(4, "the stacks could not be taken: UnicodeError: no text\n")]
        assert "the stacks of the workers could not be taken: UnicodeError: no text" in caplog.text
        monkeypatch.setattr(VitalThread, "start", _no_thread)
        wait_for("the end of that thread", lambda: not watching._taking.is_alive() if watching._taking else True)
        watching.tell_stacks(5, ())
    assert told[1:] == [StacksTaken(5, "the stacks could not be taken: can't start new thread\n")]
    assert not died, "the run goes on"


def _no_thread(thread: VitalThread) -> None:
    raise RuntimeError("can't start new thread")

"""What is reported about a worker that failed: in error files, in its stderr, by its exit code."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import SLOWNESS
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from elastic_agents.outcome import result_of
from elastic_agents.policy_types import WorkerExit
from elastic_agents.workers import failures
from elastic_agents.workers.failures import OutOfMemoryKills, about, printed_last, raised_in, report
from elastic_launch.batch import BatchError
from elastic_launch.contract import Placement
from elastic_launch.error_file import ErrorFile, do_not_retry, read_error_file, write_error_file
from elastic_launch.errors import FINAL_NOTE, REPEATS_NOTE, UsageError
from elastic_launch.events.sentences import ending, how_failed
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.snapshot.errors import CheckpointWriteError, UnsupportedStateError
from elastic_launch.system.memory_groups import memory_groups
from elastic_launch.training.ranks.replicas import ReplicasDifferError
from elastic_launch.training.transaction import NonFiniteLossError

PLACEMENT = Placement(5, 1, 0, 8, 2, 4, "127.0.0.1", 29500, 5, 8, False)

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "    main()",
    "ValueError: boom",
)


def failed(error_file: Path, **arguments: Any) -> Failure:
    """A report on a worker that, by default, has exit code 1 and left nothing."""
    worker: dict[str, Any] = {"ran": 1.5, "log": error_file.parent, "trained": None}
    values: dict[str, Any] = {
        "world_size": 8,
        "exit_code": 1,
        "ago": 0.5,
        "error": read_error_file(error_file),
        "stderr": (),
        "stopped": False,
        "out_of_memory": lambda: False,
    }
    worker |= {name: arguments.pop(name) for name in worker if name in arguments}
    return report(about("a", 3, PLACEMENT, 42, **worker), **{**values, **arguments})


@pytest.fixture
def error_file(tmp_path: Path) -> Path:
    return tmp_path / "error.json"


# Exit codes in words.


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "signal 9 (SIGKILL)"),
        (-11, "signal 11 (SIGSEGV)"),
        (-15, "signal 15 (SIGTERM)"),
        (-99, "signal 99"),
    ],
)
def test_exit_codes_as_text(exit_code: int, text: str) -> None:
    assert ending(exit_code) == text


# Error files.


def test_the_error_file_of_record(error_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch writes it for a function under ``@record``."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    try:
        raise ValueError("boom\nmore")
    except ValueError as error:
        ErrorHandler().record_exception(error)
    found = read_error_file(error_file)
    assert found is not None
    assert found.message == "ValueError: boom\nmore"
    assert found.traceback[0] == "Traceback (most recent call last):"
    assert found.traceback[-2:] == ("ValueError: boom", "more")
    assert abs(found.at - time.time()) < 60


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("RuntimeError: \n\n  it is empty\nmore", "RuntimeError: it is empty"),
        ("RuntimeError:\n", "RuntimeError:"),
        ("ValueError: boom\nmore", "ValueError: boom"),
        ("\nout of luck", "out of luck"),
    ],
)
def test_a_cause_of_one_line_is_the_first_one_with_text(error_file: Path, message: str, said: str) -> None:
    write_error_file(error_file, ErrorFile(message, TRACEBACK))
    assert failed(error_file).error == said


def test_a_printed_exception_whose_message_begins_with_an_empty_line(error_file: Path) -> None:
    printed = [*TRACEBACK[:-1], "RuntimeError: ", "  it is empty", FINAL_NOTE]
    found = failed(error_file, stderr=printed)
    assert (found.error, found.kind) == ("RuntimeError: it is empty", "fatal")


def test_an_error_file_with_a_plain_message(error_file: Path) -> None:
    error_file.write_text('{"message": "out of luck"}')
    found = read_error_file(error_file)
    assert found is not None
    assert (found.message, found.traceback) == ("out of luck", ())


@pytest.mark.parametrize("extra", [{}, {"extraInfo": None}, {"extraInfo": {}}, {"extraInfo": ["x"]}])
def test_an_error_file_without_a_traceback(error_file: Path, extra: dict[str, Any]) -> None:
    error_file.write_text(json.dumps({"message": {"message": "ValueError: boom", **extra}}))
    found = read_error_file(error_file)
    assert found is not None
    assert (found.message, found.traceback) == ("ValueError: boom", ())


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b'{"message": 3}', b'{"message": null}', b"{}", b"\xff\xfe\xfd", b"[" * 100_000],
    ids=lambda content: f"{content[:16]!r}",
)
def test_an_invalid_error_file_is_ignored(error_file: Path, content: bytes) -> None:
    error_file.write_bytes(content)
    assert read_error_file(error_file) is None


def test_no_error_file(error_file: Path) -> None:
    assert read_error_file(error_file) is None
    assert read_error_file(error_file.parent) is None


def test_only_a_regular_file_of_bounded_size_is_read(error_file: Path) -> None:
    """The worker chose what it is: the agent must not wait for a pipe's other end, nor read without end."""
    os.mkfifo(error_file)
    assert read_error_file(error_file) is None
    error_file.unlink()
    error_file.symlink_to("/dev/zero")
    assert read_error_file(error_file) is None
    error_file.unlink()
    error_file.write_text(json.dumps({"message": "x" * 17_000_000}))
    assert read_error_file(error_file) is None


# Workers that ask not to be retried.


def test_a_worker_reports_that_a_retry_would_not_help(
    error_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    with pytest.raises(SystemExit) as ended:
        do_not_retry("the data set is not complete")
    assert ended.value.code == 93
    assert capsys.readouterr().err == "the data set is not complete\n"
    found = failed(error_file, exit_code=93)
    assert (found.kind, how_failed(found)) == ("fatal", "exit code 93: the data set is not complete")
    stopped = failed(error_file, exit_code=-15, stopped=True)
    assert stopped.kind == "fatal", "it was stopped as it ended"


def test_what_a_worker_was_handling_is_its_traceback(
    error_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    try:
        raise ValueError("boom")
    except ValueError:
        with pytest.raises(SystemExit):
            do_not_retry("of no use")
    assert failed(error_file, exit_code=93).detail[-1] == "ValueError: boom"
    assert "ValueError: boom\nof no use\n" in capsys.readouterr().err


def test_without_a_launcher_the_reason_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(SystemExit):
        do_not_retry("of no use")
    assert capsys.readouterr().err == "of no use\n"


def test_exit_code_93_means_the_same_in_any_language(error_file: Path) -> None:
    assert failed(error_file, exit_code=93, stderr=("no licence",)).kind == "fatal"


def test_a_user_who_quits_the_debugger_is_not_asked_again(error_file: Path) -> None:
    printed = (*TRACEBACK[:-1], "bdb.BdbQuit")
    assert failed(error_file, stderr=printed).kind == "fatal"
    assert failed(error_file, exit_code=-15, stopped=True, supposed=True, stderr=printed).kind == "crash"


# The library's errors that a restart would only repeat.


def _traceback(error: Exception) -> tuple[str, ...]:
    try:
        raise error
    except type(error) as raised:
        return tuple(line for part in traceback.format_exception(raised) for line in part.rstrip().splitlines())


class OfAScript(UsageError):
    """A user's own exception, unrelated to this project's code."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __str__(self) -> str:
        return f"{self.what} cannot be\nin two lines"


ODD = UnsupportedStateError("A checkpoint cannot hold x.", "Convert it.")
FINAL = [UsageError("every=-1", "Write steps."), BatchError("micro=0"), ODD, OfAScript("x")]


@pytest.mark.parametrize("error", FINAL, ids=type)
def test_misuse_of_the_library_is_final(error_file: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    printed = _traceback(error)
    assert failed(error_file, stderr=printed).kind == "fatal", "an executed worker"
    assert failed(error_file, stderr=[f"[rank0]: {line}" for line in printed]).kind == "fatal"
    stopped = failed(error_file, exit_code=-15, stopped=True, stderr=[f"[rank0]: {line}" for line in printed])
    assert stopped.kind == "fatal", "it had raised before it was stopped"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    try:
        raise error
    except type(error) as raised:
        ErrorHandler().record_exception(raised)
    found = failed(error_file)
    assert (found.kind, how_failed(found)) == (
        "fatal",
        f"exit code 1: {type(error).__name__}: {str(error).splitlines()[0]}",
    )


def test_no_other_error_counts_as_misuse_of_the_library(error_file: Path) -> None:
    """It may be quoted by another exception, may have been handled, or may only have the same name."""
    printed = _traceback(UsageError("every=-1"))
    assert failed(error_file, stderr=(*printed, "ValueError: other")).kind == "crash", "an error that followed"
    assert failed(error_file, stderr=(*printed, "going on"), exit_code=-11).kind == "crash"
    assert failed(error_file, exit_code=-15, stopped=True, supposed=True, stderr=printed).kind == "crash"
    unlike: Any = ValueError("other")
    unlike.__cause__ = UsageError("every=-1")
    for other in (
        CheckpointWriteError("no room"),
        ReplicasDifferError("differs"),
        ValueError("UsageError: no"),
        unlike,
    ):
        assert failed(error_file, stderr=_traceback(other)).kind == "crash"
    error_file.write_text(json.dumps({"message": {"message": "UsageError: another library's"}}))
    assert failed(error_file).kind == "crash"


def test_a_copy_of_a_final_error_is_reported_once() -> None:
    """For example, a copy of an exception from a loader's process."""
    for copied in (pickle.loads(pickle.dumps(FINAL[0])), copy.copy(FINAL[0])):
        assert copied.__notes__ == [FINAL_NOTE]


@pytest.mark.parametrize("recorded", [False, True])
def test_where_a_restart_computes_the_same_again_is_reported(error_file: Path, recorded: bool) -> None:
    error = NonFiniteLossError("The loss is nan on rank 1.", "It diverges.")
    error.add_note(f"{REPEATS_NOTE}step 3.")
    printed = _traceback(error)
    if recorded:
        write_error_file(error_file, ErrorFile("NonFiniteLossError: The loss is nan", printed))
    found = failed(error_file, stderr=[f"[rank0]: {line}" for line in printed])
    assert (found.kind, found.repeats) == ("crash", f"{REPEATS_NOTE}step 3.")
    assert not failed(error_file.parent / "none", stderr=(*printed, "going on")).repeats


# Reports.


def test_a_report_names_the_worker_and_its_node(error_file: Path) -> None:
    found = failed(error_file)
    assert (found.node_id, found.round, found.rank, found.local_rank, found.pid) == ("a", 3, 5, 1, 42)
    assert (found.exit_code, found.ran, found.log) == (1, 1.5, str(error_file.parent))


def test_the_error_file_goes_before_stderr(error_file: Path) -> None:
    error_file.write_text(
        json.dumps({"message": {"message": "KeyError: 'x'", "extraInfo": {"py_callstack": "line 1\nline 2"}}})
    )
    found = failed(error_file, stderr=TRACEBACK)
    assert how_failed(found) == "exit code 1: KeyError: 'x'"
    assert found.detail == ("line 1", "line 2")


def test_without_an_error_file_the_exception_is_found_in_stderr(error_file: Path) -> None:
    found = failed(error_file, stderr=("epoch 1", *TRACEBACK))
    assert how_failed(found) == "exit code 1: ValueError: boom"
    assert found.detail == ("epoch 1", *TRACEBACK)


def test_a_group_of_exceptions_is_found_by_its_own_line(error_file: Path) -> None:
    printed = _traceback(ExceptionGroup("two failed", [OSError("no disk"), ExceptionGroup("b", [ValueError()])]))
    chained = (*TRACEBACK, "", "During handling of the above exception, another exception occurred:", "", *printed)
    for stderr in (printed, chained):
        for lines in (stderr, ranked(stderr, 1)):
            assert failed(error_file, stderr=tuple(lines)).error == "ExceptionGroup: two failed (2 sub-exceptions)"
    assert failed(error_file, stderr=(*printed, *TRACEBACK)).error == "ValueError: boom"


def ranked(lines: Sequence[str], rank: int) -> list[str]:
    """As torch prints tracebacks once the process group is there."""
    return [f"[rank{rank}]: {line}" for line in lines]


def test_the_exception_is_found_after_torchs_rank_prefix(error_file: Path) -> None:
    assert how_failed(failed(error_file, stderr=ranked(TRACEBACK, 5))) == "exit code 1: ValueError: boom"


def test_a_later_warning_of_torch_is_not_the_exception(error_file: Path) -> None:
    warning = "[rank5]:[W1121 10:00:00.123456789 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not"
    found = failed(error_file, stderr=[*ranked(TRACEBACK, 5), warning])
    assert how_failed(found) == "exit code 1: ValueError: boom"


def test_output_without_a_traceback_is_not_an_exception(error_file: Path) -> None:
    found = failed(error_file, stderr=("no such option: --lr", "usage: train.py"))
    assert how_failed(found) == "exit code 1"
    assert found.detail == ("no such option: --lr", "usage: train.py")


def test_a_signal_is_named_and_the_end_of_stderr_kept(error_file: Path) -> None:
    found = failed(error_file, exit_code=-11, stderr=("Fatal Python error: Segmentation fault", "", "Thread 0x0001"))
    assert how_failed(found) == "signal 11 (SIGSEGV)"
    assert found.detail == ("Fatal Python error: Segmentation fault", "", "Thread 0x0001")


def test_a_message_is_one_line(error_file: Path) -> None:
    error_file.write_text(json.dumps({"message": {"message": "ValueError: one\ntwo\nthree"}}))
    assert how_failed(failed(error_file)) == "exit code 1: ValueError: one"


def test_an_empty_message(error_file: Path) -> None:
    error_file.write_text(json.dumps({"message": {"message": ""}}))
    assert how_failed(failed(error_file)) == "exit code 1"


def test_a_long_traceback_is_cut_at_its_beginning(error_file: Path) -> None:
    lines = [f"line {number}" for number in range(1000)]
    error_file.write_text(
        json.dumps({"message": {"message": "RecursionError", "extraInfo": {"py_callstack": "\n".join(lines)}}})
    )
    found = failed(error_file)
    assert found.detail[-1] == "line 999"
    assert len(found.detail) < 100


HOSTILE = {
    "emoji": "\N{PARTY POPPER}",
    "letters": "x",
    "NUL": "\0",
    "escapes": "\x1b[31m",
    "halves of characters": "\udcff",
    "quotes": '"\\\\',
    "right to left": "\u202e",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("lines", [1, 10_000])
def test_a_report_is_small_and_printable_for_any_exception(error_file: Path, text: str, lines: int) -> None:
    """The leader drops a link with a line of 1 MiB, and would treat the node as lost."""
    line = text * (100_000 // lines)
    huge = "\n".join(["ValueError: " + line] * lines)
    error_file.write_text(json.dumps({"message": {"message": huge, "extraInfo": {"py_callstack": huge}}}))
    for found in (
        failed(error_file),
        failed(error_file.parent / "none", stderr=[*TRACEBACK[:-1], *huge.split("\n")], log=Path("/x" + text * 1000)),
    ):
        assert how_failed(found).startswith("exit code 1: ValueError:")
        assert len(m.pack(found)) < 256 * 1024
        for said in (how_failed(found), found.log, *found.detail):
            assert said.isprintable()
            assert said.encode()


def test_truncated_text_is_marked(error_file: Path) -> None:
    error_file.write_text(json.dumps({"message": {"message": "ValueError: " + "x" * 100_000}}))
    assert re.search(r"x \[\.\.\. \d+ more characters\]$", how_failed(failed(error_file)))
    found = failed(error_file.parent / "none", stderr=[f"line {number}" for number in range(1000)])
    assert found.detail[0] == "[... 940 more lines]"
    assert found.detail[-1] == "line 999"


def test_a_progress_bar_shows_what_it_showed_last(error_file: Path) -> None:
    found = failed(error_file, stderr=["10 %|#  |\r20 %|## |\r", "\x1b[1;31mred\x1b[0m and plain"])
    assert found.detail == ("20 %|## |", "red and plain")


# Kinds.


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({}, "crash"),
        ({"exit_code": -9}, "crash"),
        ({"exit_code": -9, "out_of_memory": lambda: True}, "out of memory"),
        ({"exit_code": -11, "out_of_memory": lambda: True}, "crash"),
        ({"exit_code": -15}, "preemption"),
        ({"exit_code": -15, "only_crashes": True}, "crash"),
        ({"exit_code": -15, "stopped": True}, "crash"),
        ({"exit_code": -2}, "crash"),
    ],
)
def test_kinds(error_file: Path, arguments: dict[str, Any], kind: str) -> None:
    assert failed(error_file, **arguments).kind == kind


SYNTAX = ('  File "/x/train.py", line 3', "    def f(:", "          ^", "SyntaxError: invalid syntax")
MISSING = (
    "Traceback (most recent call last):",
    '  File "/x/train.py", line 1, in <module>',
    "    import nosuch",
    "ModuleNotFoundError: No module named 'nosuch'",
)
USAGE = ("usage: train.py [-h] --lr LR", "train.py: error: the following arguments are required: --lr")
EVALUATED = (*TRACEBACK[:-1], '  File "<string>", line 1', "    1 +", "SyntaxError: invalid syntax")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"stderr": SYNTAX}, "startup"),
        ({"stderr": (*SYNTAX[:-1], "IndentationError: unexpected indent")}, "startup"),
        ({"stderr": MISSING}, "startup"),
        ({"stderr": ("/usr/bin/python: No module named nosuch",)}, "startup"),
        ({"stderr": (r"SyntaxError: Non-UTF-8 code starting with '\xe9' in file /x/train.py on line 1",)}, "startup"),
        ({"stderr": ("SyntaxError: encoding problem: foo",)}, "startup"),
        ({"stderr": USAGE, "exit_code": 2}, "startup"),
        ({"stderr": ("Usage: train [OPTIONS]", "", "Error: No such option: --lr"), "exit_code": 2}, "startup"),
        ({"stderr": ("python: can't open file '/mnt/train.py': [Errno 2] No such file",), "exit_code": 2}, "crash"),
        ({"stderr": USAGE, "exit_code": 1}, "crash"),
        ({"stderr": EVALUATED}, "crash"),
        ({"stderr": TRACEBACK}, "crash"),
        ({"stderr": MISSING, "ran": 100.0}, "crash"),
        ({"stderr": MISSING, "trained": 0}, "crash"),
        ({"stderr": SYNTAX, "exit_code": -9}, "crash"),
        ({"stderr": MISSING, "exit_code": -9}, "crash"),  # printed by a child, for example
    ],
)
def test_permanent_errors_are_distinguished_from_transient_ones(
    error_file: Path, arguments: dict[str, Any], kind: str
) -> None:
    assert failed(error_file, **arguments).kind == kind


# Workers that had failed before they were stopped.


def test_a_worker_that_had_raised_before_it_was_stopped_is_a_crash(error_file: Path) -> None:
    error_file.write_text(json.dumps({"message": {"message": "ValueError: boom"}}))
    found = failed(error_file, exit_code=-15, stopped=True)
    assert (found.kind, how_failed(found), found.exit_code) == ("crash", "ValueError: boom", 1)


def test_a_traceback_that_a_stopped_worker_printed_last_may_be_why(error_file: Path) -> None:
    found = failed(error_file, exit_code=-15, stopped=True, supposed=True, stderr=("epoch 1", *TRACEBACK), trained=None)
    assert (found.kind, found.supposed, found.symptom) == ("crash", True, "")
    assert how_failed(found) == "printed before it was stopped: ValueError: boom"
    module = (*TRACEBACK[:-1], "ModuleNotFoundError: No module named 'x'")
    assert failed(error_file, exit_code=-15, stopped=True, supposed=True, stderr=module).kind == "crash"


def test_a_traceback_in_the_output_of_a_stopped_worker_counts_if_torch_marked_it() -> None:
    """Other tracebacks may be of exceptions that it had handled."""
    assert raised_in(TRACEBACK, stopped=False) == 3
    assert printed_last(TRACEBACK) == 3
    assert printed_last((*TRACEBACK, "")) == 3
    assert printed_last((*TRACEBACK, "epoch 2")) is None
    assert printed_last((*TRACEBACK[:-1], "    more")) is None
    assert printed_last(("ValueError: boom",)) is None
    assert raised_in(TRACEBACK, stopped=True) is None
    assert raised_in(("epoch 1", *ranked(TRACEBACK, 3), "bye"), stopped=True) == 4


def test_out_of_memory_is_reported(error_file: Path) -> None:
    found = failed(error_file, exit_code=-9, out_of_memory=lambda: True)
    assert how_failed(found) == "signal 9 (SIGKILL); the kernel killed it for lack of memory"


LOST = {
    "loader": """
        from torch.utils.data import DataLoader
        list(DataLoader([1], num_workers=1, worker_init_fn=lambda worker: os.kill(os.getpid(), 9)))
    """,
    "pool": """
        from concurrent.futures import ProcessPoolExecutor
        with ProcessPoolExecutor() as pool:
            pool.submit(signal.raise_signal, 9).result()
    """,
    "program": """
        subprocess.run(["sh", "-c", "kill -9 $$"], check=True)
    """,
}


@pytest.mark.parametrize("lost", LOST)
def test_a_child_that_the_kernel_killed_is_known_by_the_kernels_counter(error_file: Path, lost: str) -> None:
    code = f"import os, signal, subprocess{textwrap.dedent(LOST[lost])}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60 * SLOWNESS)
    stderr = done.stderr.splitlines()
    found = failed(error_file, exit_code=done.returncode, stderr=stderr, out_of_memory=lambda: True)
    assert found.kind == "out of memory", found
    assert how_failed(found).startswith("exit code 1; the kernel killed a child of it for lack of memory: ")
    assert failed(error_file, stderr=stderr).kind == "crash", "a user may have killed it"


def test_another_exception_says_nothing_of_lost_memory(error_file: Path) -> None:
    assert failed(error_file, stderr=TRACEBACK, out_of_memory=lambda: True).kind == "crash"


# The kernel's counter.


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files in which kills may be counted: one that does not exist, a cgroup's v2 file, a v1 file."""
    paths = [tmp_path / "absent", tmp_path / "memory.events", tmp_path / "memory.oom_control"]
    monkeypatch.setattr(failures, "_event_files", lambda: [*map(Path, paths)])
    return paths


class Time:
    """A clock that stands unless a test moves it."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at


def test_kills_are_counted_in_cgroup_v2(counters: list[Path]) -> None:
    counters[1].write_text("low 0\nhigh 0\nmax 5\noom 1\noom_kill 3\noom_group_kill 0\n")
    kills = OutOfMemoryKills(Time())
    assert not kills.explain_one()
    counters[1].write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 4\noom_group_kill 0\n")
    assert kills.explain_one()
    assert not kills.explain_one(), "one end for one kill"


def test_kills_are_counted_in_cgroup_v1(counters: list[Path]) -> None:
    counters[2].write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    kills = OutOfMemoryKills(Time())
    counters[2].write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert kills.explain_one()


@pytest.mark.parametrize("inner", [True, False], ids=["in its own group", "where its own has no controller"])
def test_kills_are_counted_where_the_memory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: bool
) -> None:
    """A hierarchy of version 2, whose root has no such file."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/slice/job/step\n")
    step = tmp_path / "groups" / "slice" / "job" / "step"
    step.mkdir(parents=True)
    files = [*([step] if inner else []), step.parent, step.parent.parent]
    for place in files:
        (place / "memory.events").write_text("oom 0\noom_kill 0\n")
    monkeypatch.setattr(failures, "memory_groups", lambda: memory_groups(tmp_path, tmp_path / "groups"))
    kills = OutOfMemoryKills(Time())
    (files[-1] / "memory.events").write_text("oom 1\noom_kill 1\n")
    assert not kills.explain_one(), "of another job"
    (files[0] / "memory.events").write_text("oom 1\noom_kill 1\n")
    assert kills.explain_one()


def test_two_kills_at_the_same_moment_explain_two_ends(counters: list[Path]) -> None:
    counters[2].write_text("oom_kill 1\n")
    kills = OutOfMemoryKills(Time())
    counters[2].write_text("oom_kill 3\n")
    assert [kills.explain_one() for _ in range(3)] == [True, True, False]
    counters[2].write_text("oom_kill 5\n")
    assert kills.explain_one()
    counters[2].write_text("oom_kill 6\n")
    assert [kills.explain_one() for _ in range(3)] == [True, True, False]


def test_a_kill_of_another_process_explains_no_later_end(counters: list[Path]) -> None:
    counters[1].write_text("oom_kill 0\n")
    time = Time()
    kills = OutOfMemoryKills(time)
    counters[1].write_text("oom_kill 3\n")
    assert kills.explain_one()
    time.at += failures.EXPLAINS / 2
    assert kills.explain_one()
    time.at += failures.EXPLAINS
    assert not kills.explain_one()
    counters[1].write_text("oom_kill 4\n")
    assert [kills.explain_one() for _ in range(2)] == [True, False]


def test_an_old_kill_of_another_process_explains_no_end(counters: list[Path]) -> None:
    counters[1].write_text("oom_kill 0\n")
    time = Time()
    kills = OutOfMemoryKills(time)
    counters[1].write_text("oom_kill 1\n")
    kills.look()
    time.at += failures.ENDS
    counters[1].write_text("oom_kill 2\n")
    kills.look()
    time.at += failures.ENDS
    assert kills.explain_one(), "its process may have taken long to end"
    counters[1].write_text("oom_kill 3\n")
    kills.look()
    time.at += failures.ENDS + 1
    kills.look()
    assert not kills.explain_one()


@pytest.mark.parametrize("content", ["", "oom_kill\n", "oom_kill many\n", "nothing of use\n"])
def test_a_counter_that_cannot_be_read_counts_nothing(counters: list[Path], content: str) -> None:
    counters[1].write_text(content)
    assert not OutOfMemoryKills(Time()).explain_one()


def test_without_any_counter_nothing_is_counted(counters: list[Path]) -> None:
    assert not OutOfMemoryKills(Time()).explain_one()


def test_this_process_can_be_looked_up() -> None:
    assert not OutOfMemoryKills(Time()).explain_one()


def test_undecodable_text_is_escaped(error_file: Path) -> None:
    """A file's name may hold any bytes; Python represents undecodable ones as lone surrogates."""
    message = {"message": "no such file: \udcff", "extraInfo": {"py_callstack": "open(\udcff)", "timestamp": "1"}}
    error_file.write_text(json.dumps({"message": message}))
    failure = failed(error_file)
    assert how_failed(failure) == r"exit code 1: no such file: \udcff"
    assert failure.detail == (r"open(\udcff)",)


@pytest.mark.parametrize("text", ["", '{"message": {"mess', "[]", '{"message": {"message": "boom"}}'])
def test_an_incomplete_error_file_raises_nothing(error_file: Path, text: str) -> None:
    error_file.write_text(text)
    exited = WorkerExit(1, 1, 1, rank=5, pid=42)
    result = result_of(1, {5: exited}, {1: error_file})
    assert (result.failures[5].pid, result.failures[5].exitcode) == (42, 1)


def test_a_broken_connection_names_the_ranks_that_had_ended_with_0_before(error_file: Path) -> None:
    # As after batches that are not the same number on all ranks: nothing else tells why a peer was gone.
    stderr = (*TRACEBACK[:-1], "RuntimeError: Connection closed by peer")
    found = failed(error_file, stderr=stderr, done=[1, 5])
    assert how_failed(found) == (
        "exit code 1, after rank 1 and 1 more had ended with exit code 0: RuntimeError: Connection closed by peer"
    )
    assert how_failed(failed(error_file, stderr=TRACEBACK, done=[1])) == "exit code 1: ValueError: boom"
    lost = failures.disconnection(about("a", 3, PLACEMENT, 42, ran=1.5, log=None, trained=4), stderr[-1], [2])
    assert how_failed(lost) == "after rank 2 had ended with exit code 0: RuntimeError: Connection closed by peer"

"""Which exceptions say that the script is wrong, and where: of real ones, as Python prints them."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SLOWNESS

from elastic_agents.workers.failures import about, report
from elastic_agents.workers.mistakes import mistake_in
from elastic_launch.contract import Placement
from elastic_launch.error_file import ErrorFile
from elastic_launch.errors import UsageError
from elastic_launch.failure import Failure, Mistake

PLACEMENT = Placement(5, 1, 0, 8, 2, 4, "127.0.0.1", 29500, 5, 8, False)


def raised(function: Callable[[], object]) -> tuple[str, list[str]]:
    """Return the exception of a function as ``Type: message``, and its traceback."""
    try:
        function()
    except Exception as error:  # noqa: BLE001
        said = "".join(traceback.format_exception_only(error)).rstrip()
        return said, "".join(traceback.format_exception(error)).splitlines()
    raise AssertionError("nothing was raised")


def found(function: Callable[[], object]) -> Mistake | None:
    return mistake_in(*raised(function))


def fails(error: Exception) -> Callable[[], object]:
    def function() -> None:
        raise error

    return function


def wrong_shape() -> object:
    return torch.nn.Linear(4, 2)(torch.ones(3, 5))


def typo() -> object:
    return undefined  # type: ignore[name-defined]  # noqa: F821


def wrong_state() -> object:
    return torch.nn.Linear(4, 2).load_state_dict({"weight": torch.ones(1), "other": torch.ones(1)})


def after_another() -> object:
    try:
        return {}["lr"]
    except KeyError:
        return int("lr")


@pytest.mark.parametrize(
    ("function", "exception", "where"),
    [
        (wrong_shape, "RuntimeError", "wrong_shape"),
        (typo, "NameError", "typo"),
        (wrong_state, "RuntimeError", "wrong_state"),
        (after_another, "ValueError", "after_another"),
        (fails(AssertionError()), "AssertionError", "function"),
        (fails(UnicodeDecodeError("utf-8", b"x", 0, 1, "no")), "UnicodeDecodeError", "function"),
        (fails(RuntimeError("\nit is\n\nwrong")), "RuntimeError", "function"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_mistake_is_known_by_its_type_and_the_innermost_line_of_the_users(
    function: Callable[[], object], exception: str, where: str
) -> None:
    mistake = found(function)
    assert mistake is not None
    assert mistake.exception == exception
    file, _, place = mistake.frame.partition(":")
    assert file == Path(__file__).name
    assert place.endswith(f" in {where}")


LOADER = """
from torch.utils.data import DataLoader
class Samples:
    def __len__(self): return 1
    def __getitem__(self, index): return {}["x"]
def main(): list(DataLoader(Samples(), num_workers=1))
main()
"""


def test_a_mistake_in_a_loaders_process_is_where_it_was_made_there(tmp_path: Path) -> None:
    script = tmp_path / "load.py"
    script.write_text(LOADER)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60 * SLOWNESS, cwd=tmp_path)
    mistake = mistake_in("KeyError: Caught KeyError in DataLoader worker process 0.", done.stderr.splitlines())
    assert mistake == Mistake("KeyError", "load.py:5 in __getitem__"), done.stderr


def because_of(cause: Exception) -> Callable[[], object]:
    def function() -> None:
        raise RuntimeError("no data") from cause

    return function


class OfAScript(ValueError):
    pass


@pytest.mark.parametrize(
    "error",
    [
        OSError("disk"),
        FileNotFoundError(2, "no such file"),
        ConnectionResetError("reset"),
        TimeoutError("late"),
        MemoryError(),
        Exception("of no type"),
        OfAScript("own"),
        UsageError("final, and of another kind"),
        ExceptionGroup("several", [KeyError("x")]),
        torch.distributed.DistStoreError("lost"),
        torch.distributed.DistBackendError("NCCL"),
        torch.OutOfMemoryError("full"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        RuntimeError("No CUDA GPUs are available"),
        RuntimeError("NCCL error: unhandled system error"),
        RuntimeError("Timed out waiting 1800000ms for recv operation to complete"),
        RuntimeError("the server timed out"),
        RuntimeError("Connection closed by peer [127.0.0.1]:1"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
        RuntimeError("DataLoader worker (pid 7) exited unexpectedly"),
        RuntimeError("several lines\n\nOSError: [Errno 5] Input/output error"),
        ValueError("HTTP 503 from the hub"),
    ],
    ids=repr,
)
def test_what_may_pass_or_is_not_known_is_no_mistake(error: Exception) -> None:
    assert found(fails(error)) is None


@pytest.mark.parametrize(
    ("cause", "counts"), [(KeyError("x"), True), (OSError("disk"), False), (torch.OutOfMemoryError("x"), False)]
)
def test_an_exception_that_followed_from_another_one_is_a_mistake_only_if_both_are(
    cause: Exception, counts: bool
) -> None:
    assert (found(because_of(cause)) is not None) is counts


def test_without_a_traceback_or_a_frame_there_is_no_mistake() -> None:
    text, lines = raised(typo)
    assert mistake_in(text, [lines[-1]]) is None
    assert mistake_in(text, [lines[0], lines[-1]]) is None
    assert mistake_in(text, [*lines[:-1], "KeyError: 1"]) is None, "the traceback of another exception"
    assert mistake_in("", lines) is None


def test_lines_before_and_after_the_traceback_do_not_matter() -> None:
    text, lines = raised(typo)
    assert mistake_in(text, ["epoch 1", "INFO:root:epoch 2", *lines, "train.py:3: UserWarning: x"]) is not None
    assert mistake_in(text, [*raised(fails(OSError("disk")))[1], *lines]) is None, "it may follow from it"


# In a report.


def of_worker(lines: list[str], text: str = "", **arguments: Any) -> Failure:
    values: dict[str, Any] = {
        "world_size": 8,
        "exit_code": 1,
        "ago": 0.5,
        "error": ErrorFile(text, tuple(lines)) if text else None,
        "stderr": lines,
        "stopped": False,
        "out_of_memory": lambda: False,
    }
    return report(about("a", 3, PLACEMENT, 42, ran=1.5, log=None, trained=None), **{**values, **arguments})


def test_a_report_has_the_mistake_recorded_or_printed() -> None:
    text, lines = raised(wrong_shape)
    known = mistake_in(text, lines)
    assert known is not None
    assert of_worker(lines, text).mistake == known
    assert of_worker(lines, text, exit_code=-15, stopped=True).mistake == known
    printed = [f"[rank5]: {line}" for line in lines]
    assert of_worker(printed).mistake == known
    assert of_worker(printed[-2:], earlier=printed[:-2]).mistake is None, "the end shows no traceback"
    assert of_worker(printed[-6:], earlier=printed[:-6]).mistake == known, "it is longer than what is shown"


@pytest.mark.parametrize(
    "arguments",
    [
        {"exit_code": 3},
        {"exit_code": -9},
        {"only_crashes": True},
        {"exit_code": -15, "stopped": True, "supposed": True},
        {"fatal_codes": (1,)},
    ],
    ids=["its own code", "killed", "as torchrun", "supposed", "fatal"],
)
def test_any_other_failure_has_none(arguments: dict[str, Any]) -> None:
    assert of_worker(raised(typo)[1], **arguments).mistake is None


def test_a_consequence_of_another_ranks_failure_has_none() -> None:
    found = of_worker(raised(fails(RuntimeError("Connection closed by peer")))[1])
    assert found.symptom
    assert found.mistake is None

"""Functions that tests have workers call; tests that spawn workers import this file by name. It imports no torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def describe(*args: Any) -> dict[str, Any]:
    """Return the arguments, and the worker's view of its place; the last rank ends some time after the others."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_RANK")
    names = (*names, "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    names = (*names, "GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID")
    names = (*names, "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    found = {name: os.environ[name] for name in names}
    if int(found["RANK"]) + 1 == int(found["WORLD_SIZE"]):
        time.sleep(0.5)
    if args == ("a",):
        print("described")
    return {**found, "args": args}


def fail(rank: str, text: str, calls: str) -> None:
    """Raise in one rank; the others would sleep. Each call appends a line to a file."""
    with open(calls, "a") as file:
        file.write(f"{os.environ['RANK']} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
    if os.environ["RANK"] == rank:
        raise ValueError(text)
    time.sleep(600)


def fail_once() -> str:
    """Raise in the first round."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("once")
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def kill_once() -> str:
    """Kill one rank in the first round."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return os.environ["TORCHELASTIC_RESTART_COUNT"] + os.environ["MASTER_PORT"]


def call_again(directory: str) -> tuple[str, Any]:
    """Launch workers of this worker's own, each way."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    from elastic_launch.api import LaunchConfig, elastic_launch

    found = {}
    for method in ("spawn", "fork"):
        logs = DefaultLogsSpecs(log_dir=f"{directory}/{os.environ['RANK']}")
        config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", start_method=method, logs_specs=logs)
        found[method] = elastic_launch(config, describe)(method)
    return os.environ["RANK"], {method: [one["RANK"] for one in found[method].values()] for method in found}


def end_with(how: str) -> None:
    """End other than by returning."""
    if how == "SystemExit(0)":
        sys.exit(0)
    if how == "os._exit(0)":
        os._exit(0)
    if how == "KeyboardInterrupt":
        raise KeyboardInterrupt
    os.kill(os.getpid(), signal.SIGKILL)


def lock_of_pickles(calls: str) -> object:
    """Return something that cannot be pickled; each call appends the number of restarts to a file."""
    with open(calls, "a") as file:
        file.write(os.environ["TORCHELASTIC_RESTART_COUNT"])
    return open(os.devnull)


class Unpicklable:
    """Its error is of a type that torch's raise, such as those of TorchScript modules."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError("Tried to serialize object")


def unpicklable(calls: str) -> object:
    """Return something that cannot be pickled, with the error of its own; see :func:`lock_of_pickles`."""
    lock_of_pickles(calls)
    return Unpicklable()


class _OnlyPickled:
    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, ()


def _unpickled() -> None:
    raise RuntimeError("not here")


def only_pickled() -> object:
    """Return something that cannot be unpickled."""
    return _OnlyPickled()


def put(queue: Any, value: Any) -> None:
    """Put this rank and a value into a queue of multiprocessing's."""
    queue.put((os.environ["RANK"], value))


def linger(directory: str) -> None:
    """Report that this worker runs, and sleep; report which signal asks it to end."""
    here = Path(directory) / os.environ["RANK"]

    def note(number: int, frame: object) -> None:
        here.with_suffix(".signal").write_text(signal.Signals(number).name)
        sys.exit(3)

    signal.signal(signal.SIGTERM, note)
    here.with_suffix(".new").write_text(str(os.getpid()))
    here.with_suffix(".new").replace(here)
    time.sleep(600)


def too_late_once(directory: str) -> str:
    """Let a timer of torch's expire in one rank of the first round; record why there was another round."""
    from torch.distributed.elastic import timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=600):
        pass
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        with timer.expires(after=0.3 if os.environ["RANK"] == "1" else 600, scope="step"):
            time.sleep(600)
    (Path(directory) / "reason").write_text(os.environ["ELASTIC_LAUNCH_START_REASON"])
    return "done"

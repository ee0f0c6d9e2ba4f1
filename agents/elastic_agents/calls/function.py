"""The caller's side of a call: a function and its arguments for the workers, and what they return."""

from __future__ import annotations

import functools
import json
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import context, reduction, resource_tracker, spawn
from multiprocessing.popen_spawn_posix import Popen as _SpawnPopen
from typing import Any

from elastic_agents.calls.worker import HEADER, UNPICKLABLE
from elastic_agents.warm.server import entered
from elastic_launch.config.launch_config import Command


class Results:
    """What the workers of a call return, by local rank.

    Args:
        nproc: how many workers there are on this node.

    Attributes:
        name: name of the function.
        results: descriptors that the workers write their results to.
    """

    def __init__(self, function: Callable[..., object], nproc: int) -> None:
        self.name = name_of(function)
        with ExitStack() as stack:
            self.results = [memory("result", stack) for _ in range(nproc)]
            self._held = stack.pop_all()

    def close(self) -> None:
        self._held.close()

    def result(self, local_rank: int, round_number: int) -> Any:
        """Return what a worker has returned in a round that has succeeded.

        Raises:
            RuntimeError: if it has left no result, as after ``os._exit(0)``.
            Exception: any exception raised by unpickling.
        """
        descriptor = self.results[local_rank]
        found = os.pread(descriptor, HEADER.size, 0)
        if len(found) < HEADER.size or HEADER.unpack(found) != (round_number,):
            raise RuntimeError(
                f"local rank {local_rank} ended with exit code 0 before {self.name} returned: it has no result."
            )
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
            data.seek(HEADER.size)
            try:
                return pickle.load(data)
            except Exception as error:
                error.add_note(f"This was raised while the result of local rank {local_rank} was unpickled.")
                raise


class ForkedCall(Results):
    """A function that is called by workers forked from this process."""

    def __init__(self, function: Callable[..., object], args: Sequence[object], nproc: int) -> None:
        super().__init__(function, nproc)
        self.function, self.args = function, tuple(args)

    @property
    def command(self) -> Command:
        """A placeholder for the worker's command: nothing is executed."""
        python = os.fsdecode(spawn.get_executable())
        argv = (python, "-c", self.name, "${local_rank}")
        return Command(argv, (self.name,), function=True, forked=True)


class FunctionCall(Results):
    """A function that every worker calls, pickled as :mod:`multiprocessing` does for a process that it spawns.

    Raises:
        ValueError: if the function or an argument cannot be pickled, or if the function is in a ``__main__`` that no
            other process can import.
        Exception: any other exception that the caller's own classes raise while they are pickled.
    """

    def __init__(self, function: Callable[..., object], args: Sequence[object], nproc: int) -> None:
        super().__init__(function, nproc)
        with ExitStack() as undo:
            undo.callback(self.close)
            self._call = memory("call", self._held)
            self._shared = _pickle(function, tuple(args), self._call)
            undo.pop_all()
        self._tracker: int | None = getattr(resource_tracker._resource_tracker, "_fd", None)

    @property
    def command(self) -> Command:
        """The command that a worker executes."""
        settings = {"call": self._call, "results": self.results, "tracker": self._tracker}
        code = entered("from elastic_agents.calls.worker import main", "main(*sys.argv[1:])")
        tracker = () if self._tracker is None else (self._tracker,)
        return Command(
            (os.fsdecode(spawn.get_executable()), "-u", "-c", code, json.dumps(settings), "${local_rank}"),
            (self.name,),
            inherit=tuple(sorted({self._call, *self.results, *self._shared, *tracker})),
            function=True,
        )


def _innermost(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function that a ``functools.partial`` calls, or the function itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def name_of(function: Callable[..., object]) -> str:
    """The name of a function, or of the function that a ``functools.partial`` calls."""
    function = _innermost(function)
    return getattr(function, "__qualname__", type(function).__qualname__)


def memory(name: str, stack: ExitStack) -> int:
    """Return a descriptor of anonymous memory, which the stack closes."""
    descriptor = os.memfd_create(f"elastic-launch-{name}")
    stack.callback(os.close, descriptor)
    return descriptor


class _Child:
    """Stands for the child while :mod:`multiprocessing` pickles: descriptors keep their numbers in it."""

    DupFd = _SpawnPopen.DupFd

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        self.descriptors.append(descriptor)
        return descriptor


def _pickle(function: Callable[..., object], args: tuple[object, ...], descriptor: int) -> list[int]:
    """Write a call to a descriptor; return the descriptors a worker must inherit for it (queues, shared tensors)."""
    child = _Child()
    # Raises if a worker imports the caller's module and it has no `if __name__ == "__main__"`.
    prepared = spawn.get_preparation_data("worker")
    in_main = getattr(_innermost(function), "__module__", None) == "__main__"
    if not {"init_main_from_name", "init_main_from_path"} & prepared.keys() and in_main:
        raise ValueError(
            f"{name_of(function)} is defined in a __main__ that is not a file, where a new process cannot find it. "
            "Define it in a module, or use start_method='fork'."
        )
    context.set_spawning_popen(child)  # type: ignore[arg-type]
    try:
        with open(descriptor, "wb", closefd=False) as file:
            reduction.dump(prepared, file)
            try:
                reduction.dump((function, args), file)
            except UNPICKLABLE as error:
                raise ValueError(_why_not(function, args)) from error
    finally:
        context.set_spawning_popen(None)
    return child.descriptors


def _why_not(function: Callable[..., object], args: tuple[object, ...]) -> str:
    """Say which part of a call cannot be pickled, and how to fix it."""
    name = name_of(function)
    parts: list[tuple[str, object]] = [(f"entrypoint {name}", function)]
    for number, arg in enumerate(args, 1):
        parts.append((f"argument {number} of entrypoint {name}, a {type(arg).__name__},", arg))
    for what, part in parts:
        try:
            reduction.ForkingPickler.dumps(part)
        except UNPICKLABLE as error:
            why = str(error).rstrip(".")
            remedy = "Define the function at the top level of a module" if part is function else "Give another one"
            return (
                f"{what} cannot be pickled for a worker that start_method='spawn' or 'forkserver' starts: {why}.\n"
                f"  {remedy}, or use start_method='fork', which pickles nothing but results."
            )
    return f"the call of entrypoint {name} cannot be pickled. Use start_method='fork'."

"""A worker that calls a function: what runs between the interpreter's start and the function.

It does what ``multiprocessing`` does in a process that it has spawned, see :mod:`multiprocessing.spawn`. It imports
none of this project's heavy packages.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Callable
from multiprocessing import process, resource_tracker, spawn

from elastic_agents.warm.ending import ERROR_FILE, record

HEADER = struct.Struct("<Q")
"""Precedes a pickled result: the number of the round."""

UNPICKLABLE = (pickle.PickleError, AttributeError, TypeError, ValueError, RuntimeError)
"""What pickling raises for an object that cannot be pickled; torch's and multiprocessing's raise the last one."""

ROUND = "ELASTIC_LAUNCH_ROUND"
"""The variable with the round's number (elastic_launch.contract.ENV_ROUND)."""


def main(text: str, local_rank: str) -> None:
    """Call the function; the worker's main function.

    Args:
        text: as JSON the descriptors of the call, of each worker's result, and of multiprocessing's resource tracker.
    """
    settings = json.loads(text)
    mine = settings["results"].pop(int(local_rank))
    for descriptor in settings["results"]:
        os.close(descriptor)
    for descriptor in (settings["call"], mine):
        os.set_inheritable(descriptor, False)
    if settings["tracker"] is not None:
        vars(resource_tracker._resource_tracker)["_fd"] = settings["tracker"]

    def load() -> tuple[Callable[..., object], tuple[object, ...]]:
        with mmap.mmap(settings["call"], 0, access=mmap.ACCESS_READ) as data:
            process.current_process()._inheriting = True  # type: ignore[attr-defined]
            try:
                spawn.prepare(pickle.load(data))
                function, args = _loaded(data)
            finally:
                del process.current_process()._inheriting  # type: ignore[attr-defined]
        os.close(settings["call"])
        return function, args

    call(load, local_rank, mine)


def _loaded(data: mmap.mmap) -> tuple[Callable[..., object], tuple[object, ...]]:
    try:
        function, args = pickle.load(data)
    except AttributeError as error:
        if not str(error).startswith("Can't get attribute"):
            raise  # by a module that the function needs
        from elastic_launch.errors import UsageError  # such a failure is not restarted

        raise UsageError(
            f"a new process does not find what the call was given: {error}.",
            "Define it at the top level of its module, not behind `if __name__ == '__main__'`, "
            "or use start_method='fork'.",
        ) from None
    return function, args


def call(load: Callable[[], tuple[Callable[..., object], tuple[object, ...]]], local_rank: str, result: int) -> None:
    """Call a function, and leave its result where the caller looks for it.

    An exception is recorded as torch's ``@record`` does, since torch's launcher wraps every function in that.
    """
    worker = os.getpid()  # a process that the function forks may come to its end here, too
    if sys.stderr is not None:
        faulthandler.enable()
    try:
        function, args = load()
        # As in torch: in strings, a placeholder stands for the local rank.
        filled = [x.replace("${local_rank}", local_rank) if isinstance(x, str) else x for x in args]
        try:
            value = function(*filled)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
            value = None
        data = _pickled(value)
        os.ftruncate(result, 0)
        os.lseek(result, 0, os.SEEK_SET)
        with open(result, "wb") as file:
            file.write(HEADER.pack(int(os.environ[ROUND])))
            file.write(data)
    except BaseException as error:
        while (tb := error.__traceback__) is not None and tb.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = tb.tb_next
        record(error, os.environ.get(ERROR_FILE, ""), worker)
        raise


def _pickled(value: object) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except UNPICKLABLE as error:
        from elastic_launch.errors import UsageError  # such a failure is not restarted

        raise UsageError(
            f"the function returned a {type(value).__name__} that cannot be pickled for the caller: {error}.",
            "Return something else, for example a state_dict().",
        ) from error

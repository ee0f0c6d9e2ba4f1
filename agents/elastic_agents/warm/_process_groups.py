"""Keeps a process group alive until what uses it in C++ has been destroyed, and frees it without the GIL.

``torch.nn.parallel.DistributedDataParallel`` holds its process group through a ``Reducer``, whose destructor runs with
the GIL held. After ``destroy_process_group()`` that is the last reference: the group's destructor then joins gloo's
threads, and one of these may be waiting for the GIL, to free the Python context that autograd has stashed in the work
that the thread has just done. This is a deadlock (torch 2.13). If Python holds the last reference, torch releases the
GIL first.

The thread has the time between the end of the last collective and the destructor to get the GIL: about half a
millisecond in a script that ends with ``destroy_process_group()``. It gets the GIL at once if it arrives before the
main thread, which the same collective has woken; otherwise Python makes the main thread hand it over only after 5 ms
(``sys.getswitchinterval()``). An executed worker can deadlock in the same way.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

_DONE = "_elastic_launch_outlived"


def outlive_users() -> None:
    """Make process groups outlive the reducers that use them, from now on and in all forked processes.

    Has an effect once, after torch was imported.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    group = getattr(c10d, "ProcessGroup", None)
    reducer, logger = getattr(c10d, "Reducer", None), getattr(c10d, "Logger", None)
    if group is None or reducer is None or logger is None or hasattr(reducer, _DONE):
        return  # also with a torch build without torch.distributed
    setattr(reducer, _DONE, True)
    held: dict[weakref.ref[object], object] = {}
    _hold_arguments(reducer, group, held)
    _hold_arguments(logger, reducer, held)  # the logger keeps the reducer alive


def _hold_arguments(user: Any, kind: type, held: dict[weakref.ref[object], object]) -> None:
    """Keep constructor arguments of the type ``kind`` alive until the ``user`` object made with them is gone.

    pybind11 calls weak reference callbacks once the C++ object is destroyed.
    """
    initialize = user.__init__

    def __init__(self: object, *args: object, **kwargs: object) -> None:
        initialize(self, *args, **kwargs)
        used = [value for value in (*args, *kwargs.values()) if isinstance(value, kind)]
        if used:
            held[weakref.ref(self, held.pop)] = used

    user.__init__ = __init__

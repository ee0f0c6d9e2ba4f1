"""Writes the state that a Python process finds at its start, as one JSON object."""

import sys

AT_START = {"modules": sorted(name for name in sys.modules if name.startswith("elastic"))}


def findings():
    import ctypes
    import faulthandler
    import gc
    import locale
    import multiprocessing
    import os
    import resource
    import signal
    import threading
    import time
    import warnings
    from pathlib import Path

    import __main__

    def stream(s):
        names = ("encoding", "errors", "line_buffering", "write_through", "newlines", "mode", "name")
        return [type(s.buffer).__name__, s.isatty(), s.fileno(), *(str(getattr(s, name, None)) for name in names)]

    death = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    argv = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode().split()
    main = vars(__main__)
    return AT_START | {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": list(sys.flags),
        "executable": [sys.executable, sys.prefix, sys.base_prefix],
        "main": {
            name: str(main.get(name, "absent")).split(" object at")[0]
            for name in (
                "__name__",
                "__file__",
                "__package__",
                "__doc__",
                "__cached__",
                "__loader__",
                "__spec__",
                "__annotations__",
            )
        },
        "main names": sorted(name for name in main if name.startswith("_")),
        "builtins": type(main["__builtins__"]).__name__,
        "directory": os.getcwd(),
        "umask": [os.umask(0o77), os.umask(0o77)][0],
        "environment": {k: v for k, v in os.environ.items() if k != "FRESH_OUT"},
        "getenv of C": ctypes.CDLL(None).getenv(b"LATE") != 0,
        "handlers": {
            s.name: str(signal.getsignal(s)).split(" at 0x")[0]
            for s in signal.Signals
            if s.name not in ("SIGKILL", "SIGSTOP")
        },
        "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd")],
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "stdin": os.readlink("/proc/self/fd/0").split(":")[0],
        "streams": [stream(s) for s in (sys.stdin, sys.stdout, sys.stderr)],
        "descriptors": [fd for fd in range(256) if _open(fd)],
        "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "parent": os.getppid(),
        "threads": [
            threading.active_count(),
            threading.current_thread().name,
            threading.current_thread() is threading.main_thread(),
            len(os.listdir("/proc/self/task")),
        ],
        "native id": threading.get_native_id() == os.getpid(),
        "faulthandler": faulthandler.is_enabled(),
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        "limits": [
            resource.getrlimit(getattr(resource, name)) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")
        ],
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)),
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.getfilesystemencoding()],
        "recursion": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "warnings": [[str(part) for part in item] for item in warnings.filters],
        "warn options": sys.warnoptions,
        "hooks": [
            sys.excepthook is sys.__excepthook__,
            sys.displayhook is sys.__displayhook__,
            sys.gettrace(),
            sys.getprofile(),
        ],
        "processes": [
            multiprocessing.current_process().name,
            multiprocessing.parent_process(),
            multiprocessing.get_start_method(allow_none=True),
            multiprocessing.active_children(),
        ],
        "death signal": death.value,
        "name": status["Name"],
        "command": argv,
        "user": [status[name] for name in ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp")],
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "zone": [time.tzname, time.timezone],
        "cpu time is small": time.process_time() < 5,
    }


def _open(fd):
    import fcntl

    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    import json
    import os

    with open(os.environ["FRESH_OUT"], "w") as file:
        json.dump(findings(), file)

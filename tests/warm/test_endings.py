"""A forked worker ends like an executed one: exit code and output are compared."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_processes import WAYS, Ended, Starter, both_ways, config_for, write

from elastic_agents.workers.sessions import kill_sessions, reap_orphans

AT_ONCE = "import os\nclass Drained(SystemExit):\n    at_once = True"

ENDINGS = {
    "at the end": "print('done')",
    "exit 0": "import sys; sys.exit(0)",
    "exit 3": "import sys; sys.exit(3)",
    "exit with a message": "import sys; sys.exit('a message')",
    "exit with nothing": "raise SystemExit",
    "exit 256": "import sys; sys.exit(256)",
    "at once": "import os; print('lost?', end=''); os._exit(4)",
    "exception": "def f(x):\n    return 1 / x\n\nf(0)",
    "chained exceptions": "try:\n    {}['a']\nexcept KeyError as e:\n    raise RuntimeError('b') from e",
    "exception group": "raise ExceptionGroup('g', [ValueError('a'), TypeError('b')])",
    "syntax error": "x = = 1",
    "encoding": "# -*- coding: latin-1 -*-\nprint('caf\\u00e9')",
    "recursion": "import sys\nsys.tracebacklimit = 1\ndef f(): f()\nf()",
    "debugger": "x = 1\nbreakpoint()\nprint('never: stdin has ended')",
    "tracer": """import sys, threading
calls = []
def f():
    g()
def g():
    pass
trace = lambda frame, event, argument: calls.append(frame.f_code.co_name)
threading.settrace(trace)
sys.settrace(trace)
f()
thread = threading.Thread(target=f)
thread.run()
sys.settrace(None)
print(calls)""",
    "profiler": "import cProfile\ndef f():\n    pass\nwith cProfile.Profile() as p:\n    f()\nprint(len(p.getstats()))",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__, a[2].tb_lineno)\nraise ValueError",
    "last words": "import atexit\natexit.register(print, 'bye')\nraise SystemExit(5)",
    "last words that fail": "import atexit\natexit.register(lambda: 1 / 0)",
    "drained": f"""{AT_ONCE}
import atexit, threading, time
threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()
atexit.register(print, 'bye')
f = open(os.dup(1), 'w')
f.write('kept back')
raise Drained""",
    "drained, with a code": f"{AT_ONCE}\nraise Drained(7)",
    "drained, to nobody's delight": f"{AT_ONCE}\ntry:\n    raise Drained\nfinally:\n    print('at last')",
    "buffered": "import sys, os\nf = os.fdopen(os.dup(1), 'w')\nf.write('kept back')",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
    "thread that fails": "import threading\nthreading.Thread(target=lambda: 1 / 0, name='t').start()",
    "daemon thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "interrupt": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(60)",
    "interrupt caught": "import signal\ntry:\n    signal.raise_signal(2)\nexcept KeyboardInterrupt:\n    print('no')",
    "terminate": "import signal\nsignal.raise_signal(signal.SIGTERM)",
    "terminate caught": "import signal, sys\nsignal.signal(15, lambda *a: sys.exit(7))\nsignal.raise_signal(15)",
    "kill": "import signal\nsignal.raise_signal(signal.SIGKILL)",
    "abort": "import os\nos.abort()",
    "fault": "import ctypes\nctypes.string_at(0)",
    "warning": "import warnings\nwarnings.warn('careful')",
    "exit with an object": "import sys\nclass A:\n    def __str__(self): return 'an object'\nsys.exit(A())",
    "exit -1": "import sys; sys.exit(-1)",
    "exit with a large number": "import sys; sys.exit(2 ** 70)",
    "hook that fails": "import sys\nsys.excepthook = lambda *a: 1 / 0\nraise ValueError('first')",
    "hook that exits": "import sys\nsys.excepthook = lambda *a: sys.exit(6)\nraise ValueError",
    "interrupt raised": "raise KeyboardInterrupt",
    "last words of an exception": "import atexit, sys\natexit.register(lambda: print(sys.last_value))\n1 / 0",
    "last words by exit": "import atexit, sys\natexit.register(lambda: sys.exit(4))",
    "destructor": "class A:\n    def __del__(self): print(f'{B.name} is destroyed')\nclass B: name = 'a'\na = A()",
    "destructor of what a class holds": """class A:
    def __del__(self): print('destroyed')
class B: a = A()""",
    "destructor of what functions hold": """class A:
    def __del__(self): print('destroyed')
def f(a=A()): pass
f.a = A()""",
    "file that a class holds": "import os\nclass A: f = os.fdopen(os.dup(1), 'w')\nA.f.write('kept back')",
    "destructor that calls a function": """import os
def say(text): print(text, os.sep, Other.name)
class Other: name = 'a'
class A:
    def __del__(self): say('destroyed')
class B: a = A()
b = A()""",
    "destructor of what a class holds, with a signal handler": """import signal
def stop(*args): pass
signal.signal(signal.SIGTERM, stop)
class A:
    def __del__(self): print('destroyed')
class B: a = A()""",
    "destructor in a cycle": "class A:\n    def __del__(self): print('destroyed')\na = A()\na.a = a\nb = [a]",
    "destructor after an exception": """class A:
    def __del__(self): print('destroyed')
def f():
    a = A()
    try:
        {}['a']
    except KeyError as error:
        raise ValueError from error
f()""",
    "finalizer": "import weakref\nclass A: pass\na = A()\nweakref.finalize(a, print, 'finalized')",
    "temporary directory": "import tempfile\nd = tempfile.TemporaryDirectory()",
    "daemon that would notice": """import threading, time
x = [1]
def f():
    while True: time.sleep(0.001), x[0]
threading.Thread(target=f, daemon=True).start()""",
    "closed output": "import sys\nsys.stdout.close()",
    "no output": "import sys\nsys.stdout = None\nsys.exit(2)",
    "output that cannot be flushed": """import io, sys
class A(io.StringIO):
    def flush(self): raise OSError('full')
sys.stdout = A()""",
    "C's buffers": "import ctypes\nctypes.CDLL(None).printf(b'kept back by C')",
    "log": "import logging\nlogging.warning('careful')",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A, A.__module__)",
    "source": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))",
    "own import": "import sys, __main__\nprint(__main__ is sys.modules['__main__'], __main__.__dict__ is globals())",
    "no agent": "import elastic_agents.inbox as g, sys\nprint(g.__name__, 'elastic_agents.warm' in sys.modules)",
    "standard input": "import sys\nprint(repr(sys.stdin.read()))",
    "subprocess": "import subprocess as s, sys\nprint(s.check_output([sys.executable, '-c', 'print(1)']))",
    "fork": "import os\npid = os.fork()\nif pid == 0:\n    os._exit(9)\nprint(os.waitpid(pid, 0)[1])",
    "pool by fork": "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p: print(p.map(abs, [-1, -2]))",
    "executor": "from concurrent.futures import ThreadPoolExecutor as E\nwith E() as e: print(list(e.map(abs, [-1])))",
    "event loop": "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 1\nprint(asyncio.run(f()))",
    "path": "import sys, os\nprint(os.path.isabs(sys.path[0]))",
}

AS_MODULE = ("exception", "syntax error", "exit 3", "interrupt", "pickle")

MULTIPROCESSING = """
import multiprocessing as m, os, sys

class Thing:
    pass

def work(thing):
    return type(thing).__name__, thing.__class__.__module__, sys.argv[1:], m.parent_process() is not None

if __name__ == "__main__":
    m.set_start_method(sys.argv[1])
    with m.Pool(2) as pool:
        print(pool.map(work, [Thing(), Thing()]))
"""


@pytest.fixture(scope="module")
def starters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Starter]]:
    directory = tmp_path_factory.mktemp("logs")
    for name in AS_MODULE:
        write(directory, f"module_{name.replace(' ', '_')}.py", ENDINGS[name])
    config = config_for(directory, write(directory, "any.py", ""))
    with both_ways(config, {"PYTHONPATH": str(directory)}) as starters:
        yield starters


def _told(ended: Ended) -> tuple[int, str, str]:
    """The output that must be equal: without addresses and thread numbers."""
    texts = (re.sub(r"0x[0-9a-f]+", "0x", text) for text in (ended.stdout, ended.stderr))
    return (ended.code, *texts)  # type: ignore[return-value]


@pytest.mark.parametrize("name", ENDINGS)
def test_a_forked_worker_ends_as_an_executed_one_ends(name: str, starters: dict[str, Starter], tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", ENDINGS[name])
    ends = {way: _told(starters[way].run(script)) for way in WAYS}
    if name == "exit with a large number":
        # Python 3.12 and 3.13 then happen upon the error of reading that number, and print it; 3.11 and 3.14 do not.
        code, out, err = ends["exec"]
        assert err == "" or err.endswith("OverflowError: Python int too large to convert to C long\n")
        ends["exec"] = (code, out, "")
    assert ends["warm"] == ends["exec"]


@pytest.mark.parametrize("name", [*AS_MODULE, "that nobody has"])
def test_a_forked_module_ends_as_an_executed_one_ends(name: str, starters: dict[str, Starter]) -> None:
    ends = {way: _told(starters[way].run("-m", f"module_{name.replace(' ', '_')}")) for way in WAYS}
    assert ends["warm"] == ends["exec"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_forked_worker_starts_processes_in_every_way(
    method: str, starters: dict[str, Starter], tmp_path: Path
) -> None:
    script = write(tmp_path, "script.py", MULTIPROCESSING)
    ends = {way: _told(starters[way].run(script, method)) for way in WAYS}
    assert ends["warm"] == ends["exec"]
    assert ends["warm"][0] == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_right_after_the_start_is_not_lost(
    way: str, number: signal.Signals, starters: dict[str, Starter], tmp_path: Path
) -> None:
    pid = starters[way].start(write(tmp_path, "script.py", "import time; time.sleep(60)"))
    starters[way].processes.signal(pid, number)
    ended, code = starters[way].wait()
    assert ended == pid
    assert code == -number or (number == signal.SIGINT and code in (1, -number))


def test_random_numbers_differ_between_forked_workers(starters: dict[str, Starter], tmp_path: Path) -> None:
    text = "import random, uuid, tempfile\nprint(random.random(), uuid.uuid4(), next(tempfile._get_candidate_names()))"
    script = write(tmp_path, "script.py", text)
    first, second = (starters["warm"].run(script).stdout.split() for _ in range(2))
    assert len(first) == 3
    assert not set(first) & set(second)


def test_what_a_worker_leaves_running_becomes_the_agents(starters: dict[str, Starter], tmp_path: Path) -> None:
    text = f"import subprocess\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))"
    worker = starters["warm"].start(write(tmp_path, "script.py", text))
    assert starters["warm"].wait() == (worker, 0)
    orphan = int((tmp_path / "pid").read_text())
    assert f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{orphan}/status").read_text()
    assert kill_sessions({worker}) == []
    reap_orphans({worker})
    assert not Path(f"/proc/{orphan}").exists()

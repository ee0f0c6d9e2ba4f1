"""Threads that a process depends on."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_launch.system.threads import ThreadDied, VitalThread, deaths_reported_to

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "elastic_launch").rglob("*.py"), *(ROOT / "agents").rglob("*.py")])

BARE = {
    "elastic_launch/system/threads.py": ["threading.Thread"] * 2,  # VitalThread itself; within() awaits the other
    "elastic_launch/rendezvous/node/membership.py": ["threading.Thread"],  # its end is RendezvousLost
    "elastic_launch/observe/spans.py": ["threading.Thread"],  # OpenTelemetry's own call, and its caller awaits it
    "agents/elastic_agents/main.py": ["threading.Thread"],  # what it does not remove, the next launch does
    # In a worker: its script is told where it uses them, and what ends a thread is printed.
    "elastic_launch/snapshot/stall.py": ["threading.Thread"],  # what it raises, its caller raises
    "elastic_launch/snapshot/storage/background.py": ["threading.Thread"],  # the next use raises
    "elastic_launch/collective_dump.py": ["threading.Thread"],  # without it, the agent has no dump to look at
    "elastic_launch/training/link.py": ["threading.Thread"],  # without it, the agent has its late worker killed
    "elastic_launch/training/live/sockets.py": ["threading.Thread"],  # as for link; lives while a group is being formed
    "elastic_launch/training/live/timeout_watch.py": ["threading.Thread"],  # without it, a timeout ends no collective
    "elastic_launch/training/live/turns.py": ["threading.Thread"],  # without it, groups take their time to end
    "elastic_launch/training/live/waits.py": ["threading.Thread"],  # its caller raises what its call raises
}
"""Threads whose death is not reported as a VitalThread's is: by module, with the reason."""

ENDLESS = {
    "agents/elastic_agents/calls/caller.py": ["process.wait()"],  # the run itself, for as long as it takes
    "agents/elastic_agents/workers/guard.py": ["process.popen.wait()"],  # close() kills that process
    # Threads that wait for work, and are notified of the end.
    "agents/elastic_agents/snapshots/snapshot_store.py": ["self._changed.wait_for()"],
    "elastic_launch/system/writer_thread.py": ["self._filled.wait_for()"],
    "elastic_launch/snapshot/storage/background.py": ["self._changed.wait_for()"],
    "elastic_launch/rendezvous/voters/peers.py": ["self._changed.wait_for()"],
    "elastic_launch/rendezvous/stores/etcd.py": ["self._closing.wait()"],
    "elastic_launch/snapshot/memory/slot_state.py": ["staging.wait_for()"],  # a device's copy in progress
    # Work on memory alone: sums of it, and a copy into a slot.
    "elastic_launch/snapshot/storage/shares.py": ["found[index - 1].result()"],
    "elastic_launch/training/checkpoints/memory.py": ["writing.result()"],
    # Exchanges with other ranks, which end with the timeout of their process group.
    "elastic_launch/training/evaluations.py": ["table.wait()"],
    "elastic_launch/training/gradients/accumulation.py": ["table.wait()"],
    "elastic_launch/training/gradients/buckets.py": [
        *("first.work.wait()", "self.work.wait()", *["bucket.wait()"] * 3)
    ],
    "elastic_launch/training/gradients/means.py": ["self.wait()"],
    "elastic_launch/training/gradients/shards.py": [*("buckets[turn - 2].wait()", "work.wait()", "bucket.wait()")],
    "elastic_launch/training/loop.py": ["self._rounds.join()"],  # a round, which ends with the time of its store
    "elastic_launch/training/live/waits.py": [
        *("self._calls.get()", "work.wait()")  # close() ends the first one's thread
    ],
    # The value of a context variable.
    "elastic_launch/training/ranks/exchange.py": ["_link.get()", "_link.get()", "_link.get()"],
}
"""Waits without a time: by module, with the reason. None is on the way to the end of a process."""


WAITS = {"join": 0, "wait": 0, "communicate": 0, "result": 0, "get": 0, "acquire": 0, "wait_for": 1}
"""How many arguments these have without a time."""


def bare_threads(nodes: list[ast.AST]) -> Iterator[str]:
    """Uses of classes and functions that start a thread whose death is not reported."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in ("threading", "_thread"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name in ("Thread", "Timer", "*"))
        elif isinstance(node, ast.Import):
            yield from (f"{x.name} as {x.asname}" for x in node.names if x.name == "threading" and x.asname)
            yield from (x.name for x in node.names if x.name == "_thread")
        elif isinstance(node, ast.Call | ast.ClassDef):
            used = [node.func] if isinstance(node, ast.Call) else node.bases
            names = (ast.unparse(x) for x in used if isinstance(x, ast.Attribute) and x.attr in ("Thread", "Timer"))
            yield from (name for name in names if name in ("threading.Thread", "threading.Timer"))


def endless_waits(nodes: list[ast.AST]) -> Iterator[str]:
    """Calls that wait for a thread, a process or a condition, however long it takes."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            bounded = {"timeout", "blocking", None} & {keyword.arg for keyword in node.keywords}
            if len(node.args) == WAITS.get(node.func.attr) and not bounded:
                yield f"{ast.unparse(node.func)}()"


def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def test_no_thread_dies_unseen_and_no_wait_is_endless() -> None:
    bare, endless = {}, {}
    for path in SOURCES:
        name, nodes = str(path.relative_to(ROOT)), nodes_of(path.read_text())
        bare[name], endless[name] = sorted(bare_threads(nodes)), sorted(endless_waits(nodes))
    assert len(bare) > 100
    assert {name: found for name, found in bare.items() if found} == BARE
    assert {name: found for name, found in endless.items() if found} == {
        name: sorted(known) for name, known in ENDLESS.items()
    }


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nthreading.Thread(target=f)",
        "import threading\nthreading.Timer(1, f)",
        "import threading\nclass Own(threading.Thread): pass",
        "from threading import Thread",
        "import threading as t",
        "import _thread",
    ],
)
def test_a_bare_thread_is_found(source: str) -> None:
    assert len(list(bare_threads(nodes_of(source)))) == 1


@pytest.mark.parametrize(
    ("call", "endless"),
    [
        ("thread.join()", True),
        ("thread.join(3)", False),
        ("process.wait()", True),
        ("process.wait(timeout=3)", False),
        ("condition.wait_for(done)", True),
        ("condition.wait_for(done, 3)", False),
        ("future.result()", True),
        ("', '.join(names)", False),
    ],
)
def test_a_wait_without_a_time_is_found(call: str, endless: bool) -> None:
    assert bool(list(endless_waits(nodes_of(call)))) is endless


def _end(error: BaseException | None) -> None:
    if error is not None:
        raise error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_that_ends_a_thread_is_reported_with_its_name() -> None:
    reported: list[ThreadDied] = []
    with deaths_reported_to(reported.append):
        for error in (OverflowError("too large"), None, SystemExit()):
            thread = VitalThread(_end, "control", (error,))
            thread.start()
            thread.join(30)
    assert reported == [ThreadDied("control", "OverflowError: too large")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_removed_listener_receives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[ThreadDied] = []
    printed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda *_: printed.set())
    with deaths_reported_to(reported.append):
        pass
    VitalThread(_end, "control", (ValueError("x"),)).start()
    assert printed.wait(30), "the traceback is printed as for any thread"
    assert reported == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_with_an_owner_reports_to_it_alone() -> None:
    reported: list[ThreadDied] = []
    owner: list[ThreadDied] = []
    with deaths_reported_to(reported.append):
        thread = VitalThread(_end, "leader", (KeyError(7),), owner=owner.append)
        thread.start()
        thread.join(30)
    assert (owner, reported) == ([ThreadDied("leader", "KeyError: 7")], [])

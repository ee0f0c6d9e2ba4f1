"""Fixtures for all tests; every test is checked for leaks."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

sys.path.insert(0, str(Path(__file__).parent))

from harness import BUSY, SLOWNESS, Job, forks, job_in, share_forks

# Until all tests are collected nearly all objects are kept, so that a search for garbage finds none.
gc.disable()

# Threads of torch's operations wait for each other without a loop, which would take the processors from other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell without job control, or nohup, ignores these signals for background jobs; all child processes would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

# A slow machine must not fail a test, and examples are the same in every run. Hypothesis also draws constants of the
# project's modules, of those that are imported at that time: with them, each change of the source would draw others.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
providers._get_local_constants = lambda: providers._local_constants


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {int(pid) for pid in (task / "children").read_text().split()}
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that has just ended
    return found


def _descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:
            continue
    return found


def _native_threads() -> list[str]:
    """The names of all threads, also of those that libraries made: they may hold the descriptors."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found.append((task / "comm").read_text().strip())
    return sorted(found)


def _shared() -> set[str]:
    # This project's programs have no semaphores. Those of multiprocessing exist for moments, but one remains if a
    # process is killed while it creates one: under a random name that sem_open(3) uses first. podman's lock remains
    # until the machine is rebooted.
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "libpod"))}


def _open_gpu() -> None:
    """Create this process' CUDA context: its descriptors stay open for as long as the process lives."""
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")


# Loaders of tests in this process use functions of those tests, which cannot be pickled; from Python 3.14 on, the
# loader's processes would receive them that way. Scripts use their Python's default method.
if multiprocessing.get_start_method(allow_none=True) is None:
    multiprocessing.set_start_method("fork")


class _Failures:
    """Prints each failure when it happens: the log of an interrupted run has no summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message.partition("\n")[0][:200] if crash is not None else ""
            self._terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}): {why}", red=True)
            self._terminal.flush()


LONG = (
    *("frameworks", "sharded", "api", "containers", "container_memory", "slurm", "engines", "checkpoint_urls"),
    *("torch", "convert", "elasticctl", "hangs", "live_starts", "live_changes", "two_runs", "partitions", "pages"),
    *("benchmarks", "drills", "kubernetes", "planned_exact", "examples", "live_frozen", "voters", "kills_exact"),
    *("drains", "newest_state", "chaos", "tutorial_examples", "torchrun_mode", "clouds", "plain_loops"),
    *("trainer_ranks", "exact", "checkpoint_faults", "exact_matrix", "beginnings", "site", "schedules_resume"),
    *("memory_snapshots", "teardown", "live_objects", "streams", "etcd", "shares", "freezes", "spoiled_record"),
    *("takeover_midpoints", "kill", "gpu_check"),
    *("leavers_serve", "takeover_stateful", "first_second", "ledger", "etcd_bad_input", "token", "several_nodes"),
    *("one_node", "snapshot_store", "bad_input", "options", "server", "front_ends", "console", "distributions"),
    *("groups", "trainer", "elected", "hang_watch", "http_pages", "live_ahead", "live_rounds", "composer_rows"),
    "stateful_loaders",
)
"""The files that take longest, of make test-all and of make test, in this order."""


TEST_ALL = "(system or slow) and not soak"
"""The tests of make test-all, as pytest's -m."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which make test-all runs no test: two thirds of them, and each of its processes would."""
    if config.option.markexpr != TEST_ALL or collection_path.suffix != ".py":
        return None
    return None if _names_marks(collection_path) else True


def _names_marks(path: Path) -> bool:
    return re.search(r"\bmark\.(system|slow)\b", path.read_text()) is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that none of them runs alone at the end; tests have more time if it is busy."""
    for item in items if BUSY > 1.5 else ():
        own = item.get_closest_marker("timeout")
        limit = own.args[0] if own is not None else float(item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(limit * BUSY), append=False)
    marked = {item.path for item in items if any(map(item.get_closest_marker, ("system", "slow")))}
    if unnamed := [str(path) for path in marked if not _names_marks(path)]:
        raise pytest.UsageError(f"name the marks of slow and system tests in their own files: {', '.join(unnamed)}")
    place = {f"test_{name}": at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


def pytest_collection_finish() -> None:
    """Keep modules and tests out of the garbage collector: it takes 0.3 s to look through half a million objects."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # the terminal reporter must exist
def pytest_configure(config: pytest.Config) -> None:
    if Path("/dev/nvidiactl").exists() and not re.match(r"\(*gpu\b", config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # other tests expect that a process trains on the CPU
    if getattr(config.option, "numprocesses", None):  # of pytest-xdist
        share_forks()
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if isinstance(terminal, pytest.TerminalReporter):  # a pytest-xdist process has none
        config.pluginmanager.register(_Failures(terminal))


BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ
"""Whether other tests run in parallel: then the process that started them checks shared memory, at the end."""


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[_SHARED] = set() if BESIDE_OTHERS else _shared()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if left := set() if BESIDE_OTHERS else _shared() - session.stash[_SHARED]:
        raise pytest.UsageError(f"the tests left behind in /dev/shm: {', '.join(sorted(left))}")


_SHARED = pytest.StashKey[set[str]]()


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Parse a command line, given as one string or as its words, beside a ``train.py``."""
    from elastic_launch.cli import main as cli

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def parse_it(*line: str, **environ: str) -> object:
        argv = line[0].split() if len(line) == 1 else list(line)
        return cli.parse(argv, {"HOME": str(tmp_path), "PATH": os.environ["PATH"], **environ})

    return parse_it


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads of torch that wait for each other by spinning take seconds for a step on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def default_signals() -> Iterator[None]:
    """Restore signal handlers: a training, or one of our programs, in this process keeps them installed."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def default_logging() -> Iterator[None]:
    """Restore the launcher's logger, which our programs configure in this process for its lifetime."""
    log = logging.getLogger("elastic_launch")
    handlers, propagate, level = log.handlers[:], log.propagate, log.level
    yield
    log.handlers[:] = handlers
    log.propagate = propagate
    log.setLevel(level)


FORKS = {"forks", "run_script", "undisturbed_hash"}
"""Functions that begin to use the process that forks agents, which then stays."""


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaks threads, children, descriptors or shared memory."""
    if request.node.get_closest_marker("gpu") is not None:
        _open_gpu()
    if FORKS & vars(request.module).keys():
        request.getfixturevalue("forking")
    threads, children = set(threading.enumerate()), _children()
    descriptors, shared = _descriptors(), _shared()
    yield
    deadline = time.monotonic() + 2.0 * SLOWNESS
    while True:
        left = {
            "threads": [t.name for t in threading.enumerate() if t not in threads],
            "children": sorted(_children() - children),
            "descriptors": sorted(_descriptors() - descriptors),
            "shared memory": [] if BESIDE_OTHERS else sorted(_shared() - shared),
        }
        if not any(left.values()) or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    found = {name: what for name, what in left.items() if what}
    assert not found, f"left behind: {found}; native threads: {_native_threads()}"


@pytest.fixture(scope="session")
def forking() -> None:
    """Start the process that forks agents, and keep it."""
    forks()


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest, forking: None) -> Iterator[Job]:
    """Launches whose workers must not outlive the test."""
    yield from job_in(tmp_path, executed=request.node.get_closest_marker("executed") is not None)

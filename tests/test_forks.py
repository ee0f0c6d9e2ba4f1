"""What processes that a script forks have of this project's signal handlers: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

BEGIN = """
import ctypes, faulthandler, multiprocessing, os, re, signal, sys, threading, time
from concurrent.futures import ProcessPoolExecutor
from elastic_launch.stack_dump import dump_stacks_on_signal
from elastic_launch.training.stopping import Termination

def caught():
    with open("/proc/self/status") as file:
        found = re.findall(r"^Sig(?:Cgt|Blk):\\s*(\\w+)$", file.read(), re.MULTILINE)
    return [{number for number in signal.Signals if int(mask, 16) >> number - 1 & 1} for mask in found]

def forked(does):
    pid = os.fork()
    if not pid:
        os._exit(does() or 0)
    return pid

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

blocked, usual = caught()
termination = Termination()
termination.watch()
dump_stacks_on_signal()
"""


def passes(code: str, directory: str = "") -> None:
    env = {"TORCHELASTIC_ERROR_FILE": f"{directory}/error.json"} if directory else {}
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + code], env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=120)
        finally:
            with suppress(ProcessLookupError):  # it has left none
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors


SAME = """
same = lambda: int(caught() != [blocked, usual] or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
"""


@pytest.mark.parametrize(
    "code",
    [
        "assert ended(forked(same)) == 0",
        "thread = threading.Thread(target=lambda: found.append(ended(forked(same)))); found = []\n"
        "thread.start(); thread.join(); assert found == [0]",
        "assert ended(forked(lambda: ended(forked(same)))) == 0",
        "process = multiprocessing.get_context('fork').Process(target=lambda: os._exit(same()))\n"
        "process.start(); process.join(); assert process.exitcode == 0",
    ],
    ids=["main thread", "another thread", "of a fork", "multiprocessing"],
)
def test_a_forked_process_has_the_signal_handling_from_before(code: str, tmp_path: object) -> None:
    passes(f"{SAME}\n{code}\nassert caught() == [blocked, usual | {{signal.SIGTERM, signal.SIGURG}}]", str(tmp_path))


@pytest.mark.parametrize(
    "code",
    [
        "with multiprocessing.get_context('fork').Pool(4) as pool: pool.map(abs, range(4))",
        "with ProcessPoolExecutor(2, multiprocessing.get_context('fork')) as pool:\n"
        "    waits = pool.submit(time.sleep, 600)\n"
        "    for process in list(pool._processes.values()): process.terminate()\n"
        "    assert waits.exception() is not None",
        "for _ in range(100):\n"  # at once: before the new process has run anything
        "    process = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,))\n"
        "    process.start(); process.terminate(); process.join(); assert process.exitcode == -signal.SIGTERM",
    ],
    ids=["pool", "executor", "at once"],
)
def test_a_forked_process_ends_by_sigterm(code: str, tmp_path: object) -> None:
    passes(f"{code}\nassert not termination.asked", str(tmp_path))


def test_a_process_that_native_code_forks_ends_by_sigterm() -> None:
    passes(
        """
reading, writing = os.pipe()
pid = ctypes.PyDLL(None).fork()
if not pid:
    os.write(writing, b"x")
    while True: time.sleep(0.01)
os.read(reading, 1)
os.kill(pid, signal.SIGTERM)
assert ended(pid) == -signal.SIGTERM
"""
    )


def test_a_handler_of_the_script_is_inherited_and_outlives_the_training(tmp_path: object) -> None:
    passes(
        """
came = []
def own(number, frame):
    came.append(number)
    if callable(before): before(number, frame)
before = signal.signal(signal.SIGTERM, own)

def child():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    return int(came != [signal.SIGTERM] * 2 or signal.getsignal(signal.SIGTERM) is not own)

assert ended(forked(child)) == 0
os.kill(os.getpid(), signal.SIGTERM)
assert came == [signal.SIGTERM] and termination.asked
termination.close()
assert signal.getsignal(signal.SIGTERM) is own
""",
        str(tmp_path),
    )


def test_a_handler_that_the_script_has_put_in_place_of_the_stack_dump_is_inherited(tmp_path: object) -> None:
    passes(
        """
signal.signal(signal.SIGURG, own := lambda number, frame: None)
assert ended(forked(lambda: int(signal.getsignal(signal.SIGURG) is not own or signal.SIGURG not in caught()[1]))) == 0
""",
        str(tmp_path),
    )


def test_what_a_process_forks_after_the_training_is_not_changed() -> None:
    passes(
        """
termination.close()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
assert ended(forked(lambda: int(signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN))) == 0
"""
    )

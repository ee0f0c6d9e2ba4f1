"""Show that a run that loses a worker ends with the same weights as one without a fault. `make demo` runs this script.

Trains the digit classifier in exact mode on two workers and kills one of them from outside with SIGKILL as soon as
there is a checkpoint. If the training ends first, as on a busy machine, it is done once more with longer steps. Then
runs the same training without a fault, as one process without a launcher, and at the same time with another seed.
Exits non-zero, with the reason, unless the run went on above step 0, with the other worker in the same process, and
has the same weights as the run without a fault, the other seed has different weights, and no process is left.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

TRAIN = [str(Path(__file__).resolve().parent / "digits" / "train.py"), "--exact", "--epochs", "3"]
WORKERS = 2
VICTIM_RANK = 1
SEEDS = (0, 1)
STEP_TIMES = (0.1, 0.5)
RUN_TIMEOUT = 120.0
STOP_TIMEOUT = 15.0
MARK = "ELASTIC_DEMO_DIRECTORY"

Result = dict[str, Any]


class DemoFailed(Exception):
    """The run did not show what the demo demonstrates."""


class TooLateError(DemoFailed):
    """The training ended before the kill, so that nothing was left to go wrong."""


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


class Processes:
    """The demo's processes and all their descendants, identified by a mark in their environment."""

    def __init__(self, directory: Path, signals: SimpleQueue[int]) -> None:
        self.directory = directory
        self._signals = signals
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], output: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a Python program; its output goes to a file, or to this script's own stdout and stderr."""
        say(f"starting python {shlex.join(command)}")
        with open(output or os.devnull, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=file if output else None,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: str(self.directory)},
                # Ctrl-C reaches only this script, which stops the runs once, in order.
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def wait(self, look: Callable[[], None] = lambda: None) -> None:
        """Wait, with a time limit, until all have ended."""
        deadline = time.monotonic() + RUN_TIMEOUT
        while any(process.poll() is None for process in self._started):
            if time.monotonic() > deadline:
                raise DemoFailed(f"no end within {RUN_TIMEOUT:.0f} s")
            look()
            with suppress(Empty):
                raise DemoFailed(f"stopped by {signal.Signals(self._signals.get(timeout=0.05)).name}")

    def left(self) -> list[int]:
        mark = os.fsencode(f"{MARK}={self.directory}\0")
        found = []
        for entry in Path("/proc").iterdir():
            # Another user's, or one that has just ended, cannot be read.
            with suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def end(self) -> None:
        running = [process for process in self._started if process.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT)
        for pid in self.left():
            say(f"killing pid {pid}, which was left behind")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait()


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in the run's event log."""
    found = []
    for file in directory.glob("**/events-*.jsonl"):
        for line in file.read_text().splitlines(keepends=True):
            # The last line may be incomplete.
            event = json.loads(line) if line.endswith("\n") else {}
            if event.get("event") == kind:
                found.append(event)
    return found


def started_worker(directory: Path, rank: int) -> int:
    """The pid of the worker of this rank that was started last."""
    pids = [int(event["pid"]) for event in events(directory, "worker_started") if event["rank"] == rank]
    if not pids:
        raise DemoFailed(f"no event log under {directory} names the pid of the worker with rank {rank}")
    return pids[-1]


def disturbed(processes: Processes, step_time: float) -> Result:
    """Train on several workers with steps of at least this time, and kill one of them when there is a checkpoint."""
    directory = processes.directory / f"disturbed-{step_time}"
    checkpoints, result = directory / "checkpoints", directory / "result.json"
    launcher = ["-m", "elastic_launch", "--standalone", "--nproc", str(WORKERS)]
    # Slow enough for the kill to hit the middle of the training.
    options = [
        "--checkpoint",
        str(checkpoints),
        "--every",
        "10",
        "--step-time",
        str(step_time),
        "--result",
        str(result),
    ]
    command = [*launcher, "--log-dir", str(directory / "logs"), *TRAIN, *options]
    killed: list[int] = []
    too_late: list[int] = []

    def kill() -> None:
        saved = sorted(path.name for path in checkpoints.glob("step-*"))
        if saved and not killed:
            killed.append(started_worker(directory, VICTIM_RANK))
            say(f"{saved[-1]} is saved; killing rank {VICTIM_RANK}, pid {killed[0]}, from outside with SIGKILL")
            try:
                os.kill(killed[0], signal.SIGKILL)
            except ProcessLookupError:
                too_late.append(killed[0])

    process = processes.start(command)
    processes.wait(kill)
    if process.returncode:
        raise DemoFailed(f"the run ended with exit code {process.returncode}; its last words are above")
    if not killed:
        raise TooLateError("the run ended without a checkpoint, so no worker was killed")
    if too_late:
        raise TooLateError(f"pid {killed[0]}, rank {VICTIM_RANK}'s in the event log, did not run any more")
    kept = {event["rank"] for event in events(directory, "worker_kept")}
    # The first round began at step 0.
    again = max(event["step"] for event in events(directory, "training_begun"))
    told = json.loads(result.read_text())
    if again >= told["steps"]:
        raise TooLateError("the kill came after the last step")
    return {**told, "kept": kept, "again": again}


def disturbed_in_time(processes: Processes) -> Result:
    """Train with a kill; if it comes too late, once more with longer steps."""
    for step_time in STEP_TIMES[:-1]:
        try:
            return disturbed(processes, step_time)
        except TooLateError as error:
            say(f"too late: {error}; the machine is busy, so it is done again with longer steps")
    return disturbed(processes, STEP_TIMES[-1])


def undisturbed(processes: Processes) -> list[Result]:
    """Train each seed in one process, at the same time."""
    runs = []
    for seed in SEEDS:
        result, output = (processes.directory / f"seed-{seed}.{suffix}" for suffix in ("json", "out"))
        runs.append((processes.start([*TRAIN, "--seed", str(seed), "--result", str(result)], output), result, output))
    processes.wait()
    for process, _, output in runs:
        if process.returncode:
            print(output.read_text(errors="replace"), flush=True)
            raise DemoFailed(f"an undisturbed run ended with exit code {process.returncode}; its output is above")
    return [json.loads(result.read_text()) for _, result, _ in runs]


def check(ours: Result, same: Result, other: Result) -> None:
    if ours["restarts"] < 1:
        raise DemoFailed("the run ended without a restart, although a worker was killed")
    if ours["again"] < 1:
        raise DemoFailed("the training began again at step 0")
    if VICTIM_RANK in ours["kept"] or len(ours["kept"]) != WORKERS - 1:
        raise DemoFailed(f"the ranks that kept their processes are {ours['kept']}")
    if ours["weights_sha256"] != same["weights_sha256"]:
        raise DemoFailed("the weights are not those of the undisturbed run")
    if ours["weights_sha256"] == other["weights_sha256"]:
        raise DemoFailed("another seed came to the same weights, so that equal ones show nothing")


def tell(name: str, result: Result) -> None:
    workers = " then ".join(map(str, result["worlds"]))
    told = f"weights {result['weights_sha256'][:16]}, accuracy {result['accuracy']:.3f}, workers {workers}"
    say(f"{name + ':':<12} {told}")


def run(processes: Processes) -> None:
    ours = disturbed_in_time(processes)
    if left := processes.left():
        raise DemoFailed(f"the run left processes behind: {left}")
    kept = ", ".join(map(str, ours["kept"]))
    say(f"the run came to its end: restarts {ours['restarts']}, training went on after step {ours['again']}")
    say(f"rank {kept} kept its process")
    say("now the same undisturbed, as one process without a launcher, and beside it with another seed")
    same, other = undisturbed(processes)
    say("hashes of the final weights follow: equal ones mean that the kill has changed no bit of the result")
    for name, result in (("one killed", ours), ("undisturbed", same), ("other seed", other)):
        tell(name, result)
    check(ours, same, other)
    say("passed: with a worker killed, the weights are those of the undisturbed run, to the bit")


def main() -> int:
    signals: SimpleQueue[int] = SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: signals.put(number))
    with tempfile.TemporaryDirectory(prefix="elastic-launch-demo-") as directory:
        processes = Processes(Path(directory), signals)
        try:
            run(processes)
        except DemoFailed as failure:
            say(f"FAILED: {failure}")
            return 1
        finally:
            processes.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())

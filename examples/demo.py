"""Show a run that loses a worker and trains on: what `make demo` runs.

Starts the digits job on two workers, kills one of them from outside with SIGKILL as soon as there is a
snapshot to come back to, and checks how the run ended. Exits non-zero, with the reason, unless the run ended
well after at least one restart that resumed above step 0.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

SCRIPT = Path(__file__).resolve().parent / "torchrun_style" / "train.py"
EVERY = 5
EPOCHS = 8
VICTIM_RANK = 1
RUN_TIMEOUT = 120.0
STOP_TIMEOUT = 15.0
# A launcher that has ended may have left a process that holds its output open.
OUTPUT_TIMEOUT = 5.0

STEP = re.compile(r"\bstep (\d+) loss ")
RESUMED = re.compile(r"\bresumed at step (\d+) \(restart (\d+)\)")
DONE = re.compile(r"\bdone: steps (\d+) accuracy ([\d.]+) world (\d+) restarts (\d+)")


class DemoFailed(Exception):
    """The run did not do what the demo is there to show."""


@dataclass(frozen=True)
class Line:
    text: str


@dataclass(frozen=True)
class EndOfOutput:
    pass


@dataclass(frozen=True)
class Signal:
    number: int


Inbox = SimpleQueue[Line | EndOfOutput | Signal]


@dataclass
class Story:
    """What the run has shown so far."""

    killed_at_step: int | None = None
    killed_at: float = 0.0
    resumed_at_step: int | None = None
    resumed_after: float = 0.0
    accuracy: float = 0.0
    world: int = 0
    restarts: int | None = None


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


def read_output(process: subprocess.Popen[str], inbox: Inbox) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        inbox.put(Line(line.rstrip("\n")))
    inbox.put(EndOfOutput())


def messages(process: subprocess.Popen[str], inbox: Inbox) -> Iterator[str]:
    """The lines that the run prints, until it has ended; bounded."""
    deadline = time.monotonic() + RUN_TIMEOUT
    ended: float | None = None
    while True:
        now = time.monotonic()
        if now > deadline:
            raise DemoFailed(f"the run did not end within {RUN_TIMEOUT:.0f} s")
        if ended is None and process.poll() is not None:
            ended = now
        if ended is not None and now > ended + OUTPUT_TIMEOUT:
            raise DemoFailed("the launcher has ended, but a process that it left holds its output open")
        try:
            message = inbox.get(timeout=0.2)
        except Empty:
            continue
        match message:
            case Line(text):
                yield text
            case Signal(number):
                raise DemoFailed(f"stopped by {signal.Signals(number).name}")
            case EndOfOutput():
                return


def started_worker(directory: Path, rank: int) -> int | None:
    """The pid of the last worker that the run's event log says was started with this rank."""
    pid: int | None = None
    for file in directory.glob("**/events-*.jsonl"):
        for line in file.read_text().splitlines(keepends=True):
            # The last line may be one that is being written.
            event = json.loads(line) if line.endswith("\n") else {}
            if event.get("event") == "worker_started" and event["rank"] == rank:
                pid = event["pid"]
    return pid


def kill_worker(directory: Path, step: int, story: Story) -> None:
    pid = started_worker(directory, VICTIM_RANK)
    if pid is None:
        raise DemoFailed(f"no event log under {directory} names the pid of the worker with rank {VICTIM_RANK}")
    say(f"killing the worker with rank {VICTIM_RANK}, pid {pid}, from outside with SIGKILL after step {step}")
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        raise DemoFailed(f"pid {pid}, which the event log gives to rank {VICTIM_RANK}, is no running process") from None
    story.killed_at_step, story.killed_at = step, time.monotonic()


def watch(process: subprocess.Popen[str], inbox: Inbox, directory: Path) -> Story:
    story = Story()
    for line in messages(process, inbox):
        print(line, flush=True)
        if found := STEP.search(line):
            step = int(found[1])
            if story.killed_at_step is None and step > EVERY:
                kill_worker(directory, step, story)
        elif (found := RESUMED.search(line)) and story.resumed_at_step is None:
            story.resumed_at_step = int(found[1])
            story.resumed_after = time.monotonic() - story.killed_at
        elif found := DONE.search(line):
            story.accuracy, story.world, story.restarts = float(found[2]), int(found[3]), int(found[4])
    return story


def check(story: Story, exit_code: int) -> None:
    if exit_code:
        raise DemoFailed(f"the run ended with exit code {exit_code}; its last words are above")
    if story.killed_at_step is None:
        raise DemoFailed(f"the run printed no step above {EVERY}, so no worker was killed")
    if story.restarts is None:
        raise DemoFailed("the script printed no `done:` line")
    if story.restarts < 1:
        raise DemoFailed("the run ended without a restart, although a worker was killed")
    if not story.resumed_at_step:
        raise DemoFailed("the training began again at step 0 instead of the last snapshot")


def processes_of(directory: Path) -> list[int]:
    """Everything that has this run's directory, whose name is like no other, among its arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                arguments = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(directory) in arguments:
                found.append(int(entry.name))
    return found


def end(process: subprocess.Popen[str], directory: Path) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            say(f"the launcher did not stop within {STOP_TIMEOUT:.0f} s of SIGTERM: killing it")
            process.kill()
            process.wait()
    for pid in processes_of(directory):
        say(f"killing pid {pid}, which the run left behind")
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def run(directory: Path, inbox: Inbox) -> None:
    launcher = [sys.executable, "-m", "elastic_launch"]
    options = ["--standalone", "--nproc", "2", "--log-dir", str(directory / "logs")]
    script = [str(SCRIPT), "--dir", str(directory / "snapshots"), "--epochs", str(EPOCHS)]
    command = [*launcher, *options, *script, "--every", str(EVERY), "--step-time", "0.05"]
    say(f"starting {shlex.join(command)}")
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Ctrl-C reaches us alone, and we stop the run once, in order.
        start_new_session=True,
    )
    try:
        threading.Thread(target=read_output, args=(process, inbox), daemon=True).start()
        story = watch(process, inbox, directory)
        check(story, process.wait(STOP_TIMEOUT))
        if left := processes_of(directory):
            raise DemoFailed(f"the run left processes behind: {left}")
    finally:
        end(process, directory)
    say(f"a worker was killed after step {story.killed_at_step}")
    say(f"training resumed at step {story.resumed_at_step}, {story.resumed_after:.1f} s after the kill")
    say(f"it ended with accuracy {story.accuracy:.3f}, world size {story.world}, restarts {story.restarts}")
    say("passed")


def main() -> int:
    inbox: Inbox = SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: inbox.put(Signal(number)))
    with tempfile.TemporaryDirectory(prefix="elastic-launch-demo-") as directory:
        try:
            run(Path(directory), inbox)
        except DemoFailed as failure:
            say(f"FAILED: {failure}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

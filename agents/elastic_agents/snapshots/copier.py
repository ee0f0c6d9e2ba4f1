"""The agent's side of a process that copies a snapshot to durable storage; ``copying`` is the process itself.

Storage may hang: a network file system whose server is gone blocks a process in a call that no signal interrupts. So a
copier may take any total time as long as it makes progress. One that makes none is killed, and left behind if it cannot
be killed.
"""

from __future__ import annotations

import logging
import os
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from elastic_agents.helpers import helper_command, helper_environment
from elastic_launch import codec
from elastic_launch.contract import MAX_LINE, CommitAnswer, Copied, Copying, CopyJob, MayCommit, pack, unpack
from elastic_launch.errors import ProtocolError

_log = logging.getLogger("elastic_launch.agent")

WARN_AFTER = 10.0
"""Seconds without progress after which a warning names the storage location."""

STALL = 60.0
"""Seconds without progress after which a copier is killed; those in which it waited for a processor do not count, since
another one would wait as long. Files are synced to disk 64 MiB at a time."""

URL_STALL = 300.0
"""The same for a URL, where a driver may send an entire file in one call, and retries on its own."""

KILLED_WITHIN = 5.0
"""Seconds within which a killed process ends, unless the kernel holds it."""

_TURN = 1.0  # Seconds


class Copier:
    """One process, started immediately; its priority is low, except for the final copy, which the node's end awaits.

    Args:
        job: what to copy.
        slot: descriptors of the snapshot's tensors and head.
        url: whether the destination is a URL.
        stderr: opens a descriptor for its stderr; None: it shares this process' stderr.

    Raises:
        OSError: if it cannot be started.
    """

    _left: ClassVar[list[subprocess.Popen[bytes]]] = []
    """Processes that could not be killed; they are reaped when the kernel releases them."""

    def __init__(
        self,
        job: CopyJob,
        slot: tuple[int, int],
        *,
        url: bool,
        stderr: Callable[[], int] | None = None,
    ) -> None:
        Copier._left[:] = [process for process in Copier._left if process.poll() is None]
        # Before imports, which take long. A stopped process continues when this one is killed, and ends by itself.
        code = "" if job.last else "from elastic_agents.priority import give_way; give_way(); "
        code += "from elastic_agents.prctl import signal_at_parents_death; "
        code += f"signal_at_parents_death({signal.SIGCONT:d}); "
        code += "from elastic_agents.snapshots.copying import main; main()"
        said = None if stderr is None else stderr()
        try:
            self._process = subprocess.Popen(
                helper_command(code, codec.dumps(job).decode(), *map(str, slot)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                pass_fds=slot,
                start_new_session=True,
                env=helper_environment(),
            )
        finally:
            if said is not None:
                os.close(said)
        self._directory = job.directory
        self._there = Copied(job.step, job.round, directory=job.directory)
        self._stall = URL_STALL if url else STALL
        self._pending = b""
        self._begun = False
        self._given_up = False

    def fail(self) -> None:
        """Make its writes to files fail from now on: by the limit of their size, with EFBIG, as a full disk would."""
        with suppress(ProcessLookupError):
            _, hard = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (0, hard))

    def kill(self) -> None:
        """Make :meth:`hear_out` return soon, even if the kernel holds the process; may be called from any thread."""
        self._given_up = True
        self._process.kill()

    def hear_out(self, may_commit: Callable[[], CommitAnswer], progress: Callable[[], object]) -> Copied:
        """Wait until the process has copied, failed, or stopped making progress; it has then ended, or is left
        behind.

        ``may_commit`` is called before the copy becomes visible, and ``progress`` now and then while it makes progress.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            return self._hear_out(may_commit, progress)
        finally:
            self._process.kill()  # after an answer it ends anyway
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.stdout.close()
            self._reap()

    def _hear_out(self, may_commit: Callable[[], CommitAnswer], progress: Callable[[], object]) -> Copied:
        while True:
            line = self._line()
            if line is None:
                error, hint = self._stalled()
                return replace(self._there, error=error, hint=hint)
            try:
                message = unpack(line, {Copying, MayCommit, Copied})
            except ProtocolError:
                return replace(self._there, error=f"The process that copies it {self._unexpected(line)}.")
            match message:
                case Copying():
                    progress()
                case MayCommit(number=number):
                    self._say(replace(may_commit(), number=number))
                case Copied(pruning=True):
                    self._there = replace(message, pruning=False)
                case Copied():
                    return message

    def _stalled(self) -> tuple[str, str]:
        if not self._begun:
            error = f"The process that copies to {self._directory} has not begun within {self._stall:g} s."
            return error, "Look for what keeps the machine busy."
        error = f"{self._directory} does not respond: the copy made no progress for {self._stall:g} s."
        return error, "Check the file system or the service that holds it."

    def _unexpected(self, line: bytes) -> str:
        if line:
            return f"said {line[:80].decode(errors='replace')!r}, an unexpected reply"
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_WITHIN)
        return f"ended with {self._process.returncode}"

    def _line(self) -> bytes | None:
        """Return the next line, an incomplete one at the end of file, or None if the process makes no progress."""
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        silent, warned, waited = 0.0, False, self._waited()
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            while b"\n" not in self._pending and len(self._pending) < MAX_LINE:
                if silent - (self._waited() - waited) >= self._stall or self._given_up:
                    return None
                if not warned and silent >= WARN_AFTER:
                    warned = True
                    text = "%s does not respond: a copy has made no progress for %g s"
                    if not self._begun:  # the machine is busy; the storage is not to blame
                        text = "the process that copies to %s has not begun after %g s"
                    text += "; after %g s another one is tried"
                    _log.warning(text, self._directory, WARN_AFTER, self._stall)
                began = time.monotonic()
                if not selector.select(min(_TURN, self._stall)):
                    # An agent that was frozen itself has not read what the process wrote meanwhile.
                    silent += min(time.monotonic() - began, 2 * _TURN)
                    continue
                if not (data := os.read(source, MAX_LINE)):
                    return self._pending
                self._pending += data
        if warned:
            _log.info("%s responds again" if self._begun else "the process that copies to %s begins", self._directory)
        self._begun = True
        line, end, self._pending = self._pending.partition(b"\n")
        return line + end

    def _waited(self) -> float:
        """Return for how many seconds the process was ready to run and had no processor; 0 if the kernel does not say.

        A wait counts once it is over.
        """
        with suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[1]) / 1e9
        return 0.0

    def _say(self, answer: CommitAnswer) -> None:
        assert self._process.stdin is not None
        try:
            # Bypass the buffer: data left in it would raise BrokenPipeError again on close.
            os.write(self._process.stdin.fileno(), pack(answer))
        except BrokenPipeError:
            _log.debug("the copier is gone")

    def _reap(self) -> None:
        try:
            self._process.wait(_TURN if self._given_up else KILLED_WITHIN)
        except subprocess.TimeoutExpired:
            text = "process %d, which copies to %s, cannot be killed: the kernel holds it, and it is left behind"
            _log.warning(text, self._process.pid, self._directory)
            Copier._left.append(self._process)

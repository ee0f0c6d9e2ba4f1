"""A voter's state on disk: replaced as a whole, and synced before the voter answers."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from elastic_launch import codec
from elastic_launch.errors import EndpointError, ProtocolError
from elastic_launch.rendezvous.voters.voter import VoterState
from elastic_launch.system.private_files import make_private, open_private, read_small, untrusted
from elastic_launch.system.whole_writes import write_whole


class VoteFile:
    """The file of one voter. It is locked while this object is open, as hosts may share the directory.

    Raises:
        EndpointError: if the directory cannot be written, or another process has the lock.
    """

    def __init__(self, directory: Path, voter: str) -> None:
        self.path = directory / f"voter-{re.sub('[^A-Za-z0-9.-]', '_', voter)}.json"
        self._new = self.path.with_suffix(".new")
        self._lock = -1
        if reason := untrusted(directory, exclusive=True):
            raise EndpointError(
                f"Voter {voter} does not keep its state in {directory}: {reason}.",
                "Give another directory with --log-dir.",
            )
        try:
            make_private(directory)
            self._lock = open_private(self.path.with_suffix(".lock"), os.O_RDWR)
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise EndpointError(
                f"Another process is voter {voter}: it has the lock on {self.path}.",
                "End that agent, or give each host its own --log-dir.",
            ) from error
        except OSError as error:
            self.close()
            raise EndpointError(
                f"Voter {voter} cannot keep its state in {directory}: {error.strerror or error}.",
                "Give a directory on a disk of this host with --log-dir.",
            ) from error

    def load(self, group: str) -> VoterState | None:
        """Return the state of this group's voter; None if there is none that can be read."""
        try:
            state = codec.decode(VoterState, codec.loads(read_small(self.path, codec.MAX_BYTES)))
        except (OSError, ValueError, ProtocolError):
            return None
        return state if state.group == group else None

    def save(self, state: VoterState) -> None:
        """Write a state; once this returns, it survives a crash of the host.

        Raises:
            OSError: if it may not have been written.
        """
        descriptor = open_private(self._new, os.O_WRONLY | os.O_TRUNC)
        try:
            write_whole(descriptor, codec.dumps(state))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(self._new, self.path)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def remove(self) -> None:
        """Remove the state of a run that has ended."""
        for path in (self.path, self._new, self.path.with_suffix(".lock")):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

"""Every error that users can see, with its exit code and a remedy.

::

    ElasticLaunchError
    ├── UsageError                  2   invalid flag or value
    │   └── CommandLineError            that any argument parser would reject
    └── RendezvousError            95   lost or refused
        ├── EndpointError               cannot be resolved, reached or bound
        │   └── UnresolvedError         its name does not resolve, or not yet
        ├── RefusedError                this node does not fit the run
        ├── StoreError                  the control store failed or did not answer in time
        │   ├── RecordTooLargeError     it never accepts a record of that size
        │   └── DeniedError             it denies access to this node
        ├── ProtocolError               a message or record that cannot be parsed
        └── InternalError               a part of the rendezvous has failed because of a bug
"""

from __future__ import annotations

from enum import IntEnum

TYPE_CHECKING = False  # programs import this early, and importing typing takes several milliseconds
if TYPE_CHECKING:
    from typing import Self

FINAL_NOTE = "  A restart would fail in the same way."
"""Line after the message of a final error in every traceback, by which an agent recognizes one, whatever its class."""

REPEATS_NOTE = "  In exact mode a restart computes the same again: "
"""Beginning of such a line for an error that results from numbers; the rest says where, the same each time."""


class ExitCode(IntEnum):
    """Exit codes of ``elastic-launch``, besides a failed worker's own code and 128 + N for signal N."""

    DONE = 0
    TRAINING_FAILED = 1
    USAGE = 2
    STARTUP_FAILURE = 90
    BUDGET_SPENT = 91
    NO_PROGRESS = 92
    DO_NOT_RETRY = 93
    TOO_FEW_NODES = 94
    RENDEZVOUS = 95
    INTERRUPTED = 130
    TERMINATED = 143


class ElasticLaunchError(Exception):
    """Base class of all errors.

    Args:
        message: what was requested and what was found.
        hint: what to do about it.

    Attributes:
        exit_code: the exit code of a program that ends with this error.
        final: whether a restarted worker would end with it again; then the run ends instead of restarting.
    """

    exit_code: int = ExitCode.TRAINING_FAILED
    final: bool = False

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Not in __init__, which a subclass may forget to call.
        error = super().__new__(cls, *args, **kwargs)
        if cls.final:
            error.add_note(FINAL_NOTE)
        return error

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # An exception's own way calls the class with args, which takes other arguments where a subclass says so.
        return type(self).__new__, (type(self), *self.args), self.__dict__

    def __str__(self) -> str:
        return "\n  ".join([self.message, *self.hint.splitlines()])


class UsageError(ElasticLaunchError):
    """An invalid flag, argument or value, or an invalid use of the library; a restart would fail in the same way."""

    exit_code = ExitCode.USAGE
    final = True


class CommandLineError(UsageError):
    """An unknown flag, a missing value, or a value of the wrong type: errors that argparse would also report."""


class RendezvousError(ElasticLaunchError):
    """The rendezvous was lost, or refused this node."""

    exit_code = ExitCode.RENDEZVOUS


class EndpointError(RendezvousError):
    """The endpoint cannot be resolved, reached or bound."""


class UnresolvedError(EndpointError):
    """The endpoint's name does not resolve here, or not yet."""


class RefusedError(RendezvousError):
    """The run refuses this node: another command, other limits, another protocol version."""


class StoreError(RendezvousError):
    """The control store failed or did not answer before its deadline."""


class LeasedError(StoreError):
    """The control store's voters have heard the leader, and refuse all others for ``wait`` seconds."""

    def __init__(self, message: str, wait: float) -> None:
        super().__init__(message)
        self.wait = wait


class RecordTooLargeError(StoreError):
    """The control record is too large to be written; a retry cannot help."""


class DeniedError(StoreError):
    """The control store requires a different user, password or permission."""


class ProtocolError(RendezvousError):
    """A message or record that cannot be parsed."""


class InternalError(RendezvousError):
    """A part of the rendezvous has failed because of a bug; a retry does not help.

    Args:
        what: the part and its error, as text.
    """

    def __init__(self, what: str) -> None:
        hint = "This is a fault of elastic-launch itself: please report it with the traceback that was printed."
        super().__init__(f"Internal error: {what}.", hint)

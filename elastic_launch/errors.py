"""Every error that a user can meet, with its exit code and a remedy.

::

    ElasticLaunchError
    ├── UsageError                  2   a flag or value that cannot work
    │   └── CommandLineError            that no parser of arguments takes
    └── RendezvousError            95   lost or refused
        ├── EndpointError               cannot be resolved, reached or bound
        │   └── UnresolvedError         its name is not known, or not yet
        ├── RefusedError                this node does not fit the run
        ├── StoreError                  the control store failed or did not answer in time
        │   ├── RecordTooLargeError     it never takes a record of that size
        │   └── DeniedError             it does not let this node in
        ├── ProtocolError               a message or record that cannot be understood
        └── InternalError               a part of the rendezvous has failed by a fault of its own
"""

from __future__ import annotations

from enum import IntEnum

TYPE_CHECKING = False  # programs import this early, and typing takes several milliseconds
if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "FINAL_NOTE",
    "REPEATS_NOTE",
    "CommandLineError",
    "DeniedError",
    "ElasticLaunchError",
    "EndpointError",
    "ExitCode",
    "InternalError",
    "ProtocolError",
    "RecordTooLargeError",
    "RefusedError",
    "RendezvousError",
    "StoreError",
    "UnresolvedError",
    "UsageError",
]


FINAL_NOTE = "  A restart would fail in the same way."
"""Line behind the message of a final error in each traceback: by it an agent knows one, whatever its class."""

REPEATS_NOTE = "  In exact mode a restart computes the same again: "
"""Begin of such a line of an error that has come of numbers; what follows says where, the same each time."""


class ExitCode(IntEnum):
    """Exit codes of ``elastic-launch``; a failed worker's own code and 128 + N for signal N come beside them."""

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
    """Root of all errors.

    Args:
        message: what was asked for and what was found.
        hint: what to do about it.

    Attributes:
        exit_code: of a program of this project that ends by it.
        final: whether a worker that ends by it would end so again: then the run ends instead of starting another one.
    """

    exit_code: int = ExitCode.TRAINING_FAILED
    final: bool = False

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Not in __init__, which a derived class may forget to call.
        error = super().__new__(cls, *args, **kwargs)
        if cls.final:
            error.add_note(FINAL_NOTE)
        return error

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UsageError(ElasticLaunchError):
    """A flag, a value or a combination of them that cannot work."""

    exit_code = ExitCode.USAGE
    final = True


class CommandLineError(UsageError):
    """A flag that is not known, one without its value, or a value of another type: what argparse would refuse, too."""


class RendezvousError(ElasticLaunchError):
    """The rendezvous was lost, or refused this node."""

    exit_code = ExitCode.RENDEZVOUS


class EndpointError(RendezvousError):
    """The endpoint cannot be resolved, reached or bound."""


class UnresolvedError(EndpointError):
    """The endpoint's name is not known here, or not yet."""


class RefusedError(RendezvousError):
    """The run refuses this node: another command, other limits, another protocol version."""


class StoreError(RendezvousError):
    """The control store failed or did not answer before its deadline."""


class RecordTooLargeError(StoreError):
    """The control record is too large to be written, and would be every time."""


class DeniedError(StoreError):
    """The control store wants another user, password or right than it was given."""


class ProtocolError(RendezvousError):
    """A message or record that cannot be understood."""


class InternalError(RendezvousError):
    """A part of the rendezvous has failed by a fault of its own; trying again does not help.

    Args:
        what: the part and its error, in words.
    """

    def __init__(self, what: str) -> None:
        hint = "This is a fault of elastic-launch itself: please report it with the traceback that was printed."
        super().__init__(f"Internal error: {what}.", hint)

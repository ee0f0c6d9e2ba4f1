"""The content of a job file: values of flags, the script with its arguments, and environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_launch.cli.flags import Sourced

NOT_IN_FILES = ("--help", "--version", "--config", "--print-config", "--print-completion")


@dataclass(frozen=True, slots=True)
class JobFile:
    """The content of a job file, each value with its file and line.

    Attributes:
        script: what the workers run; None if the command line names it.
        args: arguments of the script, before those of the command line.
        env: variables for the launcher and its workers, unless set in the environment.
    """

    values: Mapping[str, Sourced] = field(default_factory=dict)
    script: Sourced | None = None
    args: tuple[Sourced, ...] = ()
    env: Mapping[str, Sourced] = field(default_factory=dict)

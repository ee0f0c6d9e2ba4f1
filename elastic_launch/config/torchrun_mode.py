"""Standing in for torchrun to the last default and exit code, for wrappers that rely on them.

Wanted by the environment, or by the name that the program is called by.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from elastic_launch.config.settings import Setting
from elastic_launch.errors import CommandLineError, ElasticLaunchError, ExitCode

__all__ = [
    "DEFAULTS",
    "DEFAULT_ENDPOINT",
    "EMPTY",
    "ENV_TORCHRUN",
    "NAME",
    "SOURCE",
    "called_so",
    "code_of",
    "errors_told",
    "wanted",
]

ENV_TORCHRUN = "ELASTIC_LAUNCH_TORCHRUN"

NAME = "torchrun"

SOURCE = "default of torchrun"
"""Where values come from that nobody has given."""

DEFAULTS: Mapping[str, str] = {
    "--rdzv-backend": "static",
    "--join-settle": "30",
    "--dead-after": "15",
    "--max-restarts": "0",
    "--log-layout": "torchrun",
    "--signals-to-forward": "none",
    "--notice": "none",
}
"""The flags whose defaults are torchrun's then; tests compare them with torch's own."""

DEFAULT_ENDPOINT = "localhost:29400"
"""Where torchrun's c10d meets if it is named without an endpoint."""

EMPTY = frozenset(
    {
        "--rdzv-endpoint",
        "--rdzv-id",
        "--rdzv-conf",
        "--role",
        "--log-dir",
        "--local-ranks-filter",
        "--log-line-prefix-template",
    }
)
"""The flags of torchrun for which an empty value is the default."""


def wanted(environ: Mapping[str, str], program: str = "") -> bool:
    """Whether to do as torchrun.

    Args:
        program: what this process was called as; the variable wins.

    Raises:
        UsageError: if the variable is neither yes nor no.
    """
    if text := environ.get(ENV_TORCHRUN):
        return Setting(f"{ENV_TORCHRUN}=", text).truth()
    return called_so(program)


def called_so(program: str) -> bool:
    """Whether a program is called torchrun, by its file's name."""
    return os.path.basename(program) == NAME


def code_of(code: int) -> int:
    """Return torchrun's exit code where this project has another."""
    return int(ExitCode.TRAINING_FAILED if code else ExitCode.DONE)


@contextmanager
def errors_told(*, as_torchrun: bool) -> Iterator[None]:
    """Give errors from within torchrun's exit codes, if wanted: 2 is for what a parser of arguments refuses."""
    try:
        yield
    except ElasticLaunchError as error:
        if as_torchrun and not isinstance(error, CommandLineError):
            error.exit_code = ExitCode.TRAINING_FAILED
        raise

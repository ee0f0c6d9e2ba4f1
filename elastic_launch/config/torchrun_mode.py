"""torchrun mode: torchrun's defaults and exit codes without exception, for wrappers that rely on them.

It is enabled by an environment variable, or by the name by which the program is called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from elastic_launch.config.settings import Setting
from elastic_launch.errors import CommandLineError, ElasticLaunchError, ExitCode

ENV_TORCHRUN = "ELASTIC_LAUNCH_TORCHRUN"

NAME = "torchrun"

SOURCE = "default of torchrun"
"""The source shown for values that were not given."""

DEFAULTS: Mapping[str, str] = {
    "--rdzv-backend": "static",
    "--join-settle": "30",
    "--dead-after": "15",
    "--max-restarts": "0",
    "--log-layout": "torchrun",
    "--signals-to-forward": "none",
    "--notice": "none",
}
"""The flags that get torchrun's defaults; tests compare them with torch's own."""

DEFAULT_ENDPOINT = "localhost:29400"
"""torchrun's default endpoint if c10d is named without one."""

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
"""torchrun's flags for which an empty value means the default."""


def wanted(environ: Mapping[str, str], program: str = "") -> bool:
    """Whether torchrun mode is enabled.

    Args:
        program: the name by which this process was called; the variable wins.
    """
    if text := environ.get(ENV_TORCHRUN):
        return Setting(f"{ENV_TORCHRUN}=", text).truth()
    return called_so(program)


def called_so(program: str) -> bool:
    """Whether a program's file name is torchrun."""
    return os.path.basename(program) == NAME


def code_of(code: int) -> int:
    """Return torchrun's exit code where this project's differs."""
    return int(ExitCode.TRAINING_FAILED if code else ExitCode.DONE)


@contextmanager
def errors_told(*, as_torchrun: bool) -> Iterator[None]:
    """Give errors raised within torchrun's exit codes, if enabled: 2 only for what an argument parser rejects."""
    try:
        yield
    except ElasticLaunchError as error:
        if as_torchrun and not isinstance(error, CommandLineError):
            error.exit_code = ExitCode.TRAINING_FAILED
        raise

"""How the agent starts its helper processes: with a safe import path, and without the run's secrets.

A helper runs beside the user's script, often in the script's own directory, where a ``secrets.py`` or ``json.py`` would
be imported instead of the standard library's: with ``python -c``, the working directory is searched first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from elastic_launch.secret import without_secrets


def helper_command(code: str, *arguments: str) -> list[str]:
    """Return the command of a helper process.

    Args:
        code: Python code; ``sys.argv`` holds the arguments from index 1 on, ``sys.path`` is :func:`helper_path`.
    """
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {helper_path()!r}; {code}", *arguments]


def helper_environment() -> dict[str, str]:
    """Return a helper's environment: this process' own, without the run's secrets.

    Storage drivers find their credentials there. PYTHONPATH is left out: before :func:`helper_path` takes effect, the
    interpreter would search it for a ``sitecustomize``, and an empty entry in it means the working directory.
    """
    env = {name: value for name, value in without_secrets(os.environ).items() if name != "PYTHONPATH"}
    return {**env, "PYTHONDONTWRITEBYTECODE": "1"}


def helper_path() -> list[str]:
    """Return ``sys.path`` of a helper: this process' own without the directory that the interpreter put first.

    The working directory and the program's directory may be in it for another reason, such as PYTHONPATH or an editable
    install. Then they come last, where they hide no other module. This project's directories follow the standard
    library, so that a helper runs the same version as the agent.
    """
    own = set(filter(None, [_real(os.curdir), *(_real(os.path.dirname(_real(name))) for name in _program())]))
    entries = list(sys.path)
    if entries and not sys.flags.safe_path and _real(entries[0] or os.curdir) in own:
        del entries[0]
    entries = [entry for entry in entries if os.path.isabs(entry)]
    first = [entry for entry in entries if _real(entry) not in own]
    ours = [str(Path(__file__).resolve().parents[number]) for number in (1, 2)]
    library = os.path.dirname(os.__file__)
    at = max(
        (number for number, entry in enumerate(first, 1) if entry in (library, f"{library}/lib-dynload")), default=0
    )
    return list(dict.fromkeys([*first[:at], *ours, *first[at:], *entries]))


def _program() -> list[str]:
    """Return the file that this process runs, if any; there is none with ``python -m`` and ``python -c``."""
    return [name for name in sys.orig_argv[1:2] if not name.startswith("-")]


def _real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except FileNotFoundError:  # the working directory was removed
        return ""

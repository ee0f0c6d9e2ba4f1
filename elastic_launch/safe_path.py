"""Removes the working directory, often that of the user's script, which ``python -m`` puts first on ``sys.path``."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder


def leave_out_working_directory() -> None:
    """Let a program that runs by ``-m`` import the same modules as an installed command.

    A ``secrets.py`` there would shadow the standard library's, and run with the agent's token. The directory stays if
    this project cannot be found elsewhere.
    """
    if not sys.flags.safe_path and PathFinder.find_spec("elastic_agents", sys.path[1:]):
        del sys.path[0]

"""``python -m`` puts the working directory first on ``sys.path``, where the user's script often lies."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder

__all__ = ["leave_out_working_directory"]


def leave_out_working_directory() -> None:
    """Have a program that runs by ``-m`` import what it would import as an installed command.

    A ``secrets.py`` there would stand for the standard library's, and run with the agent's token. The directory stays
    where this project is to be found in no other.
    """
    if not sys.flags.safe_path and PathFinder.find_spec("elastic_agents", sys.path[1:]):
        del sys.path[0]

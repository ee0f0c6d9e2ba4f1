"""Frames of a stack, and which of them is of the user's code: pure."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import elastic_agents
import elastic_launch


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"


Stack = tuple[Frame, ...]
"""The frames of a thread, innermost first."""

_FRAME = re.compile(r'  File "(.*)", line (\d+),? in (.*)$')
_OURS = tuple(os.path.dirname(os.path.abspath(str(x.__file__))) + "/" for x in (elastic_launch, elastic_agents))
_STANDARD = re.compile(r"^<frozen |/lib(64)?/python3\.\d+/(?!site-packages/|dist-packages/)")
_PACKAGES = re.compile(r"/(site|dist)-packages/")
_TORCH = re.compile(r"/torch/")


def frame_in(line: str) -> Frame | None:
    """Read a line of a traceback, or of what faulthandler writes; None if it has no frame."""
    found = _FRAME.match(line)
    return Frame(found[1], int(found[2]), found[3]) if found else None


def user_frame(stack: Stack) -> Frame | None:
    """Return the innermost frame of the user's code: of no installed package, if there is any; else not of torch."""
    if len(stack) > 1 and stack[-1].file == "<string>" and stack[-2].file.startswith(_OURS):
        stack = stack[:-1]  # the command by which the warm server runs, of which a worker is a fork
    own = [x for x in stack if not _STANDARD.search(x.file) and not x.file.startswith(_OURS)]
    for refused in (_PACKAGES, _TORCH):
        if found := next((x for x in own if not refused.search(x.file)), None):
            return found
    return next(iter(stack), None)

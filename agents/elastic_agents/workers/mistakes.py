"""Whether the exception that ended a worker says that the script is wrong, by its traceback: pure.

A run whose first two rounds end by the same mistake gets no third one. So what may be different another time, or is not
known, does not count: files, networks, devices, memory, time-outs, and the types of other packages.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence

from elastic_agents.workers.frames import frame_in, user_frame
from elastic_launch.failure import Mistake
from elastic_launch.system.plain_text import clipped, one_line

_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""With their subclasses, if these are Python's own."""

_FRAME_BYTES = 256

_RAISED = re.compile(r"((?:\w+\.)*[A-Z]\w*)(?::|$)")
"""The last line of a traceback; several are there if an exception was raised because of another one."""

_MAY_PASS = re.compile(
    r"CUDA|CUDNN|cuDNN|CUBLAS|cuBLAS|NCCL|HIP error|hipError"
    r"|[Cc]onnect(ion|ed to)|[Ss]ocket|Broken pipe|[Tt]im(ed|e)[ -]?out|HTTP|https?://|[Dd]ownload"
    r"|[Oo]ut of memory|not enough memory|allocate (shared )?memory|shared memory|can't start new thread"
    r"|Errno|[Tt]emporar|Too many open files|No space left|PytorchStreamReader|[Cc]orrupt|DataLoader worker \(pid"
)
"""Messages about what may be different another time: torch has a ``RuntimeError`` for most of it."""

_LINES, _LINE, _MESSAGE = 10_000, 256, 64 * 1024
"""Number of lines, and of characters of a line and of the message, that are looked at: the worker chose them."""


def mistake_in(text: str, lines: Sequence[str]) -> Mistake | None:
    """Return a script's mistake.

    Args:
        text: the exception, as ``Type: message``.
        lines: its traceback, perhaps after other output.
    """
    kind, lines = text.partition(":")[0].strip(), lines[-_LINES:]
    begins = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not begins or not _is_mistake(kind):
        return None
    last = lines[begins[-1] :]
    frame = user_frame(tuple(found for line in reversed(last) if (found := frame_in(line))))
    said = next((index for index, line in enumerate(last) if index and not line.startswith(" ")), len(last))
    if frame is None or not last[said:] or last[said].partition(":")[0] != kind:
        return None
    # Of a loader's process, the message has the traceback, too.
    message = "\n".join(line for line in last[said:] if not line.startswith("  "))
    raised = (match[1] for line in lines if (match := _RAISED.match(line[:_LINE])))
    if _MAY_PASS.search(message[:_MESSAGE]) or any(map(_may_pass, raised)):
        return None
    return Mistake(kind, clipped(one_line(str(frame)), _FRAME_BYTES))


def _is_mistake(kind: str) -> bool:
    known = vars(builtins).get(kind)
    return isinstance(known, type) and issubclass(known, _MISTAKES)


def _may_pass(kind: str) -> bool:
    """Whether this is the name of an exception that may be absent another time, as each package's own types may."""
    known = vars(builtins).get(kind)
    is_exception = isinstance(known, type) and issubclass(known, BaseException)
    return not _is_mistake(kind) and (is_exception or "." in kind or kind.endswith(("Error", "Exception")))

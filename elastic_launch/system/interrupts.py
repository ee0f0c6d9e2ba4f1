"""The effect of Ctrl-C on a program until there is something to clean up.

Most of a program's first second is spent on imports, so this module is imported first, and imports almost nothing.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

_INTERRUPTED = 130
"""As in :class:`elastic_launch.errors.ExitCode`, whose import takes too long for this module."""


def end_quietly() -> None:
    """From now on, end at once on Ctrl-C, unless SIGINT is ignored or already handled."""
    try:
        import signal

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _end)
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(_INTERRUPTED)

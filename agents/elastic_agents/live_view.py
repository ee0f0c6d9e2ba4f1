"""The live view of a run: the last rows of a terminal. What is printed scrolls above it, byte for byte.

The terminal's own scroll margins (DECSTBM) keep the two apart. So unfinished lines, carriage returns and colours of
what is printed do what they do on a terminal without the view.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import unicodedata
from collections.abc import Sequence
from functools import partial

from elastic_agents.console import Consoles
from elastic_agents.inbox import HowAreYou, Inbox
from elastic_agents.output_sinks import has_colours
from elastic_launch.observe.node_watch import NODES, NodeWatch
from elastic_launch.observe.present import Present
from elastic_launch.system.threads import ThreadDied, VitalThread

_log = logging.getLogger("elastic_launch.agent")

TICK = 0.5
"""Seconds between two pictures."""

ROWS = 5
"""Rows of the view, at all times: what is printed above does not jump."""

NAMED = range(NODES, -1, -1)
"""Nodes that are named at most: fewer if not all figures fit, which are worth more."""

LEAST_ROWS, LEAST_COLUMNS = 10, 30
"""Minimum size of a terminal on which there is room for the view."""

SILENCE = 5.0
"""Seconds without an answer from the agent's loop after which the view says so."""

_DIM, _REVERSED = 2, 1

_OPEN = re.compile(rb"(\x1b(\[[0-?]*[ -/]*|[ -/]*|[\]PX^_][^\x07\x1b]*)|[\xc0-\xff][\x80-\xbf]{0,2})\Z")
"""Ends within an escape sequence (ECMA-48), or perhaps within a character of UTF-8."""


class Panel:
    """Returns what a terminal needs to be sent to show lines in its last rows.

    Attributes:
        size: rows and columns for which the margins are set; None while no panel is shown.
    """

    def __init__(self) -> None:
        self.size: tuple[int, int] | None = None

    def drawn(self, lines: Sequence[str], size: tuple[int, int]) -> bytes:
        """Show these lines, which fit; each call has the same number of them."""
        rows, columns = size
        text = ""
        if size != self.size:
            text = self.erased(size)
            if rows < LEAST_ROWS or columns < LEAST_COLUMNS:
                return text.encode()
            # Moves the cursor out of the last rows, if it is there, and scrolls what is there; its column stays.
            text += "\x1bD" * len(lines) + f"\x1b[{len(lines)}A"
            self.size = size
        top = rows - len(lines)
        # Setting the margins moves the cursor; it is restored with its colours. Set again each time, since what is
        # printed may have reset the terminal.
        text += f"\x1b7\x1b[1;{top}r\x1b[m"
        text += "".join(f"\x1b[{top + number};1H{line}\x1b[m\x1b[K" for number, line in enumerate(lines, 1))
        return (text + "\x1b8").encode(errors="replace")

    def erased(self, size: tuple[int, int]) -> str:
        """Remove the panel, and the margins. The terminal may have moved all lines if its size has changed."""
        before, self.size = self.size, None
        if before is None:
            return ""
        if size != before:
            return "\x1b7\x1b[r\x1b8\x1b[m\x1b[J"
        rows = range(size[0] - ROWS + 1, size[0] + 1)
        return "\x1b7\x1b[r\x1b[m" + "".join(f"\x1b[{row};1H\x1b[K" for row in rows) + "\x1b8"


class LiveView:
    """Draws until it is closed, in a thread of its own; the consoles' thread writes."""

    def __init__(self, title: str, watch: NodeWatch, inbox: Inbox[object], consoles: Consoles) -> None:
        self._title, self._watch, self._inbox, self._consoles = title, watch, inbox, consoles
        self._panel = Panel()
        self._coloured = has_colours(2)
        self._present = Present("starting")
        self._heard = time.monotonic()
        self._asked = self._queued = False
        self._stop = threading.Event()
        # The run can go on without it.
        self._thread = VitalThread(self._run, "live view", owner=self._failed)
        self._thread.start()

    def close(self) -> None:
        """Remove the view."""
        self._stop.set()
        self._thread.join(SILENCE)
        self._consoles.draw(2, self._last_picture)

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._asked and not self._inbox.closed:
                self._asked = True
                self._inbox.put(HowAreYou(self._answered))
            # A console that is not being read holds one picture, not many.
            if not self._queued and (size := _size()) is not None:
                # Here and not in the consoles' thread, on which others depend.
                lines = self._lines(size[1])
                self._queued = True
                if not self._consoles.draw(2, partial(self._picture, lines, size)):
                    self._queued = False
            self._stop.wait(TICK)

    def _failed(self, died: ThreadDied) -> None:
        """Called from the thread that ends: a picture that stays would look like the run's present state."""
        self._consoles.draw(2, self._last_picture)
        _log.error("the last lines of the terminal no longer show the run: %s", died.error)

    def _answered(self, present: Present) -> None:
        """Called from the agent's loop."""
        self._present, self._heard = present, time.monotonic()
        self._asked = False

    def _picture(self, lines: Sequence[str], size: tuple[int, int], tail: bytes) -> bytes:
        """Called from the console's thread."""
        self._queued = False
        if _OPEN.search(tail):
            return b""
        if not _in_foreground():
            return self._panel.erased(size).encode()
        return self._panel.drawn(lines, size)

    def _last_picture(self, tail: bytes) -> bytes:
        # CAN ends an escape sequence that is not complete.
        return (b"\x18" if _OPEN.search(tail) else b"") + self._panel.erased(_size() or (0, 0)).encode()

    def _lines(self, columns: int) -> list[str]:
        present = self._present
        width = columns - 1
        doing = self._watch.doing(present, width - 1)
        silent = time.monotonic() - self._heard
        if self._inbox.closed:
            doing = "leaves the run"
        elif present.phase != "starting" and silent > SILENCE:
            doing = f"the agent has not answered for {silent:.0f} s"
        for named in NAMED:
            *figures, (name, age) = self._watch.figures(present, named)
            body, whole = laid_out(figures, width, ROWS - 2)
            if whole:
                break
        end = f" {name} {age} --"
        head = _cut(f"-- elastic-launch: {self._title} ", width - len(end))
        head += "-" * (width - _cells(head) - len(end)) + end
        lines = [head, *body, _cut(f" {doing}", width)]
        if self._coloured:
            lines[0], lines[-1] = f"\x1b[{_DIM}m{lines[0]}", f"\x1b[{_REVERSED}m{lines[-1]}"
        return lines


def laid_out(figures: Sequence[tuple[str, str]], width: int, rows: int) -> tuple[list[str], bool]:
    """Return names and values in so many lines, and whether all fit; what does not is cut or left out."""
    lines, whole = [""] * rows, True
    for name, value in figures:
        text = _cut(uncut := f" {name} {value}", width)
        whole = whole and text == uncut
        for at, line in enumerate(lines):
            if not line or _cells(line) + 2 + _cells(text) <= width:
                lines[at] += ("  " if line else "") + text
                break
        else:
            whole = False
    return lines, whole


def _cut(text: str, width: int) -> str:
    if _cells(text) <= width:
        return text
    used, kept = 0, []
    for character in text:
        used += _cells(character)
        if used > width - 3:
            break
        kept.append(character)
    return "".join(kept) + "..."


def _cells(text: str) -> int:
    """Return how many columns a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(x) else 2 if unicodedata.east_asian_width(x) in "WF" else 1 for x in text)


def _size() -> tuple[int, int] | None:
    try:
        found = os.get_terminal_size(2)
    except OSError:  # the terminal is gone
        return None
    return found.lines, found.columns


def _in_foreground() -> bool:
    """Whether the terminal is this job's: after Ctrl-Z and bg, it is the shell's."""
    try:
        return os.tcgetpgrp(2) == os.getpgrp()
    except OSError:  # it controls no jobs here
        return True

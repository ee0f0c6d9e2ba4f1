"""Makes untrusted text (exceptions, output, messages from a link) safe to send, log and show on a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

_STYLES = re.compile(r"\x1b\[[0-9;:]*[mK]")

_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (including bidirectional ones), line ends other than ``\\n``, and surrogates."""


def plain(text: str) -> str:
    """Return the text without colours, with control characters and invalid text escaped; tabs and line ends stay."""
    return _CONTROLS.sub(_escape, _STYLES.sub("", text))


def one_line(text: str) -> str:
    """Return the text as one line, with control characters escaped."""
    return " ".join(plain(text).split())


def clipped(text: str, most: int) -> str:
    """Return the text; if its JSON takes more than ``most`` bytes, its end is replaced with a mark.

    In JSON, a character outside ASCII takes 6 or 12 bytes.
    """
    if 12 * len(text) <= most or _size(text) <= most:
        return text
    kept, left = 0, most - 32  # for the mark
    while (left := left - _size(text[kept])) >= 0:
        kept += 1
    return f"{text[:kept]} [... {len(text) - kept} more characters]"


def some(names: Iterable[str], most: int = 4) -> str:
    """Return the first of some names, and how many more there are."""
    names = [*names]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _size(text: str) -> int:
    return len(json.dumps(text)) - 2


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

"""Settings of a handler that plain torchrun makes."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import fields

from elastic_launch.config import Timing
from elastic_launch.errors import UsageError

__all__ = ["default_node_id", "timing_from_conf"]


def default_node_id() -> str:
    """Return a name for a node that was given none: its host's, and something that tells two agents of a host apart."""
    return f"{socket.gethostname()}-{secrets.token_hex(3)}"


def timing_from_conf(conf: Mapping[str, str]) -> Timing:
    """Read the fields of :class:`Timing` from ``--rdzv-conf``.

    Raises:
        UsageError: on an unknown key or a value that is no number.
    """
    known = {item.name for item in fields(Timing)}
    values: dict[str, float] = {}
    for key, text in conf.items():
        if key not in known:
            raise UsageError(f"--rdzv-conf has the unknown key {key!r}.", f"Known: {', '.join(sorted(known))}.")
        try:
            values[key] = float(text)
        except ValueError:
            raise UsageError(f"--rdzv-conf {key}={text} is not a number of seconds.", "Give one.") from None
    return Timing(**values)

"""What the dump of torch's flight recorder says about the collectives that a worker has begun: pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from elastic_launch.errors import ProtocolError
from elastic_launch.rendezvous.wire.messages import Collective
from elastic_launch.system.plain_text import clipped, one_line

MOST = 16
"""Process groups of a worker that are reported."""

LONGEST = 200
"""Bytes of a text that describes a collective or names a group."""

_ENDED = "completed"


def last_collectives(data: bytes) -> tuple[Collective, ...]:
    """Return the last collective in each process group, those that wait first, and then the newest.

    Args:
        data: what :mod:`elastic_launch.collective_dump` writes; empty if the worker has not answered.

    Raises:
        ProtocolError: if it is not that.
    """
    last: dict[tuple[str, str], dict[str, Any]] = {}
    try:
        found = json.loads(data or '{"first": [], "dumps": []}')
        for first, dump in zip(found["first"], found["dumps"], strict=True):
            for entry in dump.get("entries", ()):
                # Messages between two ranks have numbers of their own.
                if not entry["is_p2p"] and entry["pg_id"] >= first:
                    last[_backend(entry), entry["process_group"][0]] = entry
        order = sorted(last.values(), key=lambda x: (not _waits(x), -int(x["time_created_ns"])))
        return tuple(map(_collective, order[:MOST]))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"the dump of the flight recorder is not as expected: {error!r}") from error


def text_of_collectives(collectives: Sequence[Collective]) -> str:
    """Return them as text, a line for each."""
    lines = (f"  {x} {'has not finished' if x.waits else 'has finished'}" for x in collectives)
    return "The last collective in each process group:\n" + "\n".join(lines) if collectives else ""


def _backend(entry: dict[str, Any]) -> str:
    return str(entry["profiling_name"].partition(":")[0])


def _waits(entry: dict[str, Any]) -> bool:
    return not entry["retired"] and entry["state"] != _ENDED


def _collective(entry: dict[str, Any]) -> Collective:
    name, description = map(str, entry["process_group"])
    inputs = [f"{kind}{list(size)}" for kind, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)]
    of = f" of {', '.join(inputs)}" if inputs else ""
    what = clipped(one_line(str(entry["profiling_name"]).rpartition(":")[2] + of), LONGEST)
    described = "" if description in ("undefined", name) else clipped(one_line(description), LONGEST)
    number, backend = int(entry["collective_seq_id"]), clipped(one_line(_backend(entry)), LONGEST)
    return Collective(clipped(one_line(name), LONGEST), described, number, what, _waits(entry), backend)

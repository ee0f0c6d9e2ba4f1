"""Parses settings: numbers, times, and the keys of ``--rdzv-conf``."""

from __future__ import annotations

import logging
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from elastic_launch.config.launch_config import ZERO_ALLOWED, Timing, check_seconds
from elastic_launch.errors import CommandLineError, UsageError

log = logging.getLogger("elastic_launch.cli.main")

TIMES = tuple(item.name for item in fields(Timing))

OF_TORCH = {
    "last_call_timeout": ("join_settle",),
    "keep_alive_interval": ("beat", "dead_after"),
    "keep_alive_max_attempt": ("dead_after",),
    "timeout": ("join_timeout",),
}
"""torch's keys of --rdzv-conf that have other names here, and the keys that each one sets."""

IDLE = {
    "cas_backoff_max_seconds": "nodes do not write to a store in turns",
    "close_timeout": "no node waits for others to close the rendezvous",
    "heartbeat_timeout": "a node is judged by dead_after",
    "store_type": "the control record is kept by the rendezvous backend",
}
"""torch's keys of --rdzv-conf that have no effect here, and why."""

TORCH_KEEP_ALIVE_INTERVAL, TORCH_KEEP_ALIVE_MAX_ATTEMPT = 5.0, 3
"""torch's defaults if only one of the two is given."""

CONF_KEYS = (*TIMES, "is_host", "reuse", *OF_TORCH, *IDLE)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that has not been parsed.

    Every method raises :class:`UsageError` if the text is not of the expected type.

    Attributes:
        asked: the flag or key before the value, for errors.
        text: the value.
        error: the exception class to raise if the text is of another type.
    """

    asked: str
    text: str
    error: type[UsageError] = CommandLineError

    def whole(self) -> int:
        """Return the value as an integer."""
        if not re.fullmatch(r"[+-]?[0-9]{1,9}", self.text.strip()):
            raise self._error("is not a whole number", "Give one of at most nine digits, as in 4.")
        return int(self.text)

    def positive(self) -> int:
        """Return the value as an integer above 0."""
        if (value := self.whole()) < 1:
            raise self._error("is below 1", "Give 1 or more.")
        return value

    def seconds(self, *, zero: bool = False) -> float:
        """Return the value as a time to wait; ``zero`` says whether 0 is allowed."""
        try:
            value = float(self.text)
        except ValueError:
            raise self._error("is not a number of seconds", "Give a number, as in 2.5.") from None
        return check_seconds(f"{self.asked}{self.text}", value, zero=zero)

    def truth(self) -> bool:
        """Return the value as a bool, in the words that torch accepts."""
        word = self.text.strip().lower()
        if word in ("1", "true", "t", "yes", "y"):
            return True
        if word in ("0", "false", "f", "no", "n"):
            return False
        raise self._error("is neither yes nor no", "Give 1 or 0, true or false, yes or no.")

    def _error(self, problem: str, hint: str) -> UsageError:
        return self.error(f"{self.asked}{self.text} {problem}.", hint)


def default_node_id() -> str:
    """Return the default node id: the host name, and a part that distinguishes agents on one host."""
    return f"{socket.gethostname()}-{secrets.token_hex(3)}"


def host_of(node_id: str) -> str:
    """Return what identifies a node's host across starts of its agent: the host name, or the node id that was given."""
    host = socket.gethostname()
    return host if re.fullmatch(rf"{re.escape(host)}-[0-9a-f]{{6}}", node_id) else node_id


def read_timing(layers: Iterable[Mapping[str, Setting]], *, one_wait: bool = False) -> tuple[Timing, bool | None, bool]:
    """Merge the settings of the rendezvous.

    Args:
        layers: settings by key, weakest first.
        one_wait: use ``join_timeout`` for ``min_wait`` if that is not given, since it means both in torch.

    Returns:
        The times, whether this node hosts the run (None if not given), and whether to reuse an ended run's id.
    """
    settings: dict[str, Setting] = {}
    for layer in layers:
        for key in layer:
            # This project's keys win over torch's, but those in the environment do not win over torch's in a flag.
            for own in OF_TORCH.get(key, ()):
                settings.pop(own, None)
        settings |= layer
    _tell_idle(settings)
    times = {key: settings[key].seconds(zero=key in ZERO_ALLOWED) for key in TIMES if key in settings}
    if patience := settings.get("timeout"):
        times.setdefault("join_timeout", patience.seconds())
    if last_call := settings.get("last_call_timeout"):
        times.setdefault("join_settle", last_call.seconds(zero=True))
    interval, attempts = settings.get("keep_alive_interval"), settings.get("keep_alive_max_attempt")
    if interval:
        times.setdefault("beat", interval.seconds())
    if interval or attempts:
        count = attempts.positive() if attempts else TORCH_KEEP_ALIVE_MAX_ATTEMPT
        times.setdefault("dead_after", times.get("beat", TORCH_KEEP_ALIVE_INTERVAL) * count)
    if one_wait:
        times.setdefault("min_wait", times.get("join_timeout", Timing().join_timeout))
    host, reuse = settings.get("is_host"), settings.get("reuse")
    return Timing(**times), host.truth() if host else None, reuse.truth() if reuse else False


def _tell_idle(settings: Mapping[str, Setting]) -> None:
    for key, why in IDLE.items():
        if not (setting := settings.get(key)):
            continue
        if key == "store_type" and setting.text != "tcp":
            raise UsageError(
                f"{setting.asked}{setting.text}: {why}, not in a file.",
                "Drop store_type, or run torchrun for a store in a file.",
            )
        if key != "store_type":
            log.warning("%s%s has no effect: %s.", setting.asked, setting.text, why)


def parse_conf(asked: str, text: str, *, lenient: bool = False) -> dict[str, Setting]:
    """Parse ``key=value,key=value``.

    Args:
        lenient: log and ignore unknown keys.
    """
    items = conf_items(asked, text, lenient=lenient)
    for key in [key for key in items if key not in CONF_KEYS]:
        log.warning("%s %s=%s has no effect: the key is not known.", asked, key, items.pop(key))
    return {key: Setting(f"{asked} {key}=", value, UsageError) for key, value in items.items()}


def conf_items(asked: str, text: str, *, lenient: bool = True) -> dict[str, str]:
    """Split ``key=value,key=value``, optionally quoted; ``lenient`` accepts any key."""
    found: dict[str, str] = {}
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":  # not removed by a shell: a list of args in YAML
        text = text[1:-1]
    for item in filter(None, map(str.strip, text.split(","))):
        key, _, value = map(str.strip, item.partition("="))
        if not lenient:
            check_key(asked, key)
        if not value:
            raise UsageError(f"{asked} gives {key} no value.", "Write KEY=VALUE,KEY=VALUE.")
        found[key] = value
    return found


def check_key(asked: str, key: str) -> None:
    """Reject an unknown key of the rendezvous, and name the nearest known one."""
    if key not in CONF_KEYS:
        meant = nearest(key, CONF_KEYS)
        hint = f"{f'Did you mean {meant}? ' if meant else ''}Known: {', '.join(CONF_KEYS)}."
        raise UsageError(f"{asked} has the unknown key {key!r}.", hint)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that the user may have meant, if any is similar."""
    import difflib  # slow to import, and only errors need it

    found = difflib.get_close_matches(word, list(known), n=1)
    return found[0] if found else None

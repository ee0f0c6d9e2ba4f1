"""Runs a thread for each source of notices."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module

from elastic_agents.notices.auto import kinds_here, read_dmi
from elastic_agents.notices.types import Notice, Source, Trouble
from elastic_launch.config.notice_sources import NoticeSource
from elastic_launch.system.threads import ThreadDied, VitalThread

_log = logging.getLogger("elastic_launch.notices")

REMEMBERED = 20
"""Reports per source: this many troubles and notices without consequence, and this many that make the node leave."""


class NoticeWatch:
    """Polls each source in its own thread while it is entered, and puts new notices into an inbox."""

    def __init__(self, sources: Sequence[Source], put: Callable[[Notice], None]) -> None:
        self._sources = tuple(sources)
        self._put = put
        self._closing = threading.Event()
        self._threads = [
            VitalThread(self._run, f"notices-{source.name}", (source,), owner=_lost) for source in self._sources
        ]

    def __enter__(self) -> NoticeWatch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; one that is blocked in the kernel, as in a hanging file system, is left behind."""
        self._closing.set()
        for source in self._sources:
            source.close()
        for thread in self._threads:
            thread.join(1.0)

    def acknowledge(self, notice: Notice) -> None:
        """Tell the source of the notice that the node has left because of it."""
        self.close()
        for source in self._sources:
            if source.name == notice.source:
                try:
                    if done := source.acknowledge(notice):
                        _log.info("%s: %s", source.name, done)
                except Trouble as trouble:
                    _log.warning("%s", _troubled(source, trouble))

    def _run(self, source: Source) -> None:
        told, left = _Told(), _Told()
        past: set[str] | None = None
        while not self._closing.is_set():
            notices: Sequence[Notice] = ()
            try:
                notices = source.poll()
            except Trouble as trouble:
                if told.first(trouble.what) and not self._closing.is_set():
                    _log.warning("%s (reported once; retrying)", _troubled(source, trouble))
            else:
                if past is None:
                    past = {notice.key for notice in notices if notice.begun}
            for notice in notices:
                self._tell(replace(notice, leaves=notice.leaves and notice.key not in (past or ())), told, left)
            self._closing.wait(source.pause)

    def _tell(self, notice: Notice, told: _Told, left: _Told) -> None:
        """Pass a notice on once; once the node leaves, only a notice that makes it leave sooner."""
        if left.first(notice.key) if notice.leaves else not left and told.first(notice.key):
            self._put(notice)


class _Told:
    """What was reported of one source; a hostile source gets no more than REMEMBERED lines."""

    def __init__(self) -> None:
        self._texts: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._texts)

    def first(self, text: str) -> bool:
        """Whether to report it."""
        if text in self._texts or len(self._texts) >= REMEMBERED:
            return False
        self._texts.add(text)
        return True


def _lost(died: ThreadDied) -> None:
    """A source's thread has died; training continues without it."""
    _log.error("%s: no more notices, because of an internal error: %s", died.name, died.error)


def _troubled(source: Source, trouble: Trouble) -> str:
    detail = f" ({trouble.detail})" if trouble.detail else ""
    return f"no notices from {source.name} for now: {trouble.what}{detail}"


def sources_of(
    wanted: Iterable[NoticeSource], environ: Mapping[str, str], dmi: Callable[[], Mapping[str, str]] = read_dmi
) -> list[Source]:
    """Return the sources to poll, and log one line for each.

    Args:
        dmi: returns the firmware's description; called only for ``auto``.
    """
    found: dict[str, Source] = {}
    # Explicitly requested sources go before those that auto finds.
    for one in sorted(wanted, key=lambda one: (one.kind == "auto", not one.early)):
        for source in _sources(one, environ, dmi):
            if found.setdefault(source.name + one.path, source) is source:
                by = ", found by --notice auto" if one.kind == "auto" else ""
                _log.info("notices from %s: %s%s", source.name, source.watched, by)
    return list(found.values())


def _sources(one: NoticeSource, environ: Mapping[str, str], dmi: Callable[[], Mapping[str, str]]) -> Iterable[Source]:
    for kind in kinds_here(environ, dmi()) if one.kind == "auto" else [one.kind]:
        if kind != "signal":  # the agent handles it
            # Imported only where needed: other runs do not import an HTTP client.
            yield import_module(f"elastic_agents.notices.{kind}").source(one, environ)

"""Runs a thread for each source of notices, and detects which sources this node has."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from elastic_agents.notices.types import Notice, Source, Trouble
from elastic_launch.config.notice_sources import NoticeSource
from elastic_launch.system.threads import ThreadDied, VitalThread

_log = logging.getLogger("elastic_launch.notices")

DMI = Path("/sys/class/dmi/id")
"""The firmware's description of the machine, which the kernel makes readable to all users."""

FIELDS = ("sys_vendor", "product_name", "product_version", "bios_vendor", "bios_version", "chassis_asset_tag")

AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
"""The asset tag of every Azure machine; Hyper-V elsewhere has a different one."""

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
        told: set[str] = set()
        left: set[str] = set()
        past: set[str] | None = None
        while not self._closing.is_set():
            notices: Sequence[Notice] = ()
            try:
                notices = source.poll()
            except Trouble as trouble:
                if _first(trouble.what, told) and not self._closing.is_set():
                    _log.warning("%s (reported once; retrying)", _troubled(source, trouble))
            else:
                if past is None:
                    past = {notice.key for notice in notices if notice.begun}
            for notice in notices:
                self._tell(replace(notice, leaves=notice.leaves and notice.key not in (past or ())), told, left)
            self._closing.wait(source.pause)

    def _tell(self, notice: Notice, told: set[str], left: set[str]) -> None:
        """Pass a notice on once; once the node leaves, only a notice that makes it leave sooner."""
        if _first(notice.key, left) if notice.leaves else not left and _first(notice.key, told):
            self._put(notice)


def _first(text: str, told: set[str]) -> bool:
    """Whether to report a text of a source; a hostile source gets no more than REMEMBERED lines."""
    if text in told or len(told) >= REMEMBERED:
        return False
    told.add(text)
    return True


def _lost(died: ThreadDied) -> None:
    """A source's thread has died; training continues without it."""
    _log.error("%s: no more notices, because of an internal error: %s", died.name, died.error)


def _troubled(source: Source, trouble: Trouble) -> str:
    detail = f" ({trouble.detail})" if trouble.detail else ""
    return f"no notices from {source.name} for now: {trouble.what}{detail}"


def cloud_of(dmi: Mapping[str, str]) -> str | None:
    """Return the cloud that the machine's firmware names: ``aws``, ``gcp``, ``azure`` or None.

    EC2: "Identify EC2 instances" in its User Guide; instances on Xen have Amazon only in a version. GCP: "Detect if a
    VM is running in Compute Engine".
    """
    if dmi.get("sys_vendor") == "Amazon EC2" or any(
        "amazon" in dmi.get(field, "").lower() for field in ("bios_vendor", "bios_version", "product_version")
    ):
        return "aws"
    if dmi.get("product_name") == "Google Compute Engine":
        return "gcp"
    return "azure" if dmi.get("chassis_asset_tag") == AZURE_TAG else None


def read_dmi(directory: Path = DMI) -> dict[str, str]:
    """Return those of FIELDS that exist."""
    found = {}
    for field in FIELDS:
        try:
            found[field] = (directory / field).read_text(errors="replace").strip()
        except OSError:
            continue  # no such firmware, or a container that hides it
    return found


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
    kinds: list[str | None] = [one.kind]
    if one.kind == "auto":
        kinds = ["slurm" if "SLURM_JOB_ID" in environ else None, cloud_of(dmi())]
    for kind in filter(None, kinds):
        if kind != "signal":  # the agent handles it
            # Imported only where needed: other runs do not import an HTTP client.
            yield import_module(f"elastic_agents.notices.{kind}").source(one, environ)

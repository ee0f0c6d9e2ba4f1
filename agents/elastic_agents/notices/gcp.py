"""Compute Engine: the metadata server.

The protocol is documented by Compute Engine: "View and query VM metadata" (with the section on waiting for changes),
"Preemptible VM instances", "Query metadata server for maintenance event notices".
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice leads to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from elastic_agents.notices.http import LINK_LOCAL, MetadataSource, Reply
from elastic_agents.notices.types import Notice, Trouble
from elastic_launch.config.notice_sources import NoticeSource

NAME = "GCP"

INSTANCE = "/computeMetadata/v1/instance/"

PROMISE = 30.0
"""Seconds between a preemption notice and the end of the machine."""

DEADLINE = 5.0
"""Seconds for one request, in addition to those that the server is asked to wait."""

WAIT = 10
"""Seconds that the server is asked to wait for a preemption; then maintenance is polled again."""

MAINTENANCE = 60.0 - WAIT - 1
"""Seconds between learning of a maintenance and its start, which is announced 60 s ahead, or up to an hour."""


def preempted(text: str) -> Notice | None:
    """Read ``preempted``: ``TRUE`` or ``FALSE``.

    Raises:
        Trouble: if it is anything else.
    """
    if text not in ("TRUE", "FALSE"):
        raise Trouble("instance/preempted is neither TRUE nor FALSE", repr(text[:60]))
    return Notice(NAME, "preemption", "preemption", PROMISE) if text == "TRUE" else None


def maintenance(text: str) -> Notice | None:
    """Read ``maintenance-event``: ``NONE``, or what will happen to the machine.

    A live migration pauses the machine for a moment and loses nothing, so the node only reports it.

    Raises:
        Trouble: if it is anything else.
    """
    match text:
        case "NONE":
            return None
        case "MIGRATE_ON_HOST_MAINTENANCE":
            return Notice(NAME, "maintenance", "live migration", MAINTENANCE, leaves=False)
        case "TERMINATE_ON_HOST_MAINTENANCE" | "SHUTDOWN_ON_HOST_MAINTENANCE":
            return Notice(NAME, "maintenance", "host maintenance ends this machine", MAINTENANCE)
    raise Trouble("instance/maintenance-event has an unknown value", repr(text[:60]))


class Gcp(MetadataSource):
    """Waits for a preemption, and polls for maintenance in between."""

    name = NAME
    watched = "preemption and maintenance of this Compute Engine machine"
    pause = 0.5  # the server does the waiting; this is for a server that does not

    def __init__(self, base: str = LINK_LOCAL) -> None:
        super().__init__(base)
        self._etag = ""

    def poll(self) -> Sequence[Notice]:
        notices: list[Notice] = []
        found: tuple[str, str] | None = None  # not the error itself: its traceback would hold a connection
        # Polling maintenance is also what makes the server announce it a minute ahead. Trouble with one document must
        # not hide the other.
        for document in (self._maintenance, lambda: self._preempted(WAIT if self._etag and not notices else 0)):
            try:
                if (notice := document()) is not None:
                    notices.append(notice)
            except Trouble as trouble:
                found = found or (trouble.what, trouble.detail)
        if found and not notices:
            raise Trouble(*found)
        return notices

    def _maintenance(self) -> Notice | None:
        return maintenance(self._get("maintenance-event", DEADLINE).text)

    def _preempted(self, wait: int) -> Notice | None:
        """Send the last ETag: any change since then is answered at once."""
        query = f"?wait_for_change=true&timeout_sec={wait}&last_etag={quote(self._etag, safe='')}" if wait else ""
        reply = self._get(f"preempted{query}", wait + DEADLINE)
        self._etag = reply.headers.get("etag", "")[:80]
        return preempted(reply.text)

    def _get(self, path: str, deadline: float) -> Reply:
        headers = {"Metadata-Flavor": "Google", "Host": "metadata.google.internal"}
        reply = self._http.get(INSTANCE + path, headers, deadline)
        if reply.headers.get("metadata-flavor") != "Google":
            raise Trouble(
                "what answers is not Google's metadata server: its answer lacks the header Metadata-Flavor", path
            )
        return reply


def source(asked: NoticeSource, environ: Mapping[str, str]) -> Gcp:
    return Gcp()

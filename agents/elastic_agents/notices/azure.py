"""Azure: Scheduled Events of the instance metadata service.

The protocol is documented by Microsoft: "Azure Metadata Service: Scheduled Events for Linux VMs" (version 2020-07-01)
and "Azure Instance Metadata Service".
https://learn.microsoft.com/en-us/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from elastic_agents.notices.http import LINK_LOCAL, Http, MetadataSource
from elastic_agents.notices.types import SOON, Notice, Trouble, dated, decoded, plain, promised, seconds_until
from elastic_launch.config.notice_sources import NoticeSource

NAME = "Azure"

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"

MY_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"

HEADERS = {"Metadata": "true"}

PROMISE = {"Preempt": 30.0, "Terminate": 300.0, "Redeploy": 600.0, "Reboot": 900.0}
"""The minimum seconds of advance notice, by event type; see "Event scheduling" there."""

FIRST = 150.0
"""Seconds for the first request, which enables the service: that takes up to two minutes."""

DEADLINE = 10.0
"""Seconds for each later request."""

ACKNOWLEDGE = 2.0
"""Seconds for the approval; the exit waits for it."""


def events(body: bytes, mine: Callable[[], str], now: datetime) -> list[Notice]:
    """Read the document, which lists events of several machines; return those of this machine.

    A Freeze stops the machine for some seconds and loses nothing, so the node only reports it.

    Args:
        mine: returns this machine's name, as in Resources; in a scale set, ``SET_NUMBER``. Called only if needed.

    Raises:
        Trouble: if the document is anything else.
    """
    document = decoded("the scheduled events", body)
    found = document.get("Events") if isinstance(document, dict) else None
    if not isinstance(found, list):
        raise Trouble("the scheduled events have no list of them", repr(body[:60]))
    notices = []
    me = _folded(mine()) if found else ""
    for event in found:
        if not isinstance(event, dict) or not isinstance(event.get("Resources"), list):
            continue  # it does not say which machines are meant
        names = {_folded(str(name)) for name in event["Resources"]}
        if me in names:
            notices += _notice(event, now, alone=len(names) == 1)
    return notices


def _notice(event: dict[str, object], now: datetime, *, alone: bool) -> list[Notice]:
    kind, number = plain(event.get("EventType")), plain(event.get("EventId"), 80)
    left = seconds_until(event.get("NotBefore"), now)
    if kind == "Freeze":
        return [Notice(NAME, "maintenance", "Freeze for some seconds", left, leaves=False, id=number, alone=alone)]
    if kind not in PROMISE:
        return [Notice(NAME, "maintenance", f"{kind} (unknown)", left, leaves=False, id=number, alone=alone)]
    name = "preemption" if kind == "Preempt" else "scale-in" if kind == "Terminate" else "maintenance"
    if event.get("EventStatus") == "Started":
        return [Notice(NAME, name, kind, None, True, number, alone, begun=True)]  # no time is promised any more
    # An event that is days ahead, as on hardware that begins to fail, can wait.
    far = left is not None and left > PROMISE[kind] + SOON
    seconds = left if far else promised(left, PROMISE[kind])
    return [Notice(NAME, name, kind, seconds, not far, number, alone)]


def _folded(name: str) -> str:
    """Names are case-insensitive; versions of the service before 2017-08-01 put an underscore before them."""
    return name.casefold().removeprefix("_")


class Azure(MetadataSource):
    """Polls once a second, as Microsoft recommends.

    Args:
        approves: whether to approve the event that the node has left for: it then begins at once.
    """

    name = NAME
    watched = "scheduled events of this machine"
    pause = 1.0

    def __init__(self, base: str = LINK_LOCAL, *, approves: bool = True) -> None:
        self._base = base
        self._approves = approves
        super().__init__(base)
        self._answered = False

    def poll(self) -> Sequence[Notice]:
        reply = self._http.get(EVENTS, HEADERS, DEADLINE if self._answered else FIRST)
        self._answered = True
        # Usually there are no events; the name is not cached, as another service might once have answered.
        return events(reply.body, self._mine, dated(reply.headers))

    def _mine(self) -> str:
        name = self._http.get(MY_NAME, HEADERS, DEADLINE).text
        if not re.fullmatch(r"[\w.-]{1,200}", name):
            raise Trouble("the metadata service does not tell this machine's name", repr(name[:60]))
        return name

    def acknowledge(self, notice: Notice) -> str:
        if not self._approves or not notice.id or not notice.alone:
            return ""  # an approved event begins for every machine that it names
        asked = json.dumps({"StartRequests": [{"EventId": notice.id}]}).encode()
        headers = {**HEADERS, "Content-Type": "application/json"}
        reply = Http(self._base).ask("POST", EVENTS, headers, deadline=ACKNOWLEDGE, body=asked)
        if reply.status != 200:
            raise Trouble(f"the approval of {notice.why} was answered by {reply.status}")
        return f"{notice.why} approved: the machine may go now"


def source(asked: NoticeSource, environ: Mapping[str, str]) -> Azure:
    return Azure(approves=asked.kind == "azure")  # a machine found by auto may be shared

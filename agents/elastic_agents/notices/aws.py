"""EC2: the instance metadata service, version 2 (IMDSv2).

The protocol is documented in the EC2 User Guide: "Use the Instance Metadata Service to access instance metadata", "Spot
Instance interruption notices", "EC2 instance rebalance recommendations", "Scheduled events for your instances"; and in
the EC2 Auto Scaling User Guide: "Retrieve the target lifecycle state through instance metadata".
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html leads to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from elastic_agents.notices.http import LINK_LOCAL, MetadataSource, Reply, Unanswered
from elastic_agents.notices.types import SOON, Notice, Trouble, dated, decoded, plain, promised, seconds_until
from elastic_launch.config.notice_sources import NoticeSource

NAME = "AWS"

META = "/latest/meta-data/"

PROMISE = 120.0
"""Seconds between a spot interruption notice and the interruption."""

TTL = 21600
"""Seconds for which a token is valid; the maximum."""

DEADLINE = 2.0
"""Seconds for one request."""

PAUSE = 5.0
"""Seconds between two polls, as AWS recommends."""

HOPS = (
    "the metadata service gives no token. In a container, its answer may need one network hop more than is allowed: "
    "allow two (aws ec2 modify-instance-metadata-options --http-put-response-hop-limit 2), or use the host's network"
)


def instance_action(body: bytes, now: datetime) -> Notice:
    """Read ``spot/instance-action``: ``{"action": "terminate", "time": "2017-09-18T08:22:00Z"}``.

    A hibernation gives no time in advance, and is treated like the others: what can be saved is saved.

    Raises:
        Trouble: if the document is anything else.
    """
    found = decoded("spot/instance-action", body)
    action = found.get("action") if isinstance(found, dict) else None
    if action not in ("terminate", "stop", "hibernate"):
        raise Trouble("spot/instance-action names no action", repr(body[:60]))
    left = promised(seconds_until(found.get("time"), now), PROMISE)
    return Notice(NAME, "preemption", f"spot interruption ({action})", left)


def rebalance(body: bytes, *, leaves: bool) -> Notice:
    """Read ``events/recommendations/rebalance``: ``{"noticeTime": "2020-10-27T08:22:00Z"}``, an elevated risk only.

    Raises:
        Trouble: if the document is anything else.
    """
    found = decoded("events/recommendations/rebalance", body)
    if not isinstance(found, dict) or not isinstance(found.get("noticeTime"), str):
        raise Trouble("events/recommendations/rebalance has no noticeTime", repr(body[:60]))
    return Notice(NAME, "rebalance", "rebalance recommendation", PROMISE if leaves else None, leaves)


def scheduled(body: bytes, now: datetime) -> list[Notice]:
    """Read ``events/maintenance/scheduled``: a list of events with Code, EventId, NotBefore and State.

    Only active events count. The node leaves SOON before the earliest start of any of them.

    Raises:
        Trouble: if the document is anything else.
    """
    found = decoded("events/maintenance/scheduled", body)
    if not isinstance(found, list) or not all(isinstance(event, dict) for event in found):
        raise Trouble("events/maintenance/scheduled is not a list of events", repr(body[:60]))
    notices = []
    for event in found:
        left = seconds_until(event.get("NotBefore"), now)
        if event.get("State") != "active" or left is None:
            continue
        why = f"maintenance ({plain(event.get('Code'))})"
        seconds = left if left > SOON else promised(left, SOON)
        number = plain(event.get("EventId"), 80)
        notices.append(Notice(NAME, "maintenance", why, seconds, left <= SOON, number, begun=left <= 0))
    return notices


def lifecycle(body: bytes) -> Notice | None:
    """Read ``autoscaling/target-lifecycle-state``: the state that the group moves this instance to.

    Only the group's lifecycle hook knows how long the group waits.
    """
    terminated = body.strip() == b"Terminated"
    return Notice(NAME, "scale-in", "its Auto Scaling group terminates it") if terminated else None


class Aws(MetadataSource):
    """Polls all of these documents in turn.

    Args:
        base: URL of the service.
        early: whether to leave at a rebalance recommendation.
    """

    name = NAME
    watched = "spot interruptions, maintenance and Auto Scaling of this EC2 instance"
    pause = PAUSE

    def __init__(self, base: str = LINK_LOCAL, *, early: bool = False) -> None:
        super().__init__(base)
        self._token = ""
        self._documents: dict[str, Callable[[Reply], list[Notice]]] = {
            "spot/instance-action": lambda reply: [instance_action(reply.body, dated(reply.headers))],
            "autoscaling/target-lifecycle-state": lambda reply: list(filter(None, [lifecycle(reply.body)])),
            "events/maintenance/scheduled": lambda reply: scheduled(reply.body, dated(reply.headers)),
            "events/recommendations/rebalance": lambda reply: [rebalance(reply.body, leaves=early)],
        }

    def poll(self) -> Sequence[Notice]:
        self._token = self._token or self._new_token()
        notices: list[Notice] = []
        found: tuple[str, str] | None = None  # not the error itself: its traceback would hold a connection
        # Trouble with one document (a filter may block it) must not hide another document.
        for path, notices_in in self._documents.items():
            try:
                if (reply := self._get(path)) is not None:
                    notices += notices_in(reply)
            except Unanswered:
                raise
            except Trouble as trouble:
                found = found or (trouble.what, trouble.detail)
            if any(notice.leaves for notice in notices):
                break  # the most urgent comes first
        if found and not notices:
            raise Trouble(*found)
        return notices

    def _get(self, path: str) -> Reply | None:
        """Return the document, or None if there is none; an expired token is replaced once."""
        for _ in range(2):
            self._token = self._token or self._new_token()
            reply = self._http.ask("GET", META + path, {"X-aws-ec2-metadata-token": self._token}, deadline=DEADLINE)
            if reply.status != 401:
                break
            self._token = ""
        if reply.status == 404:
            return None
        if reply.status != 200:
            raise Trouble(f"the metadata service answers {reply.status}", path)
        return reply

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TTL)}
        try:
            reply = self._http.ask("PUT", "/latest/api/token", headers, deadline=DEADLINE)
        except Unanswered as trouble:
            # A refused connection is not caused by the hop limit.
            late = isinstance(trouble.__cause__, TimeoutError)
            raise Unanswered(HOPS, trouble.detail) if late else trouble from None
        if reply.status != 200 or not reply.text.isascii() or not reply.text.isprintable() or not reply.text:
            raise Trouble(f"the metadata service gives no token (status {reply.status})", "PUT /latest/api/token")
        return reply.text


def source(asked: NoticeSource, environ: Mapping[str, str]) -> Aws:
    return Aws(early=asked.early)

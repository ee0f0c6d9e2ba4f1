"""etcd as a service that keeps control records; ``etcd`` is its client."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any

from elastic_launch.config.backends import StoreService
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.errors import UsageError
from elastic_launch.system.findings import PATIENCE, Finding, error, good, warning
from elastic_launch.system.plain_text import one_line
from elastic_launch.system.threads import within

if TYPE_CHECKING:
    from elastic_launch.rendezvous.stores.control_store import ControlStore

ENV_USER, ENV_PASSWORD = "ELASTIC_LAUNCH_ETCD_USER", "ELASTIC_LAUNCH_ETCD_PASSWORD"

LONGEST_ANSWER = 65536
"""Bytes of a member's answer that are read."""


class EtcdService(StoreService):
    """An etcd cluster; the endpoints are client addresses of its members, with ``http://`` or without."""

    name = "etcd"
    port = 2379

    def parse(self, text: str) -> tuple[Endpoint, ...]:
        if "https://" in text:
            raise UsageError(
                f"--rdzv-endpoint {text!r} asks for TLS, which the etcd client cannot do.",
                "Start etcd grpc-proxy on this host with the certificates, and give its address.",
            )
        return super().parse(",".join(part.strip().removeprefix("http://").rstrip("/") for part in text.split(",")))

    def open(self, endpoints: Sequence[Endpoint], run_id: str) -> ControlStore:
        from elastic_launch.rendezvous.stores.etcd import EtcdStore

        user, password = os.environ.get(ENV_USER), os.environ.get(ENV_PASSWORD)
        return EtcdStore(tuple(endpoints), run_id, user=user, password=password)

    def removal(self, run_id: str) -> str:
        return f"etcdctl del /elastic-launch/runs/{run_id}/record"

    def probe(self, endpoint: Endpoint) -> Iterator[Finding]:
        """Ask a member for its health over HTTP, which it serves on the same port: the client has no call for it."""
        try:
            version = str(_answer(endpoint, "GET", "/version").get("etcdserver", "unknown"))
            health = _answer(endpoint, "GET", "/health")
            raised = _answer(endpoint, "POST", "/v3/maintenance/alarm", {"action": "GET"}).get("alarms", ())
        except (OSError, ValueError) as problem:
            yield warning(
                f"etcd at {endpoint} does not tell its health: {one_line(str(problem)) or type(problem).__name__}.",
                f"Check that it is etcd, without TLS: etcdctl --endpoints {endpoint} endpoint health.",
            )
            return
        kinds = {str(alarm.get("alarm")) for alarm in raised if isinstance(alarm, dict)}
        remedy = "Look at its log; most members must run and reach each other (etcdctl endpoint status --cluster)."
        if "NOSPACE" in kinds:
            remedy = "Compact and defragment it, then etcdctl alarm disarm; or raise --quota-backend-bytes."
        elif "CORRUPT" in kinds:
            remedy = "A member's data is damaged: replace that member, then etcdctl alarm disarm."
        if kinds:
            names = ", ".join(sorted(kinds))
            yield error(f"etcd {version} at {endpoint} has raised the alarm {names}.", remedy)
        elif str(health.get("health")) != "true":
            reason = one_line(str(health.get("reason", ""))) or "it has no leader, or cannot reach it"
            yield error(f"etcd {version} at {endpoint} is not healthy: {reason}.", remedy)
        else:
            yield good(f"etcd {version} at {endpoint} is healthy, without an alarm")


def _answer(endpoint: Endpoint, method: str, path: str, body: object = None) -> dict[str, Any]:
    """Return a member's JSON answer, whatever its HTTP status is.

    Raises:
        ValueError: if it is something else.
    """

    def ask() -> bytes:
        link = HTTPConnection(endpoint.host, endpoint.port, timeout=PATIENCE)
        with contextlib.closing(link):
            try:
                link.request(method, path, None if body is None else json.dumps(body))
                return link.getresponse().read(LONGEST_ANSWER)
            except HTTPException as problem:
                raise OSError(f"{path} answers no HTTP ({type(problem).__name__})") from problem

    try:
        found = json.loads(within(PATIENCE, path, ask))
    except ValueError:
        raise ValueError(f"{path} answers something else than JSON") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} answers something else than an object")
    return found

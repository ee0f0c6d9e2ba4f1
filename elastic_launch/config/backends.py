"""The rendezvous backends: what distinguishes them, and how each reads ``--rdzv-endpoint``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from elastic_launch.config.endpoints import Endpoint, parse_endpoint, parse_voters
from elastic_launch.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from elastic_launch.rendezvous.stores.control_store import ControlStore
    from elastic_launch.system.findings import Finding

SERVICES = {"etcd": "elastic_launch.rendezvous.stores.etcd_service:EtcdService"}
"""This project's services that keep records, by the name of the backend: module and class, as in an entry point."""

SERVICES_GROUP = "elastic_launch.stores"
"""The group of entry points with the services of other packages."""


class StoreService:
    """A service outside of the runs that keeps the control records of many of them: a backend of its own.

    A subclass describes it, in a module that imports the service's client only where it is used.

    Attributes:
        name: the value of ``--rdzv-backend``.
        port: the default port of an endpoint.
    """

    name: ClassVar[str]
    port: ClassVar[int]

    def parse(self, text: str) -> tuple[Endpoint, ...]:
        """Return the addresses that ``--rdzv-endpoint`` names, separated by commas."""
        found = tuple(parse_endpoint(part, self.port) for part in text.split(","))
        if any(endpoint.port == 0 for endpoint in found):
            raise UsageError(
                f"--rdzv-endpoint {text!r} has port 0, on which no {self.name} can listen.",
                f"Write HOST:PORT, or several with commas, as in --rdzv-endpoint {self.name}0:{self.port},"
                f"[::1]:{self.port}.",
            )
        return found

    def open(self, endpoints: Sequence[Endpoint], run_id: str) -> ControlStore:
        """Return a new client for a run's record, which its user closes."""
        raise NotImplementedError

    def removal(self, run_id: str) -> str:
        """Return how the user removes a run's record, such as a command."""
        raise NotImplementedError

    def probe(self, endpoint: Endpoint) -> Iterator[Finding]:
        """Ask the service at an endpoint that accepts connections for its health, for ``elasticctl doctor``."""
        return iter(())


@dataclass(frozen=True, slots=True)
class BackendKind:
    """How the nodes of a run find each other.

    Attributes:
        name: the value of ``--rdzv-backend``.
        voting: the endpoints are hosts of the run, which keep the record by majority.
        service: what keeps the record, outside of the run; None if the run's own nodes do.
        fixed_ranks: every node is assigned its rank, and the workers meet at the endpoint, too.
        own: whether it is one of this project, or has a store for it; otherwise it is a rendezvous of another package.
    """

    name: str
    voting: bool = False
    service: StoreService | None = None
    fixed_ranks: bool = False
    own: bool = True

    @property
    def elected(self) -> bool:
        """Whether the record is not in the memory of the node that leads, so that another one may take over.

        Otherwise the endpoint is a node of the run, which leads.
        """
        return self.voting or self.service is not None

    def parse(self, text: str) -> tuple[Endpoint, ...]:
        """Return the endpoints that ``--rdzv-endpoint`` names; raises UsageError if it does not."""
        return parse_voters(text) if self.service is None else self.service.parse(text)


def kind_of(backend: str, endpoints: int = 1) -> BackendKind:
    """Return the kind of a backend with so many endpoints."""
    if backend == "c10d":
        return BackendKind(backend, voting=endpoints > 1)
    if backend == "static":
        return BackendKind(backend, fixed_ranks=True)
    service = _service(backend)
    return BackendKind(backend, service=service, own=service is not None)


def names_of_backends() -> list[str]:
    """Return the names of this project's backends, and of those that other packages have a store for."""
    return ["c10d", *SERVICES, "static", *sorted(_of_other_packages())]


@cache
def _service(name: str) -> StoreService | None:
    if name in SERVICES:
        module, _, described = SERVICES[name].partition(":")
        found = getattr(import_module(module), described)
    else:
        found = _of_other_packages().get(name)
        found = None if found is None else found.load()
    return None if found is None else found()


@cache
def _of_other_packages() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # slow to import

    return {found.name: found for found in entry_points(group=SERVICES_GROUP)}

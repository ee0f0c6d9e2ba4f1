"""The rendezvous backends of this project, and what distinguishes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackendKind:
    """How the nodes of a run find each other.

    Attributes:
        name: the value of ``--rdzv-backend``.
        elected: the record is not in the memory of the node that leads, and another one may take over. Otherwise the
            endpoint is a node of the run, which leads.
        voting: the endpoints are hosts of the run, which keep the record by majority. Otherwise the endpoints of a
            backend whose leader is elected are servers that keep the records of many runs.
        fixed_ranks: every node is assigned its rank, and the workers meet at the endpoint, too.
    """

    name: str
    elected: bool = False
    voting: bool = False
    fixed_ranks: bool = False


BACKENDS = {
    kind.name: kind
    for kind in (BackendKind("c10d"), BackendKind("etcd", elected=True), BackendKind("static", fixed_ranks=True))
}


def kind_of(backend: str, endpoints: int = 1) -> BackendKind:
    """Return the kind of a backend with so many endpoints; torch's own backends have none of the properties."""
    if backend == "c10d" and endpoints > 1:
        return BackendKind(backend, elected=True, voting=True)
    return BACKENDS.get(backend) or BackendKind(backend)

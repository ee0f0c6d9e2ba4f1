"""The rendezvous backends of this project, and what distinguishes them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BACKENDS", "BackendKind", "kind_of"]


@dataclass(frozen=True, slots=True)
class BackendKind:
    """How the nodes of a run find each other.

    Attributes:
        name: the value of ``--rdzv-backend``.
        elected: the endpoints are servers that keep the records of many runs, and any node may lead. Otherwise the
            endpoint is a node of the run, which leads.
        fixed_ranks: every node is assigned its rank, and the workers meet at the endpoint, too.
    """

    name: str
    elected: bool = False
    fixed_ranks: bool = False


BACKENDS = {
    kind.name: kind
    for kind in (BackendKind("c10d"), BackendKind("etcd", elected=True), BackendKind("static", fixed_ranks=True))
}


def kind_of(backend: str) -> BackendKind:
    """Return the kind of a backend; torch's own backends have none of the properties."""
    return BACKENDS.get(backend) or BackendKind(backend)

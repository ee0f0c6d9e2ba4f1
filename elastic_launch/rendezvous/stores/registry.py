"""Control stores, by the name of their backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from elastic_launch.config.endpoints import Endpoint
from elastic_launch.rendezvous.stores.control_store import ControlStore
from elastic_launch.secret import ENV_ETCD_PASSWORD, ENV_ETCD_USER


def open_store(backend: str, endpoints: Sequence[Endpoint], run_id: str) -> ControlStore:
    """Return a client of the store that keeps a run's control record."""
    return _STORES[backend](endpoints, run_id)


def _etcd(endpoints: Sequence[Endpoint], run_id: str) -> ControlStore:
    # Imported here: only runs on a store pay for importing its client and need its packages.
    from elastic_launch.rendezvous.stores.etcd import EtcdStore

    user, password = os.environ.get(ENV_ETCD_USER), os.environ.get(ENV_ETCD_PASSWORD)
    return EtcdStore(tuple(endpoints), run_id, user=user, password=password)


_STORES: dict[str, Callable[[Sequence[Endpoint], str], ControlStore]] = {"etcd": _etcd}

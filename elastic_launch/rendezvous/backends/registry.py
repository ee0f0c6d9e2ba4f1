"""Which way to the leader a configuration asks for."""

from __future__ import annotations

import os

from elastic_launch.clock import Clock
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.events.types import EventSink
from elastic_launch.rendezvous.backends.c10d import Backend, C10dBackend
from elastic_launch.rendezvous.stores.control_store import ControlStore
from elastic_launch.secret import ENV_ETCD_PASSWORD, ENV_ETCD_USER

__all__ = ["backend_of"]


def backend_of(config: LaunchConfig, clock: Clock, events: EventSink) -> Backend:
    """Return the backend that the configuration names."""
    if config.backend == "c10d":
        return C10dBackend(config, clock, events)
    # Only who asks for a store pays for its client.
    if config.backend == "static":
        from elastic_launch.rendezvous.backends.static import StaticBackend

        return StaticBackend(config, clock, events)
    from elastic_launch.rendezvous.backends.election import ElectedBackend
    from elastic_launch.rendezvous.stores.etcd import EtcdStore

    user, password = os.environ.get(ENV_ETCD_USER), os.environ.get(ENV_ETCD_PASSWORD)

    def open_store() -> ControlStore:
        return EtcdStore(config.endpoints, config.run_id, user=user, password=password)

    return ElectedBackend(config, clock, events, open_store)

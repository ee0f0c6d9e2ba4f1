"""Backends, by kind."""

from __future__ import annotations

from functools import partial

from elastic_launch.clock import Clock
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.events.types import EventSink
from elastic_launch.rendezvous.backends.c10d import Backend, C10dBackend


def backend_of(config: LaunchConfig, clock: Clock, events: EventSink) -> Backend:
    """Return the backend that the configuration names."""
    # Imported here because importing them takes time that other runs need not spend.
    if config.kind.fixed_ranks:
        from elastic_launch.rendezvous.backends.static import StaticBackend

        return StaticBackend(config, clock, events)
    if config.kind.voting:
        from elastic_launch.rendezvous.backends.voting import VotingBackend

        return VotingBackend(config, clock, events)
    if (service := config.kind.service) is not None:
        from elastic_launch.rendezvous.backends.election import ElectedBackend

        return ElectedBackend(config, clock, events, partial(service.open, config.endpoints, config.run_id))
    return C10dBackend(config, clock, events)

"""Reads where the nodes of a run meet from flags: the backend, its address, and this node's rank."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from elastic_launch.cli.flags import Values
from elastic_launch.config.backends import SERVICES, BackendKind, kind_of, names_of_backends
from elastic_launch.config.endpoints import Endpoint, parse_endpoint
from elastic_launch.config.launch_config import LaunchConfig, Limits
from elastic_launch.config.settings import conf_items
from elastic_launch.config.torch_options import Foreign
from elastic_launch.config.torchrun_mode import DEFAULT_ENDPOINT, SOURCE
from elastic_launch.errors import UsageError

log = logging.getLogger("elastic_launch.cli.main")

_ALIASES = {f"elastic-{name}": name for name in ("c10d", *SERVICES)}
"""This project's backends by the names under which torchrun knows them."""

_OF_TORCH = ("etcd-v2",)
"""Backends that torch itself registers besides c10d, etcd and static, which have an equivalent here."""

MASTER_ADDR, MASTER_PORT = "127.0.0.1", 29500
"""torchrun's defaults."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the nodes of a run meet.

    Attributes: see :class:`~elastic_launch.config.launch_config.LaunchConfig`.
    """

    backend: str
    endpoints: tuple[Endpoint, ...] = ()
    node_id: str | None = None
    node_rank: int | None = None
    foreign: Foreign | None = None

    @property
    def kind(self) -> BackendKind:
        return kind_of(self.backend, len(self.endpoints))

    @property
    def endpoint(self) -> Endpoint | None:
        return self.endpoints[0] if self.endpoints else None


def read_meeting(values: Values, limits: Limits) -> Meeting:
    """Read backend, endpoint, master and rank."""
    rank, node_id = values.integer("--node-rank", None), values.text("--node-id")
    if values.switch("--standalone"):
        _tell_ignored(values, limits)
        return Meeting(LaunchConfig.backend, (), node_id, rank)
    backend, asked = _backend(values, limits), values.text("--rdzv-endpoint")
    if kind_of(backend).fixed_ranks:
        return _static(values, limits, rank)
    master = [name for name in ("--master-addr", "--master-port") if values.text(name) is not None]
    if master:
        alone = "static" if limits.max_nodes > 1 else "static with --master-port"
        log.warning("%s has no effect: only --rdzv-backend %s uses it.", values.origin(master[0]), alone)
    if asked is None and values.torchrun and backend == "c10d" and values.text("--rdzv-backend") != "static":
        asked = DEFAULT_ENDPOINT
    if kind_of(backend).own:
        return Meeting(backend, _endpoints(asked, backend, values.text("--rdzv-id")), node_id, rank)
    return Meeting(backend, (), node_id, rank, _foreign(values, backend, asked or "", rank))


def asked_backend(values: Values) -> str:
    """Return the backend: the named one, or the one that torchrun would choose for the other flags."""
    text = values.text("--rdzv-backend")
    if text is not None:
        return _ALIASES.get(text, text)
    master = any(values.text(name) is not None for name in ("--master-addr", "--master-port"))
    return "static" if master and values.text("--rdzv-endpoint") is None else LaunchConfig.backend


def _tell_ignored(values: Values, limits: Limits) -> None:
    if limits.max_nodes > 1:
        raise UsageError(
            f"--standalone runs on one node, --nnodes {values.text('--nnodes')} asks for up to {limits.max_nodes}.",
            "Drop --nnodes to stay on this node, or --standalone to use several.",
        )
    for name in ("--rdzv-endpoint", "--rdzv-backend", "--master-addr", "--master-port"):
        text = values.text(name)
        if text is None or values.origin(name) == SOURCE:
            continue
        if name == "--rdzv-backend" and _known(text) == LaunchConfig.backend:
            continue
        what = parse_endpoint(text) if name == "--rdzv-endpoint" and "," not in text else text
        log.warning("--standalone ignores %s %s: this node hosts its own run.", values.origin(name), what)


def _backend(values: Values, limits: Limits) -> str:
    """Return the backend that is asked for, if it exists, or the one with which a single node needs no address."""
    backend = _known(asked_backend(values))
    if kind_of(backend).fixed_ranks and limits.max_nodes == 1 and _any_port(values):
        return LaunchConfig.backend  # as in torchrun, one node needs no address
    return backend


def _any_port(values: Values) -> bool:
    """Whether the workers of a static world may meet at any free port."""
    endpoint = values.text("--rdzv-endpoint")
    if endpoint is not None:
        return parse_endpoint(endpoint, MASTER_PORT).port == 0
    return values.text("--master-port") in (None, "0")


def _known(text: str) -> str:
    backend = _ALIASES.get(text, text)
    if kind_of(backend).own:
        return backend
    from importlib.metadata import entry_points  # slow to import

    others = sorted({*_OF_TORCH, *_registered(), *(found.name for found in entry_points(group="torchrun.handlers"))})
    if backend not in others:
        names = ", ".join([*names_of_backends(), *(name for name in others if name not in _ALIASES)])
        raise UsageError(
            f"--rdzv-backend {text} is not supported.",
            f"Supported: {names}.",
        )
    return backend


def _registered() -> Mapping[str, Any]:
    """Return the handlers that this process has registered with torch; none if it has not imported torch."""
    module = sys.modules.get("torch.distributed.elastic.rendezvous.api")
    registry: Mapping[str, Any] = getattr(getattr(module, "rendezvous_handler_registry", None), "_registry", {})
    return {name: creator for name, creator in registry.items() if not kind_of(name).own}


def _endpoints(asked: str | None, backend: str, run_id: str | None) -> tuple[Endpoint, ...]:
    """Return where the record is: one address, or several of hosts or a service; none if this node hosts it."""
    kind = kind_of(backend)
    if kind.service is None:
        found = () if asked is None else kind.parse(asked)
        if len(found) > 1 and not run_id:
            raise UsageError(
                "--rdzv-endpoint with several hosts needs a name for the run: they keep its record in files.",
                "Give one that no earlier run had, the same on all nodes, with --rdzv-id ID.",
            )
        return found
    if asked is None:
        raise UsageError(
            f"--rdzv-backend {backend} needs the addresses of the cluster.",
            f"Give them with --rdzv-endpoint HOST:{kind.service.port}[,HOST:{kind.service.port}...].",
        )
    if not run_id:
        raise UsageError(
            f"--rdzv-backend {backend} needs a name for the run: its record outlives it.",
            "Give one that no earlier run had, the same on all nodes, with --rdzv-id ID.",
        )
    return kind.parse(asked)


def _static(values: Values, limits: Limits, rank: int | None) -> Meeting:
    """Return the meeting of fixed members with fixed ranks, at the master's address that the user gives."""
    named = "--rdzv-backend static" if values.text("--rdzv-backend") else "--master-addr or --master-port"
    if limits.min_nodes != limits.max_nodes and not values.torchrun:
        raise UsageError(
            f"{named} fixes the nodes of the run, --nnodes {values.text('--nnodes')} leaves them open.",
            f"Give --nnodes {limits.max_nodes}, or meet at --rdzv-endpoint HOST:PORT and drop the rest.",
        )
    if rank is None and limits.max_nodes > 1 and not values.torchrun:
        raise UsageError(
            f"{named} with --nnodes {limits.max_nodes} needs the rank of each node.",
            f"Give --node-rank, 0 to {limits.max_nodes - 1}, a different one to each node.",
        )
    rank = rank or 0
    if rank >= limits.max_nodes:
        raise UsageError(
            f"--node-rank {rank} is not one of the {limits.max_nodes} nodes of --nnodes.",
            f"Give 0 to {limits.max_nodes - 1}.",
        )
    if node_id := values.text("--node-id"):
        raise UsageError(
            f"{named} names this node by its rank, --node-id {node_id} by something else.",
            "Drop --node-id: it would hide that two nodes have the same rank.",
        )
    return Meeting("static", (_master(values),), f"node-{rank}", rank)


def _master(values: Values) -> Endpoint:
    endpoint, address = values.text("--rdzv-endpoint"), values.text("--master-addr")
    port = values.integer("--master-port", MASTER_PORT)
    if endpoint is not None:
        for name in ("--master-addr", "--master-port"):
            if values.text(name) is not None:
                log.warning("%s has no effect: --rdzv-endpoint takes precedence.", values.origin(name))
        found = parse_endpoint(endpoint, MASTER_PORT)
    else:
        if not 0 <= port <= 65535:
            raise UsageError(f"--master-port {port} is not a port.", "Give 1 to 65535.")
        found = parse_endpoint(address or MASTER_ADDR, port, asker="--master-addr")
        if found.port != port:
            raise UsageError(
                f"--master-addr {address} has a port in it.", f"Give --master-addr {found.host} and --master-port."
            )
    if found.port == 0 and values.text("--nnodes") not in (None, "1", "1:1"):
        raise UsageError("the master's port is 0 (any free port), which other nodes cannot know.", "Give a port.")
    return found


def _foreign(values: Values, backend: str, endpoint: str, rank: int | None) -> Foreign:
    conf: dict[str, str] = {}
    for found in chain.from_iterable(values.levels("--rdzv-conf")):
        conf |= conf_items(found.asked.rstrip(" :="), found.text)
    if rank is not None:
        log.warning("--node-rank has no effect under --rdzv-backend %s, as in torchrun.", backend)
    return Foreign(endpoint, tuple(conf.items()))

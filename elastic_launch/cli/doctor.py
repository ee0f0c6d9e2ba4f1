"""``elasticctl doctor``: what keeps this host from taking part in a run, each finding with its remedy.

It asks the resolver, the kernel, the endpoint and the leader, each for a bounded time, and changes nothing but a file
in the log directory, which it removes.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from elastic_launch import __version__
from elastic_launch.config.launch_config import Endpoint
from elastic_launch.config.torch_options import installed_torch, untested_torch
from elastic_launch.errors import ElasticLaunchError, EndpointError, ExitCode
from elastic_launch.events.types import counted
from elastic_launch.rendezvous.admin.client import Address, AdminClient, RunEndedError
from elastic_launch.rendezvous.wire.addresses import (
    interface_of,
    is_hidden,
    resolve,
    routable_address,
    source_address,
    try_listen,
)
from elastic_launch.system.plain_text import plain
from elastic_launch.system.threads import within

__all__ = ["examine"]

T = TypeVar("T")

SLOW = 1.0
"""Seconds after which an answer of the resolver is slow: torch asks it for each connection to its store."""

PATIENCE = 5.0
"""Seconds that the resolver or the endpoint has to answer."""

FEW_FILES = 4096
LITTLE_SHARED = 64 * 1024 * 1024
LITTLE_DISK = 1024 * 1024 * 1024

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


class Level(Enum):
    GOOD = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found.

    Attributes:
        remedy: what to do; empty if all is well.
    """

    level: Level
    text: str
    remedy: str = ""


Findings = Iterator[Finding]


def good(text: str) -> Finding:
    return Finding(Level.GOOD, text)


def warning(text: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, text, remedy)


def error(text: str, remedy: str) -> Finding:
    return Finding(Level.ERROR, text, remedy)


def examine(address: Address | None, log_dir: Path, environ: Mapping[str, str], about: str = "") -> int:
    """Print the findings; return 1 if there is an error among them, else 0.

    Args:
        address: of the run that this host is to take part in; None if none is given.
        log_dir: where logs and events are written.
        about: why there is no address.
    """
    checks: list[Callable[[], Findings]] = [
        _versions,
        lambda: _own_name(environ),
        lambda: _interfaces(environ),
        _resources,
        lambda: _directory(log_dir),
        _devices,
    ]
    if address is not None:
        checks.append(lambda: _run(address))
    elif about:
        checks.append(lambda: iter([good(about)]))
    failed = False
    for check in checks:
        for found in check():
            print(plain(f"{found.level.value:<8} {found.text}"), flush=True)
            if found.remedy:
                print(plain(f"{'':<8} -> {found.remedy}"), flush=True)
            failed |= found.level is Level.ERROR
    return ExitCode.TRAINING_FAILED if failed else ExitCode.DONE


# This host.


def _versions() -> Findings:
    python = ".".join(map(str, sys.version_info[:3]))
    torch = installed_torch()
    if not torch:
        yield error("torch is not installed in this environment.", "Install it where the agents and workers run.")
        return
    yield good(
        f"elastic-launch {__version__}, python {python}, torch {torch}; other nodes need the same elastic-launch"
    )
    if line := untested_torch():
        yield warning(f"{line}.", "Use a tested version, or report what fails.")


def _own_name(environ: Mapping[str, str]) -> Findings:
    name, here = socket.gethostname(), routable_address()
    if ipaddress.ip_address(here).is_loopback:
        yield error("this host has no network: it has no route to another host.", "Configure its network.")
        return
    given = environ.get("GLOO_SOCKET_IFNAME")
    try:
        addresses, took = _timed(lambda: {str(x[4][0]) for x in socket.getaddrinfo(name, None)})
    except (OSError, TimeoutError) as problem:
        addresses, took = set(), 0.0
        reason = f"this host's name {name} does not resolve here ({problem}), so gloo may choose the loopback address"
    else:
        reason = f"this host's name {name} resolves to {', '.join(sorted(addresses))}, which other hosts cannot reach"
    if took > SLOW:
        yield warning(f"resolving {name} takes {took:.1f} s.", f"Add {here} {name} to /etc/hosts.")
    if all(ipaddress.ip_address(x.partition("%")[0]).is_loopback for x in addresses) and not given:
        interface = interface_of(here)
        text = f"{reason}. Workers of a run with several nodes get GLOO_SOCKET_IFNAME={interface}"
        yield good(text) if interface else warning(f"{reason}.", f"Add {here} {name} to /etc/hosts.")
    else:
        yield good(f"this host is {name}; others reach it at {here}")
    try:
        _, took = _timed(lambda: socket.getnameinfo((here, 0), 0))
    except (OSError, TimeoutError):
        took = PATIENCE
    if took > SLOW:
        yield warning(
            f"finding the name of {here} takes {took:.1f} s or more; torch does it for each connection to its store.",
            f"Add {here} {name} to /etc/hosts on all nodes, or have the DNS server answer for that address.",
        )


def _interfaces(environ: Mapping[str, str]) -> Findings:
    known = [name for _, name in socket.if_nameindex()]
    for variable in _INTERFACES:
        # NCCL's ^ excludes interfaces, and = asks for exact names; otherwise a name is a prefix.
        wanted = environ.get(variable, "")
        for name in filter(None, wanted.removeprefix("=").split(",")):
            if not wanted.startswith("^") and not any(found.startswith(name) for found in known):
                yield error(
                    f"{variable} names {name}, and this host has no such interface.", f"There are: {', '.join(known)}."
                )


def _resources() -> Findings:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < FEW_FILES:
        yield warning(f"a process may open {most} files at most.", f"Raise the hard limit (ulimit -Hn) to {FEW_FILES}.")
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as problem:
        yield error(f"/dev/shm cannot be used: {problem.strerror}.", "Mount a tmpfs there: data loaders share memory.")
        return
    if free < LITTLE_SHARED:
        remedy = "Give containers more (--shm-size, or an emptyDir in memory): data loaders pass samples through it."
        yield warning(f"/dev/shm has {free >> 20} MiB free.", remedy)
    else:
        yield good(f"/dev/shm has {free >> 20} MiB free; a process may open {most} files")


def _directory(log_dir: Path) -> Findings:
    place = next(path for path in (log_dir, *log_dir.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=place) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(place).free
    except OSError as problem:
        yield error(f"logs cannot be written to {log_dir}: {problem.strerror}.", "Give a directory with --log-dir.")
        return
    if free < LITTLE_DISK:
        yield warning(f"{place} has {free >> 20} MiB free.", "Give a directory on another disk with --log-dir.")
    else:
        yield good(f"logs can be written to {log_dir}, with {free >> 30} GiB free")


def _devices() -> Findings:
    """Look for GPUs that torch cannot use, without importing torch."""
    count = len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()])
    torch = installed_torch()
    if count and "+cpu" in torch:
        remedy = "Install a CUDA build: https://pytorch.org/get-started/locally/."
        yield error(f"this host has {counted(count, 'GPU')}, but torch {torch} is a CPU build.", remedy)
    elif count:
        yield good(f"this host has {counted(count, 'GPU')}")


# The run.


def _run(address: Address) -> Findings:
    reached = []
    for endpoint in address.endpoints:
        reached.append((yield from _endpoint(endpoint, elected=address.kind.elected and not address.kind.voting)))
    if any(reached):
        yield from _leader(address)


def _endpoint(endpoint: Endpoint, *, elected: bool) -> Generator[Finding, None, bool]:
    """Return whether something accepts connections there."""
    try:
        addresses, took = _timed(lambda: resolve(endpoint))
        here, _ = _timed(lambda: source_address(endpoint))
        hidden = is_hidden(endpoint)
    except EndpointError as problem:
        yield error(problem.message, problem.hint)
        return False
    except TimeoutError:
        yield error(f"resolving {endpoint.host} takes more than {PATIENCE:g} s.", "Check this host's DNS servers.")
        return False
    if took > SLOW:
        yield warning(f"resolving {endpoint.host} takes {took:.1f} s.", "Check this host's DNS servers.")
    if hidden:
        remedy = "Give the endpoint by an address, or correct /etc/hosts."
        yield warning(f"{endpoint.host} resolves to a loopback address here; other hosts see another one.", remedy)
    where = ", ".join(found[0] for _, found in addresses)
    try:
        socket.create_connection((endpoint.host, endpoint.port), PATIENCE).close()
    except TimeoutError:
        remedy = f"Allow TCP to port {endpoint.port}, and between the nodes to all ports: workers choose theirs."
        yield error(f"{endpoint} ({where}) does not answer within {PATIENCE:g} s: a firewall may drop packets.", remedy)
    except OSError as problem:
        yield _unreachable(endpoint, problem, elected=elected)
    else:
        yield good(f"{endpoint} ({where}) accepts connections; this host's address on that route is {here}")
        return True
    return False


def _unreachable(endpoint: Endpoint, problem: OSError, *, elected: bool) -> Finding:
    if elected:
        return error(f"nothing listens at {endpoint}: {problem.strerror}.", "Start etcd, or correct --rdzv-endpoint.")
    try:
        listener, _ = try_listen(endpoint)
    except EndpointError as refused:
        return error(refused.message, refused.hint)
    if listener is None:
        remedy = "Start elastic-launch on the endpoint's host; other nodes wait for it. If it runs, check the port."
        return error(f"nothing listens at {endpoint}: {problem.strerror}.", remedy)
    listener.close()
    return good(f"{endpoint} is this host and the port is free: the agent that starts here hosts the run")


def _leader(address: Address) -> Findings:
    try:
        with AdminClient(address) as client:
            asked = time.monotonic()
            status = client.status()
    except RunEndedError as ended:
        yield warning(ended.message, "Use another --rdzv-id for a new run.")
        return
    except ElasticLaunchError as problem:
        yield error(problem.message, problem.hint)
        return
    nodes = f"{counted(len(status.nodes), 'node')} of {status.min_nodes}:{status.max_nodes}"
    milliseconds = 1000 * (time.monotonic() - asked)
    yield good(f"run {status.run_id} has {nodes}; its leader {status.leader} answers in {milliseconds:.0f} ms")
    yield good(f"{status.next}")


def _timed(act: Callable[[], T]) -> tuple[T, float]:
    """Return a result and the seconds that it took.

    Raises:
        TimeoutError: if it takes more than :data:`PATIENCE`.
    """
    began = time.monotonic()
    return within(PATIENCE, "it", act), time.monotonic() - began

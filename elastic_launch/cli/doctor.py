"""``elasticctl doctor``: what keeps this host from taking part in a run, each finding with its remedy.

It asks the resolver, the kernel, torch in a process of its own, the storage, the endpoint and the leader, each for a
bounded time, and changes nothing but a file in the log directory and one beside the checkpoints, which it removes.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from itertools import chain
from pathlib import Path

from elastic_launch import __version__
from elastic_launch.cli.doctor_storage import checkpoints, logs
from elastic_launch.config.backends import StoreService
from elastic_launch.config.endpoints import Endpoint
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
from elastic_launch.system.findings import (
    PATIENCE,
    SLOW,
    Finding,
    Findings,
    Level,
    clock,
    error,
    good,
    timed,
    warning,
)
from elastic_launch.system.plain_text import one_line, plain
from elastic_launch.system.threads import within

FEW_FILES = 4096
LITTLE_SHARED = 64 * 1024 * 1024

IMPORT_PATIENCE = 60.0
"""Seconds that torch has to be imported."""

IMPORT_SLOW = 20.0

_TORCH = """
import json, torch
nccl = torch.cuda.nccl.version() if torch.distributed.is_available() and torch.distributed.is_nccl_available() else None
print(json.dumps([torch.version.cuda, ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl]))
"""
"""Prints which CUDA and NCCL torch has, in a process of its own: the import takes seconds, and may hang."""

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def examine(
    address: Address | None, log_dir: Path, environ: Mapping[str, str], about: str = "", checkpoint: str = ""
) -> int:
    """Print the findings; return 1 if there is an error among them, else 0.

    Args:
        address: address of the run that this host is to take part in; None if none is given.
        log_dir: where logs and events are written.
        about: why no address is known.
        checkpoint: the directory or URL of the training's checkpoints; empty if it is not given.
    """
    checks = [_versions(), _torch(), _own_name(environ), _interfaces(environ), _resources(), logs(log_dir), _devices()]
    if checkpoint:
        checks.append(checkpoints(checkpoint))
    if address is not None:
        checks.append(_run(address))
    elif about:
        checks.append(iter([good(about)]))
    failed = False
    for found in chain.from_iterable(checks):  # each is made when the one before is printed
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


def _torch() -> Findings:
    if not installed_torch():
        return
    command = [sys.executable, "-P", "-c", _TORCH]
    began = time.monotonic()
    try:
        # Only a thread bounds the wait for a process that a file system without a server has stopped.
        ended = within(IMPORT_PATIENCE + 1, "it", lambda: _finished(command))
    except TimeoutError:
        remedy = "Put the environment on a local disk, and look at the load of this host."
        yield error(f"importing torch takes more than {IMPORT_PATIENCE:g} s.", remedy)
        return
    took = time.monotonic() - began
    try:
        cuda, nccl = json.loads(ended.stdout.splitlines()[-1] if ended.returncode == 0 else "null")
    except (ValueError, TypeError, IndexError):
        last = one_line((ended.stderr.splitlines() or [f"exit code {ended.returncode}"])[-1])
        yield error(f"torch cannot be imported: {last}.", f"Try {sys.executable} -c 'import torch', and reinstall it.")
        return
    if took > IMPORT_SLOW:
        remedy = "Put the environment on a local disk: each start of a worker may take as long."
        yield warning(f"importing torch takes {took:.0f} s.", remedy)
    if nccl:
        yield good(f"torch can be imported; it has CUDA {cuda} and NCCL {nccl}; other nodes need the same NCCL")
    else:
        yield good(f"torch can be imported; it has {f'CUDA {cuda}' if cuda else 'no CUDA'} and no NCCL")


def _finished(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=IMPORT_PATIENCE)
    except subprocess.TimeoutExpired as problem:
        raise TimeoutError from problem


def _own_name(environ: Mapping[str, str]) -> Findings:
    name, here = socket.gethostname(), routable_address()
    if ipaddress.ip_address(here).is_loopback:
        yield error("this host has no network: it has no route to another host.", "Configure its network.")
        return
    given = environ.get("GLOO_SOCKET_IFNAME")
    try:
        addresses, took = timed(lambda: {str(x[4][0]) for x in socket.getaddrinfo(name, None)})
    except OSError as problem:
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
        yield from _gloo(name, here, given)
    try:
        _, took = timed(lambda: socket.getnameinfo((here, 0), 0))
    except OSError:
        took = PATIENCE
    if took > SLOW:
        yield warning(
            f"finding the name of {here} takes {took:.1f} s or more; torch does it for each connection to its store.",
            f"Add {here} {name} to /etc/hosts on all nodes, or have the DNS server answer for that address.",
        )


def _gloo(name: str, here: str, given: str | None) -> Findings:
    """Which interface gloo takes: of the addresses of this host's name, the first that this host has."""
    if given:
        yield good(f"gloo takes the interface {given} (GLOO_SOCKET_IFNAME)")
        return
    try:
        taken, _ = timed(lambda: _first_own(name))
    except OSError as problem:
        taken, reason = "", f" ({problem})"
    else:
        reason = ""
    remedy = f"Set GLOO_SOCKET_IFNAME={interface_of(here)}, or have {name} resolve to {here} (/etc/hosts)."
    if not taken:
        yield warning(f"this host has no address to which {name} resolves{reason}: gloo takes a loopback one.", remedy)
    elif ipaddress.ip_address(taken.partition("%")[0]).is_loopback:
        yield warning(f"the first address of {name} is {taken}, which other hosts cannot reach; gloo takes it.", remedy)
    else:
        yield good(f"gloo takes {taken} on the interface {interface_of(taken) or 'unknown'}")


def _first_own(name: str) -> str:
    """Return the first address of a name that a socket of this host can be bound to; "" if there is none."""
    for family, kind, protocol, _, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return str(address[0])
    return ""


def _interfaces(environ: Mapping[str, str]) -> Findings:
    known = [name for _, name in socket.if_nameindex()]
    for variable in _INTERFACES:
        wanted = environ.get(variable, "")
        # Of NCCL alone, ^ excludes interfaces, and = asks for exact names; otherwise a name is a prefix.
        mark = wanted[:1] if variable == "NCCL_SOCKET_IFNAME" else ""
        if mark == "^":
            continue
        exact = mark == "="
        for name in filter(None, wanted[exact:].split(",")):
            if not any(found == name if exact else found.startswith(name) for found in known):
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
    service = address.kind.service
    for endpoint in address.endpoints:
        reached.append((yield from _endpoint(endpoint, service)))
        if service is not None and reached[-1]:
            yield from service.probe(endpoint)
    if any(reached):
        yield from _leader(address)


def _endpoint(endpoint: Endpoint, service: StoreService | None) -> Generator[Finding, None, bool]:
    """Return whether something accepts connections there."""
    try:
        addresses, took = timed(lambda: resolve(endpoint))
        here, _ = timed(lambda: source_address(endpoint))
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
        yield _unreachable(endpoint, problem, service)
    else:
        yield good(f"{endpoint} ({where}) accepts connections; this host's address on that route is {here}")
        return True
    return False


def _unreachable(endpoint: Endpoint, problem: OSError, service: StoreService | None) -> Finding:
    if service is not None:
        remedy = f"Start {service.name}, or correct --rdzv-endpoint."
        return error(f"nothing listens at {endpoint}: {problem.strerror}.", remedy)
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
            asked, sent = time.monotonic(), time.time()
            status = client.status()
    except RunEndedError as ended:
        yield warning(ended.message, "Use another --rdzv-id for a new run.")
        return
    except ElasticLaunchError as problem:
        yield error(problem.message, problem.hint)
        return
    nodes = f"{counted(len(status.nodes), 'node')} of {status.min_nodes}:{status.max_nodes}"
    took = time.monotonic() - asked
    yield good(f"run {status.run_id} has {nodes}; its leader {status.leader} answers in {1000 * took:.0f} ms")
    yield good(f"{status.next}")
    # As if the answer took as long as the question.
    meaning = ": events and logs of the nodes cannot be compared. The run itself does not use the clock."
    remedy = "Run an NTP client on all nodes (chronyc tracking, or timedatectl)."
    yield clock(sent + took / 2 - status.time, took / 2, "the leader's", meaning, remedy)

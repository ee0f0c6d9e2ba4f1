"""Addresses to advertise, and sockets to listen on."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import ElasticLaunchError, EndpointError, UnresolvedError
from elastic_launch.system.threads import within

ANY_ADDRESS = ("::", "0.0.0.0")
"""Addresses that a socket that listens on all addresses is bound to."""

NAMING = 0.5
"""Seconds that the resolver has for this host's full name: without a network it may take long."""

_SIOCGIFADDR = 0x8915  # netdevice(7)

_LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")

_ANYWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Unused addresses (RFC 5737, RFC 3849): connecting a datagram socket to them determines the route, sends nothing."""


def resolve(endpoint: Endpoint) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Return the endpoint's addresses in the resolver's order.

    Raises:
        UnresolvedError: if the name does not resolve.
    """
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise UnresolvedError(
            f"The rendezvous endpoint {endpoint} does not resolve: {error}.",
            "Check --rdzv-endpoint, and that the name is known on this host.",
        ) from error
    return [(family, (str(address[0]), int(address[1]))) for family, _, _, _, address in found]


def is_loopback(endpoint: Endpoint) -> bool:
    """Whether the endpoint has only loopback addresses.

    Raises:
        UnresolvedError: if the name does not resolve.
    """
    return all(ipaddress.ip_address(address[0].partition("%")[0]).is_loopback for _, address in resolve(endpoint))


def is_hidden(endpoint: Endpoint) -> bool:
    """Whether the endpoint is a host name that this host resolves to loopback only, such as Debian's 127.0.1.1.

    Other hosts resolve that name to another address. ``localhost`` or an address is taken literally.

    Raises:
        UnresolvedError: if the name does not resolve.
    """
    name = endpoint.host.rstrip(".").lower()
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name not in _LOCAL_NAMES and not name.endswith(".localhost") and is_loopback(endpoint)
    return False


def try_listen(endpoint: Endpoint) -> tuple[socket.socket | None, bool]:
    """Listen at the endpoint if it is an address of this host.

    Binding is the test: names prove nothing, since hosts in network namespaces and containers may share them.

    Returns:
        The listening socket or None, and whether the address is on this host but in use.
    """
    for family, address in resolve(endpoint):
        try:
            return _bound(family, address), False
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None, True
            if error.errno in (errno.EACCES, errno.EPERM):
                raise EndpointError(
                    f"This host may not listen at {endpoint}: {error.strerror}.", "Give a port above 1023."
                ) from error
    return None, False


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen at an address of this host, or at all of them if ``address`` is not one (address translation).

    Raises:
        EndpointError: if the port is in use.
    """
    listener, taken = try_listen(Endpoint(address, port))
    if taken:
        raise EndpointError(f"Port {port} of {address} is in use.", "Give another port, or end what listens there.")
    return listener or listen_anywhere(port)


def listen_at(endpoint: Endpoint, *, hidden: bool) -> tuple[socket.socket | None, bool]:
    """Listen at the endpoint if it is on this host; return the listener, and whether the port is in use.

    Args:
        hidden: see :func:`is_hidden`; then at all addresses of this host.
    """
    if not hidden:
        return try_listen(endpoint)
    try:
        return listen_anywhere(endpoint.port), False
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None, True
        raise


def listen_anywhere(port: int) -> socket.socket:
    """Listen at all of this host's addresses, including IPv6: there may be no others.

    Raises:
        OSError: if the port is in use or not permitted.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return _bound(socket.AF_INET, ("", port))


def _bound(family: socket.AddressFamily, address: tuple[str, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def source_address(endpoint: Endpoint) -> str:
    """Return this host's address on the route to the endpoint.

    Raises:
        EndpointError: if the name does not resolve or there is no route.
    """
    reason = "no address"
    for family, address in resolve(endpoint):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address[0], address[1] or 9))
                return str(probe.getsockname()[0])
            except OSError as error:
                reason = error.strerror or str(error)
    raise EndpointError(f"There is no route to the rendezvous endpoint {endpoint}: {reason}.", "Check the network.")


def routable_address() -> str:
    """Return the address at which other hosts most likely reach this one; loopback if there is no network."""
    for family, address in _ANYWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def early_address(config: LaunchConfig) -> str:
    """Return the address that this node will advertise, as far as it is known without asking a DNS server."""
    if config.local_addr:
        return config.local_addr
    try:
        if config.endpoint is not None and config.limits.max_nodes > 1:
            ipaddress.ip_address(config.endpoint.host)
            return source_address(config.endpoint)
    except (ValueError, EndpointError):
        pass
    return routable_address()


def full_host_name() -> str:
    """Return this host's name with its domain, or without if the resolver does not know it in time."""
    try:
        return within(NAMING, "the resolver", socket.getfqdn)
    except (TimeoutError, ElasticLaunchError):
        return socket.gethostname()


def interface_of(address: str) -> str:
    """Return the network interface of this host that has an address; "" for a loopback one, and if there is none."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if wanted.is_loopback:
        return ""
    if wanted.version == 6:
        return _interface_of_v6(wanted.exploded.replace(":", ""))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if found[20:24] == wanted.packed:
                return name
    return ""


def _interface_of_v6(digits: str) -> str:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split()[-1] for line in lines if line.startswith(digits)), "")


def has_usable_name(seconds: float) -> bool:
    """Whether this host's own name is known within so many seconds to have an address that is not a loopback one.

    Debian gives a host's name the address 127.0.1.1. A resolver that does not answer is not waited for.
    """
    own = Endpoint(socket.gethostname(), 0)
    try:
        return not within(seconds, "resolving this host's name", lambda: is_loopback(own))
    except (EndpointError, TimeoutError):
        return False

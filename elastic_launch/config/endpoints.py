"""Addresses of a run as the user writes them: of its leader, of several hosts, and of what an agent serves.

The functions that parse text raise a UsageError if it is not of the form that they name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from elastic_launch.errors import UsageError

PORT = 29400
"""The port of a run's leader if none is given, as of torchrun's c10d."""

MOST_VOTERS = 7
"""Most hosts that keep a record together."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a port as the user wrote them; port 0 means any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, default_port: int = PORT, asker: str = "--rdzv-endpoint") -> Endpoint:
    """Parse ``host``, ``host:port``, an IPv6 address, ``[v6]`` or ``[v6]:port``."""
    asked = f"{asker} {text!r}"
    hint = "Write HOST:PORT, as in --rdzv-endpoint node0:29400 or [::1]:29400."
    text = text.strip()
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise UsageError(f"{asked} has a bracket that does not close an address.", hint)
        port, is_v6 = rest[1:], True
    elif text.count(":") > 1:
        host, port, is_v6 = text, "", True
    else:
        host, _, port = text.partition(":")
        is_v6 = False
    if not host:
        raise UsageError(f"{asked} names no host.", hint)
    if is_v6 and not _is_v6(host):
        raise UsageError(f"{asked} has {host!r} where an IPv6 address belongs.", hint)
    if not _names_a_host(host):
        raise UsageError(f"{asked} has {host!r} where a host name belongs.", hint)
    if not port:
        return Endpoint(host, default_port)
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise UsageError(f"{asked} has the port {port!r}.", "A port is a number from 0 to 65535.")
    return Endpoint(host, int(port))


def parse_voters(text: str) -> tuple[Endpoint, ...]:
    """Parse the endpoint of c10d: one, or the comma-separated hosts that keep the run's record together."""
    parts = [part.strip() for part in text.split(",")]
    found = tuple(parse_endpoint(part) for part in parts)
    if len(found) == 1:
        return found
    asked = f"--rdzv-endpoint {text!r}"
    hint = "Name 3 hosts, of which one may be lost, or 5 or 7, of which two or three may."
    if len(found) % 2 == 0:
        raise UsageError(
            f"{asked} names {len(found)} hosts: with an even number, no more hosts may be lost than with one fewer.",
            hint,
        )
    if len(found) > MOST_VOTERS:
        raise UsageError(f"{asked} names {len(found)} hosts, of at most {MOST_VOTERS}.", hint)
    if len(set(found)) < len(found):
        raise UsageError(f"{asked} names a host and port twice.", hint)
    if any(endpoint.port == 0 for endpoint in found):
        raise UsageError(f"{asked} has port 0 (any free port), which other nodes cannot know.", "Give a port.")
    return found


def parse_listening(text: str, flag: str) -> Endpoint:
    """Parse ``port`` or ``host:port``; since there is always a port, an IPv6 address needs no brackets.

    Returns:
        An endpoint whose host is empty if none is given.
    """
    host, colon, port = text.strip().rpartition(":")
    if re.fullmatch(r"[0-9]{1,9}", port) and not colon:
        return Endpoint("", int(port))  # its range is checked later
    hint = f"Write PORT or HOST:PORT, as in {flag} 29480 or {flag} 127.0.0.1:29480."
    if not host or not re.fullmatch(r"[0-9]{1,5}", port):
        raise UsageError(f"{flag} {text!r} is not a port.", hint)
    if ":" in host.strip("[]") and not _is_v6(host.strip("[]")):
        raise UsageError(f"{flag} {text!r} has {host!r} where an IPv6 address belongs.", hint)
    return parse_endpoint(f"[{host}]:{port}" if _is_v6(host) else text, asker=flag)


def parse_host(text: str, flag: str) -> str:
    """Parse a host's name or address, without brackets and without a port."""
    host = text.strip()
    if not (_is_v6(host) or (":" not in host and _names_a_host(host))):
        raise UsageError(
            f"{flag} {text!r} is not the address of a host, nor its name.",
            f"Write it without a port, as in {flag} 10.0.0.7, {flag} ::1 or {flag} node0.",
        )
    return host


def _names_a_host(text: str) -> bool:
    """Whether text may be the name of a host, or an IPv4 address, as far as that shows without a resolver."""
    if "." not in text or not re.fullmatch("[0-9.]+", text):  # a name may have digits only, as a container's
        return bool(text) and not re.search(r"[\s/\[\]]", text)
    try:
        socket.inet_aton(text)  # also the short forms that a resolver takes, as 127.1
    except OSError:
        return False
    return True


def _is_v6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True

"""A network namespace for a benchmark."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct

CLONE_NEWUSER, CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP = 0x10000000, 0x40000000, 0x8914, 1


def own_network() -> bool:
    """Move this process to its own network namespace, with only a loopback interface.

    Every client of torch's store resolves the name of the host that it connected to. A DNS server that serves many
    hosts may not answer hundreds of clients on one; if no server can be reached, the lookup costs nothing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as lo:
        fcntl.ioctl(lo, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
    return True

"""A file system whose writes fail, or that does not respond, on command: FUSE's protocol over a directory. Needs root.

One process serves it, so that a test which accesses it cannot block itself. It reads what it is to do from a file:
nothing, ``hang``, or the name of an error, such as ``EIO``, which all writes then get.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["Storage", "missing", "storage"]

LOOK = 0.02
"""Seconds between two looks at what to do."""

_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_MAX_WRITE = 128 * 1024
_ROOT = 1
_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """Return what this machine lacks to mount such a file system, or nothing."""
    if os.geteuid() != 0:
        return "needs root to mount a file system"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"needs FUSE: /dev/fuse: {error.strerror}"
    return ""


class Storage:
    """A mounted file system.

    Attributes:
        path: where it is mounted.
        beneath: the directory that holds its files.
    """

    def __init__(self, directory: Path, path: Path) -> None:
        self.path = path
        self.beneath = directory / "files"
        self._order, self._commits = directory / "order", directory / "commits"
        self._hit = directory / "hit"
        self._order.write_text("")
        self._commits.touch()

    def fail(self, how: str) -> None:
        """Have it hang, or its writes fail; from when this returns, nothing is written."""
        self._hit.unlink(missing_ok=True)
        self._tell(how)

    def mend(self) -> None:
        self._tell("")

    @property
    def hit(self) -> bool:
        """Whether any request has failed or hung since :meth:`fail`."""
        return self._hit.exists()

    def commits(self) -> dict[str, float]:
        """When a directory got its name, by name."""
        lines = self._commits.read_text().splitlines()
        return {name: float(clock) for clock, name in (line.split(" ", 1) for line in lines)}

    def _tell(self, order: str) -> None:
        new = self._order.with_suffix(".new")
        new.write_text(order)
        new.rename(self._order)
        time.sleep(3 * LOOK)


@contextlib.contextmanager
def storage(directory: Path, path: Path) -> Iterator[Storage]:
    """Mount one at a path; its own files are in a directory."""
    (directory / "files").mkdir(parents=True)
    made = Storage(directory, path)
    server = subprocess.Popen([sys.executable, __file__, str(directory), str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "mounted\n"
        yield made
    finally:
        made.mend()
        if _libc.umount2(os.fsencode(path), _DETACH):
            print(f"{path} is still mounted: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        server.kill()  # what still waits for it gets an error
        server.wait(10)
        server.stdout.close()


class _Server:
    """Answers the kernel's requests one by one."""

    def __init__(self, fuse: int, directory: Path) -> None:
        self._fuse = fuse
        self._order, self._commits = directory / "order", directory / "commits"
        self._hit = directory / "hit"
        self._root = directory / "files"
        self._nodes: dict[int, tuple[int, str]] = {}  # parent and name
        self._ids: dict[tuple[int, str], int] = {}
        self._open: dict[int, int] = {}  # node of each open descriptor
        self._next = _ROOT
        self._calls: dict[int, Callable[[int, bytes], bytes]] = {
            1: self._lookup,
            3: self._getattr,
            4: self._setattr,
            9: self._mkdir,
            10: self._unlink,
            11: self._rmdir,
            12: self._rename,
            14: self._open_file,
            15: self._read,
            16: self._write,
            17: self._statfs,
            18: self._release,
            20: self._sync,
            25: lambda node, data: b"",  # flush
            26: self._init,
            27: lambda node, data: bytes(16),  # opendir
            28: self._readdir,
            29: lambda node, data: b"",  # releasedir
            30: lambda node, data: b"",  # fsyncdir
            34: lambda node, data: b"",  # access
            35: self._create,
            45: self._rename2,
        }
        self._writes = {4, 9, 12, 16, 20, 30, 35, 45}

    def serve(self) -> None:
        while True:
            asked, order = self._asked(), self._order.read_text()
            if not asked:
                continue
            if order == "hang":
                self._hit.touch()
                time.sleep(LOOK)
                continue
            try:
                request = os.read(self._fuse, _MAX_WRITE + 4096)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return  # unmounted
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                raise
            _, call, unique, node, *_ = _IN.unpack_from(request)
            if call in (2, 36, 42):  # forget, interrupt: without an answer
                continue
            error, answer = 0, b""
            try:
                if order and call in self._writes:
                    self._hit.touch()
                    raise OSError(getattr(errno, order), order)
                answer = self._calls[call](node, request[_IN.size :])
            except KeyError:
                error = errno.ENOSYS
            except OSError as failure:
                error = failure.errno or errno.EIO
            with contextlib.suppress(OSError):  # the request was given up
                os.write(self._fuse, _OUT.pack(_OUT.size + len(answer), -error, unique) + answer)

    def _asked(self) -> bool:
        """Whether a request waits, perhaps after a moment."""
        return bool(select.select([self._fuse], [], [], LOOK)[0])

    def _path(self, node: int, name: str = "") -> Path:
        parts = [name] if name else []
        while node != _ROOT:
            if node not in self._nodes:
                raise FileNotFoundError(errno.ENOENT, "removed")
            node, part = self._nodes[node]
            parts.append(part)
        return self._root.joinpath(*reversed(parts))

    def _node(self, parent: int, name: str) -> int:
        if (parent, name) not in self._ids:
            self._next += 1
            self._ids[parent, name] = self._next
            self._nodes[self._next] = parent, name
        return self._ids[parent, name]

    def _drop(self, parent: int, name: str) -> None:
        node = self._ids.pop((parent, name), 0)
        self._nodes.pop(node, None)

    def _stat(self, node: int) -> os.stat_result:
        with contextlib.suppress(FileNotFoundError):
            return os.lstat(self._path(node))
        for descriptor, opened in self._open.items():  # removed, and still open
            if opened == node:
                return os.fstat(descriptor)
        raise FileNotFoundError(errno.ENOENT, "removed")

    def _entry(self, parent: int, name: str) -> bytes:
        os.lstat(self._path(parent, name))
        node = self._node(parent, name)
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + _attributes(node, self._stat(node))

    def _init(self, node: int, data: bytes) -> bytes:
        readahead = struct.unpack_from("<II", data, 8)[0]
        return struct.pack("<IIIIHHIIHH", 7, 31, readahead, 0, 16, 12, _MAX_WRITE, 1, 0, 0) + bytes(32)

    def _lookup(self, node: int, data: bytes) -> bytes:
        return self._entry(node, _name(data))

    def _getattr(self, node: int, data: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + _attributes(node, self._stat(node))

    def _setattr(self, node: int, data: bytes) -> bytes:
        valid, _, handle, size = struct.unpack_from("<IIQQ", data)
        if valid & 8:  # FATTR_SIZE
            os.truncate(handle if valid & 64 else self._path(node), size)
        return self._getattr(node, data)

    def _mkdir(self, node: int, data: bytes) -> bytes:
        mode = struct.unpack_from("<I", data)[0]
        name = _name(data[8:])
        os.mkdir(self._path(node, name), stat.S_IMODE(mode))
        return self._entry(node, name)

    def _unlink(self, node: int, data: bytes) -> bytes:
        os.unlink(self._path(node, _name(data)))
        self._drop(node, _name(data))
        return b""

    def _rmdir(self, node: int, data: bytes) -> bytes:
        os.rmdir(self._path(node, _name(data)))
        self._drop(node, _name(data))
        return b""

    def _rename(self, node: int, data: bytes) -> bytes:
        return self._moved(node, struct.unpack_from("<Q", data)[0], data[8:])

    def _rename2(self, node: int, data: bytes) -> bytes:
        target, flags = struct.unpack_from("<QI", data)
        if flags:
            raise OSError(errno.EINVAL, "flags")
        return self._moved(node, target, data[16:])

    def _moved(self, parent: int, target: int, names: bytes) -> bytes:
        old, new = (part.decode() for part in names.split(b"\0")[:2])
        os.rename(self._path(parent, old), self._path(target, new))
        node = self._node(parent, old)
        del self._ids[parent, old]
        self._drop(target, new)
        self._ids[target, new], self._nodes[node] = node, (target, new)
        if target == _ROOT:
            with self._commits.open("a") as file:
                file.write(f"{time.monotonic()} {new}\n")
        return b""

    def _opened(self, node: int, descriptor: int) -> bytes:
        self._open[descriptor] = node
        return struct.pack("<QII", descriptor, 0, 0)

    def _open_file(self, node: int, data: bytes) -> bytes:
        flags = struct.unpack_from("<I", data)[0]
        return self._opened(node, os.open(self._path(node), flags & ~os.O_NOFOLLOW | os.O_CLOEXEC))

    def _create(self, node: int, data: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", data)
        name = _name(data[16:])
        descriptor = os.open(self._path(node, name), flags | os.O_CREAT | os.O_CLOEXEC, stat.S_IMODE(mode))
        return self._entry(node, name) + self._opened(self._node(node, name), descriptor)

    def _read(self, node: int, data: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", data)
        return os.pread(handle, size, offset)

    def _write(self, node: int, data: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", data)
        return struct.pack("<II", os.pwrite(handle, data[40 : 40 + size], offset), 0)

    def _sync(self, node: int, data: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", data)[0])
        return b""

    def _release(self, node: int, data: bytes) -> bytes:
        handle = struct.unpack_from("<Q", data)[0]
        self._open.pop(handle, None)
        os.close(handle)
        return b""

    def _statfs(self, node: int, data: bytes) -> bytes:
        found = os.statvfs(self._root)
        counts = found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree
        return struct.pack("<QQQQQIII", *counts, found.f_bsize, found.f_namemax, found.f_frsize) + bytes(28)

    def _readdir(self, node: int, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        found = b""
        for number, name in enumerate(sorted(os.listdir(self._path(node)))[offset:], offset + 1):
            kind = stat.S_IFMT(os.lstat(self._path(node, name)).st_mode) >> 12
            text = name.encode()
            entry = struct.pack("<QQII", number, number, len(text), kind) + text
            entry += bytes(-len(entry) % 8)
            if len(found) + len(entry) > size:
                break
            found += entry
        return found


def _attributes(node: int, found: os.stat_result) -> bytes:
    whole = (int(found.st_atime), int(found.st_mtime), int(found.st_ctime))
    rest = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    parts = [nanoseconds % 10**9 for nanoseconds in rest]
    first = struct.pack("<QQQQQQ", node, found.st_size, found.st_blocks, *whole)
    return first + struct.pack("<IIIIIIIIII", *parts, found.st_mode, found.st_nlink, 0, 0, 0, 4096, 0)


def _name(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode()


def main(directory: Path, path: Path) -> None:
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if _libc.mount(b"faulty", os.fsencode(path), b"fuse.faulty", 0, options):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    _Server(fuse, directory).serve()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

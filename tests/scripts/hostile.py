"""A worker that sends invalid messages to its agent: ``hostile.py DIRECTORY``; its error file is a FIFO; exits with 3.

It sends each over a separate connection, and then writes garbage into the memory that the agent shares with it.
DIRECTORY/heard has a line for each: the message, and whether the agent closed the connection.
"""

import json
import os
import socket
import sys
import time
import zlib
from pathlib import Path

from elastic_launch import shared_progress
from elastic_launch.snapshot.memory import slot

work = Path(sys.argv[1])
hello = {"type": "workerhello", "round": 1, "rank": 0, "local_rank": 0}
ready = {"type": "ready", "step": 1, "total": 5, "restore_s": 0.0}
job = {"sequence": 1, "step": 1, "round": 1}
stored = {"type": "stored", "slot": 0, "job": job}


def line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def connected() -> tuple[socket.socket, list[int]]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(30)
    sock.connect("\0" + os.environ["ELASTIC_LAUNCH_SOCKET"][1:])
    sock.sendall(line(hello))
    _, descriptors, _, _ = socket.recv_fds(sock, 4096, 16)
    return sock, descriptors


ODD = {
    "deep": b"[" * 60_000 + b"\n",
    "long float": line({**ready, "restore_s": 10**400}),
    "long total": line({**ready, "total": 10**400}) + line({"type": "stepdone", "step": 2}),
    "slot": line({**stored, "slot": 99}),
    "sequence": line({**stored, "job": {**job, "sequence": 2**64}}),
    "zero byte": line({**stored, "job": {**job, "directory": "/a\0b"}}),
    "infinite": line(ready).replace(b"0.0", b"1e999"),
    "not a number": line(ready).replace(b"0.0", b"NaN"),
    "rank": line({**hello, "local_rank": 77}),
    "agent's": line({"type": "use", "slot": 1}),
    "bytes": bytes(range(256)) + b"\n",
}
for name, odd in ODD.items():
    sock, descriptors = connected()
    sock.sendall(odd)
    try:
        hung_up = not sock.recv(100)
    except OSError as error:
        hung_up = isinstance(error, ConnectionResetError)
    for descriptor in descriptors:
        os.close(descriptor)
    with (work / "heard").open("a") as file:
        file.write(f"{name}: {hung_up}\n")

sock, descriptors = connected()
sock.sendall(line(ready))
fields = slot._FIELDS.pack(slot._MAGIC, 1, 2**64 - 1, 0, 0, 2**63, 2**63, 2**63)
for head in descriptors[1:-1:2]:
    os.pwrite(head, slot._HEADER.pack(2**64 - 1, fields, zlib.crc32(fields)), 0)
nan, counts = float("nan"), [2**64 - 1] * shared_progress._COUNTS
steps = 1, 2**64 - 1, nan, 2**64 - 1, nan, 0, b"\xff" * 32, nan, 0, 0, nan, nan
fields = shared_progress._FIELDS.pack(*steps, *counts, 2**64 - 1)
os.pwrite(descriptors[-1], shared_progress._RECORD.pack(fields, zlib.crc32(fields)), 0)
sock.sendall(line({"type": "stepdone", "step": 3}))
time.sleep(1.5)  # the agent looks at all of it for its beat

error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
error_file.unlink(missing_ok=True)
os.mkfifo(error_file)
sys.exit(3)

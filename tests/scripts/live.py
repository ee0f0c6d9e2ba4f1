"""A worker that can be suspended, without torch: ``live.py DIRECTORY [FLAGS]``; it speaks with its agent itself.

``finish`` in DIRECTORY: exit 0. It appends what happens to it to ``live.jsonl``: its place at the start and in each
round, and orders. ``disconnect-<rank>``: it reports a broken connection, once. ``fail-<rank>``: it records an exception
and exits with 1, once. With ``--deaf`` it reports nothing when it is told to leave the round.

Started ahead, it says that it has come once there is a file ``come`` or ``come-<pid>``; with ``--reads-rank`` it fails.
With ``--fails-again`` each but the first round's fails as it starts.
"""

import json
import os
import pathlib
import socket
import sys
import threading
import time

directory, flags = pathlib.Path(sys.argv[1]), sys.argv[2:]
ahead = os.environ.get("ELASTIC_LAUNCH_AHEAD") == "1"
if ahead and "--reads-rank" not in flags:
    place = {"round": 0, "rank": 0, "reason": "ahead"}
else:
    place = {"round": int(os.environ["ELASTIC_LAUNCH_ROUND"]), "rank": int(os.environ["RANK"]), "reason": "first"}
local_rank = int(os.environ["LOCAL_RANK"])


def note(what, **more):
    line = {"what": what, "pid": os.getpid(), **place, **more}
    with (directory / "live.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def say(kind, **fields):
    sock.sendall(json.dumps({"type": kind, **fields}).encode() + b"\n")


def begin():
    say("ready", step=0, total=0, restore_s=0.0, uncompared=0, live=True)
    say("maycommit", number=place["round"])


def listen():
    with sock.makefile("rb") as lines:
        for line in lines:
            message = json.loads(line)
            kind = message["type"]
            if (
                kind == "commitanswer"
            ):  # the answer to a later message: the agent knows that this worker can be suspended
                note("begins")
            if kind == "stop":
                say("drained", step=7, seconds=0.0)
            if kind == "suspend":
                note("suspends", cause=message["cause"])
            if kind == "noted" or (kind == "suspend" and "--deaf" not in flags):
                say("suspended", step=7)
            if kind == "place":
                place.update(round=message["round"], rank=message["placement"]["rank"], reason=message["reason"])
                begin()
            if kind == "exit":
                note("exits")
                os._exit(143)
    os._exit(5)  # the agent is gone


with (directory / "started.jsonl").open("a") as file:
    env = {name: value for name, value in os.environ.items() if name.isupper()}
    file.write(json.dumps({"pid": os.getpid(), "children": [], "env": env}) + "\n")
if "--fails-again" in flags and place["round"] != 1:
    sys.exit("there is no device")
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.connect("\0" + os.environ["ELASTIC_LAUNCH_SOCKET"][1:])
say("workerhello", round=place["round"], rank=place["rank"], local_rank=local_rank)
answer, descriptors, _, _ = socket.recv_fds(sock, 4096, 16)
note("connects", patience_s=json.loads(answer)["patience_s"])
if ahead:
    while not (directory / "come").exists() and not (directory / f"come-{os.getpid()}").exists():
        time.sleep(0.02)
    note("comes")
    say("ahead")
else:
    begin()
threading.Thread(target=listen, daemon=True).start()


def take(name):
    try:
        (directory / f"{name}-{place['rank']}").unlink()
    except FileNotFoundError:
        return False
    return True


while not (directory / "finish").exists():
    if take("disconnect"):
        say("disconnected", step=7, error="RuntimeError: Connection closed by peer [127.0.0.1]:7")
    if take("fail"):
        record = {"message": {"message": "ValueError: told to fail", "extraInfo": {}, "errorCode": 0}}
        pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(record))
        os._exit(1)
    time.sleep(0.02)

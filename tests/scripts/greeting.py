"""A worker that sends a hello to its agent, and stays: ``greeting.py DIRECTORY``, where started.jsonl has its pid."""

import json
import os
import socket
import sys
import time
from pathlib import Path

(Path(sys.argv[1]) / "started.jsonl").write_text(json.dumps({"pid": os.getpid(), "children": []}) + "\n")
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.connect("\0" + os.environ["ELASTIC_LAUNCH_SOCKET"][1:])
sock.sendall(b'{"type": "workerhello", "round": 1, "rank": 0, "local_rank": 0}\n')
time.sleep(600)

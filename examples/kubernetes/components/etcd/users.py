"""Enable etcd's authentication and create the user of a run, which can access only the runs' records.

It needs only Python, and uses the JSON gateway (https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway). Any
number of pods may run it, at the same time and repeatedly: the passwords are then those of the current secret.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

USER = "train"
PREFIX = b"/elastic-launch/"
PATIENCE = 600.0
"""Seconds within which etcd must answer."""


class Refused(Exception):
    """etcd answered with an error."""


def call(endpoint: str, path: str, token: str = "", **fields: Any) -> dict[str, Any]:
    """Call one of etcd's methods for authentication.

    Raises:
        Refused: with etcd's message.
        OSError: if etcd does not answer.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": token} if token else {})
    request = urllib.request.Request(f"{endpoint}/v3/auth/{path}", json.dumps(fields).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return dict(json.loads(answer.read(65536)))
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(error.read(65536).decode(errors="replace")) from None


def log_in(endpoint: str, user: str, password: str) -> str:
    """Return a token; it is empty while authentication is off."""
    try:
        return str(call(endpoint, "authenticate", name=user, password=password)["token"])
    except Refused as error:
        if "authentication is not enabled" in str(error):
            return ""
        raise


def set_up(endpoint: str, root_password: str, password: str) -> None:
    """Ensure that authentication is on, and that the user exists with its permission and password."""
    try:
        if log_in(endpoint, USER, password):
            return
    except Refused as error:
        print(f"{USER} cannot log in yet: {error}", file=sys.stderr, flush=True)
    token = log_in(endpoint, "root", root_password)

    def make(path: str, **fields: Any) -> None:
        try:
            call(endpoint, path, token, **fields)
        except Refused as error:
            if "already exists" not in str(error):
                raise

    if not token:
        make("user/add", name="root", password=root_password)
        make("role/add", name="root")
        make("user/grant", user="root", role="root")
    end = PREFIX[:-1] + bytes([PREFIX[-1] + 1])
    keys = {"key": base64.b64encode(PREFIX).decode(), "range_end": base64.b64encode(end).decode()}
    make("role/add", name=USER)
    make("role/grant", name=USER, perm={"permType": "READWRITE", **keys})
    make("user/add", name=USER, password=password)
    make("user/changepw", name=USER, password=password)
    make("user/grant", user=USER, role=USER)
    if not token:
        make("enable")
    log_in(endpoint, USER, password)


def main() -> int:
    """Retry until it succeeds."""
    endpoints = os.environ["ENDPOINTS"].split(",")
    deadline = time.monotonic() + PATIENCE
    said = ""
    while True:
        for endpoint in endpoints:
            try:
                set_up(endpoint, os.environ["ROOT_PASSWORD"], os.environ["TRAIN_PASSWORD"])
            except (OSError, ValueError, KeyError, Refused) as error:
                # No majority yet, or another pod was faster: then the next try finds its changes.
                if (text := f"{endpoint}: {error}") != said:
                    print(text, file=sys.stderr, flush=True)
                said = text
                continue
            print(f"etcd asks for passwords; {USER} may use {PREFIX.decode()}", flush=True)
            return 0
        if time.monotonic() > deadline:
            return 1
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())

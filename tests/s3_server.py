"""A real S3 server (moto's) as a process on this host."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from harness import free_port, wait_for

BUCKET = "bucket"


@dataclass(frozen=True, slots=True)
class S3Server:
    """The server's address; it accepts any credentials, but no requests without."""

    endpoint: str

    @property
    def env(self) -> dict[str, str]:
        """The environment of clients."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self) -> None:
        self._ask("PUT", f"/{BUCKET}")

    def remove_bucket(self) -> None:
        """Remove the bucket and all objects in it, which S3 itself would not do in one request."""
        self._ask("POST", "/moto-api/reset")

    def objects(self) -> list[str]:
        """Names of all objects, in order."""
        text = self._ask("GET", f"/{BUCKET}?list-type=2").decode()
        return [part.partition("</Key>")[0] for part in text.split("<Key>")[1:]]

    def _ask(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(self.endpoint + path, method=method)
        request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bytes(answer.read())

    def _answers(self) -> bool:
        try:
            self._ask("GET", "/moto-api/")
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except (urllib.error.URLError, ConnectionError):
            return False
        return True


@contextmanager
def s3_server(unchecked: int | None = None) -> Iterator[S3Server]:
    """Run a server without buckets.

    Args:
        unchecked: after this many requests to S3, it checks credentials and knows none; None: never.
    """
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    env = os.environ if unchecked is None else {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": str(unchecked)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        server = S3Server(f"http://127.0.0.1:{port}")
        wait_for("the S3 server", server._answers)
        yield server
    finally:
        process.kill()
        process.wait()

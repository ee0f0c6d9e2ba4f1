"""The run's token: a secret that all its nodes share.

It comes from the environment or a file, never from a flag, because all users of a host can read the command lines of
its processes. It is never passed on: code that needs a key derives one, and code that prints a configuration omits it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from typing import NoReturn

from elastic_launch.errors import UsageError

_log = logging.getLogger(__name__)

ENV_TOKEN = "ELASTIC_LAUNCH_TOKEN"

_SECRETS = re.compile("ELASTIC_LAUNCH_(TOKEN|[A-Z0-9_]+_(USER|PASSWORD))")
"""The token, and the users and passwords of stores. They are never flags: see the module."""

MIN_LENGTH = 16
"""Shortest token in characters. Network traffic allows offline guessing, so a token should be random, not invented."""

_MAX_BYTES = 4096

HINT_NO_TOKEN = f"Start all nodes with one token, or this one without: no {ENV_TOKEN} and no --token-file."

HINT_TOKEN = f"Set {ENV_TOKEN} or --token-file to the run's token."

_HINT_MAKE = f"Give at least {MIN_LENGTH} random characters, as made by: openssl rand -hex 32."


class Token:
    """A token that cannot be printed or pickled.

    Args:
        text: the token; surrounding blanks are removed.
        source: where it was found, for errors.

    Raises:
        UsageError: if it is too short, or more than one line of printable characters.
    """

    __slots__ = ("__secret",)

    def __init__(self, text: str, source: str) -> None:
        text = text.strip()
        if len(text) < MIN_LENGTH:
            found = f"holds a token of {len(text)} characters" if text else "holds no token"
            raise UsageError(f"{source} {found}.", _HINT_MAKE)
        if not text.isprintable():
            raise UsageError(f"{source} holds more than one line of printable characters.", _HINT_MAKE)
        self.__secret = text.encode("utf-8", "surrogateescape")

    @classmethod
    def made(cls) -> Token:
        """Return a random token of 256 bits."""
        return cls(secrets.token_hex(32), "what this process has made")

    def key(self, purpose: str, run_id: str) -> bytes:
        """Return a key of 32 bytes for one purpose in one run."""
        return keyed(self.__secret, b"elastic-launch 1", purpose.encode(), os.fsencode(run_id))

    def reveal(self) -> str:
        """Return its text, for this process's own use."""
        return self.__secret.decode("utf-8", "surrogateescape")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Token) and hmac.compare_digest(self.__secret, other.__secret)

    def __hash__(self) -> int:
        return hash((Token, self.__secret))

    def __repr__(self) -> str:
        return "Token(...)"

    def __deepcopy__(self, memo: object) -> Token:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a token is not to be pickled")


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process outside of the rendezvous: a worker, or a helper of the agent."""
    return {name: value for name, value in environ.items() if not _SECRETS.fullmatch(name)}


def keyed(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 (RFC 2104) of parts, each prefixed with its length to make the encoding unambiguous."""
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "big") + part for part in parts), hashlib.sha256)


def read_token(path: str | None, environ: Mapping[str, str]) -> Token | None:
    """Return the token from the file that ``--token-file`` names, or from the environment; None if there is none.

    A file that users other than its owner can read causes a warning.

    Raises:
        UsageError: on an unreadable file, on an invalid token, and if the two differ.
    """
    by_environment = Token(environ[ENV_TOKEN], ENV_TOKEN) if ENV_TOKEN in environ else None
    if path is None:
        return by_environment
    by_file = _read_file(path)
    if by_environment is not None and by_environment != by_file:
        raise UsageError(
            f"{ENV_TOKEN} and --token-file {path} give different tokens.", "Give one of the two, or the same in both."
        )
    return by_file


def _read_file(path: str) -> Token:
    asked = f"--token-file {path}"
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{asked} cannot be read: {reason}.", "Name a file that holds the run's token and nothing else."
        ) from error
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{asked} holds more than {_MAX_BYTES} bytes.", "Name a file with a token and nothing else.")
    token = Token(data.decode("utf-8", "surrogateescape"), asked)
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISREG(status.st_mode) and mode & 0o044:
        _log.warning("%s can be read by others than its owner (mode %03o): chmod 600 %s", asked, mode, path)
    return token

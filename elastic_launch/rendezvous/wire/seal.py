"""The MAC of a value in a store, keyed with the run's token: a writer without the token can only disrupt the run.

The value stays JSON: ``{"mac":"<HMAC-SHA256 of the value without it>", ...}``. It must be an object.
"""

from __future__ import annotations

import hmac

from elastic_launch import codec
from elastic_launch.errors import RefusedError, StoreError
from elastic_launch.secret import HINT_NO_TOKEN, HINT_TOKEN, Token, keyed

_HEAD, _TAIL = b'{"mac":"', b'",'
_START = len(_HEAD) + 64 + len(_TAIL)

_HINT_DIFFERS = f"{HINT_TOKEN} If that is the case already, a client without the token has written to the store."


class ValueSeal:
    """Seals and opens the values of a run with a token; those of a run without one are left unchanged."""

    def __init__(self, token: Token | None, run_id: str) -> None:
        self._key = None if token is None else token.key("record", run_id)
        self._run = f"run {run_id!r}"

    def close(self, value: bytes) -> bytes:
        """Return the value to store."""
        if self._key is None:
            return value
        return _HEAD + self._mac(self._key, value) + _TAIL + value[1:]

    def open(self, stored: bytes) -> bytes:
        """Return the value that was stored.

        Raises:
            RefusedError: if it was not written with this token, as when this node or the run has another one.
            ProtocolError: if it is not valid under any token.
        """
        sealed = stored.startswith(_HEAD) and stored[_START - len(_TAIL) : _START] == _TAIL
        if self._key is None:
            if sealed:
                raise RefusedError(f"The token is missing: {self._run} has one, this node has none.", HINT_TOKEN)
            return stored
        if not sealed:
            codec.loads(stored)
            raise RefusedError(f"This node has a token, {self._run} has none.", HINT_NO_TOKEN)
        plain = b"{" + stored[_START:]
        if not hmac.compare_digest(stored[len(_HEAD) : len(_HEAD) + 64], self._mac(self._key, plain)):
            raise RefusedError(f"The token differs from that of {self._run}.", _HINT_DIFFERS)
        return plain

    @staticmethod
    def _mac(key: bytes, value: bytes) -> bytes:
        return keyed(key, value).hex().encode()


class Patience:
    """Decides when a joining node accepts a value that refuses it: when it has stayed for some seconds.

    The leader immediately repairs what other clients have written to its store. So a value that stays is the leader's.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._what: object = None

    def stands(self, what: object, now: float) -> bool:
        """Whether the same value was found each time for so long."""
        if self._since is None or what != self._what:
            self._since, self._what = now, what
        return now - self._since >= self._seconds

    def refused(self, error: RefusedError, now: float) -> RefusedError | StoreError:
        """Return the refusal itself once it stands, else a reason to retry."""
        return error if self.stands(error.message, now) else StoreError(error.message, error.hint)

    def over(self) -> None:
        """Note that a valid value was found."""
        self._since = None

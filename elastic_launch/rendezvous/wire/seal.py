"""The MAC under the run's token that a value in a store carries: who writes without the token can only disturb.

The value stays JSON: ``{"mac":"<HMAC-SHA256 of the value without it>", ...}``. It must be an object.
"""

from __future__ import annotations

import hmac

from elastic_launch.errors import RefusedError, StoreError
from elastic_launch.rendezvous.wire import codec
from elastic_launch.secret import HINT_NO_TOKEN, HINT_TOKEN, Token, keyed

__all__ = ["Patience", "ValueSeal"]

_HEAD, _TAIL = b'{"mac":"', b'",'
_START = len(_HEAD) + 64 + len(_TAIL)

_HINT_DIFFERS = f"{HINT_TOKEN} If it is that already, somebody without it has written to the store."


class ValueSeal:
    """Seals and opens the values of a run that has a token; those of one without stay as they are."""

    def __init__(self, token: Token | None, run_id: str) -> None:
        self._key = None if token is None else token.key("record", run_id)
        self._run = f"run {run_id!r}"

    def close(self, value: bytes) -> bytes:
        """Return the value as it goes into the store."""
        if self._key is None:
            return value
        return _HEAD + self._mac(self._key, value) + _TAIL + value[1:]

    def open(self, stored: bytes) -> bytes:
        """Return the value that was stored.

        Raises:
            RefusedError: if it was not written under this token, as if this node or the run had another one.
            ProtocolError: if no token could have written it.
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
    """For how long a node that comes finds something that refuses it before it believes that.

    The leader repairs at once what others have written to its store. So what stands for longer is the leader's own.

    Args:
        seconds: of patience.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._what: object = None

    def stands(self, what: object, now: float) -> bool:
        """Whether the same was found each time for so long."""
        if self._since is None or what != self._what:
            self._since, self._what = now, what
        return now - self._since >= self._seconds

    def refused(self, error: RefusedError, now: float) -> RefusedError | StoreError:
        """Return what a refusal amounts to by now: itself, or a reason to try again."""
        return error if self.stands(error.message, now) else StoreError(error.message, error.hint)

    def over(self) -> None:
        """What is found is as it should be."""
        self._since = None

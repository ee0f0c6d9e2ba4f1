"""A control store whose value carries a MAC under the run's token: who writes without it can do no more than disturb.

The value stays JSON: ``{"mac":"<HMAC-SHA256 of the value without it>", ...}``. Who has another token, or none where the
run has one, is refused when it first reads the record, before it does anything.
"""

from __future__ import annotations

import hmac

from elastic_launch.errors import RefusedError
from elastic_launch.rendezvous import codec
from elastic_launch.rendezvous.store import ControlStore
from elastic_launch.secret import ENV_TOKEN, HINT_TOKEN, Token, keyed

__all__ = ["SealedStore"]

_HEAD, _TAIL = b'{"mac":"', b'",'
_START = len(_HEAD) + 64 + len(_TAIL)

_HINT_NONE = f"Start all its nodes with one token, or this one without: no {ENV_TOKEN} and no --token-file."
_HINT_DIFFERS = f"{HINT_TOKEN} If it is that already, somebody without it has written to the store."


class SealedStore:
    """A store's view for the holders of a token, or for a run without one.

    Every value must be a JSON object.

    Args:
        store: closed with this one.
    """

    def __init__(self, store: ControlStore, token: Token | None, run_id: str) -> None:
        self._store = store
        self._key = None if token is None else token.key("record", run_id)
        self._run = f"run {run_id!r}"

    def load(self, timeout: float) -> bytes | None:
        """As of the store.

        Raises:
            RefusedError: if the value was not written under this token; it must be left as it is.
        """
        return self._open(self._store.load(timeout))

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        return self._store.compare_and_set(self._close(expected), self._close(value) or b"", timeout)

    def wait_changed(self, known: bytes | None, timeout: float) -> bytes | None:
        """As of the store; raises what :meth:`load` does."""
        return self._open(self._store.wait_changed(self._close(known), timeout))

    def close(self) -> None:
        self._store.close()

    def _close(self, value: bytes | None) -> bytes | None:
        if value is None or self._key is None:
            return value
        return _HEAD + self._mac(self._key, value) + _TAIL + value[1:]

    def _open(self, value: bytes | None) -> bytes | None:
        if value is None:
            return None
        sealed = value.startswith(_HEAD) and value[_START - len(_TAIL) : _START] == _TAIL
        if self._key is None:
            if sealed:
                raise RefusedError(f"The token is missing: {self._run} has one, this node has none.", HINT_TOKEN)
            return value
        if not sealed:
            codec.loads(value)
            raise RefusedError(f"This node has a token, {self._run} has none.", _HINT_NONE)
        plain = b"{" + value[_START:]
        if not hmac.compare_digest(value[len(_HEAD) : len(_HEAD) + 64], self._mac(self._key, plain)):
            raise RefusedError(f"The token differs from that of {self._run}.", _HINT_DIFFERS)
        return plain

    @staticmethod
    def _mac(key: bytes, value: bytes) -> bytes:
        return keyed(key, value).hex().encode()

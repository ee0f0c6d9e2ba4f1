"""The interface of a control store."""

from __future__ import annotations

from typing import Protocol


class ControlStore(Protocol):
    """Holds one value, the control record, under the run id.

    Every call ends by its deadline. Every value written must differ from all earlier ones (the record's nonce ensures
    this), so that a writer can distinguish its own write from another's.
    """

    def load(self, timeout: float) -> bytes | None:
        """Return the value, or None if there is none yet.

        Raises:
            StoreError: if the store did not answer within timeout seconds.
        """

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        """Write ``value`` if the current one equals ``expected`` (None: if there is none); return whether it did.

        Raises:
            StoreError: if the outcome could not be learned within timeout seconds.
        """

    def renew(self, timeout: float) -> bytes | None:
        """Return the value, for the node that wrote it last: a store that protects its last writer goes on with that.

        Raises:
            StoreError: if the store did not answer within timeout seconds.
        """
        return self.load(timeout)

    def resign(self) -> None:
        """Note that the last writer no longer leads: a store that would protect it need not."""
        return

    def close(self) -> None:
        """Release what the store holds."""

"""What a control store must do. Implementations: ``c10d``, ``etcd`` and, for tests,
``elastic_launch.testing.MemoryStore``."""

from __future__ import annotations

from typing import Protocol

__all__ = ["ControlStore"]


class ControlStore(Protocol):
    """Holds one value, the control record, under the run id.

    Every call ends by its deadline. Every value written must differ from all earlier ones (the record's nonce sees to
    that), so that a writer can tell its own write from another's.
    """

    def load(self, timeout: float) -> bytes | None:
        """Return the value, or None if there is none yet.

        Raises:
            StoreError: if the store did not answer within timeout seconds.
        """
        ...

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        """Write value if the present one equals expected (None: if there is none); say whether it was written.

        Raises:
            StoreError: if the outcome could not be learned within timeout seconds.
        """
        ...

    def wait_changed(self, known: bytes | None, timeout: float) -> bytes | None:
        """Return the value once it differs from known, or known after timeout seconds.

        Raises:
            StoreError: if the store did not answer.
        """
        ...

    def close(self) -> None:
        """Release what the store holds."""
        ...

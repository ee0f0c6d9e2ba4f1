"""Writes that are done as a whole.

:func:`os.write` may write a part only, without an error: a disk that fills up takes what there is room for and reports
an error to the next write; a pipe's writer that is stopped and continued returns with what the pipe has taken.
"""

from __future__ import annotations

import os


def write_whole(descriptor: int, data: bytes | memoryview, offset: int | None = None) -> None:
    """Write all bytes, to a blocking descriptor.

    Args:
        descriptor: of a file or a pipe.
        data: what to write.
        offset: where in the file; None: at its current position, or its end if it was opened for appending.

    Raises:
        OSError: if that fails; a part may have been written.
    """
    rest = memoryview(data)
    while rest:
        if offset is None:
            written = os.write(descriptor, rest)
        else:
            written = os.pwrite(descriptor, rest, offset)
            offset += written
        rest = rest[written:]

"""Parses command lines of ``elastic-launch``, as its tests of them do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import UsageError

Parse = Callable[..., LaunchConfig]
"""What the fixture ``parse`` is."""


def refused(function: Callable[..., object], *line: object, **environ: str) -> UsageError:
    """Return the error with which a function that parses refuses its arguments."""
    with pytest.raises(UsageError) as caught:
        function(*line, **environ)
    assert caught.value.exit_code == 2
    assert caught.value.hint, "an error has to say what to do"
    return caught.value

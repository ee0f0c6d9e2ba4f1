"""Fixtures of tests with real agents."""

from __future__ import annotations

import pytest
from changes import undisturbed_hash


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights of ``scripts/changes.py`` when nothing happens."""
    return undisturbed_hash(tmp_path_factory.mktemp("undisturbed"))

"""An agent that has started this process ahead of a place in a round."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from played_agent import PlayedAgent


@pytest.fixture(autouse=True, scope="module")
def first_store() -> None:
    """The first store of a process opens a pipe of libuv's for good."""
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedAgent]:
    """An agent that has started this process ahead, and gives it the only place of round 7."""
    agent = PlayedAgent(on_ahead=lambda worker: agent.tell_place(worker, 7, 0, 0, 1))
    for name, value in agent.ahead(0).items():
        monkeypatch.setenv(name, value)
    yield agent
    agent.close()

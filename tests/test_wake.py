"""Waking a thread that waits in a selector."""

from __future__ import annotations

import os
import selectors

from elastic_launch.system.wake import Waker


def test_it_is_ready_until_it_is_cleared_however_often_it_was_woken() -> None:
    waker = Waker()
    with selectors.DefaultSelector() as selector:
        selector.register(waker, selectors.EVENT_READ)
        waker.clear()  # it was not woken
        assert not selector.select(0)
        for _ in range(2):
            waker.wake()
        assert [key.fileobj for key, _ in selector.select(0)] == [waker]
        waker.clear()
        assert not selector.select(0)
    waker.close()


def test_after_its_end_nothing_is_written_to_another_file_of_its_number() -> None:
    waker = Waker()
    number = waker.fileno()
    waker.close()
    waker.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    if other != number:
        os.dup2(other, number)
        os.close(other)
    try:
        waker.wake()
        with selectors.DefaultSelector() as selector:
            selector.register(number, selectors.EVENT_READ)
            assert not selector.select(0)
    finally:
        os.close(number)

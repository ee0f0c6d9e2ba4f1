"""One queue for all events: order, timers on a clock that the tests move, and real signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from elastic_agents.inbox import Inbox, SignalCaught, signals_to, withheld
from elastic_launch.testing import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(50.0)


@pytest.fixture
def inbox(clock: FakeClock) -> Inbox[object]:
    return Inbox(clock)


def take(inbox: Inbox[object], count: int) -> list[object]:
    return [inbox.take() for _ in range(count)]


def test_items_come_out_as_they_came_in(inbox: Inbox[object]) -> None:
    for item in "abc":
        inbox.put(item)
    assert take(inbox, 3) == ["a", "b", "c"]


def test_none_is_an_item(inbox: Inbox[object]) -> None:
    inbox.put(None)
    assert inbox.take() is None


def test_a_timer_fires_when_it_is_due(inbox: Inbox[object], clock: FakeClock) -> None:
    inbox.put_later(5.0, "later")
    inbox.put("now")
    clock.advance(4.9)
    inbox.put("still before")
    assert take(inbox, 2) == ["now", "still before"]
    clock.advance(0.1)
    assert inbox.take() == "later"


def test_timers_come_in_the_order_of_their_time(inbox: Inbox[object], clock: FakeClock) -> None:
    inbox.put_later(3.0, "third")
    inbox.put_later(1.0, "first")
    clock.advance(0.5)
    inbox.put_later(1.0, "second")
    clock.advance(10.0)
    assert take(inbox, 3) == ["first", "second", "third"]


def test_timers_of_the_same_time_come_as_they_were_set(inbox: Inbox[object], clock: FakeClock) -> None:
    items = [object() for _ in range(20)]
    for item in items:
        inbox.put_later(1.0, item)
    clock.advance(1.0)
    assert take(inbox, 20) == items


def test_what_has_come_goes_before_a_timer_that_is_due(inbox: Inbox[object], clock: FakeClock) -> None:
    """A worker's exit that is already queued must be seen before the end of its grace period."""
    inbox.put_later(1.0, "the grace is over")
    clock.advance(2.0)
    inbox.put("it has exited")
    assert take(inbox, 2) == ["it has exited", "the grace is over"]


def test_a_timer_without_delay_is_due_at_once(inbox: Inbox[object]) -> None:
    inbox.put_later(0.0, "now")
    assert inbox.take() == "now"


def test_timers_are_waited_for_while_others_are_further_off(inbox: Inbox[object], clock: FakeClock) -> None:
    inbox.put_later(1.0, "soon")
    inbox.put_later(1e6, "in eleven days")
    clock.advance(1.0)
    assert inbox.take() == "soon"


def test_any_thread_may_put(inbox: Inbox[object]) -> None:
    threads = [threading.Thread(target=inbox.put, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    assert sorted(map(str, take(inbox, 20))) == sorted(map(str, range(20)))
    for thread in threads:
        thread.join()


def test_an_item_ends_the_wait_of_another_thread(inbox: Inbox[object]) -> None:
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.append(inbox.take()))
    thread.start()
    inbox.put("it")
    thread.join(10)
    assert taken == ["it"]


# Signals.


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Handlers that were installed before, and the signals that they receive."""
    seen: list[int] = []
    before = {number: signal.signal(number, lambda number, _: seen.append(number)) for number in (10, 12)}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_come_through_the_inbox_with_the_time_at_which_they_came(
    inbox: Inbox[object], clock: FakeClock, handled: list[int]
) -> None:
    with signals_to(inbox, [signal.SIGUSR1, signal.SIGUSR2]):
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        clock.advance(2.0)
        signal.raise_signal(signal.SIGUSR1)
        clock.advance(2.0)
    caught = take(inbox, 3)
    assert caught == [SignalCaught(10), SignalCaught(12), SignalCaught(10)]
    assert [item.at for item in caught if isinstance(item, SignalCaught)] == [50.0, 50.0, 52.0]
    assert handled == []


def test_the_handlers_found_before_are_restored(inbox: Inbox[object], handled: list[int]) -> None:
    with signals_to(inbox, [signal.SIGUSR1]):
        signal.raise_signal(signal.SIGUSR2)
        assert handled == [signal.SIGUSR2], "others are left alone"
    signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGUSR2, signal.SIGUSR1]
    inbox.put("nothing else")
    assert inbox.take() == "nothing else"


def test_the_handlers_are_restored_after_an_error(inbox: Inbox[object], handled: list[int]) -> None:
    with pytest.raises(ValueError, match="boom"), signals_to(inbox, [signal.SIGUSR1]):
        raise ValueError("boom")
    signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1]


def test_a_signal_ends_the_wait_of_the_main_thread(inbox: Inbox[object], handled: list[int]) -> None:
    main = threading.main_thread().ident
    assert main is not None
    with signals_to(inbox, [signal.SIGUSR1]):
        thread = threading.Thread(target=signal.pthread_kill, args=(main, signal.SIGUSR1))
        thread.start()
        assert inbox.take() == SignalCaught(signal.SIGUSR1)
        thread.join()


WITHHELD = """
import os, signal, subprocess, sys
from elastic_agents.inbox import Inbox, SignalCaught, withheld
from elastic_launch.clock import MonotonicClock
inbox = Inbox(MonotonicClock())
with withheld(inbox, [signal.SIGUSR1]):
    child = "import signal; print(signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    subprocess.run([sys.executable, "-c", child], timeout=100, check=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert inbox.take() == SignalCaught(signal.SIGUSR1)
assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""


def test_a_withheld_signal_is_an_item_and_is_blocked_in_a_child() -> None:
    """In a process of its own: all threads of this one would have to block the signal."""
    done = subprocess.run([sys.executable, "-c", WITHHELD], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)


def test_without_signals_to_withhold_there_is_no_thread(inbox: Inbox[object]) -> None:
    threads = threading.active_count()
    with withheld(inbox, []):
        assert threading.active_count() == threads

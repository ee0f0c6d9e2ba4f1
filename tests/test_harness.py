"""Time limits of the tests themselves: a busy machine has more time, up to a limit."""

from __future__ import annotations

from unittest import mock

import harness
import pytest


class Machine:
    """Clocks of a machine on which each look at one takes a millisecond, of which a thread gets a share."""

    def __init__(self, share: float) -> None:
        self.share, self.now = share, 0.0

    def monotonic(self) -> float:
        self.now += 0.001
        return self.now

    def thread_time(self) -> float:
        return self.now * self.share

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("share", "found"), [(1.0, 1.0), (0.25, 4.0), (0.01, harness.BUSIEST), (0.0, harness.BUSIEST)])
def test_a_machine_is_as_busy_as_a_computation_is_slow(share: float, found: float) -> None:
    with mock.patch.object(harness, "time", Machine(share)):
        assert harness.busy() == pytest.approx(found)


@pytest.mark.parametrize(("share", "allowed"), [(1.0, 30.0), (0.25, 120.0), (0.0, 150.0)])
def test_a_wait_lasts_longer_on_a_machine_that_has_become_busy(share: float, allowed: float) -> None:
    machine = Machine(share)
    with (
        mock.patch.object(harness, "time", machine),
        mock.patch.object(harness, "SLOWNESS", harness.LOADED),
        pytest.raises(AssertionError, match=rf"not seen within {allowed:g} s: nothing"),
    ):
        harness.wait_for("nothing", lambda: False, 10.0)
    assert allowed < machine.now < allowed + 2

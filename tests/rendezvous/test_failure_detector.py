"""How long a node has received nothing, by its own clock, and what it concludes."""

from __future__ import annotations

import math

import pytest

from elastic_launch.events.facts import Isolation
from elastic_launch.events.sentences import why
from elastic_launch.rendezvous.node.failure_detector import FailureDetector


def linked(dead_after: float = 5.0, beat: float = 1.0) -> FailureDetector:
    detector = FailureDetector(dead_after, beat)
    detector.linked(100.0)
    detector.turn(100.0)
    detector.heard(100.0)
    return detector


def test_a_node_counts_as_cut_off_before_it_counts_its_silent_leader_as_lost() -> None:
    detector = linked()
    for now in (101.0, 102.0, 103.0, 103.9):
        assert detector.judge(now, detector.turn(now)) is None
    cut_off = detector.judge(104.0, detector.turn(104.0))
    assert cut_off is not None
    assert (cut_off.reason, cut_off.certain) == (Isolation("silent", 4.0), False)
    assert not detector.leader_lost
    detector.turn(105.0)
    assert detector.leader_lost


def test_a_node_that_was_frozen_is_cut_off_but_counts_no_leader_as_lost() -> None:
    detector = linked()
    cut_off = detector.judge(160.0, detector.turn(160.0))
    assert cut_off is not None
    assert (cut_off.reason, cut_off.certain) == (Isolation("frozen", 60.0), True)
    assert not detector.leader_lost


def test_it_is_reported_once_in_each_silence() -> None:
    detector = linked()
    assert detector.judge(104.0) is not None
    assert detector.judge(104.1) is None
    detector.heard(104.2)
    assert detector.judge(104.3) is None
    assert detector.judge(109.0) is not None


def test_it_is_reported_again_for_a_round_that_begins_meanwhile() -> None:
    detector = linked()
    assert detector.judge(104.0, unsure=4.0) is not None
    detector.formed()
    assert detector.cut_off(104.1)
    assert detector.judge(104.1, unsure=4.1) is not None
    assert detector.judge(104.2, unsure=4.2) is None


def test_a_node_that_led_counts_from_when_it_last_knew_that_it_led() -> None:
    """The leader in its own process was heard until it was deposed; the others count from the takeover before."""
    detector = linked()
    assert detector.judge(102.0, unsure=1.0) is None
    detector.heard(103.0)
    assert detector.judge(103.5) is None
    cut_off = detector.judge(105.0)
    assert cut_off is not None
    assert cut_off.reason == Isolation("silent", 4.0)
    detector.heard(105.5)
    assert detector.judge(109.0) is None
    assert detector.judge(109.5) is not None


def test_a_new_link_does_not_end_the_silence_until_something_is_received() -> None:
    detector = linked()
    detector.linked(103.5)
    assert detector.judge(103.9) is None
    assert detector.judge(104.0) is not None


def test_what_is_received_in_the_first_turn_after_a_freeze_does_not_count_as_heard_since() -> None:
    detector = linked()
    detector.turn(110.0)
    detector.heard(110.1)
    assert not detector.heard_since(110.0), "it may have been sent before"
    detector.turn(111.0)
    detector.heard(111.0)
    assert detector.heard_since(110.0)
    assert not detector.heard_since(110.1)


def test_before_the_first_message_no_link_counts_as_cut_off() -> None:
    assert FailureDetector(5.0, 1.0).judge(1000.0) is None


def test_a_leader_counts_as_cut_off_once_it_was_unsure_of_its_term_for_too_long() -> None:
    detector = linked()
    assert detector.judge(200.0, gap=60.0, unsure=0.0) is None, "nobody else can lead"
    assert detector.judge(200.0, unsure=3.9) is None
    cut_off = detector.judge(200.0, unsure=4.0)
    assert cut_off is not None
    assert not cut_off.certain
    again = linked().judge(100.0, unsure=math.inf)
    assert again is not None
    assert why(again.reason) == "this node no longer leads"


@pytest.mark.parametrize(("dead_after", "beat"), [(5.0, 1.0), (2.0, 1.0), (15.0, 5.0), (60.0, 1.0)])
def test_a_node_cut_off_knows_it_before_its_leader_counts_it_as_dead(dead_after: float, beat: float) -> None:
    """The leader counts from the last beat that arrived, which may be a whole interval before the cut."""
    detector = linked(dead_after, beat)
    assert detector.judge(100.0 + dead_after - detector.beat + 1e-9) is not None


def test_a_node_turns_in_time_to_notice_the_cut() -> None:
    detector = linked()
    assert detector.wait(100.5, 1.0) == 1.0
    assert detector.wait(103.5, 1.0) == 0.5
    assert detector.wait(103.5, -0.1) == 0.0
    assert detector.wait(104.5, 1.0) == 1.0


def test_attempts_to_reach_the_leader_leave_time_to_notice_the_cut() -> None:
    detector = linked()
    assert detector.patience(100.0, 1.5) == 1.5
    assert detector.patience(103.0, 1.5) == 0.5
    assert detector.patience(103.9, 1.5) == 0.1
    detector.judge(104.0)
    assert detector.patience(104.0, 1.5) == 1.5

"""A node's side of the link, tested without a link."""

from __future__ import annotations

from dataclasses import replace

from leader_run import failure

from elastic_launch.config.launch_config import Timing
from elastic_launch.rendezvous.backends.succession import Succession
from elastic_launch.rendezvous.node.machine import NodeMachine, Search
from elastic_launch.rendezvous.record import ControlRecord, Leader, Round
from elastic_launch.rendezvous.wire import messages as m

HELLO = m.NodeHello(m.PROTOCOL_VERSION, "run", "digest", "train.py", "", "a", "a1", 1, "host-a", 7000)


def _side() -> NodeMachine:
    side = NodeMachine()
    side.begin(HELLO)
    return side


def _form(number: int, term: int = 1) -> m.Form:
    return m.Form(term, Round(number), 0, "first")


def test_an_order_of_a_lower_term_changes_nothing() -> None:
    side = _side()
    assert side.obey(_form(3, term=2), 0.0)
    assert not side.obey(_form(4, term=1), 0.0)
    assert (side.hello.seen_term, side.hello.seen_round, side.hello.holding) == (2, 3, 3)


def test_the_hello_repeats_what_was_lost_with_the_previous_link() -> None:
    side = _side()
    side.obey(_form(3), 0.0)
    side.say(m.Joined(3), 0.0)
    side.say(m.Done(3), 0.0)
    side.say(m.Leaving("SIGTERM"), 0.0)
    side.greet(0.0)
    (hello,) = side.take()
    assert isinstance(hello, m.NodeHello)
    assert (hello.holding, hello.joined, hello.done, hello.leaving) == (3, True, True, "SIGTERM")


def test_the_hello_names_the_term_that_led_to_the_leader_of_this_link_only() -> None:
    side = _side()
    side.greet(0.0, 4)
    (first,) = side.take()
    side.greet(0.0)
    (second,) = side.take()
    assert isinstance(first, m.NodeHello)
    assert isinstance(second, m.NodeHello)
    assert (first.term, second.term) == (4, 0)


def test_a_goodbye_before_the_first_hello_is_in_it() -> None:
    side = NodeMachine()
    side.say(m.Leaving("SIGINT"), 0.0)
    side.begin(HELLO)
    assert side.hello.leaving == "SIGINT"


def test_stopped_workers_are_not_held_any_more() -> None:
    side = _side()
    side.obey(_form(3), 0.0)
    side.say(m.Joined(3), 0.0)
    side.say(m.Stopped(3, 7001), 0.0)
    assert (side.hello.holding, side.hello.joined, side.hello.store_port) == (0, False, 7001)


def test_the_hello_says_what_the_node_offers_to_the_next_round() -> None:
    side = _side()
    side.obey(_form(3), 0.0)
    side.say(m.NodeReady(3, live=True), 0.0)
    assert (side.hello.ready, side.hello.live) == (True, True)
    side.say(m.Stopped(3, 7001, importing=True, slots=(0, 2)), 0.0)
    assert (side.hello.live, side.hello.importing, side.hello.slots) == (False, True, (0, 2))
    side.say(m.RankOffer(()), 0.0)
    side.say(m.Imported(), 0.0)
    assert (side.hello.importing, side.hello.slots) == (False, ())


def test_a_node_that_starts_ahead_says_so_until_it_is_there_or_has_a_place() -> None:
    side = _side()
    side.obey(m.StartAhead(1, 3), 0.0)
    assert side.hello.importing
    side.say(m.Imported(), 0.0)
    assert not side.hello.importing
    side.obey(m.StartAhead(1, 4), 0.0)
    side.obey(_form(5), 0.0)
    assert not side.hello.importing


def test_a_node_whose_imports_are_not_loaded_yet_says_so_again_when_its_workers_have_stopped() -> None:
    side = _side()
    side.importing()
    side.obey(_form(3), 0.0)
    side.take()
    side.say(m.Stopped(3, 7001), 0.0)
    assert side.take() == [m.Stopped(3, 7001, importing=True)]
    side.say(m.Imported(), 0.0)
    side.obey(_form(4), 0.0)
    side.say(m.Stopped(4, 7001), 0.0)
    assert not side.hello.importing


def test_a_node_says_what_a_new_leader_must_know_of_the_last_one() -> None:
    side = _side()
    side.obey(_form(3), 0.0)
    side.obey(m.Strike(1, 4, "elsewhere"), 0.0)
    side.obey(m.Strike(1, 4, ""), 0.0)
    side.obey(m.Break(1, 2, "crash", "an earlier round"), 0.0)
    assert (side.hello.landed, side.hello.broken) == ((4,), False)
    side.obey(m.Break(1, 3, "crash", "a worker"), 0.0)
    assert side.hello.broken
    side.obey(_form(4), 0.0)
    assert (side.hello.landed, side.hello.broken) == ((4,), False)


def test_a_node_says_how_far_the_round_has_come_and_for_how_long() -> None:
    side = _side()
    side.greet(5.0)
    (hello,) = side.take()
    assert isinstance(hello, m.NodeHello)
    assert hello.round_seen is None
    side.obey(_form(3), 10.0)
    side.say(m.NodeReady(3, step=40), 11.0)
    side.say(m.NodeReady(2, step=90), 11.0)
    side.beats(m.ProgressBeat(3, 47))
    side.beats(m.ProgressBeat(2, 90))
    side.beats(m.Beat())
    side.greet(20.0)
    assert _seen(side) == m.RoundSeen(10.0, 10.0, 40, 47)
    side.obey(m.Break(1, 3, "crash", "a worker"), 21.0)
    side.say(m.Stopped(3, 7001), 22.0)
    side.greet(30.0)
    assert _seen(side) == m.RoundSeen(20.0, 11.0, 40, 47)
    side.obey(_form(4), 31.0)
    side.say(m.Stopped(3, 7001), 31.5)  # late
    side.say(m.Stopped(4, 7001), 32.0)
    side.greet(40.0)
    assert _seen(side) == m.RoundSeen(9.0, 1.0)


def _seen(side: NodeMachine) -> m.RoundSeen | None:
    hello = side.take()[-1]
    assert isinstance(hello, m.NodeHello)
    return hello.round_seen


def test_a_round_that_is_not_newer_than_the_last_one_is_ignored() -> None:
    side = _side()
    side.obey(_form(3), 0.0)
    side.say(m.Stopped(3, 7001), 0.0)
    assert not side.obey(_form(3), 0.0)
    assert not side.obey(_form(2, term=2), 0.0)
    assert (side.hello.holding, side.hello.seen_term) == (0, 1)


def test_an_evicted_node_returns_once_its_workers_are_gone() -> None:
    side = _side()
    side.obey(_form(3), 0.0)
    side.obey(m.Evicted(1, "late"), 0.0)
    assert not side.may_return()
    side.say(m.Stopped(3, 7001), 0.0)
    assert side.may_return()


def test_a_node_of_a_run_that_has_begun_anew_comes_as_a_new_one() -> None:
    side = _side()
    side.obey(m.Welcome(1, "a", 0.5, 5.0, run="first"), 0.0)
    side.obey(replace(_form(3), origin="before"), 0.0)
    side.say(m.Stopped(3, 7001, held=m.HeldSnapshot(3, 40, 0), trained=True), 0.0)
    assert (side.hello.seen_run, side.hello.origin) == ("first", "before")
    assert side.hello.held == m.HeldSnapshot(3, 40, 0)
    side.obey(m.Evicted(1, "the run has begun anew without it", anew=True), 0.0)
    assert side.may_return()
    assert (side.hello.seen_run, side.hello.origin) == ("", "")
    assert (side.hello.held, side.hello.trained, side.hello.seen_round) == (None, False, 0)


def test_a_lost_leader_is_reported_once_after_a_second() -> None:
    search = Search(Timing(min_wait=10.0), 0.0)
    search.linked()
    search.lost(100.0)
    assert search.gone
    assert [search.failed(now) for now in (100.5, 101.0, 102.0)] == [False, True, False]
    assert not search.over(109.0)
    assert search.over(110.0)


def test_a_leader_that_formed_a_round_while_it_seemed_silent_is_given_its_time_again() -> None:
    """The node itself was cut off, also from the store, and is now back."""
    succession = Succession("a1", 5.0)
    record = ControlRecord("run", "digest", 3, Leader("b", "b1", "host-b", 1), round=Round(2))
    succession.unreachable(record, 10.0, refused=False, silent_for=5.0, seen_round=2)
    later = replace(record, round=Round(3))
    assert succession.decide(later, 10.0, leading=False) is None
    assert succession.decide(later, 14.9, leading=False) is None
    assert succession.decide(later, 15.0, leading=False) is not None
    heard_of_it = Succession("c1", 5.0)
    heard_of_it.unreachable(record, 10.0, refused=False, silent_for=5.0, seen_round=3)
    assert heard_of_it.decide(later, 10.0, leading=False) is not None


def test_a_leader_is_succeeded_when_it_refuses_or_was_silent_for_long() -> None:
    record = ControlRecord("run", "digest", 3, Leader("b", "b1", "host-b", 1))
    for refused, wait in ((True, 0.5), (False, 5.0)):
        succession = Succession("a1", 5.0)
        assert succession.decide(record, 0.0, leading=False) is None
        succession.unreachable(record, 0.0, refused=refused)
        assert succession.decide(record, wait - 0.1, leading=False) is None
        takeover = succession.decide(record, wait, leading=False)
        assert takeover is not None
        assert (takeover.dead, takeover.silent) == (("b1", "") if refused else ("", "b1"))


def test_the_hello_brings_the_failure_of_the_round_until_another_one_is_formed() -> None:
    side = _side()
    side.obey(_form(3), 0.0)
    symptom = failure("a", round=3, symptom="broken connection")
    for reported in (symptom, failure("a", round=3), failure("a", round=3, rank=1)):
        side.say(reported, 0.0)
    side.say(m.Stopped(3, 7001), 0.0)
    assert side.hello.failed == failure("a", round=3), "the first that is not a symptom"
    side.obey(_form(4), 0.0)
    assert side.hello.failed is None

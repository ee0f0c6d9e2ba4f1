"""The ledger: what incidents cost, from events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_launch.events import types as ev
from elastic_launch.observe.chronicle import Chronicle
from elastic_launch.observe.ledger import PARTS, Ledger, RoundIncident, build
from elastic_launch.observe.live import LiveLedger
from elastic_launch.testing import FakeClock

STEADY = settings(max_examples=200)

Told = Sequence[tuple[float, ev.Event]]


def ledger(*told: tuple[float, ev.Event]) -> Ledger:
    chronicle = Chronicle()
    for clock, event in told:
        chronicle.add(clock, event)
    return build(chronicle)


def formed(number: int, restarts: int = 0) -> ev.RoundFormed:
    return ev.RoundFormed(number, 1, ("a", "b"), 2, restarts, "first", 0.1)


def form(number: int) -> ev.OrderReceived:
    return ev.OrderReceived("form", number, 1, "first")


def started(number: int) -> ev.WorkerStarted:
    return ev.WorkerStarted(number, 0, 0, 42, "first", 0.01)


def exited(number: int, code: int = 0, *, stopped: bool = False) -> ev.WorkerExited:
    return ev.WorkerExited(number, 0, 0, 42, code, 1.0, stopped)


def begun(number: int, step: int, restore: float = 0.5) -> ev.TrainingBegun:
    return ev.TrainingBegun(number, 0, step, 100, restore)


def broken(number: int, kind: str = "node loss", cause: str = "node b lost: it was silent") -> ev.RoundBroken:
    return ev.RoundBroken(number, kind, cause, 9.0, "a new round forms")


def first_round(last: int = 20) -> Told:
    """Formed at 2 s, trains from 5 s, first step 2 s, then a step each second."""
    trained = 2.0 + last - 1
    return [
        (0.0, ev.LinkChanged(up=True, cause="x")),
        (2.0, formed(1)),
        (2.0, form(1)),
        (2.1, started(1)),
        (5.0, begun(1, 0)),
        (7.0, ev.FirstStep(1, 1)),
        (5.0 + trained + 0.5, ev.RoundSteps(1, 0, last, trained)),
    ]


def parts(incident: RoundIncident) -> list[float | None]:
    return [getattr(incident, name) for name in PARTS]


def test_a_lost_node_has_all_parts() -> None:
    told = ledger(
        *first_round(),
        (32.0, ev.NodeLost("b", "silent for 5 s", 5.0, 1, "x")),
        (32.0, broken(1)),
        (32.3, exited(1, -9, stopped=True)),
        (33.0, formed(2)),
        (33.0, form(2)),
        (33.1, started(2)),
        (36.0, begun(2, 15)),
        (36.25, ev.FirstStep(2, 16)),
        (40.0, ev.RoundSteps(2, 15, 18, 2.25)),
        (41.0, ev.RunEnded(0, "x", 0, 2, 41.0)),
    )
    (incident,) = told.incidents
    assert parts(incident) == [5.0, pytest.approx(0.3), pytest.approx(0.7), 2.5, 0.5, 0.25]
    assert incident.still_s == pytest.approx(36.25 - 27.0)
    assert (incident.lost_steps, incident.recovered, incident.led, incident.drained) == (5, True, True, False)
    assert incident.line() == (
        "incident 1: node loss (node b lost: it was silent) round 1 -> 2: detected 5.00 s, stopped 0.30 s, "
        "formed 0.70 s, started 2.50 s, restored 0.50 s, first step 0.25 s: stood still 9.25 s, 5 steps lost"
    )
    # 20 steps in 21 s, the first of 2 s counted as the others' 1 s: 20 s, of which 15 steps were kept. Then 2.25 s.
    assert told.productive_s == pytest.approx(20.0 * 15 / 20 + 2.25)
    assert (told.total_s, told.steps, told.lost_steps) == (41.0, 18, 5)
    assert told.goodput == pytest.approx(17.25 / 41)
    assert told.line(3) == (
        "goodput 42.1 %: 17.2 of 41.0 s in 18 steps; 1 incident (1 node loss), 5 steps lost; restarts 0 of 3"
    )


@pytest.mark.parametrize(("down", "detect"), [(26.0, 4.0), (20.0, 0.0)])
def test_a_round_that_was_lost_with_its_leader_stood_still_from_its_last_step(down: float, detect: float) -> None:
    """The next leader learns of it later. A round that went on without a leader was lost for another reason."""
    told = ledger(
        *[event for event in first_round() if event[0] < down],
        (down, ev.LinkChanged(up=False, cause="x")),
        *[event for event in first_round() if event[0] >= down],
        (30.0, broken(1)),
        (30.1, formed(2)),
        (30.2, begun(2, 20, restore=0.0)),
        (30.4, ev.FirstStep(2, 21)),
    )
    (incident,) = told.incidents
    assert (incident.detect_s, incident.still_s) == pytest.approx((detect, detect + 0.4))


@pytest.mark.parametrize("leads", [True, False])
def test_a_hang_costs_the_time_since_the_last_step(leads: bool) -> None:
    """The other hosts are only told that the round hangs."""
    found = [(38.0, ev.HangFound(1, "rank 1 hangs", 12.0)), (38.0, broken(1, "hang", "rank 1 hangs"))]
    order = (38.0, ev.OrderReceived("break", 1, 1, "rank 1 hangs", "hang"))
    told = ledger(
        *first_round(),
        *(found if leads else [order]),
        (38.3, exited(1, -9, stopped=True)),
        (38.3, ev.RoundSteps(1, 0, 20, 21.0)),
        (38.5, formed(2) if leads else form(2)),
        (39.0, begun(2, 20, restore=0.0)),
        (39.5, ev.FirstStep(2, 21)),
    )
    (incident,) = told.incidents
    assert incident.detect_s == pytest.approx(12.0)
    assert (incident.still_s, incident.kind) == (pytest.approx(13.5), "hang")


def test_an_incident_says_how_many_workers_kept_their_processes() -> None:
    told = ledger(
        *first_round(),
        (32.0, broken(1)),
        (33.0, formed(2)),
        (33.0, ev.WorkerKept(2, 0, 0, 100)),
        (33.1, started(2)),
        (36.0, begun(2, 20)),
        (36.25, ev.FirstStep(2, 21)),
    )
    (incident,) = told.incidents
    assert (incident.kept, incident.anew, incident.ahead) == (1, 1, 0)
    assert incident.line().endswith(" s, no steps lost; 1 worker kept, 1 started")


def test_workers_that_start_ahead_count_in_the_round_in_which_they_get_a_place() -> None:
    told = ledger(
        *first_round(),
        (32.0, broken(1)),
        (32.0, formed(2)),
        (32.0, ev.WorkerKept(2, 0, 0, 100)),
        (32.1, started(0)),
        (32.2, begun(2, 20)),
        (32.5, ev.FirstStep(2, 21)),
        (40.0, ev.WorkerAhead(1, 101, 7.9)),
        (40.0, exited(0, -9)),
        (41.0, ev.RoundDrained(2, 29, "membership", "resize", 0.1, "a round forms")),
        (41.1, formed(3)),
        (41.1, ev.WorkerKept(3, 0, 0, 100)),
        (41.1, ev.WorkerPlaced(3, 1, 1, 102)),
        (41.2, begun(3, 29)),
        (41.5, ev.FirstStep(3, 30)),
    )
    lost, joined = told.incidents
    assert (lost.next_round, lost.kept, lost.anew, lost.ahead) == (2, 1, 0, 0)
    assert lost.line().endswith("; 1 worker kept, 0 started")
    assert (joined.round, joined.next_round, joined.kept, joined.anew, joined.ahead) == (2, 3, 1, 0, 1)
    assert joined.line().endswith("; 1 worker kept, 0 started, 1 started ahead")
    assert told.lost_ahead == 1
    assert "; 1 worker lost before a round; restarts" in told.line()


def test_a_worker_of_this_host_is_known_to_have_failed_before_the_round_was_broken() -> None:
    told = ledger(
        *first_round(),
        (30.0, exited(1, 1)),
        (30.2, broken(1, "preemption")),
        (30.5, exited(1, -9, stopped=True)),
        (30.6, ev.RestartCharged(1, "crash", 1, 3, "a round forms")),
        (31.0, formed(2, restarts=1)),
        (35.0, begun(2, 20)),
        (36.0, ev.FirstStep(2, 21)),
    )
    (incident,) = told.incidents
    assert parts(incident)[:3] == [pytest.approx(0.2), pytest.approx(0.3), 0.5]
    assert (incident.kind, incident.lost_steps) == ("crash", 0)
    assert told.line().endswith("1 incident (1 crash), no steps lost; restarts 1 of 3")


def test_a_drain_stands_still_from_its_last_step() -> None:
    told = ledger(
        *first_round(),
        (25.5, ev.RoundDraining(1, "membership", "resize", None)),
        (27.0, exited(1)),
        (27.5, ev.RoundDrained(1, 20, "membership", "resize", 2.0, "x")),
        (27.6, formed(2)),
        (30.0, begun(2, 20)),
        (31.0, ev.FirstStep(2, 21)),
    )
    (incident,) = told.incidents
    assert parts(incident) == [0.0, 1.5, pytest.approx(0.1), pytest.approx(1.9), 0.5, 1.0]
    assert (incident.drained, incident.lost_steps, incident.still_s) == (True, 0, 5.0)
    assert "membership, drained (resize) round 1 -> 2" in incident.line()


def test_a_member_knows_by_its_orders_alone() -> None:
    orders = [(clock, event) for clock, event in first_round() if not isinstance(event, ev.RoundFormed)]
    told = ledger(
        *orders,
        (26.0, ev.OrderReceived("drain", 1, 1, "resize", "membership")),
        (27.0, exited(1)),
        (28.0, form(2)),
        (30.0, begun(2, 20)),
        (31.0, ev.FirstStep(2, 21)),
        (40.0, ev.OrderReceived("break", 2, 1, "boom", "crash")),
        (41.0, exited(2, -9, stopped=True)),
        (42.0, form(3)),
        (45.0, begun(3, 20)),
        (46.0, ev.FirstStep(3, 21)),
    )
    drain, crash = told.incidents
    assert (drain.kind, drain.drained, drain.led, drain.still_s) == ("membership", True, False, 5.0)
    assert parts(drain)[:3] == [0.0, 1.0, 1.0]
    assert (crash.kind, crash.cause, crash.lost_steps, crash.stop_s) == ("crash", "boom", 1, 1.0)


def test_steps_lost_twice_count_twice_and_are_productive_once() -> None:
    told = ledger(
        *first_round(20),
        (30.0, broken(1)),
        (31.0, formed(2)),
        (32.0, begun(2, 10, 0.0)),
        (33.0, ev.FirstStep(2, 11)),
        (38.0, ev.RoundSteps(2, 10, 16, 6.0)),
        (38.0, broken(2)),
        (39.0, formed(3)),
        (40.0, begun(3, 8, 0.0)),
        (41.0, ev.FirstStep(3, 9)),
        (51.0, ev.RoundSteps(3, 8, 19, 11.0)),
    )
    assert [incident.lost_steps for incident in told.incidents] == [10, 8]
    assert (told.steps, told.lost_steps) == (19, 18)
    assert told.productive_s == pytest.approx(8.0 + 0.0 + 11.0)


def test_a_round_that_never_trained_gives_its_time_to_what_was_under_way() -> None:
    told = ledger(
        *first_round(),
        (30.0, broken(1)),
        (31.0, formed(2)),
        (31.1, started(2)),
        (34.0, broken(2, "crash", "boom")),
        (35.0, formed(3)),
        (36.0, begun(3, 18, 0.0)),
        (37.0, ev.FirstStep(3, 19)),
    )
    one, two = told.incidents
    assert parts(one) == [0.0, 0.0, 1.0, 3.0, None, None]
    assert (one.recovered, one.lost_steps, one.still_s) == (False, 2, 4.0)
    assert parts(two) == [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    assert (two.recovered, two.lost_steps) == (True, 0)


def test_a_run_that_ends_broken_has_an_incident_without_a_successor() -> None:
    told = ledger(
        *first_round(),
        (30.0, broken(1, "crash", "boom")),
        (30.5, exited(1, -9, stopped=True)),
        (31.0, ev.RunEnded(91, "x", 0, 1, 31.0)),
    )
    (incident,) = told.incidents
    assert (incident.next_round, incident.lost_steps, incident.still_s) == (0, None, 0.5)
    assert "round 1, the last: detected 0.00 s, stopped 0.50 s: stood still" in incident.line()


@pytest.mark.parametrize("kind", ["membership", "preemption"])
def test_a_planned_end_that_no_round_follows_is_not_an_incident(kind: str) -> None:
    assert ledger(*first_round(), (30.0, broken(1, kind))).incidents == ()


def test_a_plain_script_is_known_by_its_workers_running_alone() -> None:
    told = ledger(
        (0.0, formed(1)),
        (0.0, form(1)),
        (1.0, started(1)),
        (11.0, exited(1, 1)),
        (11.5, broken(1, "crash", "boom")),
        (12.0, formed(2)),
        (12.0, form(2)),
        (12.5, started(2)),
        (20.0, exited(2)),
        (21.0, ev.RunEnded(0, "x", 1, 2, 21.0)),
    )
    (incident,) = told.incidents
    assert parts(incident) == [0.5, 0.0, 0.5, 0.5, None, None]
    assert (incident.still_s, incident.lost_steps, incident.recovered) == (1.5, None, True)
    assert not told.by_steps
    assert (told.productive_s, told.total_s, told.steps, told.lost_steps) == (10.0 + 7.5, 21.0, None, None)
    assert told.goodput is None
    assert told.line().startswith("workers ran for 17.5 of 21.0 s; 1 incident (1 crash)")


def test_a_leader_without_workers_makes_no_claim_about_their_time() -> None:
    told = ledger((0.0, formed(1)), (90.0, broken(1)), (95.0, formed(2)), (95.0, form(2)), (95.0, started(2)),
                  (100.0, exited(2)))  # fmt: skip
    assert (told.total_s, told.productive_s) == (10.0, 5.0)


def test_a_spare_that_becomes_the_leader_makes_no_claim_about_the_round_without_it() -> None:
    told = ledger(
        *first_round(),
        (26.0, ev.OrderReceived("drain", 1, 1, "resize: at most 1 node", "membership")),
        (80.0, ev.RoundBroken(2, "node loss", "node a did not come to the new leader", 50.0, "a new round forms")),
        (81.0, ev.RoundFormed(3, 2, ("b",), 1, 0, "node loss", 0.1)),
        (81.0, ev.OrderReceived("form", 3, 2, "node loss")),
        (81.1, started(3)),
        (82.0, begun(3, 50)),
        (82.1, ev.FirstStep(3, 51)),
        (90.0, ev.RoundSteps(3, 50, 58, 8.0)),
        (90.0, ev.RunEnded(0, "x", 0, 3, 90.0)),
    )
    resized, lost = told.incidents
    assert resized.still_s == 0.0, "training went on elsewhere, and the workers here are kept"
    assert (resized.lost_steps, lost.lost_steps, told.lost_steps) == (0, None, None)
    assert told.total_s == pytest.approx(90.0 - (80.0 - 26.0))
    assert "lost" not in told.line().replace("node loss", "")
    assert ", without 54.0 s in which this node had no workers; 2 incidents" in told.line()


def test_no_events_make_an_empty_ledger() -> None:
    told = ledger()
    assert (told.incidents, told.goodput) == ((), None)
    assert told.line() == "no worker has run on this node; 0 incidents; restarts 0"


def test_a_run_that_starts_does_not_say_how_long_workers_ran() -> None:
    waits = ledger((0.0, formed(1)), (0.0, form(1)))
    assert waits.line().startswith("no worker has run on this node; 0 incidents")
    begins = ledger((0.0, formed(1)), (0.0, form(1)), (3.0, started(1)))
    assert begins.line().startswith("workers have started on this node, and no event since then tells how long")
    runs = ledger((0.0, formed(1)), (0.0, form(1)), (3.0, started(1)), (5.0, exited(1)))
    assert runs.line().startswith("workers ran for 2.0 of 5.0 s; 0 incidents")


# While the run goes on.


def test_an_incident_is_reported_once_with_the_first_step_after_it() -> None:
    clock = FakeClock()
    live = LiveLedger(clock)
    said: list[tuple[float, list[RoundIncident]]] = []

    def tell(moment: float, event: ev.Event) -> None:
        clock.advance(moment - clock.now())
        if found := live.add(event):
            said.append((moment, found))

    for moment, event in first_round():
        tell(moment, event)
    for moment, event in [(30.0, broken(1)), (31.0, formed(2)), (34.0, broken(2)), (35.0, formed(3))]:
        tell(moment, event)
    tell(36.0, begun(3, 20))
    assert said == []
    tell(37.0, ev.FirstStep(3, 21))
    ((moment, incidents),) = said
    assert (moment, [incident.round for incident in incidents]) == (37.0, [1, 2])
    assert live.summary(3).startswith("goodput ")


def test_a_node_that_does_not_lead_reports_nothing() -> None:
    live = LiveLedger(FakeClock())
    for _, event in first_round():
        live.add(event)
    assert live.summary(3)
    live.add(ev.OrderReceived("form", 2, 2, "the leader was lost"))
    assert live.add(ev.FirstStep(2, 21)) == []
    assert live.summary(3) == ""


def test_a_new_leader_reports_only_the_incidents_that_end_under_it() -> None:
    """The leader before has counted the others in its metrics, spans and lines."""
    clock = FakeClock(0.0)
    live = LiveLedger(clock)
    said: list[RoundIncident] = []

    def tell(*events: ev.Event) -> None:
        for event in events:
            clock.advance(1.0)
            said.extend(live.add(event))

    def trains_and_breaks(number: int, term: int, cause: str) -> None:
        tell(
            ev.OrderReceived("form", number, term, cause, workers=1, world_size=1),
            started(number),
            begun(number, number),
            ev.FirstStep(number, number + 1),
            ev.OrderReceived("break", number, term, "rank 0 crashed", "crash"),
            ev.RoundSteps(number, number, number + 1, 1.0),
        )

    trains_and_breaks(1, 1, "first")
    trains_and_breaks(2, 1, "rank 0 crashed")
    assert said == []
    tell(ev.RoundFormed(3, 2, ("b",), 1, 1, "node a lost", 0.1))
    trains_and_breaks(3, 2, "node a lost")
    assert [incident.round for incident in said] == [2]


def training_until(*more: tuple[float, ev.Event]) -> Ledger:
    """A round that trains a step each second from 5 s, after a first one of 2 s, and has not ended."""
    return ledger(*first_round()[:-1], *more)


def test_what_follows_the_last_known_progress_of_an_open_round_is_not_time_lost() -> None:
    told = training_until((605.0, ev.NodeJoined("c", 1, "c:1", "it waits")))
    assert (told.steps, told.total_s, told.productive_s) == (1, 7.0, 2.0)
    told = training_until((65.0, ev.RoundProgress(1, 59, 60.0)), (605.0, ev.NodeJoined("c", 1, "c:1", "it waits")))
    assert (told.steps, told.total_s) == (59, 65.0)
    assert told.productive_s == pytest.approx(59.0)
    assert told.goodput == pytest.approx(59 / 65)


def test_a_checkpoint_tells_how_far_an_open_round_has_come_at_least() -> None:
    told = training_until((605.0, ev.CheckpointSaved(1, 590, "checkpoints/step-590")))
    assert (told.steps, told.total_s) == (590, 605.0)
    assert told.goodput == pytest.approx(0.99, abs=0.01)
    older = [(65.0, ev.RoundProgress(1, 59, 60.0)), (66.0, ev.CheckpointSaved(1, 50, "checkpoints/step-50"))]
    assert training_until(*older).total_s == 65.0


def test_the_first_step_that_is_waited_for_counts_until_the_last_event() -> None:
    told = ledger(*first_round()[:-2], (305.0, ev.NodeJoined("c", 1, "c:1", "it waits")))
    assert (told.total_s, told.productive_s) == (305.0, 0.0)


def test_a_round_whose_agent_was_killed_ended_at_its_last_known_progress() -> None:
    """The agent was started again, and wrote to the same file."""
    told = training_until((65.0, ev.RoundProgress(1, 59, 60.0)), (100.0, formed(2)), (100.0, form(2)))
    (incident,) = told.incidents
    assert (incident.round, incident.kind, incident.still_s) == (1, "unknown", 35.0)


def test_the_page_of_a_run_in_progress_knows_more_steps_than_the_last_event() -> None:
    clock = FakeClock(0.0)
    live = LiveLedger(clock)
    for at, event in [*first_round()[:-1], (65.0, ev.RoundProgress(1, 59, 60.0))]:
        clock.advance(at - clock.now())
        live.add(event)
    clock.advance(35.0)
    assert live.goodput(94)[1] == pytest.approx(0.94)
    assert live.goodput()[1] == pytest.approx(59 / 65)


# Whatever the events.


NUMBERS = st.integers(1, 4)
STEPS = st.integers(0, 30)
SECONDS = st.floats(0, 20)
TEXT = st.sampled_from(["crash", "node loss", "membership", "a\nb"])
EVENTS: st.SearchStrategy[ev.Event] = st.one_of(
    st.builds(formed, NUMBERS, st.integers(0, 3)),
    st.builds(ev.RoundBroken, NUMBERS, TEXT, TEXT, SECONDS, TEXT),
    st.builds(ev.RoundDraining, NUMBERS, TEXT, TEXT, st.none()),
    st.builds(ev.RoundDrained, NUMBERS, STEPS, TEXT, TEXT, SECONDS, TEXT),
    st.builds(ev.RestartCharged, NUMBERS, TEXT, st.integers(0, 3), st.just(3)),
    st.builds(ev.NodeLost, TEXT, TEXT, SECONDS, NUMBERS, TEXT),
    st.builds(
        ev.OrderReceived, st.sampled_from(["form", "drain", "break", "evicted", "end"]), NUMBERS, NUMBERS, TEXT, TEXT
    ),
    st.builds(started, NUMBERS),
    st.builds(ev.WorkerExited, NUMBERS, STEPS, STEPS, STEPS, st.sampled_from([0, 1, -9]), SECONDS, st.booleans()),
    st.builds(ev.TrainingBegun, NUMBERS, STEPS, STEPS, STEPS, SECONDS),
    st.builds(ev.FirstStep, NUMBERS, STEPS),
    st.builds(ev.RoundProgress, NUMBERS, STEPS, SECONDS),
    st.builds(ev.RoundSteps, NUMBERS, STEPS, STEPS, SECONDS),
    st.builds(ev.CheckpointSaved, NUMBERS, STEPS, st.just("")),
    st.builds(ev.LinkChanged, st.booleans(), TEXT),
    st.builds(ev.RunEnded, st.just(0), TEXT, st.integers(0, 3), NUMBERS, SECONDS),
)
HISTORIES = st.lists(st.tuples(st.floats(0, 5), EVENTS), max_size=40)


@STEADY
@given(HISTORIES)
def test_parts_are_no_less_than_nothing_and_no_more_than_the_whole(history: list[tuple[float, ev.Event]]) -> None:
    clock, told = 100.0, []
    for seconds, event in history:
        clock += seconds
        told.append((clock, event))
    made = ledger(*told)
    for incident in made.incidents:
        known = [part for part in parts(incident) if part is not None]
        assert all(part >= 0 for part in known)
        assert incident.still_s == pytest.approx(sum(known), abs=1e-5)
        assert incident.lost_steps is None or incident.lost_steps >= 0
        assert "\n" not in incident.line()
    spent = sum(incident.still_s for incident in made.incidents)
    assert spent <= clock - 100.0 + 1e-3, "no moment belongs to two incidents"
    assert made.goodput is None or 0 <= made.goodput <= 1
    assert made.total_s <= clock - 100.0 + 1e-5


@st.composite
def trainings(draw: st.DrawFn) -> tuple[list[tuple[float, ev.Event]], int, int, int]:
    """A run of rounds that each go back to some step: its events, the steps done, the last step and the rounds."""
    clock, step, done = 0.0, 0, 0
    told: list[tuple[float, ev.Event]] = []
    rounds = draw(st.integers(1, 5))

    def tell(event: ev.Event) -> None:
        nonlocal clock
        clock += draw(st.floats(0, 3))
        told.append((clock, event))

    for number in range(1, rounds + 1):
        tell(formed(number))
        tell(form(number))
        tell(started(number))
        step = draw(st.integers(0, step))
        tell(begun(number, step, 0.0))
        at, last = clock, step + draw(st.integers(0, 10))
        if last > step:
            tell(ev.FirstStep(number, step + 1))
        trained = clock - at
        if last > step + 1:
            clock += draw(st.floats(0, 10))
            trained = clock - at
        done, step = done + last - step, last
        tell(ev.RoundSteps(number, told_step(told, number), last, trained))
        if number < rounds:
            tell(broken(number, "crash", "boom"))
    return told, done, step, rounds


def told_step(told: list[tuple[float, ev.Event]], number: int) -> int:
    return next(event.step for _, event in told if isinstance(event, ev.TrainingBegun) and event.round == number)


@STEADY
@given(trainings())
def test_each_step_done_was_either_kept_or_lost(run: tuple[Any, int, int, int]) -> None:
    told, done, last, rounds = run
    made = ledger(*told)
    assert len(made.incidents) == rounds - 1
    assert made.steps is not None
    assert made.lost_steps is not None
    assert made.steps == last
    assert made.steps + made.lost_steps == done
    assert made.productive_s + sum(x.still_s - (x.first_step_s or 0.0) for x in made.incidents) <= made.total_s + 1e-3


@pytest.mark.parametrize(("others", "unsaved"), [(["b"], 5), ([], 0)])
def test_steps_are_lost_if_all_members_leave_at_once_without_a_drain(others: list[str], unsaved: int) -> None:
    """A node that stays has them in its memory."""
    leaving = [(32.0, ev.NodeLeft(node, "SIGTERM", 1, "x")) for node in ("a", *others)]
    told = ledger(
        *first_round(),
        (26.0, ev.CheckpointSaved(1, 15, "checkpoints/step-15")),
        *leaving,
        (32.0, broken(1, "preemption", "node a leaves (SIGTERM)")),
        (33.0, ev.NodeEnded(143, "SIGTERM")),
    )
    assert told.unsaved_steps == unsaved


@pytest.mark.parametrize("saves_itself", [True, False])
def test_what_a_script_has_saved_itself_is_not_said_to_be_lost(saves_itself: bool) -> None:
    """Its drain is printed as an incident, which the summary does not deny."""
    told = ledger(
        (2.0, formed(1)),
        (2.0, form(1)),
        (3.0, ev.TrainingBegun(1, 0, 0, 0, 0.0, saves_itself=saves_itself)),
        (4.0, ev.FirstStep(1, 1)),
        (12.0, ev.RoundSteps(1, 0, 13, 8.0)),
        (12.0, ev.RoundDrained(1, 13, "preemption", "node a leaves (SIGTERM)", 1.0, "x")),
        (12.0, ev.RunEnded(143, "SIGTERM", 0, 1, 10.0)),
    )
    end = "0 incidents before the last round was drained"
    if saves_itself:
        assert told.line() == f"goodput 75.8 %: 7.6 of 10.0 s in 13 steps; {end}; restarts 0"
    else:
        assert told.line() == f"goodput 0.0 %: no step kept in 10.0 s; {end}, 13 steps lost; restarts 0"


def test_a_finished_run_that_is_started_again_had_nothing_to_train() -> None:
    began = [(2.0, formed(1)), (2.0, form(1)), (3.0, ev.TrainingBegun(1, 46, 46, 0, 0.1))]
    over = (9.0, ev.RunEnded(0, "all workers finished", 0, 1, 7.0))
    told = ledger(*began, over)
    assert (
        told.line()
        == "nothing was left to train: 46 steps had been done before; 0 incidents, no steps lost; restarts 0"
    )
    assert told.goodput is None
    assert ledger(*began).goodput == 0.0, "it may yet do a step"
    assert ledger(*began, (4.0, ev.FirstStep(1, 47)), over).goodput != 0.0
    assert ledger(*began, (9.0, ev.RunEnded(1, "failed", 0, 1, 7.0))).goodput == 0.0
    elsewhere = ledger(*began, (4.0, broken(1)), (5.0, formed(2)), over)
    assert elsewhere.done_before is None, "other hosts know what was done in round 2"


def test_steps_of_loops_that_are_one_training_are_counted_once() -> None:
    """The second and the fourth training have the checkpoints of the first; the third has others."""
    told = ledger(
        *[(2.0, formed(1)), (2.0, form(1))],
        *[
            (3.0 + number, ev.TrainingBegun(1, 0, step, 0, 0.1, training=number, continues=earlier))
            for number, (step, earlier) in enumerate([(200, None), (200, 0), (30, None), (200, 1)])
        ],
        (9.0, ev.RunEnded(0, "all workers finished", 0, 1, 7.0)),
    )
    assert told.done_before == 230


def test_a_round_whose_workers_are_all_kept_has_begun() -> None:
    told = ledger(
        *[(2.0, formed(1)), (2.0, form(1)), (2.1, started(1)), (32.0, broken(1)), (33.0, formed(2)), (33.0, form(2))],
        (33.1, ev.WorkerKept(2, 0, 0, 42)),
    )
    assert [incident.recovered for incident in told.incidents] == [True]
    assert parts(told.incidents[0])[3] == pytest.approx(0.1)


def in_training(number: int, training: int, first: int, last: int, at: float, *, ends: bool = True) -> Told:
    """A step each second, from a second after a time on; a training that ends the round's steps has their event."""
    told: list[tuple[float, ev.Event]] = [(at, ev.TrainingBegun(number, 0, first, 100, 0.5, training=training))]
    if last > first:
        told.append((at + 1, ev.FirstStep(number, first + 1, training)))
    seconds = float(last - first)
    if ends:
        return [*told, (at + seconds, ev.RoundSteps(number, first, last, seconds, training))]
    return [*told, (at + seconds, ev.RoundProgress(number, last, seconds, training))] if last > first + 1 else told


SECOND = [
    *[(2.0, formed(1)), (2.0, form(1)), (2.1, started(1))],
    *in_training(1, 0, 0, 10, 5.0, ends=False),
    *in_training(1, 1, 0, 4, 20.0),
    *[(24.0, broken(1, "crash", "boom")), (25.0, formed(2)), (25.0, form(2)), (25.1, started(2))],
]
"""A crash after 10 steps of a first training, and 4 of a second one."""


def test_a_fault_in_a_second_training_costs_its_steps_and_ends_with_its_next_step() -> None:
    told = ledger(
        *SECOND,
        *in_training(2, 0, 10, 10, 28.0, ends=False),
        *in_training(2, 1, 3, 6, 30.0),
        (33.0, ev.RunEnded(0, "x", 0, 2, 31.0)),
    )
    (incident,) = told.incidents
    # From 24 s to the step at 31 s; both trainings were restored, in 0.5 s each.
    assert parts(incident)[2:] == pytest.approx([1.0, 4.0, 1.0, 1.0])
    assert (incident.still_s, incident.recovered, incident.lost_steps) == (7.0, True, 1)
    assert (told.steps, told.lost_steps, told.unsaved_steps) == (16, 1, 0)
    assert told.productive_s == pytest.approx(10 + 3 + 3)
    assert told.total_s == 31.0


def test_a_second_training_is_lost_as_a_whole_if_the_first_one_is_trained_again() -> None:
    told = ledger(*SECOND, *in_training(2, 0, 8, 10, 28.0, ends=False))
    (incident,) = told.incidents
    assert (incident.recovered, incident.lost_steps) == (True, 2 + 4)
    assert (told.steps, told.productive_s) == (10, pytest.approx(8 + 2))
    told = ledger(
        *SECOND,
        *in_training(2, 0, 8, 10, 28.0, ends=False),
        *in_training(2, 1, 0, 4, 32.0),
        (36.0, ev.RunEnded(0, "x", 0, 2, 34.0)),
    )
    assert (told.steps, told.lost_steps, told.incidents[0].lost_steps) == (14, 6, 6)


def test_what_is_lost_of_a_training_is_unknown_until_a_round_has_come_to_it_again() -> None:
    told = ledger(*SECOND, *in_training(2, 0, 10, 10, 28.0, ends=False))
    assert (told.incidents[0].lost_steps, told.incidents[0].recovered) == (None, False)


@pytest.mark.parametrize(("saved", "training", "unsaved"), [(10, 0, 4), (3, 1, 1)])
def test_steps_that_no_checkpoint_has_are_those_of_the_last_training(saved: int, training: int, unsaved: int) -> None:
    told = ledger(
        *SECOND[:-4],
        (24.0, broken(1, "crash", "boom")),
        (24.5, ev.CheckpointSaved(1, saved, "/c", training)),
        (25.0, ev.RunEnded(1, "boom", 0, 1, 23.0)),
    )
    assert (told.unsaved_steps, told.steps) == (unsaved, 14 - unsaved)


def test_a_late_checkpoint_of_the_training_before_says_nothing_of_the_one_that_is_under_way() -> None:
    told = ledger(*SECOND[:-5], (22.5, ev.CheckpointSaved(1, 10, "/c", 0)), (22.6, ev.RoundProgress(1, 2, 2.0, 1)))
    assert told.steps == 12


@st.composite
def scripts(draw: st.DrawFn) -> tuple[Told, int, int]:
    """The events of a script with several trainings and faults, the steps done in it, and those in its end."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    told: list[tuple[float, ev.Event]] = []
    clock, done, reached = 1.0, 0, (0, 0)
    rounds = draw(st.integers(1, 5))
    for number in range(1, rounds + 1):
        training = draw(st.integers(0, reached[0]))
        step = draw(st.integers(0, reached[1] if training == reached[0] else lengths[training]))
        # A new process comes by the ends of the earlier trainings; one that was kept does not.
        before = range(training) if draw(st.booleans()) else ()
        told += [(clock, formed(number)), (clock, form(number)), (clock, started(number))]
        for earlier in before:
            told += in_training(number, earlier, lengths[earlier], lengths[earlier], clock, ends=False)
        for current in range(training, draw(st.integers(training, len(lengths) - 1)) + 1):
            last = lengths[current]
            fails = number < rounds and draw(st.booleans())
            last = draw(st.integers(step, last)) if fails else last
            told += in_training(number, current, step, last, clock, ends=False)
            told += [(clock + last - step, ev.RoundProgress(number, last, float(last - step), current))]
            clock, done, reached, step = clock + last - step + 1, done + last - step, (current, last), 0
            if fails:
                break
        if number < rounds:
            told.append((clock, broken(number, "crash", "boom")))
        clock += 1.0
    return told, done, sum(lengths[: reached[0]]) + reached[1]


@STEADY
@given(scripts())
def test_each_step_of_several_trainings_was_either_kept_or_lost(run: tuple[Told, int, int]) -> None:
    told, done, last = run
    made = ledger(*told)
    assert made.lost_steps is not None
    assert made.steps is not None
    assert (made.steps, made.steps + made.lost_steps) == (last, done)

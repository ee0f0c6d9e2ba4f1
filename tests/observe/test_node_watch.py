"""What those who watch a run are shown."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from elastic_launch.events import types as ev
from elastic_launch.failure import Suspect
from elastic_launch.observe.live import LiveLedger
from elastic_launch.observe.node_watch import NodeWatch, short_names, span
from elastic_launch.observe.present import HowEnded, Present


class Told:
    """A watch whose clock the test sets."""

    def __init__(self, replica_size: int = 1) -> None:
        self.at = 100.0
        self.ledger = LiveLedger(self)
        self.watch = NodeWatch(self, self.ledger, replica_size)

    def now(self) -> float:
        return self.at

    def add(self, *events: ev.Event) -> None:
        for event in events:
            self.at += 0.1
            self.ledger.add(event)
            self.watch.add(event)

    def figures(self, present: Present) -> dict[str, str]:
        return dict(self.watch.figures(present))


def begun(number: int, step: int) -> list[ev.Event]:
    """The events of a round of two workers until it trains."""
    return [
        ev.RoundFormed(number, 1, ("a",), 2, 0, "first", 0.1),
        ev.OrderReceived("form", number, 1, "first", workers=2),
        ev.WorkerStarted(number, 0, 0, 10, "first", 0.1),
        ev.WorkerStarted(number, 1, 1, 11, "first", 0.1),
        ev.TrainingBegun(number, 0, step, 100, 0.0),
        ev.FirstStep(number, step + 1),
    ]


def test_figures_that_are_not_known_are_left_out() -> None:
    told = Told()
    assert told.figures(Present("starting")) == {"world size": "none yet", "running for": "0 s"}


def test_all_figures() -> None:
    told = Told()
    told.add(*begun(1, 0), ev.CheckpointSaved(1, 20, "/c"))
    members = (("a", 2), ("b", 1))
    present = Present("running", 1, 2, 3, 2, 30, 100, 61.0, 30, 3.0, 28, 1, 3, members, 0.123456, 64, 4)
    told.figures(present)
    told.at += 5
    assert told.figures(present) == {
        "world size": "3 on 2 nodes: a 2, b 1",
        "step": "30 of 100 (30%)",
        "steps/s": "10",
        "time left": "61 s",
        "loss": "0.1235",
        "global batch": "64, accumulation 4",
        "restarts left": "2 of 3",
        "snapshot": "step 28, 5 s ago",
        "checkpoint": "step 20, 5 s ago",
        "running for": "6 s",
    }


def test_what_a_start_waits_for() -> None:
    told = Told()
    assert told.watch.doing(Present("starting")) == "starts: imports torch"
    assert told.watch.doing(Present("waiting")) == "waiting: finds the run's leader"
    told.add(ev.LinkChanged(up=True, cause="hello accepted"), ev.NodeJoined("a", 2, "::1", "1 more node is needed"))
    assert told.watch.doing(Present("waiting")) == "waiting: 1 more node is needed"
    # A node of another leader has only what that says; it says it with each beat.
    far = Told()
    far.add(ev.LinkChanged(up=True, cause="hello accepted"))
    assert far.watch.doing(Present("waiting")) == "waiting: waits for a round to form"
    text = "waiting for nodes: 2 of at least 3"
    assert far.watch.doing(Present("waiting", outlook=text)) == f"waiting: {text}"
    far.add(ev.WorkerStarted(0, None, 0, 10, "ahead", 0.1))
    assert far.watch.doing(Present("waiting")) == "waiting: its workers start ahead of a round"
    *starts, training, first = begun(1, 0)
    told.add(*starts[:-1])
    running = Present("running", workers=2)
    assert told.watch.doing(running) == "workers start: 1 of 2 have"
    told.add(starts[-1])
    assert told.watch.doing(running) == "workers run; no step reported"
    told.add(training)
    assert told.watch.doing(running) == "trains; first step"
    told.add(first)
    assert told.watch.doing(running) == "trains"


def test_a_state_is_a_word_and_when_it_began() -> None:
    told = Told()
    begins = told.at

    def state(phase: str, **more: Any) -> tuple[str, float]:
        return told.watch.state(Present(phase, **{"round": 1, "workers": 2, "trained": 5, "trained_s": 1.0, **more}))

    assert state("starting", round=0, trained=0) == ("starting", begins)
    told.at += 3
    assert state("waiting", round=0, trained=0) == ("starting", begins)
    told.add(*begun(1, 0)[:-1])
    assert state("running", trained=0) == ("starting", begins)
    told.add(begun(1, 0)[-1])
    first = told.at
    assert state("running") == ("training", first)
    told.at += 20
    assert state("running") == ("standing still", first), "since the last step, not since it was noticed"
    told.add(ev.RoundBroken(1, "hang", "rank 1 on node b hangs", 3.0, ""))
    assert state("stopping")[0] == "standing still"
    assert state("waiting")[0] == "standing still"
    assert state("waiting", parked=True)[0] == "parked", "on nodes that do not lead, too, which have no event of it"
    told.add(*begun(2, 5))
    assert state("running", round=2, trained=6)[0] == "training"
    told.add(ev.RoundDraining(2, "membership", "node c joined", 30.0))
    assert state("draining", round=2, trained=7)[0] == "changing"
    told.add(ev.RoundDrained(2, 9, "membership", "node c joined", 3.0, "a new round forms"))
    assert state("suspended", round=2, trained=7)[0] == "changing"
    told.add(*begun(3, 9))
    assert state("running", round=3, trained=8)[0] == "training"
    told.at += 1
    assert state("saving", round=3, trained=8) == ("saving", told.at)
    for code, word in ((0, "ended"), (143, "ended"), (91, "failed")):
        assert state("ended", end=HowEnded(code, "x", True))[0] == word


def test_a_plain_script_trains_once_its_workers_have_started() -> None:
    told = Told()
    *starts, last = begun(1, 0)[:4]
    told.add(*starts)
    assert told.watch.state(Present("running", 1, workers=2))[0] == "starting"
    told.add(last)
    assert told.watch.state(Present("running", 1, workers=2))[0] == "training"


def test_it_is_told_where_the_state_is() -> None:
    told = Told()
    assert told.watch.safe(Present("running", 1)) == ""
    assert told.watch.safe(Present("running", 1, step=4)) == "the launcher knows of no saved state"
    present = Present("running", 1, step=4, snapshot=4)
    assert told.watch.safe(present) == "no checkpoint yet; step 4 in this node's memory"
    told.add(ev.CheckpointSaved(1, 3, "/c/step-3"))
    text = told.watch.safe(present)
    assert re.fullmatch(
        r"step 3 is saved in /c/step-3, at \d\d:\d\d:\d\d UTC, 0 s ago; step 4 in this node's memory", text
    )


def test_the_only_replica_is_unprotected_until_there_is_a_copy_of_its_state() -> None:
    told = Told(replica_size=2)
    told.add(*begun(1, 0), *begun(2, 6))
    present = Present("running", 2, world_size=2, step=7, snapshot=4)
    alone = "unprotected: only one replica has the state after step 4"
    assert told.watch.safe(present) == f"no checkpoint yet; step 4 in this node's memory; {alone}"
    assert told.watch.safe(replace(present, snapshot=None)) == f"no checkpoint yet; {alone.replace('4', '0')}"
    assert "unprotected" not in told.watch.safe(replace(present, world_size=4))
    assert "unprotected" not in told.watch.safe(replace(present, snapshot=7))
    told.add(ev.CheckpointSaved(2, 7, "/c/step-7"))
    assert told.watch.safe(present).endswith("step 4 in this node's memory")


def test_what_happened_last_has_stragglers_refused_nodes_and_workers_lost_ahead() -> None:
    told = Told()
    told.add(*begun(1, 0), ev.NodeRefused("x", "another command"), ev.StragglerFound(1, 1, "b", "compute", 2.0))
    told.add(ev.WorkerExited(0, None, 0, 42, 1, 2.0, False))
    assert told.watch.slow() == {"b": 1}
    texts = [text for _, text in told.watch.happened()[1]]
    assert texts[0].startswith("the worker of local rank 0 started ahead (pid 42) ended with exit code 1")
    assert texts[1].startswith("rank 1 on node b is slow")
    assert texts[2] == "node x refused: another command"
    told.add(ev.OrderReceived("form", 2, 1, "first", workers=2))
    assert told.watch.slow() == {}


def test_what_is_in_question_is_what_the_round_or_the_run_has_ended_by() -> None:
    told = Told()
    b, c = Suspect("b", 1), Suspect("c", 2)
    told.add(*begun(1, 0), ev.OrderReceived("break", 1, 1, "text", kind="crash", suspects=(b,)))
    assert told.watch.in_question(Present("stopping", 1)) == (b,)
    told.add(ev.CauseFound(1, "crash", "text", 1, (c,)))
    assert told.watch.in_question(Present("stopping", 1)) == (c,)
    assert told.watch.in_question(Present("ended", 1, end=HowEnded(91, "x", True, suspects=(b,)))) == (b,)
    assert told.watch.in_question(Present("ended", 1, end=HowEnded(91, "x", True))) == (c,), "no worker has failed"
    assert told.watch.in_question(Present("ended", 1, end=HowEnded(143, "x", True, suspects=(b,)))) == ()
    told.add(*begun(2, 5))
    assert told.watch.in_question(Present("running", 2)) == ()


def test_an_incident_is_told_with_its_phases_until_training_goes_on() -> None:
    told = Told()
    told.add(
        *begun(1, 0), ev.WorkerExited(1, 1, 1, 11, -9, 3.0, False), ev.RoundBroken(1, "crash", "rank 1\nfell", 3.0, "")
    )
    told.at += 2
    text = told.watch.doing(Present("stopping"))
    assert text == "still for 2.1 s: crash, rank 1 fell (form 2.0 s); stopping"
    told.add(*begun(2, 1)[:-1])
    text = told.watch.doing(Present("running", workers=2))
    assert text == "still for 2.6 s: crash, rank 1 fell (form 2.1 s, start 0.4 s); trains; first step"
    told.add(ev.FirstStep(2, 2))
    told.at += 7
    assert told.watch.doing(Present("running")) == "trains; incident 1, 7 s ago, cost 2.7 s: crash, rank 1 fell"


def test_workers_that_the_guard_has_stopped_are_not_said_to_train() -> None:
    told = Told()
    told.add(*begun(1, 0))
    held = Present("held", 1, 2, 2, 1, 30, 100, 61.0, 30, 3.0, members=(("a", 1), ("b", 1)))
    text = "the workers are stopped until the leader answers: this agent did not run"
    assert told.watch.doing(held) == text
    assert not {"steps/s", "time left"} & told.figures(held).keys()


def test_a_long_cause_leaves_room_for_the_rest() -> None:
    told = Told()
    told.add(*begun(1, 0), ev.RoundBroken(1, "crash", "rank 1 on node b: " + "x" * 100, 3.0, ""))
    told.at += 2
    text = told.watch.doing(Present("stopping"), 79)
    assert len(text) == 79
    assert text.startswith("still for 2.0 s: crash, rank 1 on node b: xxx")
    assert text.endswith("xx… (form 2.0 s); stopping")


def test_the_leaders_reason_is_not_replaced_when_its_own_node_joins() -> None:
    told = Told()
    told.add(ev.NodeJoined("a", 2, "::1", "1 more node is needed"), ev.LinkChanged(up=True, cause="hello accepted"))
    assert told.watch.doing(Present("waiting")) == "waiting: 1 more node is needed"


def test_a_member_that_has_lost_its_leader_stands_still() -> None:
    told = Told()
    told.add(*begun(1, 0))
    members = (("a", 1), ("b", 1))
    present = Present("running", 1, 2, 2, 1, 30, 100, 61.0, 30, 3.0, members=members)
    assert told.figures(present).keys() >= {"steps/s", "time left"}
    told.add(ev.LinkChanged(up=False, cause="Nothing answers at a:1"))
    assert told.watch.doing(present) == "trains", "the workers may train on"
    told.at += 12
    lost = replace(present, phase="suspended", workers=0)
    assert told.watch.doing(lost) == "still for 12 s: no link to the leader: Nothing answers at a:1; suspended"
    figures = told.figures(lost)
    assert figures["world size"] == "none trains; the last was 2 on 2 nodes: a 1, b 1"
    assert not figures.keys() & {"steps/s", "time left"}
    told.add(ev.LinkChanged(up=True, cause="hello accepted"), *begun(2, 30))
    assert told.watch.doing(replace(present, trained=31, trained_s=3.1)).startswith("trains; incident 1, 0 s ago")


def test_workers_that_have_left_their_round_stand_still_before_the_cause_is_known() -> None:
    told = Told()
    told.add(*begun(1, 0), ev.OrderReceived("break", 1, 1, "rank 1 fell", kind="crash"), *begun(2, 0))
    left = Present("suspended", 2, members=(("a", 1), ("b", 1)))
    told.watch.doing(Present("running", 2))
    assert told.watch.doing(left) == "still for 0 s: its workers have left the round; suspended"
    told.add(ev.LinkChanged(up=False, cause="silence"))
    told.at += 3
    assert told.watch.doing(left) == "still for 3 s: no link to the leader: silence; suspended"


def test_a_round_without_steps_does_not_look_as_if_it_trained() -> None:
    told = Told()
    told.add(*begun(1, 0))
    present = Present("running", 1, 1, 2, 2, 30, 100, 61.0, 30, 3.0)
    assert told.watch.doing(present) == "trains"
    told.at += 20
    assert told.watch.doing(present) == "no step for 20 s"
    assert not told.figures(present).keys() & {"steps/s", "time left"}
    slow = replace(present, trained_s=300.0)
    assert told.watch.doing(slow) == "trains", "a step takes 10 s"
    assert "steps/s" in told.figures(slow)
    told.add(ev.RoundBroken(1, "crash", "rank 1", 3.0, ""), *begun(2, 30)[:-1])
    assert "steps/s" not in told.figures(replace(slow, round=2)), "no step of this round yet"


def test_a_checkpoint_of_another_node_has_its_age() -> None:
    told = Told()
    present = Present("running", 1, checkpoint=20, checkpoint_age=90.0)
    assert told.figures(present)["checkpoint"] == "step 20, 90 s ago"
    told.add(ev.CheckpointSaved(1, 40, "/c"))
    assert told.figures(present)["checkpoint"] == "step 40, 0 s ago", "this node's own is newer"


def test_a_later_checkpoint_of_another_node_counts_though_its_step_is_lower() -> None:
    """It is of a later training of the script, or the other one was withdrawn."""
    told = Told()
    told.add(ev.CheckpointSaved(1, 40, "/c"))
    told.at += 60
    assert told.figures(Present("running", 1, checkpoint=40, checkpoint_age=50.0))["checkpoint"] == "step 40, 60 s ago"
    assert told.figures(Present("running", 1, checkpoint=2, checkpoint_age=5.0))["checkpoint"] == "step 2, 5 s ago"


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a", "b"], ["a", "b"]),
        (["w-0.jobs.example.com", "w-1.jobs.example.com"], ["w-0", "w-1"]),
        (["w-0.jobs.example.com", "w-1.example.org"], ["w-0.jobs.example.com", "w-1.example.org"]),
        (["h.example.com-0a1b2c", "h.example.com-3d4e5f"], ["h-0a1b2c", "h-3d4e5f"]),
        (["w.a.example.com", "w.b.example.com"], ["w.a.example.com", "w.b.example.com"]),
        (["10.0.0.1", "11.0.0.1"], ["10.0.0.1", "11.0.0.1"]),
        (["v1.2"], ["v1.2"]),
        (["1-very-long-name-of-a-job", "2-very-long-name-of-a-job"], ["1-very-long-name-of…", "2-very-long-name-of…"]),
        (["a-very-long-name-of-a-job-worker-17", "b"], ["…-of-a-job-worker-17", "b"]),
    ],
)
def test_names_of_nodes_are_short(names: list[str], shown: list[str]) -> None:
    assert list(short_names(names).values()) == shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (99, "99 s"), (100, "2 min"), (7500, "2 h 5 min"), (864000, "10 days")]
)
def test_times(seconds: float, text: str) -> None:
    assert span(seconds) == text

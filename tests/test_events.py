"""Events: their lines for people, their lines of JSON, and files that cannot be written."""

from __future__ import annotations

import errno
import json
import os
import threading
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from elastic_launch.events import types as ev
from elastic_launch.events.sentences import sentence
from elastic_launch.events.sinks import JsonLines
from elastic_launch.failure import BegunInstead, SplitCollective, StallPlace, Suspect
from elastic_launch.observe.reading import parse
from elastic_launch.testing import FakeClock

KINDS = [kind for kind in ev.KINDS.values() if kind.__module__ == ev.__name__]


def example(kind: type[ev.Event]) -> ev.Event:
    """An event with some value in each field."""
    samples: dict[str, Any] = {
        "str": "x",
        "int": 1,
        "float": 0.5,
        "float | None": 0.5,
        "int | None": 1,
        "bool": True,
        "tuple[str, ...]": ("a", "b"),
        "tuple[int, ...]": (0, 2),
        "tuple[StallPlace, ...]": (StallPlace("code", "x:1 in f"),),
        "tuple[Suspect, ...]": (Suspect("b", 1), Suspect("c")),
        "tuple[SplitCollective, ...]": (SplitCollective("x", 7, "g", (0,), (), (BegunInstead("y", (1,)),)),),
    }
    return kind(**{item.name: samples[str(item.type)] for item in fields(kind)})


def test_all_events_are_known_by_their_names() -> None:
    defined = [
        kind
        for kind in vars(ev).values()
        if isinstance(kind, type) and issubclass(kind, ev.Event) and kind not in (ev.Event, ev.LeaderEvent)
    ]
    assert [kind for kind in defined if ev.KINDS[ev.event_name(kind)] is not kind] == []
    assert len(defined) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_event_is_one_line_for_people_at_most(kind: type[ev.Event]) -> None:
    assert is_dataclass(kind)
    assert "\n" not in sentence(example(kind))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_fields_leave_the_names_of_the_line_alone(kind: type[ev.Event]) -> None:
    assert not {"event", "time", "clock"} & {item.name for item in fields(kind)}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(ev.RoundFormed, "round_formed"), (ev.RunEnded, "run_ended"), (ev.Parked, "parked"), (ev.NodeLost, "node_lost")],
)
def test_names(kind: type[ev.Event], name: str) -> None:
    assert ev.event_name(kind) == name


def test_the_leaders_decisions_are_shown_to_people() -> None:
    shown = {kind for kind in KINDS if kind.leader}
    assert shown == {
        ev.AdmissionClosed,
        ev.CauseFound,
        ev.DrillEnded,
        ev.FaultLanded,
        ev.HangFound,
        ev.JoinBlocked,
        ev.LeaderElected,
        ev.NodeDiffers,
        ev.NewcomerLeftOut,
        ev.NodeExcluded,
        ev.NodeJoined,
        ev.NodeLeft,
        ev.NodeLost,
        ev.NodeRefused,
        ev.Parked,
        ev.ResizeSkipped,
        ev.RestartCharged,
        ev.RoundBroken,
        ev.RoundDrained,
        ev.RoundDraining,
        ev.RoundFormed,
        ev.RunEnded,
        ev.RunResized,
    }


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            ev.NodeJoined("b", 1, "10.0.0.2", "a round forms"),
            "node b joined from 10.0.0.2 with 1 worker; a round forms",
        ),
        (ev.NodeJoined("b", 8, "fd00::2", "x"), "node b joined from fd00::2 with 8 workers; x"),
        (
            ev.NodeLost("b", "its connection closed", 0.0, 0, "training goes on"),
            "node b lost (its connection closed); training goes on",
        ),
        (ev.NodeLeft("b", "SIGTERM", 0, "training goes on"), "node b leaves (SIGTERM); training goes on"),
        (ev.FaultLanded(3, "b", 1, 20), "drill: fault 1 happens on node b at step 20"),
        (ev.DrillEnded(1, ()), "drill: 1 fault happened"),
        (ev.DrillEnded(3, ()), "drill: all 3 faults happened"),
        (ev.DrillEnded(3, (0, 2)), "drill: 1 of 3 faults happened; not fault 0, 2"),
        (ev.NodeRefused("b", "it speaks version 2."), "node b refused: it speaks version 2."),
        (
            ev.JoinBlocked("c", "a", "10.0.0.1", 40123, "timed out"),
            "node c waits: it cannot connect to node a (10.0.0.1, port 40123: timed out). Nodes must be able to "
            "connect to each other on all ports; it tries again every 10 s",
        ),
        (
            ev.RoundFormed(3, 1, ("a", "b"), 16, 1, "first", 0.123),
            "round 3 formed in 0.12 s: world size 16 on 2 nodes (a, b)",
        ),
        (ev.RoundFormed(1, 1, ("a",), 1, 0, "first", 2.0), "round 1 formed in 2.00 s: world size 1 on 1 node (a)"),
        (
            ev.RoundBroken(3, "crash", "rank 0 crashed", 61.23, "a new round forms"),
            "round 3 broken after 61.2 s: rank 0 crashed; a new round forms",
        ),
        (
            ev.RoundDraining(3, "preemption", "node b leaves (SIGTERM)", 29.998),
            "round 3 drains: node b leaves (SIGTERM); its workers stop after the same step, within 30 s",
        ),
        (
            ev.RoundDraining(3, "membership", "resize", None),
            "round 3 drains: resize; its workers stop after the same step",
        ),
        (
            ev.RoundDrained(3, 120, "preemption", "node b leaves (SIGTERM)", 0.4, "a new round forms"),
            "round 3 drained in 0.40 s after step 120; a new round forms",
        ),
        (
            ev.ResizeSkipped(("c", "d"), 8.2, 4.1, 5.0),
            "no resize for node c, d: with about 8 s left, it would save 4.1 s and cost 5.0 s",
        ),
        (
            ev.RestartCharged(3, "crash", 1, 3, "a round forms"),
            "restart 1 of 3 (--max-restarts 3), charged for a crash; a round forms",
        ),
        (
            ev.RestartCharged(3, "crash", 2, 3, "a round forms", 0, 2.0),
            "restart 2 of 3 (--max-restarts 3), charged for a crash; a round forms in 2 s, as workers failed soon "
            "after their start again",
        ),
        (
            ev.RestartCharged(3, "preemption", 1, 3, "a round forms", 4),
            "restart 1 of 3 (--max-restarts 3), charged for a preemption, since the training has not advanced in 4 "
            "restarts; a round forms",
        ),
        (
            ev.RestartCharged(3, "out of memory", 1, 3, "a round forms"),
            "restart 1 of 3 (--max-restarts 3), charged for a lack of memory; a round forms",
        ),
        (ev.RoundBroken(3, "crash", "rank 0 crashed", 61.23, ""), "round 3 broken after 61.2 s: rank 0 crashed"),
        (
            ev.CauseFound(3, "crash", "rank 0 on node a: KeyError"),
            "round 3 was broken by rank 0 on node a: KeyError",
        ),
        (
            ev.Parked(1, 2, 600.0),
            "parked with 1 node, 2 needed; goes on when they are there, ends in 600 s otherwise",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ev.Event) else "",
)
def test_lines_for_people(event: ev.Event, line: str) -> None:
    assert event.printed
    assert sentence(event) == line


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_event_is_a_sentence_without_names_of_fields(kind: type[ev.Event]) -> None:
    said = sentence(example(kind))
    assert len(said.split()) >= 3
    assert "=" not in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (ev.LinkChanged(True, "hello accepted"), "the link to the leader is up: hello accepted"),
        (
            ev.WorkerExited(2, 1, 1, 42, -9, 3.04, False),
            "rank 1 of round 2 (pid 42) ended with signal 9 (SIGKILL) after 3.0 s",
        ),
        (
            ev.WorkerExited(0, None, 1, 42, 0, 3.04, True),
            "the worker of local rank 1 started ahead (pid 42) was stopped and ended with exit code 0 after 3.0 s",
        ),
        (ev.OrderReceived("form", 1, 1, "first", workers=2), "order: round 1 begins, with 2 workers of this node"),
        (ev.OrderReceived("break", 1, 1, "rank 1 failed", "crash"), "order: round 1 is broken: rank 1 failed (crash)"),
        (
            ev.NodeLost("b", "silent", 5.0, 3, "a new round forms"),
            "node b lost (silent), and with it round 3; a new round forms",
        ),
        (
            ev.RunEnded(91, "all spent", 3, 4, 99.0),
            "the run ended with exit code 91: all spent (4 rounds, 3 restarts, 99.0 s)",
        ),
        (
            ev.HangFound(1, "rank 1 hangs", 9.0, (1,), collectives=(SplitCollective("x", 7, "g", (0,), (1,)),)),
            "round 1 stands still: rank 1 hangs; rank 0 waits in x, number 7 of group g, rank 1 has not begun it",
        ),
        (
            ev.HangFound(
                1, "no rank stands out; rank 0 waits", collectives=(SplitCollective("x", 7, "g", (0,), (1,)),)
            ),
            "round 1 stands still: no rank stands out; rank 0 waits",
        ),
    ],
)
def test_sentences(event: ev.Event, said: str) -> None:
    assert sentence(event) == said


def test_the_first_line_has_the_version(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "events.jsonl", FakeClock(), fail, version="1.2")
    for _ in range(2):
        sink.emit(ev.LinkChanged(up=True, cause="x"))
    assert [value.get("version") for value in read(sink.path)] == ["1.2", None]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_event_is_read_as_it_was_written(kind: type[ev.Event], tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "events.jsonl", FakeClock(), fail)
    sink.emit(example(kind))
    assert parse(sink.path.read_text()) == (0.0, example(kind))


def test_what_is_reported_elsewhere_is_not_printed() -> None:
    """A loss that broke a round is reported by the break, the end by every agent's summary."""
    assert not ev.NodeLost("b", "its connection closed", 0.0, 3, "a new round forms").printed
    assert not ev.NodeLeft("b", "SIGTERM", 3, "a new round forms").printed
    assert not ev.RunEnded(91, "all 3 restarts spent", 3, 4, 99.0).printed
    assert not ev.LinkChanged(True, "hello accepted").printed, "it is not the leader's"


@pytest.mark.parametrize(("number", "text"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes")])
def test_counted(number: int, text: str) -> None:
    assert ev.counted(number, "node") == text


def test_a_round_of_many_nodes_does_not_fill_the_screen() -> None:
    nodes = tuple(f"node-{number}" for number in range(1000))
    line = sentence(ev.RoundFormed(1, 1, nodes, 8000, 0, "first", 2.0))
    assert "on 1000 nodes (node-0, " in line
    assert line.endswith(", ...)")
    assert len(line) < 200


# Files.


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fail(error: OSError) -> None:
    raise AssertionError(error)


def test_each_event_is_a_line_of_json(tmp_path: Path) -> None:
    clock = FakeClock(10.0)
    path = tmp_path / "run" / "events-a.jsonl"
    sink = JsonLines(path, clock, fail)
    assert not path.parent.exists(), "nothing is made before the first event"
    sink.emit(ev.RoundFormed(1, 1, ("a", "b"), 16, 0, "first", 2.0))
    clock.advance(1.5)
    sink.emit(ev.LinkChanged(up=False, cause='a "quoted"\nreason'))
    first, second = read(path)
    assert list(first)[:3] == ["event", "time", "clock"]
    assert (first["event"], first["clock"], first["nodes"]) == ("round_formed", 10.0, ["a", "b"])
    assert abs(datetime.fromisoformat(first["time"]) - datetime.now(UTC)) < timedelta(minutes=5)
    assert second == {
        "event": "link_changed",
        "time": second["time"],
        "clock": 11.5,
        "up": False,
        "cause": 'a "quoted"\nreason',
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_event_can_be_written(kind: type[ev.Event], tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "events.jsonl", FakeClock(), fail)
    sink.emit(example(kind))
    (value,) = read(sink.path)
    assert value["event"] == ev.event_name(kind)
    assert {item.name for item in fields(kind)} <= set(value)


def test_an_existing_file_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        JsonLines(path, FakeClock(), fail).emit(ev.LinkChanged(up=True, cause="x"))
    assert len(read(path)) == 2


def test_a_file_that_cannot_be_written_is_reported_once_and_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    errors: list[OSError] = []
    sink = JsonLines(tmp_path / "file" / "events.jsonl", FakeClock(), errors.append)
    for _ in range(3):
        sink.emit(ev.LinkChanged(up=True, cause="x"))
    assert len(errors) == 1


def test_recording_continues_when_the_file_can_be_written_again(tmp_path: Path) -> None:
    blocker = tmp_path / "run"
    blocker.write_text("")
    sink = JsonLines(blocker / "events.jsonl", FakeClock(), lambda error: None)
    sink.emit(ev.LinkChanged(up=True, cause="lost"))
    blocker.unlink()
    sink.emit(ev.LinkChanged(up=True, cause="kept"))
    assert [value["cause"] for value in read(sink.path)] == ["kept"]


def fill_disk(patch: pytest.MonkeyPatch, room: int) -> None:
    """Let writes take as many bytes in all, the last of them a part, and fail from then on."""
    written, write = 0, os.write

    def take(descriptor: int, data: bytes) -> int:
        nonlocal written
        if written == room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write(descriptor, data[: room - written])
        written += taken
        return taken

    patch.setattr(os, "write", take)


@pytest.mark.parametrize("same", [True, False], ids=["the same agent", "the next agent"])
def test_a_line_that_a_full_disk_has_cut_costs_no_further_line(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[OSError] = []
    sink = JsonLines(tmp_path / "events.jsonl", FakeClock(), errors.append)
    sink.emit(ev.LinkChanged(up=True, cause="first"))
    with monkeypatch.context() as patch:
        fill_disk(patch, room=20)
        sink.emit(ev.LinkChanged(up=True, cause="cut"))
        assert [error.errno for error in errors] == [errno.ENOSPC]
        sink.emit(ev.LinkChanged(up=True, cause="lost"))
    if not same:
        sink = JsonLines(sink.path, FakeClock(), fail)
    for cause in ("second", "third"):
        sink.emit(ev.LinkChanged(up=True, cause=cause))
    first, cut, *others = sink.path.read_text().splitlines()
    assert len(cut) == 20
    assert [json.loads(line)["cause"] for line in (first, *others)] == ["first", "second", "third"]


def test_lines_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "events.jsonl", FakeClock(), fail)

    def emit(number: int) -> None:
        for _ in range(10):
            sink.emit(ev.LinkChanged(up=True, cause=f"{number}" * 1000))

    threads = [threading.Thread(target=emit, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read(sink.path)) == 50

"""``python -m elastic_launch.observe``: event files in, the ledger out."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from elastic_launch.events import types as ev
from elastic_launch.events.sinks import JsonLines
from elastic_launch.observe.__main__ import main
from elastic_launch.observe.advice import SHORTER, advice
from elastic_launch.observe.ledger import PARTS, Ledger, RoundIncident, build
from elastic_launch.observe.reading import of_last_run, parse, read
from elastic_launch.observe.report import as_table, show_report
from elastic_launch.testing import FakeClock

Told = list[tuple[float, ev.Event]]

LEADER: Told = [
    (10.0, ev.RoundFormed(1, 1, ("a", "b"), 2, 0, "first", 2.0)),
    (30.0, ev.RoundBroken(1, "node loss", "node b lost: its connection closed", 20.0, "a new round forms")),
    (31.0, ev.RoundFormed(2, 1, ("a", "b"), 2, 0, "node b lost: its connection closed", 1.0)),
    (60.0, ev.RunEnded(0, "all workers finished", 0, 2, 60.0)),
]

WORKERS: Told = [
    (10.0, ev.OrderReceived("form", 1, 1, "first")),
    (12.0, ev.TrainingBegun(1, 0, 0, 50, 0.0)),
    (13.0, ev.FirstStep(1, 1)),
    (30.0, ev.RoundSteps(1, 0, 18, 18.0)),
    (31.0, ev.OrderReceived("form", 2, 1, "node b lost")),
    (33.0, ev.TrainingBegun(2, 0, 15, 50, 0.5)),
    (34.0, ev.FirstStep(2, 16)),
    (59.0, ev.RoundSteps(2, 15, 41, 26.0)),
]


def write(directory: Path, node: str, told: Told, start: float = 0.0) -> Path:
    clock = FakeClock(start)
    sink = JsonLines(directory / f"events-{node}.jsonl", clock, lambda error: pytest.fail(str(error)))
    for moment, event in sorted(told, key=lambda one: one[0]):
        clock.advance(start + moment - clock.now())
        sink.emit(event)
    return sink.path


def as_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([str(directory), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_one_file_makes_a_table_and_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a", LEADER + WORKERS)
    assert main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    heading, row, _, summary, standing = out.splitlines()
    assert err == ""
    assert heading == ("   rounds  kind       detect  stop  form  start  restore  first  still  lost  cause")
    assert row == (
        "1  1 -> 2  node loss    0.00  0.00  1.00   1.50     0.50   1.00   4.00     3  "
        "node b lost: its connection closed"
    )
    assert summary == ("goodput 82.0 %: 41.0 of 50.0 s in 41 steps; 1 incident (1 node loss), 3 steps lost; restarts 0")
    assert re.fullmatch(r"ended at \S+ \S+ UTC with exit code 0: all workers finished", standing)


def test_json_has_all_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a", LEADER + WORKERS)
    value = as_json(tmp_path, capsys)
    assert (value["node"], value["goodput"], value["steps"], value["by_steps"]) == ("a", pytest.approx(0.82), 41, True)
    (incident,) = value["incidents"]
    assert (incident["kind"], incident["start_s"], incident["lost_steps"]) == ("node loss", 1.5, 3)


def test_hosts_are_joined_by_round_numbers_and_their_clocks_never_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The leader also trained, but died before it wrote how far round 1 had come; a member has recorded it."""
    mine = [one for one in WORKERS if not isinstance(one[1], ev.RoundSteps | ev.TrainingBegun | ev.FirstStep)]
    write(tmp_path, "a", LEADER + mine)
    write(tmp_path, "b", WORKERS, start=1e6)
    value = as_json(tmp_path, capsys)
    (incident,) = value["incidents"]
    assert value["node"] == "a"
    assert (incident["kind"], incident["lost_steps"]) == ("node loss", 3)
    assert value["lost_steps"] == 3
    assert value["total_s"] < 100


def test_workers_lost_before_a_round_are_those_of_all_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = ev.WorkerExited(0, None, 0, 42, 1, 2.0, False)
    write(tmp_path, "a", [*LEADER, (40.0, lost), (41.0, lost)])
    write(tmp_path, "b", [*WORKERS, (40.0, lost), (45.0, ev.WorkerExited(0, None, 0, 43, -9, 2.0, True))])
    assert as_json(tmp_path, capsys)["lost_ahead"] == 3


def test_a_member_learns_from_the_leaders_file_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a", LEADER[1:3], start=5000)
    write(tmp_path, "b", WORKERS)
    value = as_json(tmp_path, capsys)
    assert value["node"] == "b"
    assert [(x["kind"], x["cause"]) for x in value["incidents"]] == [
        ("node loss", "node b lost: its connection closed")
    ]


def test_steps_after_the_last_checkpoint_are_lost_beside_those_of_incidents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in the agent's own summary."""
    told = [*LEADER[:-1], *WORKERS, (60.0, ev.RunEnded(91, "all restarts spent", 1, 2, 60.0))]
    path = write(tmp_path, "a", told)
    value = as_json(tmp_path, capsys)
    assert [incident["lost_steps"] for incident in value["incidents"]] == [3]
    assert (value["unsaved_steps"], value["lost_steps"]) == (41, 44)
    assert value["lost_steps"] == build(read(path).chronicle).lost_steps


def test_bad_lines_are_named_and_the_rest_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a", LEADER + WORKERS)
    lines = path.read_text().splitlines()
    lines[1:1] = ['{"event": "first_st', "[]", '{"event": "first_step", "clock": 11, "round": "x", "step": 1}']
    lines.append('{"event": "of_a_newer_version", "clock": 70.0}')
    lines.append('{"event": "run_ended", "clock": NaN}')
    path.write_text("\n".join(lines) + "\n\udcff".encode(errors="surrogateescape").decode("latin-1"))
    (tmp_path / "events-b.jsonl").mkdir()
    assert main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "goodput 82.0 %" in out
    said = err.splitlines()
    assert said[0] == (
        f'{path}: 5 of 18 lines cannot be used, the first is line 2: no JSON: \'{{"event": "first_st\'; '
        "1 of 18 lines is of kinds unknown here (of_a_newer_version)"
    )
    assert said[1:] == [f"{tmp_path / 'events-b.jsonl'} cannot be read: Is a directory"]


def test_of_several_runs_in_a_file_the_last_one_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a", LEADER + WORKERS)
    write(tmp_path, "a", [(100.0, LEADER[0][1]), (150.0, LEADER[-1][1])])
    assert main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "0 incidents" in out
    assert f"{path}: a further run begins in line 13" in err
    path.unlink()
    write(tmp_path, "a", LEADER)
    write(tmp_path, "a", WORKERS)
    assert main([str(tmp_path)]) == 0
    assert "a further run begins in line 5" in capsys.readouterr().err, "the clock fell: the host was started anew"


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        ([], "has no events-*.jsonl"),
        (["r1/events-a.jsonl", "r2/events-a.jsonl"], "has the events of 2 runs: r1, r2"),
        (["events-a.jsonl"], "No event file in"),
    ],
)
def test_a_directory_that_is_not_a_runs_is_refused(
    made: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in made:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert main([str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "is not a directory" in capsys.readouterr().err


def test_of_two_runs_of_the_same_id_the_last_one_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their nodes have other ids, since these are random. A node that came later belongs to the last one."""
    write(tmp_path, "first", [*LEADER[:-1], *WORKERS, (60.0, ev.RunEnded(91, "all restarts spent", 1, 2, 60.0))])
    write(tmp_path, "then", [*LEADER, *WORKERS])
    write(tmp_path, "late", WORKERS[4:])
    stamp(tmp_path, "first", "2026-01-01T10:00:00")
    stamp(tmp_path, "then", "2026-01-01T11:00:00")
    stamp(tmp_path, "late", "2026-01-01T11:00:30")
    assert main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "with exit code 0: all workers finished" in out
    assert "91" not in out
    assert err == f"1 event file of an earlier run in {tmp_path} is left out\n"


def from_round(number: int, told: Told) -> Told:
    """The same in rounds that begin with this number."""
    return [
        (moment, replace(event, round=event.round + number - 1) if hasattr(event, "round") else event)
        for moment, event in told
    ]


@pytest.mark.parametrize("number", [1, 3], ids=["from 1", "which continue"])
@pytest.mark.parametrize("led", [LEADER, []], ids=["led here", "led elsewhere"])
def test_two_runs_in_a_directory_are_told_apart_whatever_their_rounds_numbers(
    tmp_path: Path, number: int, led: Told
) -> None:
    """With reuse=true, numbers continue; where each host has its own directory, the leader's file may not be there."""
    came = (1.0, ev.LinkChanged(True, "hello accepted"))
    for node, told, begins in (
        ("first", [came, *led, *WORKERS], "10:00:00"),
        ("then", [came, *from_round(number, [*led, *WORKERS])], "11:00:00"),
        ("beside", [(5.0, came[1]), *from_round(number, WORKERS)], "11:00:00"),
        ("gone", [(2.0, came[1]), (3.0, ev.LinkChanged(False, "told to leave"))], "11:00:00"),
        ("late", from_round(number, WORKERS[4:]), "11:00:00"),
    ):
        write(tmp_path, node, told)
        stamp(tmp_path, node, f"2026-01-01T{begins}")
    hosts = [read(path) for path in sorted(tmp_path.glob("events-*"))]
    assert [host.node for host in of_last_run(hosts)] == ["beside", "gone", "late", "then"]
    alone = [host for host in hosts if host.node != "first"]
    assert of_last_run(alone) == alone


@pytest.mark.parametrize("ahead", [-3600, -60, 60, 3600])
@pytest.mark.parametrize("before", [False, True], ids=["one run", "after another"])
def test_a_host_that_its_leader_names_is_kept_whatever_its_clock_shows(
    tmp_path: Path, ahead: int, before: bool
) -> None:
    came, noon = (1.0, ev.LinkChanged(True, "hello accepted")), datetime.fromisoformat("2026-01-01T12:00:00")
    write(tmp_path, "a", [came, *LEADER, *WORKERS])
    write(tmp_path, "b", [came, *WORKERS, (61.0, ev.RoundFormed(3, 2, ("b",), 1, 0, "leader a lost", 1.0))])
    stamp(tmp_path, "a", noon.isoformat())
    stamp(tmp_path, "b", (noon + timedelta(seconds=ahead)).isoformat())
    if before:
        formed = ev.RoundFormed(1, 1, ("c", "d"), 2, 0, "first", 2.0)
        for node, told in (("c", [came, (10.0, formed), *WORKERS]), ("d", [came, *WORKERS])):
            write(tmp_path, node, told)
            stamp(tmp_path, node, "2026-01-01T10:00:00")
    hosts = [read(path) for path in sorted(tmp_path.glob("events-*"))]
    assert [host.node for host in of_last_run(hosts)] == ["a", "b"]


@pytest.mark.parametrize("led", [LEADER, []], ids=["led here", "led elsewhere"])
def test_a_node_that_was_in_two_runs_has_the_last_one_even_if_numbers_continue(tmp_path: Path, led: Told) -> None:
    told = [*led, *WORKERS]
    path = write(tmp_path, "a", told)
    write(tmp_path, "a", from_round(3, told), start=100.0)
    host = read(path)
    assert sorted(host.chronicle.rounds) == [3, 4]
    assert "a further run begins" in host.complaints[0]


def stamp(directory: Path, node: str, begins: str) -> None:
    """Give a host's events the times of a clock that shows ``begins`` when the host's own shows 0."""
    path, zero = directory / f"events-{node}.jsonl", datetime.fromisoformat(begins).replace(tzinfo=UTC)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [json.dumps(one | {"time": (zero + timedelta(seconds=one["clock"])).isoformat()}) for one in events]
    path.write_text("\n".join(lines) + "\n")


def test_the_only_run_of_a_log_directory_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "r1", "a", LEADER + WORKERS)
    assert as_json(tmp_path, capsys)["node"] == "a"


def test_the_link_to_the_newest_run_does_not_count_as_a_second_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "r1", "a", LEADER + WORKERS)
    (tmp_path / "latest").symlink_to("r1")
    assert as_json(tmp_path, capsys)["node"] == "a"
    assert as_json(tmp_path / "latest", capsys)["node"] == "a"


def test_fields_with_a_default_may_be_missing() -> None:
    line = '{"event": "order_received", "clock": 3, "order": "form", "round": 1, "term": 1, "cause": "first"}'
    assert parse(line) == (3, ev.OrderReceived("form", 1, 1, "first", ""))
    with pytest.raises(ValueError, match=r"FirstStep\.step is missing"):
        parse('{"event": "first_step", "clock": 3, "round": 1}')


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e400", "-1e301", "1" + "0" * 301])
def test_a_number_that_is_too_large_for_calculations_is_named(number: str) -> None:
    with pytest.raises(ValueError, match=f"it has the number {number[:40]}"):
        parse(f'{{"event": "first_step", "clock": {number}, "round": 1, "step": 1}}')


class _Tags(HTMLParser):
    """Checks that tags are closed in order, and keeps the texts and the attributes."""

    VOID = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page(directory: Path) -> tuple[dict[str, Any], str]:
    """The document in a report, and the report, which is whole."""
    assert main([str(directory), "--html", str(directory / "report.html")]) == 0
    text = (directory / "report.html").read_text()
    tags = _Tags()
    tags.feed(text)
    tags.close()
    assert tags.open == []
    assert not {"src", "href"} & {name for name, _ in tags.attributes}
    (found,) = (part for part in tags.texts if part.startswith("{"))
    return dict(json.loads(found)), text


def test_the_page_shows_rounds_and_incidents(tmp_path: Path) -> None:
    write(tmp_path, "a", LEADER + WORKERS)
    shown, text = page(tmp_path)
    assert [bar["text"] for bar in shown["rounds"]] == [
        "round 1: world size 2, steps 0 to 18; node loss node b lost: its connection closed",
        "round 2: world size 2, steps 15 to 41; trains ",
    ]
    (incident,) = shown["incidents"]
    assert (incident["still_s"], incident["since"], incident["until"]) == (4.0, 20.0, 24.0)
    assert any("form, 1.0 s (25%): --join-settle" in line for line in shown["advice"])
    assert [(mark["at"], mark["tone"]) for mark in shown["marks"]] == [(20.0, "bad")]
    assert shown["now"] is None
    assert "http:" not in text, "it needs no other host"
    assert "https:" not in text


def test_scripts_and_styles_of_the_page_are_those_of_its_policy(tmp_path: Path) -> None:
    write(tmp_path, "a", LEADER + WORKERS)
    _, text = page(tmp_path)
    allowed = re.findall(r"'(sha256-.*?)'", text)
    parts = re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", text, re.DOTALL)
    sums = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
    assert allowed == [f"sha256-{found}" for found in sums]
    assert "default-src 'none'" in text


def test_the_page_shows_texts_as_texts(tmp_path: Path) -> None:
    bad = "</title></script><script>alert('1')</script><!--&"
    told = [(at, replace(event, cause=bad) if isinstance(event, ev.RoundBroken) else event) for at, event in LEADER]
    write(tmp_path, "a", told + WORKERS)
    shown, text = page(tmp_path)
    assert text.count("<script") == 2
    assert "<!--" not in text
    assert bad in json.dumps(shown, ensure_ascii=False)


def test_the_page_of_a_run_that_did_nothing_is_whole(tmp_path: Path) -> None:
    write(tmp_path, "a", [(1.0, ev.NodeEnded(95, "refused"))])
    shown, _ = page(tmp_path)
    assert (shown["rounds"], shown["incidents"], shown["marks"], shown["charts"]) == ([], [], [], [])


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a", LEADER)
    assert main([str(tmp_path), "--html", str(tmp_path / "no" / "report.html")]) == 2
    assert "--html" in capsys.readouterr().err


def test_a_killed_agent_and_a_lost_link_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a", LEADER[:1] + WORKERS[:3] + [(40.0, ev.RoundProgress(1, 27, 27.0))])
    write(tmp_path, "b", [WORKERS[0], (42.0, ev.LinkChanged(False, "connection closed"))])
    assert main([str(tmp_path)]) == 0
    summary, standing, killed, link, _ = capsys.readouterr().out.splitlines()
    assert "goodput 93.1 %: 27.0 of 29.0 s in 27 steps; 0 incidents" in summary
    assert standing.startswith("the events stop before the end of the run; figures until ")
    assert re.fullmatch(
        r"the events of node a stop at .*: its agent has reported no end; it was killed or still runs", killed
    )
    assert link == "node b has lost its link to the leader: connection closed"
    show_report(tmp_path, as_object=False, html=None, alive=True)
    assert "in progress; figures until " in capsys.readouterr().out


def test_a_node_that_comes_back_has_not_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = [(41.0, ev.NodeEnded(143, "SIGTERM: preempted")), (50.0, ev.LinkChanged(True, "hello accepted"))]
    write(tmp_path, "a", [*WORKERS[:4], *left, (51.0, ev.OrderReceived("form", 2, 1, "node a joined"))])
    show_report(tmp_path, as_object=False, html=None, alive=True)
    assert "in progress; figures until " in capsys.readouterr().out
    write(tmp_path, "a", [(60.0, ev.NodeEnded(0, "all workers finished"))])
    assert main([str(tmp_path)]) == 0
    assert "with exit code 0: all workers finished" in capsys.readouterr().out


def test_the_end_is_told_with_what_is_saved_and_the_root_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the node says that has ended last, of those that know."""
    ended = (60.0, ev.RunEnded(91, "all restarts spent", 1, 2, 60.0))
    last = ev.NodeEnded(91, "all restarts spent", "step 41 is saved in /c", "root cause: rank 0\n    Traceback")
    write(tmp_path, "b", [*WORKERS[:4], (20.0, ev.NodeEnded(143, "SIGTERM", "step 9 is saved in /c"))])
    write(tmp_path, "a", [*LEADER[:-1], *WORKERS, ended, (61.0, last)])
    assert main([str(tmp_path)]) == 0
    *_, end, saved, cause, trace = capsys.readouterr().out.splitlines()
    assert "with exit code 91: all restarts spent" in end
    assert [saved, cause, trace] == ["step 41 is saved in /c", "root cause: rank 0", "    Traceback"]
    assert as_json(tmp_path, capsys)["standing"][1:] == [saved, cause, trace]


def test_advice_follows_causes_and_costs() -> None:
    def told(kind: str, cause: str, code: int | None = None, **costs: float) -> RoundIncident:
        spent = [costs.get(part, 0.0) for part in PARTS]
        return RoundIncident(1, 2, kind, cause, False, *spent, sum(spent), 0, True, True, exit_code=code)

    def given(*incidents: RoundIncident, lost: int = 0, unsaved: int = 0, restarts: int = 0) -> list[str]:
        return advice(Ledger(incidents, True, 90.0, 100.0, 100, unsaved, lost + unsaved, restarts, 3))

    assert given() == []
    assert given(told("membership", "node b joined", start_s=0.9, form_s=0.5)) == [], "costs next to nothing"
    (killed,) = given(told("crash", "x", -9, start_s=0.2))
    assert "lacked memory" in killed
    assert "micro-batches" in given(told("out of memory", "x"))[0]
    assert "1 incident of lost nodes" in given(told("node loss", "x"))[0]
    assert "stacks-*.txt" in given(told("hang", "x"))[0]
    assert "snapshots more often" in given(lost=9)[0]
    assert "checkpoints more often" in given(unsaved=9)[0]
    assert "was nearly spent (2 of 3 restarts)" in given(restarts=2)[0]
    assert "was spent (3 of 3 restarts)" in given(restarts=3)[0]
    assert given(told("membership", "x", start_s=3.0, form_s=1.0)) == [
        f"start, 3.0 s (75%): {SHORTER['start_s']}",
        f"form, 1.0 s (25%): {SHORTER['form_s']}",
    ]


def test_the_page_has_dates_names_of_parts_and_the_nodes(tmp_path: Path) -> None:
    write(tmp_path, "a", [*LEADER, *WORKERS, (10.5, ev.WorkerStarted(1, 0, 0, 4711, "first", 0.1))])
    shown, _ = page(tmp_path)
    moment = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    assert re.fullmatch(rf"From {moment} to {moment}\.", shown["lines"][0])
    assert re.fullmatch(rf"ended at {moment} with exit code 0: all workers finished", shown["lines"][1])
    assert len(shown["parts"]) == len(PARTS) == len(shown["incidents"][0]["parts"])
    assert abs(shown["zero"] - time.time()) < 300
    ((node, address, workers, failed, end),) = shown["nodes"]["rows"]
    assert (node, address, workers, failed) == ("a", None, "rank 0 (pid 4711)", 0)
    assert re.fullmatch(rf"{moment}: exit code 0: all workers finished", end)


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a", LEADER)
    assert main([str(tmp_path), "--html", str(tmp_path / "no" / "x.html")]) == 2
    assert "x.html cannot be written: No such file" in capsys.readouterr().err


def test_the_table_fits_the_terminal() -> None:
    cause = "rank 1 on node b: " + "a long cause of many words " * 4
    spent = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    whole = Ledger(
        tuple(RoundIncident(x, x + 1, "crash", cause.strip(), False, *spent, 2.1, 3, True, True) for x in (1, 2)),
        True, 10.0, 20.0, 100, None, 6, 2, 3,
    )  # fmt: skip
    wide = as_table(whole).splitlines()
    assert [line.endswith("many words") for line in wide[:3]] == [False, True, True]
    assert as_table(whole, 300).splitlines() == wide
    below = as_table(whole, 100).splitlines()
    assert max(map(len, below)) <= 100
    assert below[0].split() == [*wide[0].split()[:-1]]
    assert below[1].split() == wide[1].split()[: len(below[1].split())]
    assert " ".join(" ".join(below[2:4]).split()) == cause.strip()
    narrow = as_table(whole, 60).splitlines()
    assert max(map(len, narrow)) <= 60
    assert narrow[0].startswith("incident 1: crash (rank 1 on node b: a long cause")
    assert all(line.startswith(("incident", "    ", "goodput")) or not line for line in narrow)

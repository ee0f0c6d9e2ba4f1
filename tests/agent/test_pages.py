"""What ``--http`` shows of a run, without an agent."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise

import pytest

from elastic_agents.probes import pages
from elastic_agents.probes.http_server import HttpResponse
from elastic_agents.probes.pages import STILL, node_pages
from elastic_agents.probes.roster import FRESH, LastStatus, Roster
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.events import types as ev
from elastic_launch.observe.history import MOST as SAMPLES
from elastic_launch.observe.history import History
from elastic_launch.observe.ledger import build
from elastic_launch.observe.live import LiveLedger
from elastic_launch.observe.metrics import NodeMetrics
from elastic_launch.observe.node_watch import NodeWatch
from elastic_launch.observe.page import MOST, as_page
from elastic_launch.observe.present import Present
from elastic_launch.observe.reading import Host
from elastic_launch.rendezvous.admin import messages as a


class Told(Roster):
    """Tells what the test has the leader say."""

    def __init__(self) -> None:
        super().__init__(LaunchConfig(), lambda: "")
        self.answer = LastStatus()
        self.waited: list[float] = []

    def look(self, wait: float = 0.0) -> LastStatus:
        self.waited.append(wait)
        return self.answer


def standing(*nodes: a.NodeStatus) -> a.Status:
    return a.Status("<r>", "", 1, "a", 1, 2, 1, 2, 0, 3, nodes, time=0.0)


class Served:
    """The pages of a node, whose clock the test sets."""

    def __init__(self) -> None:
        self.at = 100.0
        self.ledger = LiveLedger(self)
        self.watch = NodeWatch(self, self.ledger)
        self.history = History(self)
        self.roster = Told()
        config = LaunchConfig(run_id="<r>", node_id="a")
        metrics = NodeMetrics("<r>", "a", "1")
        self.made = lambda: node_pages(
            config, metrics, self.ledger, self.watch, self.history, lambda rank: [f"<{rank}>\x1b[31m", "b"], self.roster
        )
        self.pages = self.made()

    def now(self) -> float:
        return self.at

    def add(self, *events: ev.Event) -> None:
        for event in events:
            self.at += 1
            self.ledger.add(event)
            self.watch.add(event)

    def live(self, present: Present) -> dict[str, str]:
        """What a page shows that was opened now."""
        self.pages = self.made()
        response = self.pages["/live"](present)
        found = re.fullmatch(rb"retry: 1000\ndata: (.*)\n\n", response.body)
        assert found
        assert response.content_type == "text/event-stream"
        return dict(json.loads(found[1]))


def begun(number: int) -> list[ev.Event]:
    return [
        ev.RoundFormed(number, 1, ("a",), 2, 0, "first", 0.1),
        ev.OrderReceived("form", number, 1, "first", workers=2),
        ev.TrainingBegun(number, 0, 0, 100, 0.0),
        ev.FirstStep(number, 1),
    ]


def test_a_run_in_progress_is_drawn_until_now() -> None:
    served = Served()
    served.add(*begun(1))
    served.at += 9
    found = served.live(Present("running", 1, 1, 2, 2, step=10))
    assert "goodput 83.3 %: 10.0 of 12.0 s in 10 steps; 0 incidents" in found["summary"]
    assert "round 1: world size 2, steps 0 to 10; trains" in found["rounds"]
    assert "12.0 s" in found["rounds"]
    assert "doing'>trains<" in found["now"]
    assert served.ledger.goodput(10) == (True, 10 / 12)
    served.add(ev.RoundSteps(1, 0, 12, 11.0))
    assert "in 12 steps" in served.live(Present("running", step=12))["summary"]


def test_the_page_of_a_node_that_does_not_lead_says_so() -> None:
    """It has the world size of a round all the same."""
    served = Served()
    served.add(*begun(1))
    assert "does not lead" not in served.live(Present("running", 1, step=1))["summary"]
    follower = Served()
    ordered = ev.OrderReceived("form", 2, 1, "first", workers=1, world_size=3)
    follower.add(ordered, ev.TrainingBegun(2, 0, 0, 100, 0.0), ev.FirstStep(2, 1))
    found = follower.live(Present("running", 2, step=1))
    assert "Node a does not lead" in found["summary"]
    assert "world size up to 3" in found["rounds"]


def test_it_is_drawn_as_the_report_is() -> None:
    served = Served()
    served.add(*begun(1), ev.RoundBroken(1, "crash", "<b>", 3.0, ""), *begun(2))
    parts = served.live(Present("running", 2, step=5))
    whole = served.ledger.drawn(
        lambda chronicle, told, ledger: as_page("r", Host("a", chronicle, (), tuple(told)), ledger), 5
    )
    for name in ("summary", "rounds", "incidents"):
        assert parts[name] in whole
    assert "<b>" not in json.dumps(parts)


def test_the_page_needs_no_other_host_and_shows_names_as_text() -> None:
    text = Served().pages["/"](Present("running")).body.decode()
    assert "Run &lt;r&gt;" in text
    assert not re.search(r"https?://|src=|href=|@import|url\(", text)
    assert "default-src 'none'" in text
    assert "new EventSource(base + 'live')" in text, "below the page, which a proxy may serve below a path"
    assert "fetch(base + 'log?rank='" in text
    assert "Here are the ranks of node a." in text


def test_many_readers_are_shown_what_was_drawn_for_one() -> None:
    served = Served()
    first = served.pages["/live"](Present("running", step=1))
    assert served.pages["/live"](Present("running", step=2)) is first


def test_of_many_rounds_the_last_are_drawn() -> None:
    served = Served()
    for number in range(1, MOST + 50):
        served.add(*begun(number), ev.RoundBroken(number, "crash", "x", 1.0, ""))
    found = served.live(Present("running", MOST + 49))
    assert found["rounds"].count("class='round'") <= MOST
    assert f"round {MOST + 49}: " in found["rounds"]
    assert found["incidents"].count("<tr><td") <= MOST
    assert len(build(served.ledger._chronicle).incidents) > MOST


def test_charts_have_the_time_of_the_run_and_its_incidents() -> None:
    served = Served()
    assert served.live(Present("running"))["charts"] == ""
    served.add(*begun(1))
    for steps, loss in ((2, 0.5), (4, None), (4, 0.1), (8, 0.25)):
        served.at += 4
        served.history.add(Present("running", trained=steps, trained_s=0.5 * steps, loss=loss, lr=0.1))
    served.add(ev.RoundBroken(1, "crash", "<b>", 3.0, ""), *begun(2))
    charts = served.live(Present("running", 2, step=5))["charts"]
    captions = re.findall(r"<figcaption>(.*?)<span>(.*?)</span>", charts)
    assert captions == [
        ("loss: 0.25", "0.25 to 0.5"),
        ("seconds per step: 0.5 s", "0.5 to 0.5"),
        ("learning rate: 0.1", "0.1 to 0.1"),
    ]
    assert [len(points.split()) for points in re.findall(r"points='(.*?)'", charts)] == [2, 3, 3]
    assert charts.count("class='still'") == 3
    assert "incident 1: crash (&lt;b&gt;)" in charts


def test_a_value_that_stays_is_drawn_in_the_middle_above_a_time_axis() -> None:
    served = Served()
    served.add(*begun(1))
    for steps, loss in ((2, 0.5), (4, 0.1)):
        served.at += 4
        served.history.add(Present("running", trained=steps, trained_s=0.5 * steps, loss=loss, lr=0.1))
    charts = served.live(Present("running", 1, step=4))["charts"]
    heights = [[float(x.split(",")[1]) for x in y.split()] for y in re.findall(r"points='(.*?)'", charts)]
    assert heights == [[4.0, 128.0], [66.0, 66.0], [66.0, 66.0]]
    assert charts.count("<span>+0.0 s</span>") == charts.count("<span>+11.0 s</span>") == 3


def test_what_has_not_changed_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "REDRAW", 0.0)
    served = Served()
    served.add(*begun(1))
    served.at += 1000
    step = 0

    def drawn() -> dict[str, str]:
        nonlocal step
        step += 1
        body = served.pages["/live"](Present("running", 1, step=step)).body
        return dict(json.loads(body.decode().splitlines()[1].removeprefix("data: ")))

    def sample(trained: int) -> None:
        served.history.add(Present("running", trained=trained, trained_s=1.0 * trained, loss=0.5 * trained))

    sample(1)
    first = drawn()
    served.at += STILL
    second = drawn()
    assert [second[name] == first[name] for name in ("charts", "rounds", "incidents", "summary")] == [True] * 3 + [
        False
    ]
    sample(2)
    assert drawn()["charts"] == second["charts"], "a sample waits for others"
    served.at += 0.1
    third = drawn()
    assert third["charts"] != second["charts"]
    assert third["rounds"] == second["rounds"]
    served.at += 20
    fourth = drawn()
    assert fourth["rounds"] != third["rounds"], "a hundredth of the time has passed"
    served.add(ev.RoundBroken(1, "crash", "b", 3.0, ""))
    fifth = drawn()
    assert fifth["charts"] != fourth["charts"]
    served.at += 1
    assert drawn()["incidents"] != fifth["incidents"], "an incident that lasts grows"


def test_a_long_run_keeps_a_bounded_number_of_samples_of_all_of_it() -> None:
    served = Served()
    for step in range(1, 20 * SAMPLES):
        served.at += 1
        served.history.add(Present("running", trained=step, trained_s=2.0 * step, loss=1.0))
    samples = served.history.samples()
    assert SAMPLES / 3 < len(samples) <= SAMPLES
    assert {sample.step_s for sample in samples} == {2.0}
    gaps = [after.at - before.at for before, after in pairwise(samples)]
    assert max(gaps) <= 3 * min(gaps)
    assert served.at - samples[-1].at <= max(gaps)
    assert samples[0].at - 100 <= max(gaps)


def test_the_output_is_that_of_ranks_of_the_node() -> None:
    show, present = Served().pages["/log"], Present("running", ranks=(2, 3))
    response = show(present, "rank=3")
    assert (response.status, response.body.decode()) == (200, "<3>\nb\n")
    assert response.content_type.startswith("text/plain")
    for query in ("", "rank=1", "rank=-1", "rank=x", "rank=3&x=1", "rank=\u0663"):
        response = show(present, query)
        assert response.status == 404
        assert response.body.decode().startswith("Write /log?rank=N. The ranks of this node are: 2, 3. ")
    assert "The ranks of this node are: none." in show(Present("waiting"), "rank=0").body.decode()


def test_the_nodes_are_shown_as_the_leader_sees_them() -> None:
    served = Served()
    told = standing(
        a.NodeStatus("<c>", "10.0.0.3", 1, "spare", 0.4),
        a.NodeStatus("b", "10.0.0.2", 1, "training", 4.2, (2, 2), "late", 7),
        a.NodeStatus("a", "10.0.0.1", 2, "training", 0.2, (0, 1), "train", 8),
    )
    served.roster.answer = LastStatus(told, time.monotonic())
    found = served.live(Present("running"))["nodes"]
    assert re.findall(r"<tr><td>(.*?)</td></tr>", re.sub(r"</td><td[^>]*>", "|", found)) == [
        "a (leads)|10.0.0.1|training|0-1|2 train|8",
        "b|10.0.0.2|training, silent for 4 s|2|1 make no step|7",
        "&lt;c&gt;|10.0.0.3|spare|-|1|-",
    ]
    assert "<p>" not in found
    status = json.loads(shown(served, "/status").body)["roster"]
    assert (status["nodes"][1]["node_id"], status["nodes"][1]["step"], status["problem"]) == ("b", 7, "")
    assert 0 <= status["age"] < 5


def test_a_table_that_is_old_says_so() -> None:
    served = Served()
    assert "<p>The leader is asked.</p>" in served.live(Present("running"))["nodes"]
    told = standing(a.NodeStatus("a", "10.0.0.1", 2, "training", 0.2))
    served.roster.answer = LastStatus(told, time.monotonic() - 12.2, "<it> is silent.")
    found = served.live(Present("running"))["nodes"]
    assert "<p>This is how it was 12 s ago.</p><p>The leader does not answer: &lt;it&gt; is silent.</p>" in found
    assert "<td>a (leads)</td>" in found
    served.roster.answer = LastStatus(told, time.monotonic() - 7)
    assert "7 s ago.</p><div" in served.live(Present("running"))["nodes"]


def test_of_many_nodes_those_are_shown_first_that_do_not_train() -> None:
    served = Served()
    nodes = [a.NodeStatus(f"n{x}", "10.0.0.1", 1, "training", 0.1, (x, x)) for x in range(MOST + 20)]
    nodes[MOST + 5] = a.NodeStatus("quiet", "10.0.0.1", 1, "training", 60.0, (MOST + 5, MOST + 5))
    served.roster.answer = LastStatus(standing(*nodes, a.NodeStatus("last", "10.0.0.1", 1, "waiting", 0.1)), 1.0)
    found = served.live(Present("running"))["nodes"]
    assert found.count("<tr><td>") == MOST
    assert "<td>quiet</td>" in found
    assert "<td>last</td>" in found
    assert f"{MOST} of {MOST + 21} nodes" in found


def test_the_status_waits_a_moment_for_the_leader() -> None:
    served = Served()
    shown(served, "/status")
    served.live(Present("running"))
    assert served.roster.waited == [FRESH, 0.0], "the page does not wait"


def shown(served: Served, path: str, query: str = "") -> HttpResponse:
    response = served.pages[path](Present("running"), query)
    assert response is not None
    return response

"""What ``--http`` shows of a run, without an agent."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

from elastic_agents.probes.http_server import HttpResponse
from elastic_agents.probes.pages import node_pages
from elastic_agents.probes.roster import FRESH, LastStatus, Roster
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.events import types as ev
from elastic_launch.failure import Suspect
from elastic_launch.observe.document import MOST, document
from elastic_launch.observe.history import MOST as SAMPLES
from elastic_launch.observe.history import History
from elastic_launch.observe.ledger import build
from elastic_launch.observe.live import LiveLedger
from elastic_launch.observe.metrics import NodeMetrics
from elastic_launch.observe.node_watch import NodeWatch
from elastic_launch.observe.present import HowEnded, Present
from elastic_launch.observe.reading import Host
from elastic_launch.rendezvous.admin import messages as a
from elastic_launch.system.host_load import HostLoad


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

    def live(self, present: Present) -> dict[str, Any]:
        """What a page shows that was opened now."""
        self.pages = self.made()
        response = self.pages["/live"](present, "")
        assert response.content_type == "application/json"
        return dict(json.loads(response.body))


def begun(number: int) -> list[ev.Event]:
    return [
        ev.RoundFormed(number, 1, ("a",), 2, 0, "first", 0.1),
        ev.OrderReceived("form", number, 1, "first", workers=2),
        ev.TrainingBegun(number, 0, 0, 100, 0.0),
        ev.FirstStep(number, 1),
    ]


def test_a_run_in_progress_is_shown_until_now() -> None:
    served = Served()
    served.add(*begun(1))
    served.at += 9
    found = served.live(Present("running", 1, 1, 2, 2, step=10))
    assert "goodput 83.3 %: 10.0 of 12.0 s in 10 steps; 0 incidents" in found["summary"]
    assert [bar["text"] for bar in found["rounds"]] == ["round 1: world size 2, steps 0 to 10; trains "]
    assert (found["since"], found["until"]) == (0.0, 12.0)
    assert found["now"]["doing"] == "trains"
    assert served.ledger.goodput(10) == (True, 10 / 12)
    served.add(ev.RoundSteps(1, 0, 12, 11.0))
    assert "in 12 steps" in served.live(Present("running", step=12))["summary"]


def test_the_end_is_shown_at_once_with_what_is_saved_and_lost() -> None:
    """While the run saves its state, no step is known to be lost."""
    served = Served()
    served.add(*begun(1), ev.RoundSteps(1, 0, 34, 3.0), ev.RunEnded(91, "crash", 1, 1, 9.0))
    pages = served.made()
    before = json.loads(pages["/live"](Present("saving", 1, step=34), "").body)
    assert "34 steps" in before["summary"]
    assert "lost" not in before["summary"]
    assert "end" not in before["now"]["doing"]
    served.add(ev.CheckpointSaved(1, 34, "/c"), ev.NodeEnded(91, "crash", "step 34 is saved in /c", ""))
    last = Present(
        "ended", 1, step=34, end=HowEnded(91, "crash", True, "step 34 is saved in /c", "root cause: x\n    y")
    )
    found = json.loads(pages["/live"](last, "").body)
    assert found["now"]["doing"] == "the run has ended with exit code 91: crash"
    assert found["lines"] == ["root cause: x", "    y"]
    assert found["now"]["safe"] == "step 34 is saved in /c"
    assert found["now"]["ended"]
    assert ", no steps lost" in found["summary"]
    status = json.loads(pages["/status"](last, "").body)
    assert (status["phase"], status["end"]["code"], status["end"]["cause"]) == ("ended", 91, "crash")
    metrics = pages["/metrics"](last, "").body.decode()
    assert 'elastic_launch_exit_code{node="a",run_id="<r>"} 91.0' in metrics
    assert 'elastic_launch_ended{node="a",run_id="<r>"} 1.0' in metrics
    left = served.live(replace(last, end=HowEnded(143, "SIGTERM", False)))
    assert left["now"]["doing"] == "this node's part of the run has ended with exit code 143: SIGTERM"


def test_the_page_of_a_node_that_does_not_lead_says_so() -> None:
    """It has the world size of a round all the same."""
    served = Served()
    served.add(*begun(1))
    assert len(served.live(Present("running", 1, step=1))["notes"]) == 1
    follower = Served()
    ordered = ev.OrderReceived("form", 2, 1, "first", workers=1, world_size=3)
    follower.add(ordered, ev.TrainingBegun(2, 0, 0, 100, 0.0), ev.FirstStep(2, 1))
    found = follower.live(Present("running", 2, step=1))
    assert "Node a does not lead" in found["notes"][1]
    assert "world size up to 3" in found["label"]


def test_it_has_the_document_of_a_report() -> None:
    served = Served()
    served.add(*begun(1), ev.RoundBroken(1, "crash", "<b>", 3.0, ""), ev.CheckpointSaved(1, 3, "/x"), *begun(2))
    parts = served.live(Present("running", 2, step=5))
    whole = served.ledger.drawn(
        lambda chronicle, told, ledger: document(Host("a", chronicle, (), tuple(told)), ledger), 5
    )
    same = whole.keys() - {"nodes", "now", "zero"}
    assert {name: parts[name] for name in same} == json.loads(json.dumps({name: whole[name] for name in same}))
    assert [(mark["tone"], mark["text"]) for mark in parts["marks"]] == [
        ("bad", "round 1 broken after 3.0 s: <b>"),
        ("good", "checkpoint of step 3 saved in /x"),
    ]


def test_the_page_needs_no_other_host_and_shows_names_as_text() -> None:
    text = Served().pages["/"](Present("running"), "").body.decode()
    assert "Run &lt;r&gt;" in text
    assert not re.search(r"https?://|src=|href=|@import|url\(", text)
    assert "default-src 'none'" in text
    assert "fetch(base + path" in text, "below the page, which a proxy may serve below a path"
    assert '"node": "a"' in text


def test_many_readers_are_shown_what_was_made_for_one() -> None:
    served = Served()
    first = served.pages["/live"](Present("running", step=1), "")
    assert served.pages["/live"](Present("running", step=2), "") == first


def test_of_many_rounds_the_last_are_shown() -> None:
    served = Served()
    for number in range(1, MOST + 50):
        served.add(*begun(number), ev.RoundBroken(number, "crash", "x", 1.0, ""))
    found = served.live(Present("running", MOST + 49))
    assert len(found["rounds"]) == MOST
    assert found["rounds"][-1]["text"].startswith(f"round {MOST + 49}: ")
    assert found["since"] == found["rounds"][0]["since"] > 0
    assert all(mark["at"] >= found["since"] for mark in found["marks"])
    assert len(found["incidents"]) == MOST
    assert len(build(served.ledger._chronicle).incidents) > MOST


def test_charts_have_the_time_of_the_run_and_its_incidents() -> None:
    served = Served()
    assert served.live(Present("running"))["charts"] == []
    served.add(*begun(1))
    for steps, loss in ((2, 0.5), (4, None), (4, 0.1), (6, math.nan), (8, 0.25)):
        served.at += 4
        served.history.add(Present("running", trained=steps, trained_s=0.5 * steps, loss=loss, lr=0.1))
    served.add(ev.RoundBroken(1, "crash", "<b>", 3.0, ""), *begun(2))
    found = served.live(Present("running", 2, step=5))
    assert [(chart["name"], chart["unit"]) for chart in found["charts"]] == [
        ("loss", ""),
        ("seconds per step", " s"),
        ("learning rate", ""),
    ]
    assert found["charts"][0]["points"] == [[7.0, 0.5], [23.0, 0.25]], "not a number is not drawn"
    assert [len(chart["points"]) for chart in found["charts"]] == [2, 4, 4]
    assert found["incidents"][0]["text"].startswith("incident 1: crash (<b>)")


def test_an_incident_that_lasts_grows() -> None:
    served = Served()
    served.add(*begun(1), ev.RoundBroken(1, "crash", "b", 3.0, ""))
    (before,) = served.live(Present("waiting"))["incidents"]
    served.at += 7
    (after,) = served.live(Present("waiting"))["incidents"]
    assert (after["since"], after["until"] - before["until"]) == (before["since"], 7.0)


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
        a.NodeStatus("b", "10.0.0.2", 1, "training", 4.2, (2, 2), "late", 7, HostLoad(51, 3 << 29, 64 << 30)),
        a.NodeStatus("a", "10.0.0.1", 2, "training", 0.2, (0, 1), "train", 8),
    )
    served.roster.answer = LastStatus(told, time.monotonic())
    found = served.live(Present("running"))["nodes"]
    assert found["rows"] == [
        ["a (leads)", "10.0.0.1", "training", "0-1", "2 train", 8, None],
        ["b", "10.0.0.2", "training, silent for 4 s", "2", "1 make no step", 7, "CPU 51 %, 1.5 of 64 GiB"],
        ["<c>", "10.0.0.3", "spare", None, "1", None, None],
    ]
    assert len(found["heads"]) == 7
    assert found["about"] == []
    status = json.loads(shown(served, "/status").body)["roster"]
    assert (status["nodes"][1]["node_id"], status["nodes"][1]["step"], status["problem"]) == ("b", 7, "")
    assert status["nodes"][1]["load"] == {"cpu": 51, "used": 3 << 29, "total": 64 << 30, "gpus": []}
    assert 0 <= status["age"] < 5


def test_the_node_and_the_rank_in_question_are_marked() -> None:
    """Not a node whose name begins like it."""
    served = Served()
    nodes = [a.NodeStatus(name, "10.0.0.1", 1, "stopping", 0.1) for name in ("b", "b.x", "b-1", "c")]
    served.roster.answer = LastStatus(standing(*nodes), time.monotonic())
    served.add(*begun(1), ev.StragglerFound(1, 0, "c", "compute", 2.0))
    served.add(ev.RoundBroken(1, "crash", "rank 1 on node c: exit code 1", 3.0, "", 1, (Suspect("b", 1),)))
    found = served.live(Present("stopping", 1))
    table = found["nodes"]
    assert [(row[0], row[2]) for row in table["rows"]] == [
        ("b", "stopping, rank 1 in question"),
        ("b-1", "stopping"),
        ("b.x", "stopping"),
        ("c", "stopping, rank 0 is slow"),
    ]
    assert table["marked"] == [0, 3]
    assert (found["now"]["state"], found["now"]["happened"][0][1][:14]) == ("standing still", "round 1 broken")


def test_a_table_that_is_old_says_so() -> None:
    served = Served()
    assert served.live(Present("running"))["nodes"]["about"] == ["Waiting for the leader's answer."]
    told = standing(a.NodeStatus("a", "10.0.0.1", 2, "training", 0.2))
    served.roster.answer = LastStatus(told, time.monotonic() - 12.2, "<it> is silent.")
    found = served.live(Present("running"))["nodes"]
    assert found["about"] == ["This is how it was 12 s ago.", "The leader does not answer: <it> is silent."]
    assert found["rows"][0][0] == "a (leads)"
    served.roster.answer = LastStatus(told, time.monotonic() - 7)
    assert served.live(Present("running"))["nodes"]["about"] == ["This is how it was 7 s ago."]
    served.roster.answer = LastStatus(told, time.monotonic() - 2.2, "It has ended.")
    last = Present("ended", end=HowEnded(0, "done", run=True))
    assert served.live(last)["nodes"]["about"] == ["This is how it was before the end, 2 s ago."]


def test_of_many_nodes_those_are_shown_first_that_do_not_train() -> None:
    served = Served()
    nodes = [a.NodeStatus(f"n{x}", "10.0.0.1", 1, "training", 0.1, (x, x)) for x in range(MOST + 20)]
    nodes[MOST + 5] = a.NodeStatus("quiet", "10.0.0.1", 1, "training", 60.0, (MOST + 5, MOST + 5))
    served.roster.answer = LastStatus(standing(*nodes, a.NodeStatus("last", "10.0.0.1", 1, "waiting", 0.1)), 1.0)
    found = served.live(Present("running"))["nodes"]
    assert len(found["rows"]) == MOST
    assert {"quiet", "last"} <= {row[0] for row in found["rows"]}
    assert f"{MOST} of {MOST + 21} nodes" in found["about"][-1]


def test_the_status_waits_a_moment_for_the_leader() -> None:
    served = Served()
    shown(served, "/status")
    served.live(Present("running"))
    assert served.roster.waited == [FRESH, 0.0], "the page does not wait"


def shown(served: Served, path: str, query: str = "") -> HttpResponse:
    return served.pages[path](Present("running"), query)

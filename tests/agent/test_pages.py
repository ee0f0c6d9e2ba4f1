"""What ``--http`` shows of a run, without an agent."""

from __future__ import annotations

import json
import re

from elastic_agents.probes.pages import node_pages
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.events import types as ev
from elastic_launch.observe.ledger import build
from elastic_launch.observe.live import LiveLedger
from elastic_launch.observe.metrics import NodeMetrics
from elastic_launch.observe.page import MOST, as_page
from elastic_launch.observe.present import Present
from elastic_launch.observe.reading import Host
from elastic_launch.observe.watch import Watch


class Served:
    """The pages of a node, whose clock the test sets."""

    def __init__(self) -> None:
        self.at = 100.0
        self.ledger = LiveLedger(self)
        self.watch = Watch(self, self.ledger)
        config = LaunchConfig(run_id="<r>", node_id="a")
        self.made = lambda: node_pages(config, NodeMetrics("<r>", "a", "1"), self.ledger, self.watch)
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

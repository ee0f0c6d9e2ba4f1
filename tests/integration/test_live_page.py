"""The page of a run in a real browser."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, browser
from changes import Changes
from harness import Job, asked, free_port, wait_for

from elastic_launch.events import types as ev
from elastic_launch.observe.chronicle import Chronicle
from elastic_launch.observe.document import NodeTable, Now, document
from elastic_launch.observe.document import page as html
from elastic_launch.observe.history import Sample
from elastic_launch.observe.ledger import build
from elastic_launch.observe.reading import Host

FIGURES = (
    "Object.fromEntries([...document.querySelectorAll('dt')].map(x => [x.textContent, x.nextSibling.textContent]))"
)
CHARTS = (
    "[...document.querySelectorAll('#charts figure')].map(x => ["
    "x.querySelector('figcaption').textContent.split(':')[0], "
    "x.querySelector('polyline').points.length, x.querySelectorAll('.still').length])"
)


def figure(page: Browser, name: str) -> str:
    return str(page.value(FIGURES).get(name, ""))


def number(page: Browser, selector: str) -> int:
    return int(page.value(f"document.querySelectorAll({selector!r}).length"))


def text(page: Browser, selector: str) -> str:
    return str(page.value(f"document.querySelector({selector!r}).innerText"))


def nodes(page: Browser) -> str:
    """The table of nodes, a line for each."""
    cells = "[...row.cells].map(cell => cell.textContent).join('|')"
    return str(page.value(f"[...document.querySelectorAll('#nodes tbody tr')].map(row => {cells}).join('\\n')"))


def luminance(colour: str) -> float:
    """Of a colour as a browser names it; https://www.w3.org/TR/WCAG21/#dfn-relative-luminance."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(page: Browser, selector: str) -> float:
    of = "getComputedStyle(document.querySelector({})).{}".format
    colours = page.value(of(repr(selector), "color")), page.value(of("'body'", "backgroundColor"))
    least, most = sorted(map(luminance, colours))
    return (most + 0.05) / (least + 0.05)


PREFIX = "/jobs/run1"


@contextlib.contextmanager
def proxied(port: int) -> Iterator[str]:
    """A reverse proxy that serves a page below a path, which it takes away; yields the page's address there.

    It sends a response once it has all of it.
    """

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            under = self.path == PREFIX or self.path.startswith(f"{PREFIX}/")
            path = self.path.removeprefix(PREFIX) or "/" if under else "/none"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
                    status, content, body = answer.status, answer.headers["Content-Type"], answer.read()
            except OSError:  # an HTTPError, too
                status, content, body = 502, "text/html", b"<h1>Bad Gateway</h1>"
            self.send_response(status)
            self.send_header("Content-Type", content)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the browser has gone on
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{PREFIX}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.system
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_the_page_tells_of_a_node_that_joins_and_a_killed_worker(job: Job) -> None:
    """One page, which is never loaded again, shows both as they happen; then everything is used by keyboard.

    It is below a path of a proxy.
    """
    saves = ["--checkpoint", str(job.directory / "checkpoints"), "--every", "4", "--say", "a line of a worker"]
    changes, port = Changes(job, *saves, live=True, step_time=0.4), free_port()
    with proxied(port) as address, browser() as page:
        a = changes.node("a", "--http", str(port))
        changes.trains(1)
        assert "world_size" in asked(f"{address}/status")[1]
        assert "elastic_launch_world_size" in asked(f"{address}/metrics")[1]
        for at in (f"http://127.0.0.1:{port}/", f"{address}/", address):
            page.open(at)
            wait_for("a live page", lambda: page.value("document.getElementById('state')?.textContent") == "live")
        wait_for("one node", lambda: figure(page, "world size") == "1 on 1 node: a 1")
        wait_for("its row", lambda: re.fullmatch(r"a \(leads\)\|.*\|training\|0\|1 train\|\d+\|.*", nodes(page)))
        b = changes.node("b")
        wait_for("both nodes", lambda: figure(page, "world size") == "2 on 2 nodes: a 1, b 1")
        before = changes.trains(2)
        row = r"{}\|127.0.0.1\|training\|{}\|1 train\|\d+\|.*"
        both = row.format(r"a \(leads\)", 0) + "\n" + row.format("b", 1)
        wait_for("both rows", lambda: re.fullmatch(both, nodes(page)))
        wait_for("the resize", lambda: "membership, drained" in text(page, "#incidents"))
        os.kill([int(x["pid"]) for x in job.started() if x["env"]["NODE"] == "b"][-1], signal.SIGKILL)
        changes.trains(2, after=before)
        wait_for(
            "the crash", lambda: "crash" in text(page, "#incidents") and "trains; incident" in text(page, ".doing")
        )
        wait_for("a checkpoint", lambda: figure(page, "checkpoint"))

        incidents = number(page, "#incidents tbody tr")
        assert incidents >= 2
        assert number(page, "#rounds .round") == max(event["round"] for event in job.events("round_formed"))
        assert number(page, "#rounds .still") == incidents
        assert number(page, "#rounds .good") > 0
        charts: list[list[Any]] = page.value(CHARTS)
        assert [name for name, _, _ in charts] == ["loss", "seconds per step", "learning rate"]
        assert all(points > 1 and still == incidents for _, points, still in charts), charts
        assert "learning rate: 0.05" in text(page, "#charts")

        if shown := os.environ.get("PAGE_PICTURE"):  # for docs/live-page.png
            page.picture(Path(shown), 1000)
        chosen_by_keyboard(page)
        wait_for("the rank's output", lambda: "a line of a worker" in text(page, "#log"))
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/log?rank=../../etc/passwd")
        page.width(360)
        assert page.value("document.documentElement.scrollWidth") == 360
        backs = []
        for scheme in ("light", "dark"):
            page.colours(scheme)
            backs.append(page.value("getComputedStyle(document.body).backgroundColor"))
            for selector in ("body", ".dim", "dt", "figcaption", "#log"):
                assert contrast(page, selector) > 4.5, (scheme, selector)
        assert luminance(backs[0]) > 0.9 > 0.1 > luminance(backs[1])
        assert page.errors == []
        changes.hurry()
        assert [agent.wait(60) for agent in (a, b)] == [0, 0]
        wait_for("the end", lambda: text(page, "#headline").startswith("the run has ended with exit code 0: "))
        assert text(page, "#state") == "no longer updated"
        assert figure(page, "world size"), "what was shown last stays"


CHART = "[...document.querySelectorAll('#charts polyline')].map(x => x.getAttribute('points'))"


@pytest.mark.system
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_a_report_is_drawn_from_its_file(tmp_path: Path) -> None:
    """Texts stay texts, a value that stays is drawn in the middle, and nothing is loaded."""
    bad = "</script><img src=x onerror=alert(1)>"
    chronicle, told = Chronicle(), []
    for at, event in (
        (10.0, ev.RoundFormed(1, 1, ("a", "b"), 2, 0, "first", 2.0)),
        (11.0, ev.TrainingBegun(1, 0, 0, 50, 0.0)),
        (12.0, ev.FirstStep(1, 1)),
        (20.0, ev.CheckpointSaved(1, 9, "/x")),
        (30.0, ev.RoundBroken(1, "crash", bad, 20.0, "")),
        (31.0, ev.RoundFormed(2, 1, ("a",), 1, 1, "crash", 1.0)),
        (32.0, ev.TrainingBegun(2, 0, 9, 50, 0.0)),
        (33.0, ev.FirstStep(2, 10)),
        (50.0, ev.RunEnded(0, "all workers finished", 1, 2, 40.0)),
    ):
        chronicle.add(at, event)
        told.append((at, event))
    samples = [Sample(15.0, 0.1, 0.5, 0.1), Sample(40.0, 0.1, 0.1, 0.1)]
    table: NodeTable = {"about": [], "heads": ["node", "failed"], "rows": [["<a>", 1], ["b", None]]}
    host = Host("a", chronicle, (), tuple(told))
    shown = document(host, build(chronicle), lines=["ended <b>"], samples=samples, nodes=table)
    path = tmp_path / "report.html"
    path.write_text(html("Run <r>", shown))
    with browser() as page:
        page.open(f"file://{path}")
        wait_for("a drawn page", lambda: page.value("document.querySelectorAll('.round').length") == 2)
        assert text(page, "h1") == "Run <r>"
        assert text(page, "#lines") == "ended <b>"
        assert bad in text(page, "#incidents")
        assert nodes(page) == "<a>|1\nb|-"
        assert [number(page, f"#rounds {kind}") for kind in (".still", ".mark.good", ".mark.bad")] == [1, 1, 1]
        assert number(page, "#legend rect") == 6
        assert number(page, ".ticks span") == 4 * 5
        assert text(page, ".ticks").split("\n") == ["+0.0 s", "+10.0 s", "+20.0 s", "+30.0 s", "+40.0 s"]
        heights = [[float(x.split(",")[1]) for x in points.split()] for points in page.value(CHART)]
        assert heights == [[4.0, 128.0], [66.0, 66.0], [66.0, 66.0]]
        assert page.value("getComputedStyle(document.querySelector('#incidents rect')).fill") == "rgb(179, 89, 0)"
        assert [number(page, f"{part}:not([hidden])") for part in ("#live", "#now", "#output", "#roster")] == [
            0,
            0,
            0,
            1,
        ]
        assert page.errors == []


WORDS = ("starting", "training", "changing", "standing still", "parked", "saving", "ended", "failed")
AXE = "axe.run().then(found => found.violations.map(it => [it.id, it.nodes.map(node => node.html)]))"
VISIBLE = (
    "[...document.querySelectorAll('#incidents td')].filter(it => {"
    "const box = it.getBoundingClientRect(); return box.width && box.left >= 0 && box.right <= innerWidth;"
    "}).map(it => it.dataset.head)"
)


@pytest.mark.system
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.skipif(not find_spec("axe_playwright_python"), reason="needs axe-playwright-python, for its axe-core")
def test_the_page_is_accessible_in_each_state(tmp_path: Path) -> None:
    """In light and dark colours, wide and on a phone, which shows cause, cost and lost steps of an incident."""
    chronicle = Chronicle()
    for at, event in (
        (10.0, ev.RoundFormed(1, 1, ("a", "b"), 2, 0, "first", 2.0)),
        (11.0, ev.TrainingBegun(1, 0, 0, 50, 0.0)),
        (12.0, ev.FirstStep(1, 1)),
        (30.0, ev.RoundBroken(1, "crash", "rank 1 on node b: " + 9 * "/a/long/path", 20.0, "")),
    ):
        chronicle.add(at, event)
    heads = ["node", "address", "state", "ranks", "workers", "step", "load"]
    row = ["b", "::1", "x", "1", "1", 3, "CPU 51 %, 12 of 64 GiB; GPU 97 97 %, 71 71 of 80 GiB"]
    table: NodeTable = {"about": ["old"], "heads": heads, "rows": [row], "marked": [0]}
    spec = find_spec("axe_playwright_python")
    assert spec is not None
    assert spec.origin is not None
    axe = (Path(spec.origin).parent / "axe.min.js").read_text()
    with browser() as page:
        for number, word in enumerate(WORDS):
            now: Now = {
                "node": "a",
                "state": word,
                "since": 1.0,
                "safe": "step 3 is saved",
                "happened": [(2.0, "x")],
                "doing": "x",
                "figures": [("step", "3")],
                "ranks": [0],
                "ended": number > 5,
            }
            shown = document(Host("a", chronicle, (), (), 1e9), build(chronicle), lines=["x"], nodes=table, now=now)
            path = tmp_path / f"{number}.html"
            path.write_text(html("Run r", shown))
            page.open(f"file://{path}")
            wait_for(word, lambda: page.value("document.getElementById('shape')?.textContent"))
            assert word in page.value("document.title") or "no answer" in page.value("document.title")
            page.ask("Runtime.evaluate", expression=axe)
            for scheme, width in (("light", 1000), ("dark", 1000), ("light", 360), ("dark", 360)):
                page.colours(scheme)
                page.width(width)
                found = page.ask("Runtime.evaluate", expression=AXE, awaitPromise=True, returnByValue=True)
                assert found["result"]["value"] == [], (word, scheme, width)
            assert {"cause", "stood still", "steps lost"} <= set(page.value(VISIBLE))
            if word == "starting":  # no agent answers; a page that has the end keeps it
                wait_for("a headline that says so", lambda: page.value("document.title") == "no answer - Run r")
                assert text(page, "#headline") == "Before: starting; x"
            assert now["ended"] == (text(page, "#state") == "no longer updated")
        assert page.errors == []


def chosen_by_keyboard(page: Browser) -> None:
    """Choose a rank's output with keys alone."""
    for pressed in count():
        assert pressed < 10
        if page.value("document.activeElement.id") == "rank":
            break
        page.press("Tab")
    page.press("ArrowDown")
    wait_for("a chosen rank", lambda: page.value("document.getElementById('rank').value") != "")
    page.press("Tab")
    assert page.value("document.activeElement.id") == "log"

"""The page of a run in a real browser."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile

import pytest
from changes import Changes
from harness import SLOWNESS, Job, free_port, read_lines, wait_for


def seen_at(url: str) -> str:
    """What Chromium makes of a page, as HTML, a few seconds after it was loaded."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
        command = ["chromium", *flags, "--virtual-time-budget=3000", "--dump-dom", url]
        return subprocess.run(command, capture_output=True, text=True, timeout=60 * SLOWNESS).stdout


def told(job: Job) -> list[str]:
    """The nodes that have told of the first step of the newest round."""
    newest = ("first_step", max(event["round"] for event in job.events("round_formed")))
    files = {path.stem.removeprefix("events-"): read_lines(path) for path in job.logged("events-*.jsonl")}
    return sorted(node for node, lines in files.items() if newest in [(x["event"], x.get("round")) for x in lines])


@pytest.mark.system
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_the_page_tells_of_a_node_that_joins_and_a_killed_worker(job: Job) -> None:
    changes, port = Changes(job, live=True, step_time=0.4), free_port()
    a = changes.node("a", "--http", str(port))
    changes.trains(1)
    b = changes.node("b")
    before = changes.trains(2)
    os.kill([int(x["pid"]) for x in job.started() if x["env"]["NODE"] == "b"][-1], signal.SIGKILL)
    changes.trains(2, after=before)
    wait_for("the incident's end", lambda: told(job) == ["a", "b"])
    page = seen_at(f"http://127.0.0.1:{port}/")
    assert re.search(r'role="status"[^>]*>live<', page)
    assert re.search(r'class="doing">trains; incident \d+ cost [\d.]+ s: crash', page)
    assert re.search(r"<dt>world size</dt><dd>2 on 2 nodes: a 1, b 1<", page)
    assert re.search(r"<dt>loss</dt><dd>[\d.]+<", page)
    assert page.count('class="round"') == max(event["round"] for event in job.events("round_formed"))
    assert "<td>membership, drained</td>" in page
    assert "<td>crash</td>" in page
    changes.hurry()
    assert [agent.wait(60) for agent in (a, b)] == [0, 0]

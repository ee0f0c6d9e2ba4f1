"""The wall clock, which may jump, is only displayed: no decision depends on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "elastic_launch").rglob("*.py"), *(ROOT / "agents").rglob("*.py")])

WALL = {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime", "asctime", "clock_gettime", "clock_gettime_ns"}
"""What the module ``time`` tells by the wall clock."""

FILE_TIMES = {"st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns", "getmtime", "getctime"}

DATES = {"now", "utcnow", "today"}
"""What ``datetime.datetime`` and ``datetime.date`` tell by the wall clock."""

KNOWN = {
    "elastic_launch/clock.py": ["time.clock_gettime"],  # of CLOCK_BOOTTIME, which does not jump
    "elastic_launch/events/sinks.py": ["datetime.now"],  # an event's time, beside that of the monotonic clock
    "elastic_launch/rendezvous/run_file.py": ["path.stat().st_mtime"],  # which of several runs is the newest
    # Which launches are the newest, and whether a run that has recorded no end has been silent for a week.
    "elastic_launch/rendezvous/old_runs.py": [
        *("run.stat().st_mtime", "time.time", "found.st_mtime", "path.stat().st_mtime"),
        "(path / FILE).stat().st_mtime",
    ],
    "elastic_launch/observe/node_watch.py": ["time.strftime", "time.gmtime", "time.time"],  # when a state was saved
    "agents/elastic_agents/probes/pages.py": ["time.time"],  # times of day on the page
    "elastic_launch/cli/event_lines.py": ["datetime.now"],  # --since is compared with events' times
    "elastic_launch/observe/metrics.py": ["time.time"] * 2,  # of checkpoint and snapshot, as Prometheus wants it
    "elastic_launch/rendezvous/admin/server.py": ["time.time"],  # what doctor compares, for its report
    "elastic_launch/cli/doctor.py": ["time.time"],  # the same
    "elastic_launch/cli/doctor_storage.py": ["time.time"],  # compared with the clock of an object store, for the report
    "elastic_launch/observe/spans.py": ["time.time"],  # OpenTelemetry wants Unix time
    "elastic_launch/cli/output_flags.py": ["datetime.now"],  # the name of the log directory
    "elastic_launch/cli/composer.py": ["datetime.now"],  # the same, in Composer mode
    "agents/elastic_agents/console.py": ["time.strftime", "time.localtime"],  # the time before a line
    # When a worker's exception was written down orders the failures in a report, and nothing else.
    "agents/elastic_agents/workers/round_workers.py": ["time.time"],
    "agents/elastic_agents/warm/ending.py": ["time.time"],
    "agents/elastic_agents/summary.py": ["time.time", "time.time"],  # in the error file, whose reader expects it
    "agents/elastic_agents/calls/process.py": ["time.time"],  # the same, for a call from Python
    "agents/elastic_agents/workers/watchdog.py": [
        "time.time"
    ],  # torch's protocol names moments; each is converted as it comes
    "elastic_launch/error_file.py": ["os.stat(path).st_mtime", "time.time"],
    # CLOCK_BOOTTIME, which counts the time of a suspend, as the other hosts do; a time of this host alone.
    "agents/elastic_agents/workers/guard_process.py": ["time.clock_gettime"],
    # Clouds and Slurm use absolute times. The answering server's clock is preferred over this host's.
    "agents/elastic_agents/notices/types.py": ["datetime.now"],
    "agents/elastic_agents/notices/slurm.py": ["time.time"],
}


def wall_clock_uses(source: str) -> Iterator[str]:
    """Functions that read the wall clock and that a module calls, passes on or imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"time.{alias.name}" for alias in node.names if alias.name in WALL | {"*"})
        elif isinstance(node, ast.Import):
            yield from (
                f"{alias.name} as {alias.asname}" for alias in node.names if alias.name == "time" and alias.asname
            )
        elif isinstance(node, ast.Attribute) and node.attr in WALL | FILE_TIMES | DATES:
            owner = ast.unparse(node.value)
            tells = owner == "time" and node.attr in WALL
            dates = owner.split(".")[-1] in ("datetime", "date") and node.attr in DATES
            if tells or dates or node.attr in FILE_TIMES:
                yield f"{owner}.{node.attr}"


def test_no_decision_rests_on_the_wall_clock() -> None:
    found = {str(path.relative_to(ROOT)): list(wall_clock_uses(path.read_text())) for path in SOURCES}
    assert len(found) > 100
    assert {name: uses for name, uses in found.items() if uses} == KNOWN


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "import time\nf(time.time_ns)",
        "from time import time",
        "import time as t",
        "from datetime import datetime\ndatetime.now()",
        "import datetime\ndatetime.datetime.utcnow()",
        "import datetime\ndatetime.date.today()",
        "import os\nos.stat(p).st_mtime",
        "import os\nos.path.getmtime(p)",
    ],
)
def test_a_use_of_the_wall_clock_is_found(source: str) -> None:
    assert len(list(wall_clock_uses(source))) == 1

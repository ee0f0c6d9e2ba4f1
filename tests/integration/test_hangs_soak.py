"""Many hangs, one after the other, and an hour without any: ``make soak``, outside CI.

The variables HANGS (how many), HANGS_SEED and QUIET_MINUTES change what is run.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hanging_runs import Hanging
from harness import Agent, Job, read_lines, wait_for

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

KINDS = {"stop": False, "deadlock": False, "sleep": False, "write": False, "loader": True, "skip": True}
"""Whether the run of each kind of hang has a loader with processes, and exchanges of the script's own."""

PY_SPY = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}") is not None
"""Without it, there is no stack of a stopped worker."""

RANKS = 3

SOON = 15.0
"""Seconds within which a hang is found on a machine that has processors to spare."""


def one(run: Hanging, agent: Agent, kind: str, rank: int) -> dict[str, Any]:
    """Have a rank hang; return what was found, after how many seconds, and the machine's load at that time."""
    verdicts = run.job.events("hang_found")
    before = len(verdicts)
    run.trains(RANKS, after=verdicts[-1]["round"] if verdicts else 0)
    taken = run.job.work / "hang.taken"
    taken.unlink(missing_ok=True)
    run.job.tell("hang", f"{kind} {rank} 1")
    wait_for(f"{kind} of rank {rank}", taken.exists, 60)
    began = time.monotonic()
    try:
        wait_for(f"a verdict on {kind}", lambda: len(run.job.events("hang_found")) > before, 40)
    except AssertionError as error:
        raise AssertionError(f"{kind} of rank {rank}: {error}; the agent printed:\n{agent.output[-4000:]}") from None
    event = run.job.events("hang_found")[-1]
    function = "meet" if kind == "skip" else kind
    frame = re.search(rf"hanging.py:\d+ in {function}\b", event["cause"]) is not None
    seconds = event["clock"] - began
    found = {"kind": kind, "seconds": seconds, "rank": event["ranks"] == [rank], "frame": frame}
    return {**found, "load": os.getloadavg()[0], "event": event}


@pytest.mark.parametrize("others", [False, True])
def test_hangs_are_found_in_the_right_rank_and_frame(
    job: Job, others: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    count, seed = int(os.environ.get("HANGS", "200")), int(os.environ.get("HANGS_SEED", "1"))
    chance = random.Random(seed)
    drawn = [(chance.choice([*KINDS]), chance.randrange(RANKS)) for _ in range(count)]
    run = Hanging(job, *(["--meet", "--loader-workers", "1"] if others else []))
    agent = run.alone("--max-restarts", str(count), nproc=RANKS)
    found: list[dict[str, Any]] = []
    for kind, rank in [each for each in drawn if KINDS[each[0]] is others]:
        found.append(one(run, agent, kind, rank))
        with capsys.disabled():
            print({name: value for name, value in found[-1].items() if name != "event"}, flush=True)
    by_kind = defaultdict(list)
    for each in found:
        by_kind[each["kind"]].append(each)
    with capsys.disabled():
        for kind, those in {**by_kind, "all": found}.items():
            seconds = sorted(each["seconds"] for each in those)
            ranks, frames = (sum(each[name] for each in those) for name in ("rank", "frame"))
            times = f"median {statistics.median(seconds):.1f} s, at most {seconds[-1]:.1f} s"
            print(f"{kind:9} {len(those):3}: detected after {times}; right rank {ranks}, right frame {frames}")
        loads = [each["load"] for each in found]
        print(f"load of the machine: {min(loads):.0f} to {max(loads):.0f}")
    # With more to run than processors, the seconds say how busy the machine is; they are printed above.
    late = [each for each in found if each["seconds"] > SOON and each["load"] <= (os.cpu_count() or 1)]
    assert not late, late
    wrong = [each for each in found if not each["rank"]]
    assert len(wrong) <= 0.05 * len(found), wrong
    shown = [each for each in found if each["kind"] != "stop" or PY_SPY]
    assert sum(each["frame"] for each in shown) >= 0.8 * len(shown)


@pytest.mark.parametrize(("flags", "slow"), [(["--slow"], {"save"}), (["--evaluate"], {"save", "evaluation"})])
def test_an_hour_of_what_only_takes_long_is_no_hang(job: Job, flags: list[str], slow: set[str]) -> None:
    """A loop of the script's own, and a Trainer with evaluations; slow saves, steps that differ by a factor of 10."""
    deadline = time.monotonic() + 60 * float(os.environ.get("QUIET_MINUTES", "60"))
    run = Hanging(job, *flags, "--every", "50")
    agent = run.alone(nproc=2)
    while time.monotonic() < deadline and agent.process.poll() is None and not job.events("hang_found"):
        time.sleep(1.0)
    assert agent.process.poll() is None, agent.output
    assert job.events("hang_found") == [], agent.output
    assert job.events("restart_charged") == [], agent.output
    assert {each["what"] for each in read_lines(job.work / "slow.jsonl")} == slow

"""Many hangs, one after the other, and an hour without any: ``make soak``, outside CI.

The variables HANGS (how many), HANGS_SEED and QUIET_MINUTES change what is run.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import time
from collections import defaultdict
from typing import Any

import pytest
from hanging_runs import Hanging
from harness import Agent, Job, wait_for

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

KINDS = {"stop": False, "deadlock": False, "sleep": False, "write": False, "loader": True, "skip": True}
"""Whether the run of each kind of hang has a loader with processes, and exchanges of the script's own."""

RANKS = 3


def one(run: Hanging, agent: Agent, kind: str, rank: int) -> dict[str, Any]:
    """Have a rank hang; return what was found, and after how many seconds."""
    before = len(found := run.job.events("hang_found"))
    run.trains(RANKS, after=found[-1]["round"] if found else 0)
    taken = run.job.work / "hang.taken"
    taken.unlink(missing_ok=True)
    run.job.tell("hang", f"{kind} {rank} 1")
    wait_for(f"{kind} of rank {rank}", taken.exists, 60)
    began = time.monotonic()
    try:
        wait_for(f"a verdict on {kind}", lambda: len(run.job.events("hang_found")) > before, 40)
    except AssertionError:
        return {"kind": kind, "seconds": float("inf"), "rank": False, "frame": False, "event": agent.output[-2000:]}
    event = run.job.events("hang_found")[-1]
    function = "meet" if kind == "skip" else kind
    frame = re.search(rf"hanging.py:\d+ in {function}\b", event["cause"]) is not None
    seconds = event["clock"] - began
    return {"kind": kind, "seconds": seconds, "rank": event["ranks"] == [rank], "frame": frame, "event": event}


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
    wrong = [each for each in found if not each["rank"]]
    assert len(wrong) <= 0.05 * len(found), wrong
    assert sum(each["frame"] for each in found) >= 0.8 * len(found)


def test_an_hour_of_what_only_takes_long_is_no_hang(job: Job) -> None:
    minutes = float(os.environ.get("QUIET_MINUTES", "60"))
    run = Hanging(job, "--slow")
    agent = run.alone(nproc=2)
    with pytest.raises(AssertionError, match="an end"):
        wait_for("an end", lambda: agent.process.poll() is not None or job.events("hang_found"), minutes * 20)
    assert job.events("hang_found") == [], agent.output
    assert job.events("restart_charged") == [], agent.output

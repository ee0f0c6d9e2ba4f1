"""The newest state is in the memory of a node that does not save usually, and the run ends: that node saves it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from changes import Changes
from harness import Agent, Job, wait_for


class Pair:
    """Two nodes that save nothing while they train; the first rank is on the node that is to be lost."""

    def __init__(self, job: Job, *, host: str, first: str, live: bool = True, wait: str = "6") -> None:
        self.changes = Changes(job, "--checkpoint", str(job.directory / "checkpoints"), live=live)
        timing = ["--min-wait", wait, "--rdzv-conf", "dead_after=4,beat=0.5"]
        self.agents: dict[str, Agent] = {}
        for name in "ab" if host == "a" else "ba":
            env = {"nnodes": "2", "rank": int(name != first)}
            here = ["--rdzv-conf", f"is_host={str(name == host).lower()}"]
            self.agents[name] = self.changes.node(name, *timing, *here, **env)
        self.round = self.changes.trains(2, steps=12)

    def saved(self) -> int:
        """The step of the newest checkpoint; there is one of each step."""
        steps = self.changes.durable()
        assert steps, self.changes.outputs()
        assert len(steps) == len(set(steps))
        return steps[-1]


@pytest.mark.parametrize(
    ("ends", "live"),
    [
        ("min_wait", True),
        pytest.param("min_wait", False, marks=pytest.mark.slow),
        pytest.param("SIGTERM", True, marks=pytest.mark.slow),
        pytest.param("SIGTERM", False, marks=pytest.mark.slow),
        pytest.param("host", True, marks=pytest.mark.slow),
        pytest.param("host", False, marks=pytest.mark.slow),
    ],
)
def test_the_node_that_is_left_saves_the_newest_state_at_the_end(job: Job, ends: str, live: bool) -> None:
    lost, left = ("a", "b") if ends == "host" else ("b", "a")
    pair = Pair(job, host="a", first=lost, live=live, wait="60" if ends == "SIGTERM" else "6")
    pair.agents[lost].kill()
    agent = pair.agents[left]
    if ends == "SIGTERM":
        agent.says("round 1 broken", 60)
        if not live:  # else as its worker is being suspended
            agent.says("parked with 1 node", 60, times=2)
        agent.signal(signal.SIGTERM)
    assert agent.wait(100) == {"min_wait": 94, "SIGTERM": 143, "host": 95}[ends], agent.output
    saved, last = pair.saved(), pair.changes.last(pair.round)
    if live and ends != "SIGTERM":  # it kept its process, which has the last step
        assert saved >= last - 1
    assert saved >= pair.changes.whole(pair.round, left) > 0
    assert f"step {saved} is saved in {pair.changes.checkpoints}/step-{saved}." in agent.output
    pair.changes.hurry()
    again = pair.changes.alone(name="c")
    assert again.wait(100) == 0, again.output
    assert job.noted("resumed.jsonl")[-1]["step"] == saved


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_process_that_is_kept_saves_the_last_step_though_the_first_rank_has_failed(job: Job, nodes: int) -> None:
    """Snapshots are older, and no round follows."""
    changes = Changes(job, "--checkpoint", str(job.directory / "checkpoints"), "--due-until", "4", live=True)
    ends = ("--max-restarts", "0")
    if nodes == 1:
        agents = [changes.alone(*ends, "--nproc", "2")]
    else:
        agents = [changes.node(name, *ends, nnodes="2", rank=rank) for rank, name in enumerate("ab")]
    number = changes.trains(2, steps=12)
    (first,) = [place["pid"] for place in job.noted("places.jsonl") if place["rank"] == 0]
    os.kill(first, signal.SIGKILL)
    assert [agent.wait(100) for agent in agents] == [137] * nodes, changes.outputs()
    assert changes.durable()[-1] >= changes.last(number) - 1, changes.outputs()


@pytest.mark.slow
@pytest.mark.parametrize("thaws", ["before", "after"])
def test_both_parts_of_a_run_save_and_the_newest_state_wins_unless_the_run_was_resumed(
    job: Job, undisturbed: str, thaws: str
) -> None:
    pair = Pair(job, host="a", first="b")
    frozen = pair.agents["b"].freeze()
    assert pair.agents["a"].wait(100) == 94, pair.changes.outputs()
    first = pair.saved()
    if thaws == "after":
        resumed = pair.changes.alone(name="c")
        wait_for("the resumed run", lambda: [x for x in pair.changes.steps() if x["node"] == "c" and x["step"] > first])
    pair.agents["b"].thaw(frozen)
    assert pair.agents["b"].wait(100) == 95, pair.changes.outputs()
    if thaws == "before":
        assert f"{pair.changes.checkpoints}/step-" in pair.agents["b"].output
        resumed = pair.changes.alone(name="c")
    else:
        assert pair.changes.durable() == [first]
        assert "Two runs write to one directory" in pair.agents["b"].output
    newest = pair.changes.durable()[-1]
    result = pair.changes.finish(resumed)
    assert job.noted("resumed.jsonl", "c")[0]["step"] == newest >= first
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_a_node_that_could_not_save_what_it_alone_held_says_so(job: Job, tmp_path: Path) -> None:
    pair = Pair(job, host="a", first="b")
    pair.changes.checkpoints.rename(tmp_path / "moved")
    pair.changes.checkpoints.touch()
    pair.agents["b"].kill()
    agent = pair.agents["a"]
    assert agent.wait(100) == 94
    assert re.search(rf"nothing is saved, \d+ steps lost: Could not .* {pair.changes.checkpoints}", agent.output)

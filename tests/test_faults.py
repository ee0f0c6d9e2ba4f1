"""Injected faults: what a plan may contain, and that each happens once, in its round."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_launch.cli.main import parse
from elastic_launch.errors import UsageError
from elastic_launch.faults import ENV_DRILL, ENV_FAULTS, FLIPS, MOMENTS, WAYS, Fault, FaultPlan, reached

numbers = st.integers(0, 10**6)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    do = draw(st.sampled_from(sorted(WAYS)))
    seconds = draw(st.floats(0.001, 1e5)) if do == "slow" else 0.0
    step, at = draw(st.none() | numbers), draw(st.sampled_from(sorted(MOMENTS)))
    how: dict[str, Any] = {"at": at}
    if do == "flip":
        how = {"of": draw(st.sampled_from(sorted(FLIPS))), "every": draw(st.booleans())}
    return Fault(rank=draw(numbers), step=step, round=draw(numbers) + 1, do=do, seconds=seconds, **how)


@given(st.lists(faults(), max_size=5))
def test_a_plan_is_read_as_it_was_written(planned: list[Fault]) -> None:
    plan = FaultPlan(tuple(planned))
    assert FaultPlan.loads(plan.dumps()) == plan
    assert FaultPlan.of(plan.environment()) == plan


def test_the_shortest_plan_kills_a_worker_when_a_step_is_done() -> None:
    plan = FaultPlan.loads('[{"rank": 1, "step": 20}]')
    assert plan == FaultPlan.fail_at(1, 20)
    assert plan.faults == (Fault(rank=1, step=20, at="step", round=1, do="kill", seconds=0.0),)
    assert plan.faults[0].told(20) == "rank 1 kills itself after step 20, in round 1"


@pytest.mark.parametrize("environ", [{}, {ENV_FAULTS: ""}, {ENV_FAULTS: " "}, {ENV_FAULTS: "[]"}])
def test_without_a_plan_nothing_is_planned(environ: dict[str, str]) -> None:
    assert FaultPlan.of(environ) == FaultPlan()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill rank 1", "'kill rank 1' is not a fault plan"),
        ('{"rank": 1}', "is not a fault plan"),
        ("[" * 100_000, "is not a fault plan"),
        ("[1]", "is not a fault plan"),
        ('[{"step": 20}]', "has no rank"),
        ('[{"rank": 1, "when": 20}]', "A fault has the unknown key 'when'"),
        ('[{"rank": "1"}]', "rank cannot be '1'"),
        ('[{"rank": true}]', "rank cannot be True"),
        ('[{"rank": -1}]', "rank cannot be -1"),
        ('[{"rank": 1, "step": 1.5}]', "step cannot be 1.5"),
        ('[{"rank": 1, "round": 0}]', "round cannot be 0"),
        ('[{"rank": 1, "round": null}]', "round cannot be None"),
        ('[{"rank": 1, "at": "dawn"}]', "cannot have 'at': 'dawn'"),
        ('[{"rank": 1, "at": ["step"]}]', "cannot have 'at'"),
        ('[{"rank": 1, "do": "melt"}]', "cannot have 'do': 'melt'"),
        ('[{"rank": 1, "do": "slow"}]', "cannot take 0 s"),
        ('[{"rank": 1, "do": "slow", "seconds": NaN}]', "cannot take nan seconds"),
        ('[{"rank": 1, "do": "slow", "seconds": -1}]', "cannot take -1 seconds"),
        ('[{"rank": 1, "seconds": 3}]', "cannot take 3 s"),
    ],
)
def test_an_invalid_plan_is_refused_before_anything_is_started(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([__file__], {**os.environ, ENV_FAULTS: text})
    assert caught.value.message.startswith(f"{ENV_FAULTS}: ")
    assert message in caught.value.message
    assert caught.value.hint


def test_a_launcher_logs_that_faults_are_planned(caplog: pytest.LogCaptureFixture) -> None:
    parse([__file__], {**os.environ, **FaultPlan.fail_at(0, 1).environment()})
    assert caplog.messages == [f"{ENV_FAULTS} is set: workers of this run fail on purpose, 1 in all."]


def test_each_fault_happens_once_to_its_rank_in_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan.fail_at(1, 3, do="slow", seconds=1) + FaultPlan.fail_at(1, at="drain") + FaultPlan.fail_at(0, 3)
    struck: list[tuple[int, int, Fault]] = []
    monkeypatch.setattr("elastic_launch.faults._strike", lambda fault: struck.append((number, step, fault)))
    for name, value in {ENV_FAULTS: plan.dumps(), "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for step in (1, 2, 3, 3, 4):
        for number in (2, 1):
            monkeypatch.setenv("ELASTIC_LAUNCH_ROUND", str(number))
            reached("step", step)
            if step > 2:
                reached("drain", step)
    assert struck == [(1, 3, plan.faults[0]), (1, 3, plan.faults[1])]


def worker(plan: FaultPlan, **environ: str) -> subprocess.CompletedProcess[str]:
    """A process that reaches the end of step 5."""
    code = "from elastic_launch.faults import reached; reached('step', 5); print('went on')"
    env: dict[str, Any] = {**os.environ, "RANK": "1", **environ, **plan.environment()}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)


@pytest.mark.parametrize(("do", "code", "output"), [("kill", -signal.SIGKILL, ""), ("exit", 1, "")])
def test_a_worker_logs_a_fault_and_executes_it(do: str, code: int, output: str) -> None:
    done = worker(FaultPlan.fail_at(1, do=do), ELASTIC_LAUNCH_ROUND="1")
    assert (done.returncode, done.stdout) == (code, output)
    assert done.stderr == f"[elastic-launch] planned fault: rank 1 {WAYS[do]} after step 5, in round 1\n"


def test_a_slow_worker_continues() -> None:
    done = worker(FaultPlan.fail_at(1, do="slow", seconds=0.01))
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert "rank 1 waits 0.01 s after step 5" in done.stderr


def test_under_torchrun_the_start_counts_as_the_round() -> None:
    plan = FaultPlan.fail_at(1, round=3)
    assert worker(plan, TORCHELASTIC_RESTART_COUNT="2").returncode == -signal.SIGKILL
    assert worker(plan, TORCHELASTIC_RESTART_COUNT="1").returncode == 0


def test_a_drill_may_leave_ranks_and_rounds_open() -> None:
    plan = FaultPlan.of_drill("{seed: 7, faults: [{step: 3}, {step: 9, rank: 1, do: freeze, seconds: 2}]}")
    first, second = Fault(rank=None, step=3, round=None), Fault(rank=1, step=9, round=None, do="freeze", seconds=2)
    assert plan == FaultPlan((first, second), seed=7)
    assert second.told(9) == "rank 1 is stopped for 2 s after step 9"
    assert first.told(3, rank=2) == "rank 2 kills itself after step 3"
    assert plan.drill()[ENV_DRILL].startswith("[7, ")
    assert FaultPlan().drill() == {}


@pytest.mark.parametrize("entry", ['{"rank": 1, "do": "lose"}', '{"rank": null}', '{"rank": 1, "round": null}'])
def test_what_only_a_drill_can_do_is_refused_in_the_environment(entry: str) -> None:
    with pytest.raises(UsageError, match="cannot be") as caught:
        FaultPlan.of({ENV_FAULTS: f"[{entry}]"})
    assert "--drill" in caught.value.hint


def test_a_seed_determines_the_ranks_of_a_drill(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = FaultPlan(tuple(Fault(rank=None, step=step, round=None, do="exit") for step in range(20)), seed=7)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("elastic_launch.faults._ordered", lambda number, step, rank: asked.append((number, rank)))
    for name, value in {**faults.drill(), "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv(ENV_FAULTS, " " * rank)  # of each process, which remembers what has happened
        for step in (*range(20), *range(20)):
            reached("step", step)
    assert sorted(number for number, _ in asked) == list(range(20)), "each by one rank, once"
    assert {rank for _, rank in asked} == {0, 1, 2}


def test_a_worker_whose_agent_does_not_answer_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = FaultPlan((Fault(rank=0, step=3, round=None),))
    for name, value in {ENV_DRILL: plan.drill()[ENV_DRILL], "ELASTIC_LAUNCH_SOCKET": "@nowhere", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    reached("step", 3)
    assert "fault 0 of the drill does not happen at step 3" in capsys.readouterr().err

"""Sentences are for people: with each replaced by its name, the leader decides the same."""

from __future__ import annotations

import ast
import signal
import sys
from collections.abc import Callable, Hashable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from leader_run import Run, running

import elastic_agents
from elastic_agents import summary
from elastic_launch import rendezvous
from elastic_launch.events import facts, sentences
from elastic_launch.failure import Doing, Failure
from elastic_launch.rendezvous.leader.verdict import root_cause
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.shared_progress import Activity

STEP_7 = Doing(Activity.STEP, 6)

SYMPTOM: dict[str, Any] = {"symptom": "broken connection", "error": "RuntimeError: Connection closed by peer"}
KILLED: dict[str, Any] = {"exit_code": -signal.SIGKILL, "error": ""}


def replace_sentences(monkeypatch: pytest.MonkeyPatch) -> int:
    """Replace each function that makes a sentence, wherever it was imported; return in how many places."""
    made = {f: name for name, f in vars(sentences).items() if getattr(f, "__module__", "") == sentences.__name__}
    places = 0
    for module in list(sys.modules.values()):
        if module.__name__.startswith(("elastic_launch", "elastic_agents")):
            for name, value in list(vars(module).items()):
                if callable(value) and isinstance(value, Hashable) and value in made:
                    monkeypatch.setattr(module, name, lambda *arguments, said=made[value], **options: said)
                    places += 1
    return places


def symptoms_and_a_cause() -> Run:
    run = running("1:3", "abc")
    run.done("c")
    run.fail("a", **SYMPTOM)
    run.fail("b", rank=1, **SYMPTOM, alive=True)
    run.fail("b", rank=1, **KILLED)
    run.stop("a", "b")
    run.advance(3)
    return run


def repeated() -> Run:
    """In the same way, until the restarts are spent."""
    run = running("1:2", "ab", max_restarts=2)
    while run.code is None and run.number < 9:
        number = run.number
        run.join("a", "b")
        run.fail("b", rank=1, ran=3.0, trained=0)
        run.stop("a", "b", number=number)
        run.advance(5)
    return run


def hangs() -> Run:
    """Twice at the same place, the second time in a first step."""
    run = running("2", "ab")
    for early in (False, True):
        for index, (node, state) in enumerate((("a", "exchange"), ("b", "code"))):
            worker = m.StalledWorker(index, 0, 7, state, frame="train.py:9 in main")
            run.report(node, m.Stalled(run.number, 12.0, STEP_7, f"host-{node}", (worker,), early=early))
        run.stop("a", "b")
        run.advance(3)
        run.join("a", "b")
    return run


def ranks_that_wait_for_one() -> Run:
    """In a collective that it has not begun."""
    run = running("3", "abc")
    for rank, node in enumerate("abc"):
        begun = m.Collective("0", "default_pg", 4 if rank == 1 else 5, "all_reduce of Float[9]", rank != 1)
        worker = m.StalledWorker(rank, 0, 7, "exchange", frame="train.py:9 in main", collectives=(begun,))
        run.report(node, m.Stalled(run.number, 12.0, STEP_7, f"host-{node}", (worker,)))
    run.stop("a", "b", "c")
    run.advance(3)
    return run


def a_newcomer_that_would_fail_in_a_round() -> Run:
    """It was started ahead of a place, so its failure has no rank."""
    run = running("1:2", "a")
    run.report("a", m.NodeReady(run.number, step=5, live=True))
    run.report("a", m.ProgressBeat(run.number, 9))
    run.hello("b")
    run.report("b", m.Unfit(Failure("b", "startup", None, 0, 42, 1, "ModuleNotFoundError: No module named x")))
    run.advance(3)
    return run


def newcomers_that_fail_alike() -> Run:
    """No more are admitted then."""
    run = Run("1:4")
    run.hello("a")
    run.advance(2.1)
    for node in ("", "b", "c"):
        if node:
            run.hello(node)
            run.advance(1.1)
            run.report("a", m.Stopped(run.number, 7000, 5))
            assert run.members == f"a{node}"
            run.fail(node, rank=1, ran=1.0, error=f"KeyError: 'rank {run.number}'")
            run.advance(0.3)
            run.stop("a", node)
            run.close(node)
        run.report("a", m.NodeReady(run.number, step=100 * run.number))
        run.report("a", m.ProgressBeat(run.number, 100 * run.number + 5))
    assert run.record.closed_by
    return run


def decided(run: Run) -> list[Any]:
    """What has happened, without the texts that tell it."""
    told = {"cause", "next"}
    events = [[type(x), *(getattr(x, f.name) for f in fields(x) if f.name not in told)] for x in run.events]
    record = run.record
    left_out = [node.node_id for node in record.faulty], [(host.host, host.failure) for host in record.refused]
    return [run.number, run.members, record.restarts, run.code, bool(record.closed_by), *left_out, *events]


SCENES = [
    *(symptoms_and_a_cause, repeated, hangs, ranks_that_wait_for_one),
    *(a_newcomer_that_would_fail_in_a_round, newcomers_that_fail_alike),
]


@pytest.mark.parametrize("scene", SCENES)
def test_the_leader_decides_by_facts(scene: Callable[[], Run], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = decided(scene())
    assert any(x in str(expected) for x in ("RoundBroken", "NewcomerLeftOut"))
    assert replace_sentences(monkeypatch) > 5
    assert decided(scene()) == expected


def test_the_cause_and_the_hint_are_chosen_by_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"node_id": "a", "kind": "crash", "local_rank": 0, "pid": 7}
    found = [
        Failure(rank=0, exit_code=1, **SYMPTOM, **about),
        Failure(rank=1, exit_code=1, **SYMPTOM, ended_before=(2,), **about),
        Failure(rank=2, exit_code=1, error="MemoryError", supposed=True, **about),
    ]
    causes = [root_cause([(0.0, failure) for failure in found[: count + 1]]) for count in range(3)]
    hints = [summary.hint_on(failure) for failure in found]
    assert (causes, len({*hints})) == (found, 3)
    replace_sentences(monkeypatch)
    assert [root_cause([(0.0, failure) for failure in found[: count + 1]]) for count in range(3)] == found
    assert [summary.hint_on(failure) for failure in found] == hints


NODE, LEADER, BACKENDS, VOTERS = (
    Path(rendezvous.__file__).parent / name for name in ("node", "leader", "backends", "voters")
)
MACHINES = [
    *(path for path in sorted(LEADER.glob("*.py")) if path.name != "service.py"),
    *(NODE / "machine.py", NODE / "failure_detector.py", BACKENDS / "succession.py", VOTERS / "voter.py"),
    *(Path(elastic_agents.__file__).with_name(f"{name}.py") for name in ("policy", "policy_ahead", "policy_types")),
]


IDENTITIES = (
    "f'{self._run} {self.spent}'",
    "f'{failure.kind} {failure.error or failure.exit_code}'",
    "f'{mistake.exception} at {mistake.frame}'",
)
"""Formatted texts that are hashed."""


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_a_machine_makes_no_sentence(path: Path) -> None:
    """Apart from names of facts, of one or two words, it has no text but its docstrings."""
    tree = ast.parse(path.read_text())
    docs = {id(x.value) for x in ast.walk(tree) if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)}
    texts = [
        x for x in ast.walk(tree) if isinstance(x, ast.Constant) and isinstance(x.value, str) and id(x) not in docs
    ]
    assert [x.value for x in texts if x.value.strip().count(" ") > 1] == []
    formatted = [ast.unparse(x) for x in ast.walk(tree) if isinstance(x, ast.JoinedStr)]
    assert [x for x in formatted if x not in IDENTITIES] == []


def kinds_of(fact: type[facts.Fact]) -> tuple[str, ...]:
    """What a fact can say."""
    return get_args(get_type_hints(fact).get("what"))


@pytest.mark.parametrize("fact", [x for x in facts.Fact.__subclasses__() if kinds_of(x) and x is not facts.Misfit])
def test_whatever_a_fact_says_has_its_sentence(fact: type[Any]) -> None:
    empty: dict[Any, Any] = {"float": 1.0, "int": 1, "str": "x"}
    given = {field.name: empty.get(field.type, ("x",)) for field in fields(fact) if field.name != "what"}
    say = {facts.Outlook: sentences.next_up, facts.NotInTime: sentences.warning}.get(fact, sentences.why)
    said = {say(fact(what=what, **given)) for what in kinds_of(fact)}
    assert len(said) == len(kinds_of(fact))
    assert not any(mark in text for text in said for mark in "{}()")

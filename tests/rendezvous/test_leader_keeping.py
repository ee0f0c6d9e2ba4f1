"""Leaving nodes stay as long as others need their memory, and no longer."""

from __future__ import annotations

import pytest
from leader_run import Run, hello_of, running

from elastic_launch.errors import ExitCode
from elastic_launch.rendezvous.leader.nodes import ConnectedNodes, Node, sources
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.messages import HeldSnapshot, SnapshotSource


def ready(nodes: str, node_ids: str) -> Run:
    run = running(nodes, node_ids)
    trains(run, *node_ids)
    return run


def drained(run: Run, *node_ids: str, port: int = 0, step: int = 7) -> None:
    for node_id in node_ids:
        held = m.HeldSnapshot(run.number, step, port)
        run.report(node_id, m.Stopped(run.number, 7000, step, held))


def leave(run: Run, *node_ids: str) -> None:
    for node_id in node_ids:
        run.report(node_id, m.Leaving("SIGTERM", 30.0))


def trains(run: Run, *node_ids: str) -> None:
    for node_id in node_ids:
        run.report(node_id, m.NodeReady(run.number))


def released(run: Run, *node_ids: str) -> list[int]:
    return [len(run.orders(node_id, m.Released)) for node_id in node_ids]


def test_members_without_a_snapshot_learn_its_sources_which_stay_until_they_train() -> None:
    run = ready("2:2", "bc")
    run.hello("d", "e")
    leave(run, "b", "c")
    drained(run, "b", "c", port=4000)
    assert (run.number, run.members) == (2, "de")
    for node_id in "de":
        (form,) = run.orders(node_id, m.Form)
        assert form.sources == (SnapshotSource("host-b", 4000, 1, 7), SnapshotSource("host-c", 4000, 1, 7))
    trains(run, "d")
    run.advance(5)
    assert released(run, "b", "c") == [0, 0], "e has not restored yet"
    trains(run, "e")
    assert released(run, "b", "c") == [1, 1]
    run.advance(5)
    assert released(run, "b", "c") == [1, 1], "once is enough"


def test_if_a_member_continues_no_leaving_node_stays() -> None:
    run = ready("1:4", "abc")
    leave(run, "b", "c")
    drained(run, "a")
    drained(run, "b", "c", port=4000)
    assert run.members == "a"
    assert run.orders("a", m.Form)[-1].sources == ()
    run.advance(1)
    assert released(run, "b", "c") == [1, 1]


def test_a_member_without_a_snapshot_gets_it_from_a_leaving_node() -> None:
    """It had no room for one."""
    run = ready("1:4", "bc")
    leave(run, "b")
    drained(run, "b", port=4000)
    run.report("c", m.Stopped(1, 7000, 7, m.HeldSnapshot(1, 3)))
    assert run.orders("c", m.Form)[-1].sources == (SnapshotSource("host-b", 4000, 1, 7),)


def test_if_too_few_nodes_wait_no_leaving_node_stays() -> None:
    run = ready("2:2", "bc")
    run.hello("d")
    leave(run, "b", "c")
    drained(run, "b", "c", port=4000)
    assert run.number == 1, "one node of two"
    assert released(run, "b", "c") == [1, 1]


def test_the_round_after_one_that_breaks_before_it_trains_gets_the_sources_again() -> None:
    run = ready("2:2", "bc")
    run.hello("d", "e")
    leave(run, "b", "c")
    drained(run, "b", "c", port=4000)
    run.fail("d")
    run.stop("d", "e")
    run.advance(1)
    assert run.number == 3
    assert [len(form.sources) for form in run.orders("e", m.Form)] == [2, 2]
    assert released(run, "b", "c") == [0, 0]
    run.close("b", "c")
    run.fail("d")
    run.stop("d", "e")
    run.advance(1)
    assert run.orders("e", m.Form)[-1].sources == ()


def test_a_leader_that_leaves_forms_the_round_that_needs_what_it_serves() -> None:
    """Node a is the leader; its successor would not know which node serves what."""
    run = ready("1:1", "a")
    run.hello("d")
    leave(run, "a")
    drained(run, "a", port=4000)
    assert run.members == "d"
    assert run.orders("d", m.Form)[-1].sources == (SnapshotSource("host-a", 4000, 1, 7),)
    assert released(run, "a") == [0]
    trains(run, "d")
    assert released(run, "a") == [1]


def test_a_leader_that_leaves_and_serves_nothing_forms_no_round() -> None:
    """The host of a c10d run: the others could not train without it."""
    run = ready("2:2", "ab")
    run.hello("d", "e")
    leave(run, "a", "b")
    drained(run, "a")
    drained(run, "b", port=4000)
    run.advance(1)
    assert run.number == 1
    assert released(run, "b") == [1]


def test_a_serving_node_that_comes_to_a_new_leader_is_released_when_the_round_trains() -> None:
    run = ready("1:4", "ab")
    members = run.machine.record
    after = Run("1:4", record=members)
    after.hello("a", "b", holding=1, joined=True)
    after.hello("c", leaving="SIGTERM", held=m.HeldSnapshot(1, 7, 4000))
    after.advance(1)
    assert released(after, "c") == [0]
    trains(after, "a", "b")
    assert released(after, "c") == [1]


def test_snapshots_are_ordered_by_round_and_step() -> None:
    def found(mine: HeldSnapshot | None, **leavers: HeldSnapshot | None) -> tuple[SnapshotSource, ...]:
        nodes, member = ConnectedNodes(), Node(hello_of("a"), 0, 0, 7000)
        member.held = mine
        for name, held in leavers.items():
            leaver = Node(hello_of(name), 0, 0, 7000)
            leaver.leaving, leaver.held = True, held
            nodes.add(leaver)
        return sources(nodes, [member])

    old, new = HeldSnapshot(1, 90, 4000), HeldSnapshot(2, 7, 4001)
    assert found(None, x=old, y=new) == (SnapshotSource("host-y", 4001, 2, 7),)
    assert found(HeldSnapshot(1, 90), y=new) == (SnapshotSource("host-y", 4001, 2, 7),)
    assert found(HeldSnapshot(2, 7), y=new) == ()
    assert found(None, y=HeldSnapshot(2, 7), z=None) == ()


@pytest.mark.parametrize(
    ("held", "kept", "saver"),
    [
        ({"b": 7, "c": 7}, "", "b"),
        ({"b": 7, "c": 7}, "c", "c"),
        ({"b": 7, "c": 7}, "bc", "b"),
        ({"b": 6, "c": 7}, "b", "c"),
        ({"c": 0}, "", "c"),
        ({}, "", ""),
    ],
    ids=["both", "one keeps its processes", "both do", "the later rank", "one", "none"],
)
def test_the_end_of_a_run_names_the_node_that_holds_the_newest_state(
    held: dict[str, int], kept: str, saver: str
) -> None:
    run = ready("3:3", "abc")
    run.close("a")  # the first member, which saves usually
    for node_id in "bc":
        snapshot = m.HeldSnapshot(1, held[node_id], kept=node_id in kept) if node_id in held else None
        run.report(node_id, m.Stopped(1, 7000, held=snapshot))
    run.advance(run.machine.timing.min_wait + 10)
    for node_id in "bc":
        (end,) = run.orders(node_id, m.RunEnd)
        assert (end.code, end.saver) == (ExitCode.TOO_FEW_NODES, saver)

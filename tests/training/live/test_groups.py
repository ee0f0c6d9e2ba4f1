"""A round's process groups in real processes: broken, left and formed anew, in the same processes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import SLOWNESS
from rank_processes import Answer, RankProcess, RankProcesses

from elastic_agents.hangs.collectives import last_collectives
from elastic_launch.symptoms import symptom_in
from elastic_launch.training.live import groups

PROMPT = 20.0
"""Seconds: half of the groups' time-out."""


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    started = RankProcesses()
    yield started
    started.close()


class World:
    """Processes, one of which hosts the rounds' stores."""

    def __init__(self, processes: RankProcesses) -> None:
        self._processes = processes
        (self.host,) = processes.start(1)

    def form(self, *ranks: RankProcess, order: str = "form") -> None:
        """Form a round."""
        together("begin", *ranks)
        port = self.host.do("host")
        begun = [rank.begin(order, place, len(ranks), port) for place, rank in enumerate(ranks)]
        for rank, number in zip(ranks, begun, strict=True):
            assert not rank.end(number).error
        assert together("reduce", *ranks) == [len(ranks) * (len(ranks) + 1) / 2] * len(ranks)

    def start(self, count: int) -> list[RankProcess]:
        ranks = self._processes.start(count)
        self.form(*ranks)
        return ranks


@pytest.fixture
def world(processes: RankProcesses) -> Iterator[World]:
    yield World(processes)
    processes.end()


def together(name: str, *ranks: RankProcess) -> list[object]:
    """Have all ranks do the same, and return the results."""
    orders = [rank.begin(name) for rank in ranks]
    answers = [rank.end(order) for rank, order in zip(ranks, orders, strict=True)]
    assert [answer.error for answer in answers] == [""] * len(ranks)
    return [answer.result for answer in answers]


def failed(rank: RankProcess, order: int) -> Answer:
    answer = rank.end(order)
    assert answer.error, answer
    return answer


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_that_wait_for_a_lost_one_leave_and_form_a_smaller_world(
    processes: RankProcesses, world: World, number: int
) -> None:
    *others, lost = ranks = world.start(3)
    *orders, order = [rank.begin("reduce_for_ever") for rank in ranks]
    time.sleep(0.2)
    lost.signal(number)
    time.sleep(0.2)
    for rank in others:
        rank.do("disconnect")
    for rank, waiting in zip(others, orders, strict=True):
        failed(rank, waiting)
    together("leave", *others)
    world.form(*others)
    if number == signal.SIGSTOP:  # now and then it waits until the groups' timeout
        lost.signal(signal.SIGCONT)
        failed(lost, order)
        lost.do("leave")
        assert processes.wait(lost) == 0
        assert together("reduce", *others) == [3.0, 3.0]


@pytest.mark.slow
def test_no_rank_waits_for_the_end_of_a_sending_that_failed(processes: RankProcesses, world: World) -> None:
    """As gloo lets 4 in 100 ranks do whose connections are shut down in both directions."""
    others, when = processes.start(2), random.Random(0)
    for _ in range(30):
        (lost,) = processes.start(1)
        world.form(*others, lost)
        *orders, _order = [rank.begin("reduce_for_ever", 100) for rank in (*others, lost)]
        time.sleep(when.uniform(0.02, 0.1))
        lost.signal(signal.SIGKILL)
        began = time.monotonic()
        for rank in others:
            rank.begin("disconnect")
        for rank, order in zip(others, orders, strict=True):
            assert failed(rank, order).at - began < PROMPT
        together("leave", *others)
        processes.wait(lost)


@pytest.mark.parametrize("lost", ["sender", "receiver"])
@pytest.mark.parametrize("how", ["broadcast", "transfer", "functional", "state", "chunks"])
def test_a_wait_for_a_large_message_that_is_under_way_ends(
    processes: RankProcesses, world: World, how: str, lost: str
) -> None:
    """gloo wakes neither its own thread nor one of the process that waits for the end of such a message."""
    sender, receiver = world.start(2)
    receiving = receiver.begin("transfer", how)
    time.sleep(0.2)  # by now, the sender's gloo has been asked for the message
    receiver.signal(signal.SIGSTOP)
    sending = sender.begin("transfer", how)
    time.sleep(0.2)  # by now, the connection has taken what it can
    gone, stays, order = (sender, receiver, receiving) if lost == "sender" else (receiver, sender, sending)
    gone.signal(signal.SIGKILL)
    processes.wait(gone)
    stays.signal(signal.SIGCONT)
    began = time.monotonic()
    stays.do("disconnect")
    assert failed(stays, order).at - began < PROMPT
    if how != "broadcast":  # a script may as well end because of the error
        stays.do("leave")
        world.form(stays, *processes.start(1))
    began = time.monotonic()
    assert processes.wait(stays) == 0
    assert time.monotonic() - began < PROMPT


def test_a_frozen_rank_keeps_no_other_waiting_after_a_disconnection(world: World) -> None:
    """The time from the disconnection to the error is that of two threads' switches, not that of a time-out."""
    rank, frozen = world.start(2)
    order = rank.begin("reduce_for_ever")
    frozen.signal(signal.SIGSTOP)
    time.sleep(0.2)
    began = time.monotonic()
    assert rank.do("disconnect") == 3  # two groups and the store
    assert failed(rank, order).at - began < PROMPT
    assert rank.do("disconnect") == 0
    assert "RuntimeError" in rank.end(rank.begin("reduce")).error
    rank.do("leave")


@pytest.mark.parametrize("subgroups", [0, 1])
def test_a_rank_that_waits_for_a_group_to_form_is_released(world: World, subgroups: int) -> None:
    """In init_process_group, or in new_group after it."""
    early, late = ranks = world.start(2)
    together("leave", *ranks)
    together("begin", *ranks)
    port = world.host.do("host")
    order = early.begin("form", 0, 2, port, subgroups)
    if subgroups:
        late.do("form", 1, 2, port, 0)
    time.sleep(0.3)
    began = time.monotonic()
    assert early.do("disconnect") >= 1
    assert failed(early, order).at - began < PROMPT
    late.do("disconnect")
    together("leave", *ranks)
    world.form(*ranks)


def test_no_group_forms_after_its_round_was_disconnected(world: World) -> None:
    """The order may come just before."""
    ranks = world.start(2)
    ranks[0].do("disconnect")
    assert "disconnected" in ranks[0].end(ranks[0].begin("form_another")).error


def test_works_that_are_dropped_without_waiting_keep_nobody(world: World) -> None:
    """As long as they are held, the groups' connections are open; once they are dropped, leaving succeeds."""
    ranks = world.start(2)
    ranks[0].do("post", 20)
    together("disconnect", *ranks)
    assert "sockets of the last round's groups" in ranks[0].end(ranks[0].begin("leave")).error
    ranks[0].do("drop")
    together("leave", *ranks)
    world.form(*ranks)


def test_a_round_that_is_broken_at_any_time_while_it_forms_is_left_and_formed_anew(world: World) -> None:
    ranks = world.start(2)
    for delay in range(20):
        together("leave", *ranks)
        together("begin", *ranks)
        port = world.host.do("host")
        orders = [rank.begin("form", place, 2, port) for place, rank in enumerate(ranks)]
        time.sleep(delay / 1000)
        together("disconnect", *ranks)
        for rank, order in zip(ranks, orders, strict=True):
            rank.end(order)
        together("leave", *ranks)
        world.form(*ranks)


def test_a_broken_backward_pass_is_left_with_all_its_works(world: World) -> None:
    *others, lost = ranks = world.start(3)
    orders = [rank.begin("backward") for rank in ranks]
    time.sleep(0.3)
    lost.signal(signal.SIGSTOP)
    time.sleep(0.2)
    for rank in others:
        rank.do("disconnect")
    for rank, order in zip(others, orders, strict=False):
        assert rank.end(order).result
    together("leave", *others)
    world.form(*others)


def test_a_round_is_left_as_planned_when_all_collectives_are_done(world: World) -> None:
    """Each rank leaves at once; the others may still be in the last collective."""
    ranks = world.start(3)
    assert [rank.do("facts")["used"] for rank in ranks] == [1, 1, 1]
    for _ in range(10):
        orders = [(rank.begin("reduce", 100_000), rank.begin("leave")) for rank in ranks]
        for rank, (last, left) in zip(ranks, orders, strict=True):
            assert (rank.end(last).result, rank.end(left).error) == (6.0, "")
        assert not ranks[0].do("facts")["initialized"]
        world.form(*ranks)


def test_an_exchange_is_confirmed_by_all_ranks_or_by_none(world: World) -> None:
    one, other = world.start(2)
    together("confirm", one, other)
    waits = one.begin("confirm")
    other.do("disconnect")
    assert symptom_in(failed(other, other.begin("confirm")).error)
    other.do("leave")
    assert symptom_in(failed(one, waits).error), "which was not disconnected itself"
    one.do("leave")


def test_ranks_that_hold_a_group_complete_what_they_exchange_in_it(world: World) -> None:
    ranks = world.start(2)
    orders = [rank.begin("reduce_held", 2.0 * SLOWNESS) for rank in ranks]
    time.sleep(SLOWNESS)  # the group is formed
    assert ranks[0].do("disconnect") == 3  # two groups and the store
    ranks[1].do("disconnect")
    for rank, order in zip(ranks, orders, strict=True):
        total, error = rank.end(order).result
        assert total == 3.0
        assert symptom_in(error)
    together("leave", *ranks)
    world.form(*ranks)


def test_a_backend_that_can_abort_is_aborted_and_left(world: World) -> None:
    (rank,) = world.start(1)
    rank.do("leave")
    rank.do("begin")
    assert rank.do("form_other", world.host.do("host"), "aborts") == []
    rank.do("disconnect")
    assert rank.do("aborts") == 1
    rank.do("leave")
    world.form(rank)


def test_a_backend_that_nothing_can_end_is_named(world: World) -> None:
    (rank,) = world.start(1)
    rank.do("leave")
    rank.do("begin")
    assert rank.do("form_other", world.host.do("host"), "fake") == ["fake"]
    rank.do("leave")
    world.form(rank)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_nccl_communicators_are_aborted_and_formed_anew(count: int) -> None:
    """A rank that waits for a frozen one on its GPU ends its wait; a single rank forms its groups anew."""
    processes = RankProcesses(TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
    try:
        world = World(processes)
        ranks = processes.start(count)
        world.form(*ranks, order="form_gpu")
        total = count * (count + 1) / 2
        orders = [rank.begin("reduce_gpu") for rank in ranks]
        assert [rank.end(order).result for rank, order in zip(ranks, orders, strict=True)] == [total] * count
        rank, *others = ranks
        for frozen in others:
            frozen.signal(signal.SIGSTOP)
        order = rank.begin("reduce_gpu") if others else None
        time.sleep(0.5)
        rank.do("disconnect")
        if order is not None:
            rank.end(order)  # its result is undefined
        rank.do("leave")
        world.form(rank, order="form_gpu")
        assert rank.do("reduce_gpu") == 1.0
    finally:
        processes.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_nccl_records_shows_who_waits_and_who_has_not_begun() -> None:
    processes = RankProcesses(TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
    try:
        world = World(processes)
        ranks = processes.start(3)
        world.form(*ranks, order="form_gpu")
        together("reduce_gpu", *ranks)
        *waiting, absent = ranks
        orders = [rank.begin("reduce_gpu") for rank in waiting]
        time.sleep(1.0)
        found = [last_collectives(rank.do("dump").encode()) for rank in ranks]
        on_gpu = [next(each for each in of_rank if each.backend.startswith("nccl")) for of_rank in found]
        assert [(each.number, each.waits) for each in on_gpu] == [(2, True), (2, True), (1, False)]
        assert {each.what for each in on_gpu} == {"all_reduce of Float[1000]"}
        absent.do("reduce_gpu")
        assert [rank.end(order).result for rank, order in zip(waiting, orders, strict=True)] == [6.0, 6.0]
    finally:
        processes.close()


def test_what_the_script_connects_itself_stays_connected(world: World) -> None:
    ranks = world.start(2)
    together("open_own", *ranks)
    together("leave", *ranks)
    world.form(*ranks, order="form_and_open")
    frozen, rank = ranks
    frozen.signal(signal.SIGSTOP)
    assert rank.do("disconnect") == 3
    assert rank.do("use_own") == 6
    rank.do("leave")


@pytest.mark.parametrize("environment", [{"TORCH_GLOO_LAZY_INIT": "1"}, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}])
def test_connections_are_found_however_torch_opens_them(
    processes: RankProcesses, world: World, environment: dict[str, str]
) -> None:
    """Later, with the first collective; or also for torch's own checks of collectives."""
    rank, frozen = ranks = processes.start(2)
    for each in ranks:
        each.do("set_environment", environment)
    world.form(*ranks)
    order = rank.begin("reduce_for_ever")
    frozen.signal(signal.SIGSTOP)
    time.sleep(0.3)
    assert rank.do("disconnect") >= 2
    failed(rank, order)
    rank.do("leave")


def test_a_group_of_the_scripts_own_is_named(world: World) -> None:
    ranks = world.start(2)
    together("own_group", *ranks)
    assert ranks[0].do("facts")["foreign"]
    for rank in ranks:
        rank.do("disconnect")
        error = rank.end(rank.begin("leave")).error
        assert error.startswith("GroupsRemainError: The script made process groups itself: ")
        assert "of the script" in error


def test_a_reference_that_remains_is_an_error(world: World) -> None:
    ranks = world.start(2)
    together("keep_group", *ranks)
    assert not ranks[0].do("facts")["foreign"]
    for rank in ranks:
        rank.do("disconnect")
        assert "still holds these process groups" in rank.end(rank.begin("leave")).error


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.soak)])
def test_rounds_leave_nothing_behind(world: World, count: int) -> None:
    ranks = world.start(2)
    before: list[dict[str, Any]] = []
    for number in range(count + 5):
        if number == 5:
            before = [rank.do("facts") for rank in ranks]
        together("disconnect", *ranks)
        together("leave", *ranks)
        world.form(*ranks)
    for rank, then in zip(ranks, before, strict=True):
        now = rank.do("facts")
        memory, memory_before = now.pop("memory"), then.pop("memory")
        assert now == then
        assert memory - memory_before < 4 * 2**20, (memory, memory_before)


_ALONE = """
import datetime, os, threading
import torch.distributed as dist
from elastic_launch.training.live.groups import RoundGroups
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
groups = RoundGroups()
threading.Timer(0.5, groups.disconnect).start()
try:
    with groups.forming():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
except RuntimeError:
    print("released")
"""


def test_a_rank_that_is_released_while_its_group_forms_prints_no_stack() -> None:
    ran = subprocess.run([sys.executable, "-c", _ALONE], capture_output=True, text=True, timeout=50 * SLOWNESS)
    assert "released" in ran.stdout
    assert ran.stderr == ""


def test_no_work_counts_as_lost_while_a_thread_of_gloo_s_may_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may copy what had arrived into tensors that the script would use again."""
    now, threads = [0.0], {"1": ("S", "5", "5"), "2": ("R", "7", "7")}
    monkeypatch.setattr(groups.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(groups, "_gloos_threads", lambda: dict(threads))
    lost = groups.RoundGroups()
    assert not lost.lost()  # it is not disconnected
    lost.disconnect()
    for state, ran in [("R", "7"), ("R", "7"), ("S", "8"), ("S", "9"), ("D", "9"), ("S", "9")]:
        threads["2"] = (state, ran, "7")
        now[0] += 1.0
        assert not lost.lost(), (state, ran)
    now[0] += 0.05
    assert not lost.lost()
    now[0] += 0.1
    assert lost.lost()
    threads.clear()
    assert lost.lost()

"""What the dump of a flight recorder says about collectives."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from elastic_agents.hangs.collectives import MOST, last_collectives, text_of_collectives
from elastic_launch.errors import ProtocolError
from elastic_launch.rendezvous.wire.messages import Collective


def entry(group: str, number: int, name: str = "gloo:all_reduce", **changed: Any) -> dict[str, Any]:
    """A record as torch 2.13 writes it."""
    return {
        "process_group": [group, "default_pg" if group == "0" else "undefined"],
        "collective_seq_id": number,
        "profiling_name": name,
        "input_dtypes": ["Float"],
        "input_sizes": [[1024]],
        "is_p2p": False,
        "pg_id": 1,
        "retired": True,
        "state": "scheduled",
        "time_created_ns": 1000 + number,
        **changed,
    }


def dump(*entries: dict[str, Any], first: int = 0) -> bytes:
    return json.dumps({"first": [first, 0], "dumps": [{"entries": entries}, {}]}).encode()


def test_the_last_one_of_each_group_counts_and_those_that_wait_are_first() -> None:
    found = last_collectives(
        dump(
            entry("1", 3, retired=False),
            entry("0", 8, "nccl:broadcast"),
            entry("0", 9, "nccl:broadcast", input_sizes=[[2, 3]]),
        )
    )
    assert found == (
        Collective("1", "", 3, "all_reduce of Float[1024]", waits=True, backend="gloo"),
        Collective("0", "default_pg", 9, "broadcast of Float[2, 3]", waits=False, backend="nccl"),
    )
    assert text_of_collectives(found).splitlines()[1:] == [
        "  all_reduce of Float[1024], number 3 of group 1, has not finished",
        "  broadcast of Float[2, 3], number 9 of group default_pg, has finished",
    ]
    assert text_of_collectives(()) == ""


def test_messages_between_two_ranks_and_groups_that_are_gone_do_not_count() -> None:
    gone, message = entry("1", 3, retired=False, pg_id=0), entry("0", 9, is_p2p=True)
    (found,) = last_collectives(dump(gone, entry("0", 8), message, first=1))
    assert (found.group, found.number) == ("0", 8)


def test_what_has_completed_on_a_gpu_does_not_wait() -> None:
    (found,) = last_collectives(dump(entry("0", 1, retired=False, state="completed")))
    assert not found.waits


def test_of_many_groups_the_newest_are_reported() -> None:
    found = last_collectives(dump(*(entry(str(number), number) for number in range(1, 3 * MOST))))
    assert [each.number for each in found] == list(range(3 * MOST - 1, 2 * MOST - 1, -1))


def test_a_worker_that_has_not_answered_has_none() -> None:
    assert last_collectives(b"") == ()


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"{",
        b'{"first": 1, "dumps": 3}',
        dump({}),
        dump(entry("0", 1, process_group=None)),
        dump(entry("0", 1, time_created_ns=math.inf)),
        b"[" * 100000,
        b"\xff",
    ],
    ids=["a list", "cut off", "a number", "no fields", "no group", "infinite", "deep", "no text"],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="the dump of the flight recorder is not as expected"):
        last_collectives(data)

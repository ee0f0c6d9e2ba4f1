"""The control record: what a run must not forget."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elastic_launch import codec
from elastic_launch.errors import ProtocolError
from elastic_launch.rendezvous.leader.exclusion import FAULTS, LONGEST, MOST, Exclusion
from elastic_launch.rendezvous.leader.service import MAX_RECORD
from elastic_launch.rendezvous.record import SCHEMA, ControlRecord, End, FaultyNode, Leader, Member, Round
from elastic_launch.testing import MemoryStore

MEMBERS = (Member("a", "a1", 8, "10.0.0.1", 7000), Member("b", "b1", 4, "fd00::1", 7001))
RECORD = ControlRecord(
    run_id="run",
    digest="digest",
    term=3,
    leader=Leader("a", "a1", "10.0.0.1", 6000),
    round=Round(7, MEMBERS),
    restarts=2,
    last_step=1000,
    end=End(91, "all 3 restarts spent"),
    nonce="n",
    healthy=40000.5,
    repeats="cfb8d3c8ede13adc",
    repeats_step=3,
    faulty=(FaultyNode("c", 2, 1200.0), FaultyNode("a", faults=(30.0, 2.5))),
)


@pytest.mark.parametrize(
    "record",
    [RECORD, ControlRecord("run", "digest", 1, RECORD.leader), replace(RECORD, last_step=None, end=None)],
    ids=["all fields", "a new run", "no end"],
)
def test_a_record_is_read_as_it_was_written(record: ControlRecord) -> None:
    assert ControlRecord.parse(record.encode()) == record


def test_a_record_is_readable_by_people_and_other_tools() -> None:
    value = json.loads(RECORD.encode())
    assert value["schema"] == SCHEMA
    assert value["round"]["members"][1]["address"] == "fd00::1"
    assert value["end"] == {"code": 91, "cause": "all 3 restarts spent"}


def test_ranks_follow_members_and_within_a_member_its_local_ranks() -> None:
    a, b = replace(MEMBERS[0], workers=2), replace(MEMBERS[1], workers=2, slots=(1, 3), role="eval")
    formed = Round(1, (a, b, replace(a, node_id="c")))
    assert formed.ranks_of(0) == [(0, 0, 0), (1, 1, 1)]
    assert formed.ranks_of(1) == [(1, 2, 0), (3, 3, 1)]
    assert formed.ranks_of(2) == [(0, 4, 2), (1, 5, 3)]


@pytest.mark.parametrize("slots", [(1, 0), (0, 0), (-1, 0), (0, 65536), (0,)])
def test_a_members_local_ranks_are_checked(slots: tuple[int, ...]) -> None:
    value = codec.loads(codec.dumps(MEMBERS[0]))
    with pytest.raises(ProtocolError, match=r"Member\.slots"):
        codec.decode(Member, value | {"workers": 2, "slots": list(slots)})


def test_each_write_differs_from_all_others() -> None:
    written = [RECORD.renewed() for _ in range(100)]
    assert len({record.encode() for record in written}) == 100
    assert {replace(record, nonce="n") for record in written} == {RECORD}


def test_of_two_writers_with_equal_records_one_wins() -> None:
    store = MemoryStore()
    mine, other = RECORD.renewed().encode(), RECORD.renewed().encode()
    assert store.compare_and_set(None, mine, 1.0)
    assert not store.compare_and_set(None, other, 1.0)
    assert store.load(1.0) == mine


def test_a_record_of_another_schema_is_refused_with_a_remedy() -> None:
    with pytest.raises(ProtocolError, match="has schema 3; this version reads 2") as caught:
        ControlRecord.parse(RECORD.encode().replace(b'"schema":2', b'"schema":3'))
    assert "same version" in caught.value.hint


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not json",
        b"[]",
        b"{}",
        b'{"schema":2}',
        b'{"schema":true}',
        b'{"schema":1.0}',
        RECORD.encode().replace(b'"term":3', b'"term":"3"'),
        RECORD.encode().replace(b'"port":6000', b'"port":null'),
        RECORD.encode().replace(b'"number":7', b'"number":7.5'),
        RECORD.encode().replace(b'"max_nodes":1', b'"max_nodes":0'),
        RECORD.encode().replace(b'"healthy":40000.5', b'"healthy":Infinity'),
        RECORD.encode().replace(b'"left":1200.0', b'"left":NaN'),
        RECORD.encode().replace(b'"faults":[30.0,', b'"faults":[-30.0,'),
        RECORD.encode()[:-1],
    ],
)
def test_an_invalid_record_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        ControlRecord.parse(data)


def test_fields_of_a_later_version_are_ignored() -> None:
    value = {**json.loads(RECORD.encode()), "colour": "green"}
    assert ControlRecord.parse(json.dumps(value).encode()) == RECORD


def test_a_record_of_a_version_that_did_not_count_something_begins_its_count() -> None:
    value = json.loads(RECORD.encode())
    for name in ("healthy", "repeats", "repeats_step", "faulty"):
        del value[name]
    record = ControlRecord.parse(json.dumps(value).encode())
    assert record == replace(RECORD, healthy=0.0, repeats="", repeats_step=0, faulty=())


def test_a_record_of_sixteen_thousand_nodes_can_be_read() -> None:
    members = tuple(
        Member(f"node-{number:05}.cluster.example.com", "0123456789ab", 8, f"10.0.{number >> 8}.{number & 255}", 40000)
        for number in range(16_000)
    )
    exclusion = Exclusion()
    for member in members[: 2 * MOST]:
        for _ in range(20 * FAULTS):
            exclusion.fault(member.node_id, 0.0)
    faulty = exclusion.recorded(LONGEST / 3)
    assert len(faulty) == MOST
    data = replace(RECORD, round=Round(1, members), faulty=faulty).encode()
    assert len(data) <= MAX_RECORD
    assert len(ControlRecord.parse(data).round.members) == 16_000


def test_the_world_size_is_the_sum_of_all_workers() -> None:
    assert RECORD.round.world_size == 12
    assert Round().world_size == 0


def test_a_member_is_found_by_node_id_and_incarnation() -> None:
    assert RECORD.round.index("a", "a1") == 0
    assert RECORD.round.index("b", "b1") == 1
    assert RECORD.round.index("b", "b2") is None
    assert RECORD.round.index("c", "b1") is None

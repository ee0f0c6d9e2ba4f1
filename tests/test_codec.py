"""Messages on links and values in the store survive a round trip, and nothing else is accepted."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_launch import codec
from elastic_launch.config.launch_config import Limits
from elastic_launch.contract import Count
from elastic_launch.errors import ProtocolError
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.record import ControlRecord, LocalRanks, Member, ReplicaSize, Round, Seconds
from elastic_launch.rendezvous.wire import messages as m

STEADY = settings(max_examples=25)
"""The same examples in every run, however slow the machine."""

REPORTS = list(typing.get_args(m.Report))
ORDERS = list(typing.get_args(m.Order))

HELLO = m.NodeHello(1, "run", "digest", "train.py", "--nnodes 1:2", "a", "a1", 2, "host", 7000, wanted_rank=1)
FAILURE = Failure("a", "crash", 1, 1, 42, -9, "", ("line 1", "line 2"), 1.5, 0.25, "s", "/logs", 3)
LOCAL_RANKS = st.sets(st.integers(0, 65535), max_size=3).map(lambda ranks: tuple(sorted(ranks)))


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    if hint == Count:
        return st.integers(0, 2**53 - 1)
    if hint == LocalRanks:
        return LOCAL_RANKS
    if hint == ReplicaSize:
        return st.integers(1, 65535)
    if hint == Seconds:
        return st.floats(0.0, 1e9, exclude_max=True)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (inner,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
        return st.none() | values(inner)
    if typing.get_origin(hint) is tuple:
        return st.lists(values(typing.get_args(hint)[0]), max_size=3).map(tuple)
    if hint is Limits:
        return st.builds(lambda low, more, most: Limits(low + 1, low + 1 + more, most), *[st.integers(0, 2**40)] * 3)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return instances(hint)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**63),
        float: st.floats(allow_nan=False),
        str: st.text(st.characters(codec="utf-8"), max_size=20),
        bool: st.booleans(),
    }
    return plain[hint]


def instances(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    drawn = {item.name: values(hints[item.name]) for item in fields(kind)}
    if kind is Member:
        return st.builds(lambda slots, **rest: Member(**rest | ({"slots": slots, "workers": len(slots) or 1})), **drawn)
    return st.builds(kind, **drawn)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)

# Round trips.


@pytest.mark.parametrize("kind", [*REPORTS, *ORDERS], ids=lambda kind: kind.__name__)
@STEADY
@given(data=st.data())
def test_any_message_survives_a_round_trip(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(instances(kind))
    line = m.pack(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert m.unpack(line) == message


@STEADY
@given(instances(ControlRecord) | instances(Round))
def test_any_value_survives_a_round_trip(value: Any) -> None:
    assert codec.decode(type(value), codec.loads(codec.dumps(value))) == value


def test_a_message_begins_with_its_type() -> None:
    assert m.pack(m.Joined(3)) == b'{"type":"joined","round":3}\n'
    assert m.pack(m.Beat()) == b'{"type":"beat","load":null}\n'


def test_text_that_is_not_unicode_is_kept() -> None:
    """Paths and output may hold such text."""
    message = m.Leaving(b"caf\xe9".decode(errors="surrogateescape"))
    assert m.unpack(m.pack(message)) == message


# Versions.


def test_unknown_fields_are_ignored() -> None:
    assert m.unpack(b'{"type":"joined","round":3,"since":4,"more":{"deep":[1]}}') == m.Joined(3)


def test_missing_fields_take_their_defaults() -> None:
    value = codec.loads(codec.dumps(HELLO))
    for name in ("wanted_rank", "holding", "done", "seen_term", "seen_round", "seen_restarts"):
        del value[name]
    hello = codec.decode(m.NodeHello, value)
    assert (hello.wanted_rank, hello.holding, hello.done, hello.seen_term) == (None, 0, False, 0)


def test_a_missing_field_without_default_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"Joined\.round is missing"):
        m.unpack(b'{"type":"joined"}')


# Types.


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"type":"joined","round":"3"}', r"Joined\.round: int was expected, found str"),
        ('{"type":"joined","round":3.0}', r"Joined\.round: int was expected, found float"),
        ('{"type":"joined","round":true}', r"Joined\.round: int was expected, found bool"),
        ('{"type":"joined","round":null}', r"Joined\.round: int was expected, found NoneType"),
        ('{"type":"joined","round":[3]}', r"Joined\.round: int was expected, found list"),
        ('{"type":"leaving","reason":3}', r"Leaving\.reason: str was expected, found int"),
        ('{"type":"evicted","term":1,"reason":"x","final":1}', r"Evicted\.final: bool was expected, found int"),
        ('{"type":"unfit","failure":"x"}', r"Failure: an object was expected, found str"),
        ('{"type":"unfit","failure":{}}', r"Failure\.node_id is missing"),
        (
            '{"type":"form","term":1,"restarts":0,"cause":"first","round":{"number":1,"members":{}}}',
            r"Round\.members: a list was expected, found dict",
        ),
        (
            '{"type":"form","term":1,"restarts":0,"cause":"first","round":{"number":1,"members":[["a"]]}}',
            r"Member: an object was expected, found list",
        ),
        (
            '{"type":"welcome","term":1,"node_id":"a","beat":"1","dead_after":5}',
            r"Welcome\.beat: float was expected, found str",
        ),
        (
            '{"type":"welcome","term":1,"node_id":"a","beat":true,"dead_after":5}',
            r"Welcome\.beat: float was expected, found bool",
        ),
    ],
)
def test_a_field_of_another_type_is_named(line: str, found: str) -> None:
    with pytest.raises(ProtocolError, match=found):
        m.unpack(line.encode())


def test_whole_numbers_are_accepted_as_floats() -> None:
    welcome = m.unpack(b'{"type":"welcome","term":1,"node_id":"a","beat":1,"dead_after":5}')
    assert isinstance(welcome, m.Welcome)
    assert type(welcome.beat) is float


def test_a_list_in_a_list_is_checked() -> None:
    with pytest.raises(ProtocolError, match=r"Failure\.detail: str was expected, found int"):
        codec.decode(Failure, {**asdict(FAILURE), "detail": ["a", 1]})


@dataclass(frozen=True)
class Optional:
    inner: Member | None = None


def test_none_only_where_it_is_allowed() -> None:
    assert codec.decode(Optional, {"inner": None}) == Optional()
    with pytest.raises(ProtocolError, match="Member: an object was expected, found int"):
        codec.decode(Optional, {"inner": 3})


# Messages that this project never sends.


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"GET / HTTP/1.1",
        b"{",
        b'{"type":',
        b"\x00\x01\x02",
        b"\xff\xfe\xfd",
        b"\x80\x04\x95cos\nsystem",
        b'"text"',
        b"3",
        b"null",
        b"[]",
        b"1" * 5000,
        b'{"type":"joined","round":' + b"1" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"type":"joined","round":' + b"[" * 100_000,
    ],
    ids=lambda data: f"{data[:12]!r}... {len(data)}",
)
def test_an_invalid_message_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        m.unpack(data)


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b'{"type":null}',
        b'{"type":3}',
        b'{"type":["nodehello"]}',
        b'{"type":"__class__"}',
        b'{"type":"NodeHello"}',
    ],
)
def test_an_unknown_type_is_a_protocol_error(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="unexpected type"):
        m.unpack(line)


def test_a_long_unknown_type_is_cut() -> None:
    with pytest.raises(ProtocolError) as caught:
        m.unpack(b'{"type":"' + b"x" * 100_000 + b'"}')
    assert len(str(caught.value)) < 200


def test_a_number_too_large_for_a_float_is_a_protocol_error() -> None:
    line = b'{"type":"welcome","term":1,"node_id":"a","dead_after":5,"beat":1' + b"0" * 400 + b"}"
    with pytest.raises(ProtocolError, match=r"Welcome\.beat"):
        m.unpack(line)


def test_a_value_that_is_too_large_is_not_even_parsed() -> None:
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        codec.loads(b" " * (codec.MAX_BYTES + 1))
    assert codec.loads(b" " * (codec.MAX_BYTES - 2) + b"{}") == {}


def assert_understood_or_refused(line: bytes) -> None:
    """Any input is rejected, or is a message that encodes to the same text again."""
    try:
        message = m.unpack(line)
    except ProtocolError:
        return
    again = m.unpack(m.pack(message))
    assert type(again) is type(message)
    assert repr(again) == repr(message)  # NaN is not equal to itself


@STEADY
@given(
    st.sampled_from([kind.__name__.lower() for kind in [*REPORTS, *ORDERS]]),
    st.dictionaries(st.text(max_size=10), JSON, max_size=4),
)
def test_any_json_is_understood_or_refused(name: str, value: dict[str, Any]) -> None:
    assert_understood_or_refused(json.dumps({**value, "type": name}).encode())


@STEADY
@given(data=st.data(), kind=st.sampled_from([m.NodeHello, Failure, m.Form, m.Welcome, m.RunEnd]))
def test_a_message_with_one_field_changed_is_understood_or_refused(data: st.DataObject, kind: type[Any]) -> None:
    value = json.loads(m.pack(data.draw(instances(kind))))
    value[data.draw(st.sampled_from(sorted(value)))] = data.draw(JSON)
    assert_understood_or_refused(json.dumps(value).encode())


@STEADY
@given(st.binary(max_size=200))
def test_any_bytes_are_understood_or_refused(data: bytes) -> None:
    assert_understood_or_refused(data)


# Lines.


def test_lines_are_cut_wherever_the_pieces_end() -> None:
    reader = codec.LineReader()
    assert reader.feed(b"one\ntw") == [b"one"]
    assert reader.feed(b"o") == []
    assert reader.feed(b"\n\n\nthree\nfour\n") == [b"two", b"three", b"four"]
    assert reader.feed(b"") == []


@STEADY
@given(st.lists(st.binary(min_size=1, max_size=20).map(lambda line: line.replace(b"\n", b"x"))), st.data())
def test_any_pieces_give_the_same_lines(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    reader = codec.LineReader()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:end])
    assert found == lines


def test_a_line_without_end_is_given_up_at_the_limit() -> None:
    reader = codec.LineReader(limit=100)
    assert reader.feed(b"x" * 60) == []
    assert reader.feed(b"x" * 40) == []
    with pytest.raises(ProtocolError, match="more than 100 bytes"):
        reader.feed(b"x")


def test_many_short_lines_are_no_long_one() -> None:
    reader = codec.LineReader(limit=10)
    assert len(reader.feed(b"short\n" * 1000)) == 1000

"""A value sealed with a token: its holders read and write it, all others get the reason for the refusal."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_launch.errors import ProtocolError, RefusedError, StoreError
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.wire.seal import Patience, ValueSeal
from elastic_launch.secret import ENV_TOKEN, Token

TOKEN = Token("correct-horse-battery-staple", "test")
OTHER = Token("another-token-of-some-length", "test")
RECORD = ControlRecord("run", "digest", 1, Leader("a", "a1", "10.0.0.1", 6000)).renewed().encode()
SEALED = ValueSeal(TOKEN, "run").close(RECORD)


def test_the_holders_of_a_token_share_a_record() -> None:
    assert ValueSeal(TOKEN, "run").open(SEALED) == RECORD


def test_without_a_token_the_value_is_the_record() -> None:
    seal = ValueSeal(None, "run")
    assert seal.close(RECORD) == RECORD == seal.open(RECORD)


def test_a_record_with_a_mac_is_still_readable_by_people_and_other_tools() -> None:
    read = json.loads(SEALED)
    assert len(read.pop("mac")) == 64
    assert read == json.loads(RECORD)


@pytest.mark.parametrize(
    ("writer", "reader", "message", "hint"),
    [
        (TOKEN, None, "The token is missing: run 'run' has one", ENV_TOKEN),
        (TOKEN, OTHER, "The token differs from that of run 'run'", "--token-file"),
        (None, TOKEN, "This node has a token, run 'run' has none", ENV_TOKEN),
    ],
)
def test_a_node_with_another_token_is_refused_with_a_hint(
    writer: Token | None, reader: Token | None, message: str, hint: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        ValueSeal(reader, "run").open(ValueSeal(writer, "run").close(RECORD))
    assert caught.value.exit_code == 95
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_another_runs_record_is_refused() -> None:
    with pytest.raises(RefusedError, match="differs"):
        ValueSeal(TOKEN, "another").open(SEALED)


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_record_that_was_changed_anywhere_is_not_obeyed(where: int, change: int) -> None:
    value = bytearray(SEALED)
    value[where % len(value)] ^= change
    with pytest.raises((RefusedError, ProtocolError)):
        ValueSeal(TOKEN, "run").open(bytes(value))


@pytest.mark.parametrize("value", [b"", b"garbage", b"[]", b'{"mac":"', b'{"mac":"' + b"0" * 64 + b'",'])
def test_garbage_in_the_store_is_an_error(value: bytes) -> None:
    with pytest.raises((RefusedError, ProtocolError)):
        ValueSeal(TOKEN, "run").open(value)


def test_a_refusal_is_believed_once_it_has_lasted_long_enough() -> None:
    patience, first, other = Patience(3.0), RefusedError("one"), RefusedError("other")
    found = [patience.refused(error, now) for now, error in ((0.0, first), (2.9, first), (3.0, other), (5.0, other))]
    assert [type(error) for error in found] == [StoreError] * 4
    assert patience.refused(other, 6.0) is other
    patience.over()
    assert not patience.stands("other", 7.0)

"""A record under a token: its holders read and write it, everybody else is told why not and changes nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_launch.errors import ProtocolError, RefusedError
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.sealed_store import SealedStore
from elastic_launch.secret import ENV_TOKEN, Token
from elastic_launch.testing import MemoryStore

TOKEN = Token("correct-horse-battery-staple", "test")
OTHER = Token("another-token-of-some-length", "test")
RECORD = ControlRecord("run", "digest", 1, Leader("a", "a1", "10.0.0.1", 6000)).renewed()


def _written(token: Token | None, run_id: str = "run") -> MemoryStore:
    store = MemoryStore()
    assert SealedStore(store, token, run_id).compare_and_set(None, RECORD.encode(), 1)
    return store


def test_the_holders_of_a_token_share_a_record() -> None:
    store = _written(TOKEN)
    view = SealedStore(store, TOKEN, "run")
    assert view.load(1) == RECORD.encode()
    following = RECORD.renewed().encode()
    assert not view.compare_and_set(following, RECORD.encode(), 1)
    assert view.compare_and_set(RECORD.encode(), following, 1)
    assert view.wait_changed(RECORD.encode(), 1) == following
    assert view.wait_changed(following, 0) == following


def test_without_a_token_the_value_is_the_record() -> None:
    assert _written(None).load(1) == RECORD.encode()


def test_a_record_with_a_mac_is_still_readable_by_people_and_other_tools() -> None:
    value = _written(TOKEN).load(1)
    assert value is not None
    read = json.loads(value)
    assert len(read.pop("mac")) == 64
    assert read == json.loads(RECORD.encode())


@pytest.mark.parametrize(
    ("writer", "reader", "message", "hint"),
    [
        (TOKEN, None, "The token is missing: run 'run' has one", ENV_TOKEN),
        (TOKEN, OTHER, "The token differs from that of run 'run'", "--token-file"),
        (None, TOKEN, "This node has a token, run 'run' has none", ENV_TOKEN),
    ],
)
def test_a_node_with_another_token_is_refused_and_told_what_to_do(
    writer: Token | None, reader: Token | None, message: str, hint: str
) -> None:
    store = _written(writer)
    before = store.load(1)
    view = SealedStore(store, reader, "run")
    for read in (lambda: view.load(1), lambda: view.wait_changed(None, 1)):
        with pytest.raises(RefusedError) as caught:
            read()
        assert caught.value.exit_code == 95
        assert message in caught.value.message
        assert hint in caught.value.hint
    assert not view.compare_and_set(RECORD.encode(), RECORD.renewed().encode(), 1)
    assert store.load(1) == before


def test_another_runs_record_is_none_of_this_run() -> None:
    store = _written(TOKEN, "another")
    with pytest.raises(RefusedError, match="differs"):
        SealedStore(store, TOKEN, "run").load(1)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_record_that_was_changed_anywhere_is_not_obeyed(where: int, change: int) -> None:
    value = bytearray(_written(TOKEN).load(1) or b"")
    value[where % len(value)] ^= change
    store = MemoryStore()
    store.compare_and_set(None, bytes(value), 1)
    with pytest.raises((RefusedError, ProtocolError)):
        SealedStore(store, TOKEN, "run").load(1)


@pytest.mark.parametrize("value", [b"", b"garbage", b"[]", b'{"mac":"', b'{"mac":"' + b"0" * 64 + b'",'])
def test_garbage_in_the_store_is_an_error(value: bytes) -> None:
    store = MemoryStore()
    store.compare_and_set(None, value, 1)
    with pytest.raises((RefusedError, ProtocolError)):
        SealedStore(store, TOKEN, "run").load(1)

"""Links of a run with a token: holders of the token can communicate, and all others are ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_launch import codec
from elastic_launch.errors import ProtocolError
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.authentication import (
    AuthenticationError,
    Channel,
    MissingTokenError,
    OtherTokenError,
    Seal,
    UnexpectedTokenError,
    link_key,
)
from elastic_launch.secret import Token

STEADY = settings(max_examples=100)

TOKEN = Token("correct-horse-battery-staple", "test")
KEY = link_key(TOKEN, "run")
OTHERS = [
    link_key(Token("another-token-of-some-length", "test"), "run"),
    link_key(TOKEN, "another run"),
]

MESSAGES = st.lists(st.binary(min_size=1, max_size=40).filter(lambda x: b"\n" not in x), max_size=6)


def _pair(node: bytes | None = KEY, leader: bytes | None = KEY) -> tuple[Channel, Channel]:
    return Channel.of_node(node), Channel.of_leader(leader, codec.MAX_BYTES)


def _take(channel: Channel) -> bytes:
    data = bytes(channel.unsent)
    channel.unsent.clear()
    return data


def _ready() -> tuple[Channel, Channel]:
    node, leader = _pair()
    for _ in range(2):
        assert leader.feed(_take(node)) == []
        assert node.feed(_take(leader)) == []
    assert node.ready
    assert leader.ready
    return node, leader


def _lines(data: bytes) -> list[bytes]:
    return [line + b"\n" for line in data.split(b"\n")[:-1]]


@STEADY
@given(up=MESSAGES, down=MESSAGES, early=st.booleans(), data=st.data(), key=st.sampled_from([KEY, None]))
def test_holders_of_the_token_understand_each_other_however_the_bytes_are_cut(
    up: list[bytes], down: list[bytes], early: bool, data: Any, key: bytes | None
) -> None:
    node, leader = _pair(key, key) if early or key is None else _ready()
    for message in up:
        node.send(message + b"\n")
    for message in down:
        leader.send(message + b"\n")
    heard: dict[str, list[bytes]] = {"up": [], "down": []}
    while node.unsent or leader.unsent:
        for name, source, sink in (("up", node, leader), ("down", leader, node)):
            if not source.unsent:
                continue
            size = data.draw(st.just(len(source.unsent)) | st.integers(1, len(source.unsent)))
            chunk = bytes(source.unsent[:size])
            del source.unsent[:size]
            heard[name] += sink.feed(chunk)
    assert heard == {"up": up, "down": down}


def test_without_a_token_messages_are_sent_unchanged() -> None:
    node, leader = _pair(None, None)
    assert node.ready
    assert leader.ready
    assert not node.unsent
    hello = m.pack(m.Leaving("SIGTERM"))
    node.send(hello)
    assert _take(node) == hello
    assert leader.feed(hello) == [hello[:-1]]


@pytest.mark.parametrize("other", OTHERS, ids=["another token", "another run"])
def test_the_node_detects_a_leader_with_another_token_before_it_sends_anything(other: bytes) -> None:
    node, leader = _pair(KEY, other)
    node.send(b"secretive\n")
    leader.feed(_take(node))
    with pytest.raises(AuthenticationError, match="token differs from that of the run"):
        node.feed(_take(leader))
    assert not node.ready
    assert not node.unsent


def test_the_leader_believes_no_proof_but_that_of_this_link() -> None:
    node, leader = _pair()
    other_node, other_leader = _pair()
    for a, b in ((node, leader), (other_node, other_leader)):
        b.feed(_take(a))
        a.feed(_take(b))
    with pytest.raises(AuthenticationError, match="does not know the run's token"):
        leader.feed(_take(other_node))
    assert not leader.ready


def test_the_leaders_own_mac_sent_back_proves_nothing() -> None:
    node, leader = _pair()
    leader.feed(_take(node))
    mac = json.loads(_take(leader))["mac"]
    with pytest.raises(AuthenticationError):
        leader.feed(json.dumps({"type": "proof", "mac": mac}).encode() + b"\n")


def test_a_missing_token_is_an_error_of_its_own() -> None:
    _, leader = _pair()
    hello = m.NodeHello(1, "run", "digest", "train.py", "--nnodes 1:2", "a", "a1", 2, "host", 7000)
    with pytest.raises(MissingTokenError):
        leader.feed(m.pack(hello))


HEX = "ab" * 32


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1",
        b"[]",
        b"{}",
        b"[" * 5000,
        b"\xff\xfe",
        b'{"type":"challenge"}',
        b'{"type":"challenge","nonce":7}',
        b'{"type":"challenge","nonce":"zz"}',
        b'{"type":"challenge","nonce":"abcd"}',
        b'{"type":["challenge"],"nonce":"%s"}' % HEX.encode(),
        b'{"type":"proof","mac":"%s"}' % HEX.encode(),
        b'{"type":"answer","nonce":"%s","mac":"%s"}' % (HEX.encode(), HEX.encode()),
        b'{"type":"beat"}',
    ],
)
def test_garbage_instead_of_the_handshake_is_an_error_on_both_sides(line: bytes) -> None:
    for channel in _pair():
        with pytest.raises(AuthenticationError):
            channel.feed(line + b"\n")


@STEADY
@given(st.binary(max_size=200))
def test_no_bytes_from_a_stranger_become_a_message(data: bytes) -> None:
    for channel in (*_pair(), *_ready()):
        try:
            assert channel.feed(data) == []
        except ProtocolError:
            assert not channel.unsent or not channel.ready


EDITS = st.sampled_from(["drop", "repeat", "swap", "flip", "insert", "reflect", "cut"])


@STEADY
@given(
    sent=st.lists(st.binary(min_size=1, max_size=20).filter(lambda x: b"\n" not in x), min_size=1, max_size=5),
    edit=EDITS,
    where=st.integers(0, 10**6),
    upwards=st.booleans(),
)
def test_only_lines_before_a_tampered_one_are_accepted(sent: list[bytes], edit: str, where: int, upwards: bool) -> None:
    node, leader = _ready()
    source, sink = (node, leader) if upwards else (leader, node)
    for message in sent:
        source.send(message + b"\n")
    lines = _lines(_take(source))
    at = where % len(lines)
    if edit == "drop":
        del lines[at]
    elif edit == "repeat":
        lines.insert(at + 1, lines[at])
    elif edit == "swap":
        lines[at : at + 2] = lines[at : at + 2][::-1]
    elif edit == "flip":
        line = bytearray(lines[at])
        place = where % (len(line) - 1)
        line[place] ^= 1 << where % 8
        lines[at] = bytes(line)
    elif edit == "insert":
        lines.insert(at, b"0" * 64 + b" " + sent[at] + b"\n")
    elif edit == "reflect":
        sink.send(sent[0] + b"\n")
        lines.insert(at, _take(sink))
    else:
        lines[at] = lines[at][:70] + b"\n"
    heard: list[bytes] = []
    try:
        for line in lines:
            heard += sink.feed(line)
    except AuthenticationError:
        pass
    assert heard == sent[: len(heard)]
    untouched = {"repeat": at + 1, "cut": len(sent)}.get(edit, at)
    assert len(heard) <= max(untouched, at + 1)


def test_a_message_recorded_on_another_link_is_refused() -> None:
    first, _ = _ready()
    _, second = _ready()
    first.send(b'{"type":"beat"}\n')
    with pytest.raises(AuthenticationError):
        second.feed(_take(first))


def test_a_message_goes_only_in_its_direction() -> None:
    seal = Seal(b"u" * 32, b"d" * 32)
    with pytest.raises(AuthenticationError):
        seal.open(seal.close(b"message"))
    assert Seal(b"d" * 32, b"u" * 32).open(Seal(b"u" * 32, b"d" * 32).close(b"message")) == b"message"


def test_an_endless_line_is_cut_off_at_the_limit() -> None:
    channel = Channel.of_leader(KEY, 1000)
    channel.feed(b"x" * 1000)
    with pytest.raises(ProtocolError, match="more than 1000 bytes"):
        channel.feed(b"x")
    roomy = Channel.of_leader(KEY, 1000)
    roomy.allow(2000)
    assert roomy.feed(b"x" * 2000) == []


def test_a_node_with_a_token_learns_in_plain_text_that_the_run_has_none() -> None:
    node, leader = Channel.of_node(KEY), Channel.of_leader(None, 1000)
    node.send(b"secretive\n")
    with pytest.raises(UnexpectedTokenError):
        leader.feed(_take(node))
    leader.send_bare(b'{"type":"refused","term":1,"reason":"believe me"}\n')
    with pytest.raises(OtherTokenError, match="the run has none") as caught:
        node.feed(_take(leader))
    assert "believe me" not in str(caught.value), "it proves nothing, so it is not passed on"

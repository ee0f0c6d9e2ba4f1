"""All that is decoded from a network, from shared storage, or from a file that another process wrote.

Each decoder gets valid, mangled and arbitrary samples. It returns a value or raises the error that it
declares, in bounded time and memory; what it returns comes back as it is when it is encoded and decoded again. The same
at length: ``make soak``.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import tracemalloc
import zlib
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from harness import SLOWNESS
from http_heads import understood
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_agents.hangs.collectives import last_collectives
from elastic_agents.hangs.stacks import parse_py_spy
from elastic_agents.notices.aws import instance_action, scheduled
from elastic_agents.notices.azure import events as azure_events
from elastic_agents.notices.types import Trouble
from elastic_agents.warm._record import WorkerImports
from elastic_agents.workers.watchdog import TimerRequest
from elastic_launch import codec
from elastic_launch import contract as c
from elastic_launch.cli.job_file_reader import JobFileReader
from elastic_launch.clock import MonotonicClock
from elastic_launch.config.endpoints import parse_endpoint, parse_listening
from elastic_launch.config.launch_config import Limits
from elastic_launch.error_file import ErrorFile, read_error_file
from elastic_launch.errors import ProtocolError, RefusedError, UsageError
from elastic_launch.events.sinks import JsonLines
from elastic_launch.events.types import LinkChanged, RoundFormed
from elastic_launch.observe import reading
from elastic_launch.rendezvous import run_file as w
from elastic_launch.rendezvous.admin import messages as a
from elastic_launch.rendezvous.record import ControlRecord, End, FaultyNode, Leader, Member, Round
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.authentication import Channel
from elastic_launch.rendezvous.wire.seal import ValueSeal
from elastic_launch.secret import Token
from elastic_launch.shared_progress import SharedProgress, WorkerProgress
from elastic_launch.snapshot.errors import MalformedError, UnknownFormatError
from elastic_launch.snapshot.format import tensor_file as tensorfile
from elastic_launch.snapshot.format.files import FileSum
from elastic_launch.snapshot.format.manifest import TENSORS, Manifest, parse_json
from elastic_launch.snapshot.format.tree import decode, encode
from elastic_launch.snapshot.memory.slot import Header, Slot
from elastic_launch.snapshot.storage import owner, shares
from elastic_launch.system.host_load import GpuLoad, HostLoad

KEY = b"k" * 32
TOKEN = Token("correct-horse-battery-staple", "test")
HELLO = m.NodeHello(m.PROTOCOL_VERSION, "run", "digest", "train.py", "--nnodes 1:2", "a", "a1", 2, "host", 7000)
RECORD = ControlRecord(
    "run",
    "d" * 64,
    3,
    Leader("a", "a1", "10.0.0.1", 4000),
    Round(7, (Member("a", "a1", 8, "10.0.0.1", 5000), Member("b", "b1", 2, "10.0.0.2", 5001, slots=(1, 3)))),
    limits=Limits(1, 4),
    end=End(0, "all workers finished"),
    healthy=40000.5,
    repeats="cfb8d3c8ede13adc",
    faulty=(FaultyNode("c", 2, 1200.0), FaultyNode("a", faults=(30.0, 2.5))),
)
STATUS = a.Status(
    "run", "a round forms", 1, "a", 2, 4, 1, 4, 0, 3, (a.NodeStatus("a", "10.0.0.1", 4, "training", 0.5),), time=0.0
)
Pair = namedtuple("Pair", "left right")
STATE: dict[str, Any] = {"step": 3, "weights": torch.arange(6.0).reshape(2, 3), "more": [1, "x", None, (2.5, b"y")]}
STATE |= {
    "kinds": [{1, 2}, deque([1], 3), 1 + 2j, defaultdict(list, a=[]), torch.Size([2]), torch.float32, Pair(1, "a")]
}
STATE |= {"numpy": [np.float64(0.1), np.arange(3), np.array(["a", "bc"]), np.zeros((0, 2), "<M8[s]")]}


@dataclass(frozen=True)
class Target:
    """A decoder.

    Attributes:
        samples: of what it takes.
        read: decodes; returns what it found.
        refuses: what it may raise.
        write: encodes what ``read`` returned, if anything does.
    """

    samples: tuple[bytes, ...]
    read: Callable[[bytes], Any]
    refuses: tuple[type[Exception], ...] = ()
    write: Callable[[Any], bytes] | None = None


@contextmanager
def file_of(data: bytes, name: str = "file") -> Iterator[Path]:
    with TemporaryDirectory() as directory:
        path = Path(directory) / name
        path.write_bytes(data)
        yield path


def through_file(read: Callable[[Path], Any], name: str = "file") -> Callable[[bytes], Any]:
    def act(data: bytes) -> Any:
        with file_of(data, name) as path:
            return read(path)

    return act


def on_link(side: Callable[[], Channel]) -> Callable[[bytes], Any]:
    """Input on a link before the other side has proven anything is not a message."""

    def read(data: bytes) -> None:
        channel = side()
        assert channel.feed(data) == []
        assert not channel.ready
        assert len(channel.unsent) < 1000

    return read


def opened() -> tuple[Channel, Channel]:
    node, leader = Channel.of_node(KEY), Channel.of_leader(KEY, 65536)
    for _ in range(3):
        leader.feed(taken(node))
        node.feed(taken(leader))
    assert node.ready
    assert leader.ready
    return node, leader


def taken(channel: Channel) -> bytes:
    data = bytes(channel.unsent)
    channel.unsent.clear()
    return data


def after_proof(data: bytes) -> None:
    """An attacker who intercepts the link later is ignored, too: only sealed messages are read."""
    node, leader = opened()
    node.send(m.pack(HELLO))
    mine = taken(node)
    assert leader.feed(mine) == [m.pack(HELLO)[:-1]]
    assert leader.feed(mine + data) == []


SEAL = ValueSeal(TOKEN, "run")
SEALED = (SEAL.close(RECORD.encode()),)


def sealed(data: bytes) -> bytes:
    value = SEAL.open(data)
    assert data in SEALED
    return value


def run_file(data: bytes) -> w.RunAddress | None:
    with file_of(data, w.FILE) as path:
        found, alive = w.find(path.parent, None, depth=0)
    assert not alive
    run = found[0].run if found else None
    if run is not None:
        with suppress(UsageError):
            parse_endpoint(run.leader)
    return run


def resealed(data: bytes) -> bytes:
    """With its own checksum, as an attacker would write a manifest."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(value, dict):
        return data
    value.pop("sha256", None)
    try:
        body = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        return json.dumps({**value, "sha256": hashlib.sha256(body).hexdigest()}).encode()
    except RecursionError:
        return data


def manifest(data: bytes) -> Manifest:
    found, _ = Manifest.parse(resealed(data))
    for name in found.files:
        assert "/" not in name
    return found


def state(data: bytes) -> Any:
    tensors, _ = encode(STATE)
    return encode(decode(parse_json(data), tensors))[1]


def tensors(data: bytes) -> dict[str, torch.Tensor]:
    with file_of(data) as path, path.open("rb") as file:
        found = tensorfile.read(file.fileno())
    assert sum(tensor.nbytes for tensor in found.values()) <= len(data)
    return found


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + TENSOR_FILE[8 + len(TENSOR_HEADER) :]


def division(header: bytes) -> int:
    data = with_header(header)
    found = shares.Division(lambda begin, end: iter([data[begin:end]]), len(data), 3)
    assert 0 < len(found) <= 3
    for index in range(len(found)):
        whole = b"".join(found.parts(index))
        length = int.from_bytes(whole[:8], "little")
        described = json.loads(whole[8 : 8 + length])
        assert max((one["data_offsets"][1] for one in described.values()), default=0) == len(whole) - 8 - length
    return len(found)


NOW = datetime(2026, 1, 2, tzinfo=UTC)


def progress(data: bytes) -> WorkerProgress | None:
    made = SharedProgress.make("fuzz")
    try:
        fields = data[:256].ljust(256, b"\0")
        os.pwrite(made.descriptor, fields + zlib.crc32(fields).to_bytes(4, "little"), 0)
        return made.read()
    finally:
        made.close()


def slot(data: bytes) -> Header | None:
    made = Slot.make("fuzz")
    try:
        os.pwrite(made.head, data, 0)
        for descriptor in (made.head, made.tensors):
            os.ftruncate(descriptor, 5000)
        return made.header()
    finally:
        made.close()


def slot_sample() -> bytes:
    made = Slot.make("sample")
    try:
        os.ftruncate(made.tensors, 10)
        made.commit(Header(1, 2, 3, 1, 4, 10, 2, 3), b"{}", b"abc")
        return os.pread(made.head, 80, 0)
    finally:
        made.close()


def events(data: bytes) -> Any:
    with file_of(data, "events-a.jsonl") as path:
        return reading.read(path).chronicle


def event_sample() -> bytes:
    with TemporaryDirectory() as directory:
        sink = JsonLines(Path(directory) / "events.jsonl", MonotonicClock(), lambda error: pytest.fail(str(error)))
        sink.emit(RoundFormed(1, 1, ("a", "b"), 2, 0, "start", 0.5))
        sink.emit(LinkChanged(True, "hello accepted"))
        return sink.path.read_bytes()


def error_file(data: bytes) -> ErrorFile | None:
    found = through_file(read_error_file)(data)
    if found is not None:
        assert type(found.exit_code) is int
        for text in (found.message, *found.traceback):
            text.encode()
    return None if found is None else ErrorFile(found.message, found.traceback, found.exit_code)


def request(data: bytes) -> Any:
    said, found = understood(data[:4096])
    return [(request.path, request.query) for request in found] or said[:12]


MANIFEST = Manifest(3, 1, {TENSORS: FileSum(10, "a" * 64)}, FileSum(5, "b" * 64), {"note": ["x", 1]}).dumps()[0]
SPLIT = Manifest(
    3,
    1,
    {f"tensors-{k}-of-00002.safetensors": FileSum(1, "a" * 64) for k in ("00001", "00002")},
    FileSum(5, "b" * 64),
    {},
).dumps()[0]
TENSOR_FILE = b"".join(bytes(part) for part in tensorfile.parts(encode({**STATE, "bias": torch.ones(5)})[0]))
TENSOR_HEADER = TENSOR_FILE[8 : 8 + int.from_bytes(TENSOR_FILE[:8], "little")]
WORKERS = (
    c.WorkerHello(1, 0, 0),
    c.Ready(3, 100, 0.5),
    c.WorkerSaved(3, "full"),
    c.Drained(3, 0.25),
    c.Stored(1, c.CopyJob(1, 2, 3, "/a", keep_every=5, keep_best=c.Best("loss"))),
)
LINES = (
    HELLO,
    m.Beat(),
    m.ProgressBeat(1, 2, load=HostLoad(51, 3 << 30, 8 << 30, (GpuLoad(97, 71 << 30, 80 << 30), GpuLoad(None, 0, 1)))),
    m.RankOffer((0, 2)),
    m.RunEnd(1, 0, "done", 0),
    m.Refused(1, "no", "hint"),
    m.Form(1, RECORD.round, 0, "x"),
)
CALLS = (
    a.Caller(2, "run"),
    a.AskDrain("a", 3.5),
    a.AskResize(1, 2),
    a.AdminAnswer(1, True, "done", 4),
    STATUS,
)
JOB = b"nnodes: 1:4\nnproc: 2\nenv:\n  A: b\nscript: train.py\nargs: [--lr, 0.1]\n"

COLLECTIVE = (
    b'{"process_group": ["0", "default_pg"], "collective_seq_id": 3, "profiling_name": "gloo:all_reduce", "pg_id": 1, '
    b'"input_dtypes": ["Float"], "input_sizes": [[8]], "is_p2p": false, "retired": true, "state": "scheduled", '
    b'"time_created_ns": 1003}'
)
COLLECTIVES = b'{"first": [0], "dumps": [{"entries": [%b]}]}' % COLLECTIVE
IMPORTS = b'["yaml", "/site-packages/yaml.py"]\n{"HOME": null, "HUB": "/x"}\n["parts", ""]\n'
PY_SPY = b'[{"thread_name": "MainThread", "frames": [{"filename": "/a/train.py", "line": 41, "name": "main"}]}]'

TARGETS = {
    "link": Target(tuple(m.pack(line) for line in LINES), m.unpack, (ProtocolError,), m.pack),
    "elasticctl": Target(tuple(m.pack(call) for call in CALLS), m.unpack, (ProtocolError,), m.pack),
    "handshake, node's side": Target(
        (taken(Channel.of_leader(KEY, 100)),), on_link(lambda: Channel.of_node(KEY)), (ProtocolError,)
    ),
    "handshake, leader's side": Target(
        (taken(Channel.of_node(KEY)),), on_link(lambda: Channel.of_leader(KEY, 65536)), (ProtocolError,)
    ),
    "sealed link": Target((m.pack(HELLO),), after_proof, (ProtocolError,)),
    "record": Target((RECORD.encode(),), ControlRecord.parse, (ProtocolError,), ControlRecord.encode),
    "sealed record": Target(SEALED, sealed, (ProtocolError, RefusedError)),
    "run.json": Target((json.dumps(asdict(w.RunAddress("run", "c10d", "a:1", "a", "a:2"))).encode(),), run_file),
    "timer": Target(
        (b'{"pid": 7, "scope_id": "a", "expiration_time": 1.5, "signal": 9}',),
        lambda data: codec.decode(TimerRequest, codec.loads(data)),
        (ProtocolError,),
    ),
    "worker": Target(tuple(c.pack(one) for one in WORKERS), c.unpack, (ProtocolError,), c.pack),
    "manifest": Target(
        (MANIFEST, SPLIT), manifest, (MalformedError, UnknownFormatError), lambda found: found.dumps()[0]
    ),
    "state": Target(
        (json.dumps(encode(STATE)[1]).encode(),), state, (MalformedError,), lambda tree: json.dumps(tree).encode()
    ),
    "tensors": Target((TENSOR_FILE,), tensors, (MalformedError,)),
    "header of tensors": Target((TENSOR_HEADER,), lambda header: tensors(with_header(header)), (MalformedError,)),
    "header of tensors that nodes divide": Target((TENSOR_HEADER,), division, (MalformedError,)),
    "AWS's interruption": Target(
        (b'{"action": "terminate", "time": "2026-01-02T08:22:00Z"}',),
        lambda data: instance_action(data, NOW),
        (Trouble,),
    ),
    "AWS's maintenance": Target(
        (b'[{"Code": "a", "EventId": "b", "NotBefore": "2 Jan 2026 18:29:47 GMT", "State": "active"}]',),
        lambda data: scheduled(data, NOW),
        (Trouble,),
    ),
    "Azure's events": Target(
        (
            b'{"Events": [{"Resources": ["a"], "EventType": "Preempt", "EventId": "b", "EventStatus": "Scheduled", '
            b'"NotBefore": "Fri, 02 Jan 2026 18:29:47 GMT"}]}',
        ),
        lambda data: azure_events(data, lambda: "a", NOW),
        (Trouble,),
    ),
    "copier's answer": Target(
        (c.pack(c.Copied(3, 1, 0.5, "/a", "b" * 64, 3)), c.pack(c.Copying()), c.pack(c.MayCommit(0))),
        c.unpack,
        (ProtocolError,),
        c.pack,
    ),
    "progress": Target((b"",), progress),
    "sum of a share": Target((shares.pack_sum(FileSum(5, "a" * 64)),), shares.parse_sum, (MalformedError,)),
    "owner": Target(
        (b'{"format": "elastic-launch owner", "run": "a", "token": "b", "epoch": 1, "before": ["c"]}',),
        owner.parse_mark,
    ),
    "slot": Target((slot_sample(),), slot),
    "job file": Target((JOB,), through_file(lambda path: JobFileReader(str(path)).read(), "job.yaml"), (UsageError,)),
    "events": Target((event_sample(),), events),
    "error file": Target(
        (b'{"message": {"message": "E", "errorCode": 3, "extraInfo": {"py_callstack": "a\\nb"}}}', b'{"message": "E"}'),
        error_file,
    ),
    "imports": Target((IMPORTS,), WorkerImports.of, (), lambda found: found.lines),
    "flight recorder": Target((COLLECTIVES,), last_collectives, (ProtocolError,)),
    "py-spy": Target((PY_SPY,), parse_py_spy, (ProtocolError,)),
    "endpoint": Target(
        (b"10.0.0.1:29400", b"[::1]:1", b"a"),
        lambda data: str(parse_endpoint(data.decode("latin-1"))),
        (UsageError,),
        lambda text: text.encode("latin-1"),
    ),
    "health port": Target(
        (b"10.0.0.1:29480", b"fd00::1:29480"),
        lambda data: parse_listening(data.decode("latin-1"), "--http"),
        (UsageError,),
    ),
    "http": Target((b"GET /livez HTTP/1.1\r\nHost: a", b"HEAD http://a/?q HTTP/1.0"), request),
}

HOSTILE = (
    *(b"[" * 5000, b'{"a":' * 5000, b"1" * 5000, b" " * 3000, b"," * 100),
    *(b"-1", b"1e999", b"NaN", b"Infinity", b"1.5", b"null", b"true", b'""', b"{}", b"[]", b"9223372036854775808"),
    *(b"\x00", b"\xff\xfe", b'"\\ud800"', b"\\u0000", b"\n", b"\r\n\r\n", b"\x1b]0;x\x07", b"\xe2\x80\xa8", b"%s%n"),
    *(b'"type"', b"&a [*a,*a]", b"!!python/object:os.system", b"../.."),
)


@st.composite
def mangled(draw: st.DrawFn, samples: tuple[bytes, ...]) -> bytes:
    """A sample with some pieces cut out, doubled, replaced, or exchanged for values known to be troublesome."""
    data = draw(st.sampled_from(samples))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 40)))
        other = draw(st.sampled_from(samples))
        piece = draw(
            st.binary(max_size=8)
            | st.sampled_from(HOSTILE)
            | st.just(data[start:end] * 2)
            | st.just(other[start : start + 20])
            | st.integers(-(2**70), 2**70).map(lambda number: str(number).encode())
        )
        data = data[:start] + piece + data[end:]
    return data


@st.composite
def replaced(draw: st.DrawFn, samples: tuple[bytes, ...]) -> bytes:
    """A JSON sample in which one value, at any depth, is replaced."""
    data = draw(st.sampled_from(samples))
    try:
        value = json.loads(data)
    except ValueError:
        return data
    at = value
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at))) if isinstance(at, list) else []
        if not keys:
            return json.dumps(value).encode()
        key = draw(st.sampled_from(keys))
        if not isinstance(at[key], dict | list) or draw(st.booleans()):
            at[key] = draw(ODD)
            return json.dumps(value).encode()
        at = at[key]


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63, 10**400])
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def inputs(target: Target) -> st.SearchStrategy[bytes]:
    return st.one_of(mangled(target.samples), replaced(target.samples), st.binary(max_size=300))


def check(target: Target, data: bytes) -> None:
    began = time.process_time()
    try:
        found = target.read(data)
    except target.refuses:
        return
    finally:
        assert time.process_time() - began < 2 * SLOWNESS
    if target.write is not None and found is not None:
        again = target.read(target.write(found))
        assert repr(again) == repr(found)  # not a number is not itself


@pytest.mark.parametrize("name", TARGETS)
def test_valid_input_is_read(name: str) -> None:
    target = TARGETS[name]
    for sample in target.samples:
        if name not in (
            "handshake, node's side",
            "sealed link",
        ):  # nothing is right there that was not made for this link
            check(Target(target.samples, target.read, (), target.write), sample)
            assert name == "handshake, leader's side" or target.read(sample) is not None


@pytest.mark.parametrize(
    "entry",
    [
        *(3, None, [], {}, {"data_offsets": [0, 20]}, {"dtype": "F32", "shape": [5], "data_offsets": None}),
        *({"dtype": "F32", "shape": [5], "data_offsets": odd} for odd in ([], [0], [0, 20, 30], "ab", [0, "20"])),
        *({"dtype": "F32", "shape": [5], "data_offsets": odd} for odd in ([0, 20.0], [20, 0], [-1, 20], [0, 10**400])),
        *({"dtype": "F32", "shape": [5], "data_offsets": odd} for odd in ([0, 19], [1, 20], [True, 20], [[], 20])),
        *({"dtype": odd, "shape": [5], "data_offsets": [0, 20]} for odd in ([], None)),
        *({"dtype": "F32", "shape": odd, "data_offsets": [0, 20]} for odd in (5, ["5"], None)),
    ],
)
@pytest.mark.parametrize("name", ["a", "\ud800"])
def test_a_header_that_describes_no_tensors_is_refused_before_they_are_divided(name: str, entry: Any) -> None:
    header = json.dumps({name: entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(20)
    with pytest.raises(MalformedError):
        shares.Division(lambda begin, end: iter([data[begin:end]]), len(data), 3)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_anything_else_is_read_or_refused_as_declared(name: str, data: st.DataObject) -> None:
    check(TARGETS[name], data.draw(inputs(TARGETS[name])))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=50_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_anything_else_is_read_or_refused_as_declared_at_length(name: str, data: st.DataObject) -> None:
    check(TARGETS[name], data.draw(inputs(TARGETS[name])))


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "job file"])  # the user's own
def test_no_decoder_takes_much_more_memory_than_its_input(name: str) -> None:
    """Input that nests, repeats, counts or never ends."""
    target, size = TARGETS[name], 2**13
    for unit in (b"[", b'{"a":', b"9", b" ", b"x", b"\n", b'["a"],', b"\xff", b"\x00", b"- a\n", b"GET / HTTP/1.1\r\n"):
        data = unit * (size // len(unit))
        for given_ in (data, target.samples[0] + data, target.samples[0][:-2] + data):
            tracemalloc.start()
            try:
                with suppress(*target.refuses):
                    target.read(given_)
                assert tracemalloc.get_traced_memory()[1] < 200 * size + 2**20
            finally:
                tracemalloc.stop()

"""Any state is restored bitwise, or refused by type and place."""

from __future__ import annotations

import enum
import hashlib
import json
import math
import os
import random
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from snapshot_helpers import same

from elastic_launch.snapshot import UnsupportedStateError, load, state_sha256, write
from elastic_launch.snapshot.errors import MalformedError
from elastic_launch.snapshot.format import tensor_file as tensorfile
from elastic_launch.snapshot.format import tree
from elastic_launch.snapshot.format.dtypes import DTYPES
from elastic_launch.snapshot.format.files import write_all
from elastic_launch.snapshot.format.manifest import parse_json
from elastic_launch.snapshot.format.plain import Decoder, Encoder
from elastic_launch.snapshot.format.small_values import READERS, UnknownMember


def through_the_format(state: Any) -> Any:
    """Encode, write, read and decode, in memory."""
    tensors, rest = tree.encode(state)
    text = json.dumps(rest, allow_nan=False).encode()
    descriptor = os.memfd_create("tensors")
    try:
        write_all(descriptor, tensorfile.parts(tensors))
        return tree.decode(parse_json(text), tensorfile.read(descriptor))
    finally:
        os.close(descriptor)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = math.prod(shape) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype is torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)
    view = draw(st.sampled_from(["as it is", "transposed", "every other", "parameter", "conjugate", "negative"]))
    if view == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, 1)
    if view == "every other" and tensor.dim():
        return tensor[::2]
    if view == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point() and tensor.element_size() > 1)
    if view in ("conjugate", "negative") and tensor.is_complex():
        # Both are only marked in the tensor; its memory holds something else.
        return tensor.conj() if view == "conjugate" else tensor.conj().imag
    return tensor


class Pair(NamedTuple):
    left: Any


class Phase(enum.Enum):
    WARM = "warm"
    HALF = torch.float16
    ALIAS = WARM


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(str, enum.Enum):  # noqa: UP042 - as many scripts have it
    A = "a"


class Word(enum.StrEnum):
    B = "b"


class Parts(enum.Flag):
    HEAD = enum.auto()
    TAIL = enum.auto()


class Spot(Pair, enum.Enum):
    HERE = (1,)


SMALL: list[Any] = [
    Path("runs/a"),
    datetime(2026, 1, 2, 3, 4, 5, 6),
    datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=2))),
    date(2026, 1, 2),
    time(3, 4),
    timedelta(days=-1, microseconds=3),
    Decimal("-0.10"),
    Decimal("NaN"),
    Fraction(1, 3),
    range(0, 9, 2),
    slice(None, 9),
    Phase.WARM,
    Phase.HALF,
    Level.HIGH,
    Mode.A,
    Word.B,
    Parts.HEAD,
    Parts.HEAD | Parts.TAIL,
    Parts(0),
    Spot.HERE,
]


ARRAYS: list[Any] = [
    np.arange(6, dtype="<i2").reshape(2, 3).T,
    np.array([[0.1, np.nan]], dtype=">f8"),
    np.array(3 + 1j, dtype="complex64"),
    np.array([True, False]),
    np.array(["a", "\u00fc\u20ac", ""]),
    np.array([b"a", b"bc"]),
    np.array(["2026-01-01", "NaT"], dtype="M8[D]"),
    np.zeros((0, 2)),
    np.float64(0.1),
    np.int64(-(2**63)),
    np.bool_(True),
    np.str_("\u20ac"),
    np.str_(""),
    np.bytes_(b""),
    np.bytes_(b"a"),
    np.datetime64("2026-01-01T00:00", "25s"),
]

KEYS = st.one_of(
    st.text(max_size=3), st.sampled_from(["", "$", "$tensor", "__metadata__", "a/b", "a", "0", "\ud800"]), st.integers()
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
    tensors(),
    st.floats(width=32).map(np.float32),
    st.sampled_from(ARRAYS),
    st.sampled_from([torch.float16, torch.Size([2, 0]), torch.device("cuda:1")]),
)


@st.composite
def ordered_dicts(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> OrderedDict[Any, Any]:
    made = OrderedDict(draw(st.dictionaries(KEYS, inner, max_size=3)))
    if draw(st.booleans()):
        made._metadata = OrderedDict({"": {"version": draw(st.integers(0, 3))}})  # type: ignore[attr-defined]
    return made


STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        ordered_dicts(inner),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
        st.dictionaries(KEYS, inner, max_size=3).map(lambda made: defaultdict(list, made)),
        st.lists(inner, max_size=3).map(lambda made: deque(made, 4)),
        inner.map(Pair),
        st.sets(st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.booleans())), max_size=3),
        st.sets(st.integers(), max_size=3).map(frozenset),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(STATES)
@example({0: torch.ones(1), "0": torch.zeros(1), "__metadata__": torch.ones(2)})
@example({"__metadata__": torch.ones(2)})
@example({"a/b": torch.ones(1), "a": {"b": torch.zeros(1), "b~2": torch.ones(3)}, "a/b~2": torch.ones(4)})
@example({"\ud800": torch.ones(1), "\\ud800": torch.zeros(1)})
@example([0.0, -0.0, 1, 1.0, True, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan])
@example([2**8191, -(2**8191), 0, -1])
@example(torch.arange(6).reshape(2, 3).t())
@example({"$tuple": [1], "$": 2})
@example(ARRAYS)
@example([torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag])
def test_any_state_is_restored_to_the_bit(state: Any) -> None:
    assert same(through_the_format(state), state)


def test_tensors_that_share_memory() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {"a": base, "tied": base, "view": base.view(3, 4), "row": base[1], "wide": base[0].expand(5, 4)}
    encoded, _ = tree.encode(state)
    assert sorted(encoded) == ["a", "row", "wide"]
    back = through_the_format(state)
    assert same(back, state)
    assert back["a"] is back["tied"]
    back["a"].zero_()
    assert same(back["row"], base[1]), "tensors that only overlap come back apart"


def test_empty_tensors_are_not_confused() -> None:
    state = [torch.empty(0), torch.empty(0), torch.empty(0, 3), torch.empty(0, dtype=torch.int8)]
    back = through_the_format(state)
    assert same(back, state)
    assert back[0] is not back[1]


def test_what_comes_back_does_not_depend_on_the_file(tmp_path: Path) -> None:
    info = write(tmp_path, {"a": torch.ones(1000)}, step=1, round=0)
    state = load(info).state
    (info.path / "tensors.safetensors").write_bytes(b"")
    assert same(state["a"], torch.ones(1000))
    assert state["a"].untyped_storage().nbytes() == 4000


def test_other_tools_can_read_the_tensors(tmp_path: Path) -> None:
    state = {"model": OrderedDict(w=torch.rand(3, 5), b=torch.rand(5).bfloat16()), "n": torch.tensor(3)}
    info = write(tmp_path, state, step=1, round=0)
    read = load_file(info.path / "tensors.safetensors")
    assert same(
        dict(sorted(read.items())), {"model/b": state["model"]["b"], "model/w": state["model"]["w"], "n": state["n"]}
    )
    assert json.loads((info.path / "state.json").read_text())["n"] == {"$tensor": "n", "dtype": "int64", "shape": []}


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    lambda p: torch.optim.SGD(p, torch.tensor(0.1)),
    lambda p: torch.optim.Adam(p, amsgrad=True),
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.LBFGS,
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_every_optimizer_continues_to_the_bit(make: Any) -> None:
    def built() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        return model, make(model.parameters())

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(torch.full((5, 3), float(step)) + torch.eye(5, 3)).pow(2).sum()
                loss.backward()
                return loss

            optimizer.step(closure)

    straight, optimizer = built()
    train(straight, optimizer, range(2))
    state = through_the_format({"model": straight.state_dict(), "optimizer": optimizer.state_dict()})
    train(straight, optimizer, range(2, 4))
    resumed, optimizer = built()
    resumed.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(resumed, optimizer, range(2, 4))
    assert state_sha256(resumed.state_dict()) == state_sha256(straight.state_dict())


def schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    s = torch.optim.lr_scheduler
    return [
        s.MultiStepLR(optimizer, [1, 3, 3]),
        s.OneCycleLR(optimizer, 0.1, total_steps=10),
        s.CosineAnnealingWarmRestarts(optimizer, 3),
        s.CyclicLR(optimizer, 0.1, 1.0),
        s.ReduceLROnPlateau(optimizer),
        s.LambdaLR(optimizer, lambda step: 0.9**step),
        s.SequentialLR(optimizer, [s.LinearLR(optimizer), s.ExponentialLR(optimizer, 0.9)], [2]),
        s.ChainedScheduler([s.StepLR(optimizer, 2), s.PolynomialLR(optimizer)]),
    ]


def test_schedulers_scaler_and_random_states_come_back() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1, momentum=0.9)
    states: list[Any] = [scheduler.state_dict() for scheduler in schedulers(optimizer)]
    states += [torch.amp.GradScaler("cpu").state_dict(), torch.get_rng_state()]
    states += [np.random.PCG64(0).state, random.getstate(), np.random.get_state(), np.random.MT19937(0).state]
    for state in states:
        assert same(through_the_format(state), state)


class Point(NamedTuple):
    x: int
    y: int


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.longdouble(1), "numpy.longdouble"),
        (np.array([{}]), "numpy.ndarray of dtype object"),
        (np.ma.masked_array([1]), "numpy.ma.MaskedArray"),
        (np.random.default_rng(0), "numpy.random._generator.Generator"),
        (object(), "object"),
        (print, "builtin_function_or_method"),
        (re.compile("a"), "re.Pattern"),
        (Text("a"), "Text"),
        (defaultdict(lambda: 0), "a defaultdict with the default_factory <lambda>"),
        (bytearray(b"a"), "bytearray"),
        (2**8192, "int"),
        ({(1, 2): 3}, "dict key of type tuple"),
        ({True: 3}, "dict key of type bool"),
        (torch.ones(1).to_sparse(), "torch.sparse_coo"),
        (torch.ones(1, device="meta"), "on meta"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_by_type_and_place(value: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError) as raised:
        write(tmp_path / "made", {"model": [0, {7: value}]}, step=1, round=0)
    assert name in str(raised.value)
    assert "state['model'][1][7]" in str(raised.value)
    assert not (tmp_path / "made").exists(), "it is refused before anything is written"


def test_a_named_tuple_comes_back_as_its_class_or_as_one_like_it() -> None:
    encoded = tree.encode(Point(1, 2))[1]
    assert type(tree.decode(encoded, {})) is Point
    for name in ("nowhere:Point", f"{__name__}:Pair", "os:getcwd", f"{__name__}:test_trees"):
        other = tree.decode({**encoded, "type": name}, {})
        assert (other.x, other.y, type(other).__name__) == (1, 2, name.partition(":")[2])
        assert type(other) is not Point
    with pytest.raises(MalformedError, match="no named tuple at state"):
        tree.decode({**encoded, "fields": ["x"]}, {})


@pytest.mark.parametrize("value", SMALL, ids=repr)
def test_small_values_come_back_as_they_were(value: Any) -> None:
    back = through_the_format({"a": [value], "b": {value} if not isinstance(value, slice) else None})
    assert type(back["a"][0]) is type(value)
    assert repr(back["a"][0]) == repr(value)
    if isinstance(value, enum.Enum):
        assert back["a"][0] is value


def test_what_would_not_come_back_is_refused_with_its_place() -> None:
    class Local(enum.Enum):
        A = 1

    class Mine(Decimal):
        pass

    zone, fold = datetime(2026, 1, 2, tzinfo=ZoneInfo("UTC")), datetime(2026, 10, 25, 2, 30, fold=1)
    for odd in (
        Local.A,
        Mine("1"),
        zone,
        fold,
        slice("a", 2),
        PurePosixPath("a"),
        bytearray(b"a"),
        Decimal("1" * 5000),
    ):
        with pytest.raises(UnsupportedStateError, match=r"found at state\['a'\]\['b'\]"):
            tree.encode({"a": {"b": odd}})


def test_a_member_that_its_enum_no_longer_has_becomes_an_unknown_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is identified by its name and value; no missing name is imported."""
    coded = tree.encode([Level.HIGH, Parts.HEAD | Parts.TAIL])[1]
    module = sys.modules[Level.__module__]
    monkeypatch.setattr(module, "Level", enum.IntEnum("Level", {"LOW": 1, "HIGH": 3}))
    monkeypatch.setattr(module, "Parts", enum.Flag("Parts", {"HEAD": 1}))
    back = tree.decode(coded, {})
    assert [type(value) for value in back] == [UnknownMember] * 2
    assert str(back[0]) == f"{Level.__module__}.Level.HIGH with the value 2"
    assert tree.encode(back)[1] == coded, "it can be given to another process"
    monkeypatch.delattr(module, "Level")
    assert tree.decode(coded, {})[0] == UnknownMember(f"{__name__}:Level", "HIGH", 2)
    assert tree.decode({"$enum": 1, "name": "x", "type": "this.is.not:There"}, {}) == UnknownMember(
        "this.is.not:There", "x", 1
    )


def test_an_array_is_stored_under_its_own_dtype_and_comes_back_alone(tmp_path: Path) -> None:
    array = np.arange(6.0).reshape(2, 3)
    info = write(tmp_path, {"a": array}, step=1, round=0)
    assert load_file(info.path / "tensors.safetensors")["a"].tolist() == array.reshape(-1).tolist()
    back = load(info).state["a"]
    back += 1
    assert same(load(info).state["a"], array)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(UnsupportedStateError, match="deeper than 64"):
        tree.encode(state)


def test_more_json_than_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_launch.snapshot.storage.saving.MAX_STATE_BYTES", 100)
    with pytest.raises(UnsupportedStateError, match="into tensors"):
        write(tmp_path, list(range(100)), step=1, round=0)


@pytest.mark.parametrize("meta", [{"a": torch.ones(1)}, {"a": "x" * 2**24}, [1]])
def test_meta_that_does_not_fit_leaves_nothing_behind(meta: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match="meta"):
        write(tmp_path, {}, step=1, round=0, meta=meta)
    assert os.listdir(tmp_path) == []


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(
                st.sampled_from(
                    [
                        "$tensor",
                        "$tuple",
                        "$dict",
                        "$ordered",
                        "$metadata",
                        "$counter",
                        "$float",
                        "$bytes",
                        "$set",
                        "$deque",
                        "$complex",
                        "$named",
                        "$defaultdict",
                        "$array",
                        "$scalar",
                        "$size",
                        "$device",
                        "$enum",
                        *READERS,
                        "$",
                        "dtype",
                    ]
                ),
                st.text(max_size=2),
            ),
            inner,
            max_size=2,
        ),
        st.builds(
            lambda dtype, shape: {"$tensor": "a", "dtype": dtype, "shape": shape},
            st.one_of(st.sampled_from(sorted(DTYPES)), inner),
            st.one_of(st.lists(st.integers(-1, 2**66), max_size=3), inner),
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=250, deadline=None)
@given(JSON)
@example({"$tensor": "a", "dtype": "complex64", "shape": [2**62, 0]})
@example({"$tensor": "a", "dtype": "complex64", "shape": [2]})
@example({"$tensor": ["a"], "dtype": "float32", "shape": [4]})
@example([{"$tensor": "a", "dtype": "float32", "shape": [4]}, {"$tensor": "a", "dtype": "complex64", "shape": [2]}])
@example({"$counter": [[1, {}]]})
@example({"$dict": [[[], 1]]})
@example({"$dict": [["a", 1], ["a", 2]]})
@example({"$bytes": "\ud800"})
@example({"$set": [[]]})
@example({"$deque": [], "maxlen": 2**70})
@example({"$complex": [1, 2]})
@example({"$device": ""})
@example({"$array": {"$tensor": "a", "dtype": "float32", "shape": [4]}, "dtype": "<f8", "shape": [2**62, 4]})
@example({"$array": {"$tensor": "a", "dtype": "float32", "shape": [4]}, "dtype": "<M8[x]", "shape": [2]})
@example({"$array": [], "dtype": "<f4", "shape": [4]})
@example({"$scalar": "AAA=", "dtype": "O"})
@example({"$named": [1], "fields": ["class"], "type": "a:b"})
@example({"$named": [1], "fields": ["a"], "type": "os:path"})
@example({"$enum": [], "name": "IGNORECASE", "type": "re:RegexFlag"})
@example({"$enum": 2, "name": "", "type": "os:path"})
@example({"$fraction": [1, 0]})
@example({"$timedelta": [2**70, 0, 0]})
@example({"$range": [0, 1, 0]})
@example({"$decimal": "1e"})
@example({"$datetime": 3})
@example({"$slice": [1]})
def test_no_tree_does_more_than_be_refused(hostile: Any) -> None:
    for stored in ({}, {"a": torch.ones(4)}, {"a": torch.ones(0)}):
        try:
            tree.decode(hostile, stored)
        except MalformedError:
            continue


@pytest.mark.parametrize(
    ("hostile", "message"),
    [
        ({"$tensor": "b", "dtype": "float32", "shape": [4]}, "no tensor 'b' for state"),
        ({"$tensor": "a", "dtype": "int32", "shape": [4]}, r"a tensor of float32\[4\] for state"),
        ({"$tensor": "a", "dtype": "float32", "shape": [2, 2]}, r"a tensor of float32\[4\] for state"),
        ([1], "nothing refers to the tensor 'a'"),
        ({"$pickle": [1]}, "unknown keys"),
        ({"$set": [1, 1]}, "no members of a set at state"),
        ({"$scalar": "AAA=", "dtype": "|O8"}, r"unknown dtype '|O8'"),
        ({"$tuple": [1], "b": 2}, "unknown keys"),
        ({"x": {"$float": "1"}}, r"no special float at state\['x'\]"),
    ],
)
def test_trees_that_cannot_be_are_refused_with_the_place(hostile: Any, message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        tree.decode(hostile, {"a": torch.ones(4)})


def test_the_checksum_of_a_state_depends_on_its_content_alone() -> None:
    base = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1)}
    reference = state_sha256(base)
    assert reference == state_sha256({"b": base["b"], "a": base["a"].t().contiguous().t()})
    others = [
        {"a": base["a"]},
        {**base, "c": torch.empty(0)},
        {"a": base["a"].reshape(3, 2), "b": base["b"]},
        {"a": base["a"].double(), "b": base["b"]},
        {"a": base["a"].view(torch.int32), "b": base["b"]},
        {"A": base["a"], "b": base["b"]},
        {"a": base["a"], "b": base["b"].reshape(1)},
        {"a": torch.nextafter(base["a"], base["a"] + 1), "b": base["b"]},
    ]
    assert len({reference, *map(state_sha256, others)}) == len(others) + 1
    assert state_sha256({"z": torch.tensor(0.0)}) != state_sha256({"z": torch.tensor(-0.0)})


def test_the_sum_of_a_state_never_changes() -> None:
    """Recorded results are compared with it: this is what the docstring describes, computed by other means."""
    expected = hashlib.sha256(
        struct.pack("<Q", 1) + b"w" + struct.pack("<Q", 7) + b"float32" + struct.pack("<QQQ", 2, 1, 2)
        + struct.pack("<ff", 1.0, -2.0)
    ).hexdigest()  # fmt: skip
    assert state_sha256({"w": torch.tensor([[1.0, -2.0]])}) == expected


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e5m2fnuz])
def test_a_tensor_that_another_rank_has_sent_has_its_own_type(dtype: torch.dtype) -> None:
    """Such a type is stored as another one; between ranks it is sent as it is."""
    tensor = torch.zeros(3, 2, dtype=dtype)
    tensors, rest = tree.encode({"a": tensor})
    found = tree.decode(rest, tensors)["a"]
    assert (found.dtype, found.shape) == (dtype, tensor.shape)


@pytest.mark.parametrize("text", ["\ud83d\ude00", "\U0001f600\ud83d\ude00", "\ude00\ud83d", "a\U0001f600"])  # noqa: PT014
def test_a_string_with_surrogates_comes_back_as_it_was(text: str) -> None:
    """JSON has one text for a pair of surrogates and for the character that they encode."""
    assert Decoder().decode(json.loads(json.dumps(Encoder().encode([text])))) == [text]


@pytest.mark.parametrize("data", ["/w==", 3, "?"])
def test_a_string_that_is_none_is_refused(data: object) -> None:
    with pytest.raises(MalformedError, match=r"state\[0\]"):
        Decoder().decode([{"$text": data}])

"""Checkpoints in the format of torch.distributed.checkpoint: those that torch reads, and those that torch has saved."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import SCRIPTS, Job, run_script
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_agents.snapshots.copying import copy
from elastic_launch import snapshot
from elastic_launch.contract import CommitAnswer, Copied, CopyJob
from elastic_launch.errors import UsageError
from elastic_launch.snapshot.memory.slot import EVALUATED, Header, Slot
from elastic_launch.snapshot.memory.slot_state import SlotDraft, SlotWriter

PLAIN, OWN = str(SCRIPTS / "distributed.py"), str(SCRIPTS / "distributed_own.py")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def same(found: Any, expected: Any, at: str = "") -> None:
    """Check that two states are equal, to the bit."""
    assert type(found) is type(expected) or isinstance(found, dict), at
    if isinstance(found, Tensor):
        assert found.dtype == expected.dtype, at
        assert torch.equal(found, expected), at
    elif isinstance(found, dict):
        assert found.keys() == expected.keys(), at
        for key, item in found.items():
            same(item, expected[key], f"{at}/{key}")
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected), at
        for index, item in enumerate(found):
            same(item, expected[index], f"{at}/{index}")
    elif isinstance(found, np.ndarray):
        assert found.tolist() == expected.tolist(), at
    else:
        assert found == expected, at


def ranks(script: str, *arguments: str, count: int) -> None:
    """Run a script on some ranks, under torchrun."""
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    run_script(*run, script, *arguments)


def made(seed: int = 0, width: int = 5) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    groups = [{"params": [model[0].weight], "lr": 0.2}, {"params": list(model.parameters())[1:]}]
    return model, torch.optim.AdamW(groups, lr=0.1)


def train(checkpoint: el.Checkpoint, until: str = "2ba", seed: int = 0, width: int = 5) -> tuple[Any, Any]:
    """Return what a training has at the start of its first step, and at its end."""
    model, optimizer = made(seed, width)
    loader = el.ElasticLoader(TensorDataset(torch.linspace(-1, 1, 72).view(24, 3)), el.GlobalBatch(12, 4))
    states = []

    def look() -> None:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        states.append(pickle.loads(pickle.dumps(state)))

    with el.session() as run:
        for step in run.steps(loader, model, optimizer, until=until, checkpoint=checkpoint, exact=True):
            if not states:
                look()
            for (x,) in step:
                step.backward(step.model(x).square().mean())
            step.update()
    look()
    return states[0], states[-1]


def stepped(seed: int = 5) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = made(seed)
    model(torch.linspace(-1, 1, 12).view(4, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("flat", [False, True], ids=["model", "titan"])
def test_torch_reads_what_a_training_has_saved(tmp_path: Path, scheme: str, flat: bool) -> None:
    _, last = train(el.Checkpoint(f"{scheme}{tmp_path}", every=1, keep=1, format="dcp"))
    (place,) = tmp_path.glob("step-2.*")
    model, optimizer = stepped()
    weights, moments = model.state_dict(), get_optimizer_state_dict(model, optimizer)
    dcp.load(
        {**weights, "optimizer": moments} if flat else {"model": weights, "optimizer": moments}, checkpoint_id=place
    )
    same(dict(weights), dict(last["model"]))
    same(moments, last["optimizer"])


def test_a_training_resumes_from_it_as_from_any_other(tmp_path: Path) -> None:
    _, expected = train(el.Checkpoint(tmp_path / "a", every=2), "6ba")
    train(el.Checkpoint(tmp_path / "b", every=2, format="dcp"), "4ba")
    first, last = train(el.Checkpoint(tmp_path / "b", every=2), "6ba", seed=1)
    same(last, expected)
    same(el.load_checkpoint(tmp_path / "b", step=4)["model"], dict(first["model"]))
    assert list(el.load_checkpoint(tmp_path / "b", step=4, weights_only=True)) == ["model"]
    written = {path.parent.name.partition(".")[0] for path in (tmp_path / "b").glob("step-*/.metadata")}
    assert "step-4" in written  # the others are in the native format, and one that storage delays may be left out
    assert written <= {"step-2", "step-4"}


def test_names_of_one_blob_do_not_hide_another(tmp_path: Path) -> None:
    """A model that has a part called model, tied weights, an array and what no parameter has."""
    shared = torch.arange(4.0)
    weights = {"a": torch.ones(2), "model.a": torch.zeros(3), "tied": shared, "model.tied": shared}
    state = {
        "model": weights,
        "rng": {"cpu": [torch.get_rng_state()]},
        "none": torch.empty(0, 3),
        "bf": torch.ones(1).bfloat16(),
    }
    info = snapshot.write(tmp_path, state, step=1, round=1, meta={"format": "dcp"})
    same(snapshot.load(info).state, state)
    found = {name: torch.empty_like(value) for name, value in weights.items()}
    dcp.load(found, checkpoint_id=info.path)
    same(found, weights)


EMPTY, FULL = torch.empty(0), torch.arange(3.0)


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"x": {"a.b": FULL, "a": {"b": FULL + 1}}}, {"x.a.b", "x.a.b~2"}),
        ({"x": {"a": {"b": FULL + 1}, "a.b": FULL, "a.b~2": FULL + 2}}, {"x.a.b", "x.a.b~2", "x.a.b~2~2"}),
        ({"x": {1: FULL, "1": FULL + 1}}, {"x.1", "x.1~2"}),
        ({"x": {"a": EMPTY, "b": EMPTY}, "y": [EMPTY]}, {"x.a", "x.b", "y.0"}),
        ({"x": {"a": FULL, "b": FULL}, "y": [FULL]}, {"x.a", "x.b", "y.0"}),
        ({"x": {"a.b": np.arange(2), "a": {"b": FULL}}}, {"x.a.b", "x.a.b~2"}),
        ({"model": {"a": {"b": 5}, "a.b": FULL}}, {"a.b", "a.b~2", "model.a.b"}),
        ({"model": {"w": FULL, "extra": np.arange(2)}}, {"w", "model.w", "extra", "model.extra", "model.extra.data"}),
    ],
)
def test_places_of_one_name_are_all_kept(tmp_path: Path, state: Any, names: set[str]) -> None:
    info = snapshot.write(tmp_path, state, step=1, round=1, meta={"format": "dcp"})
    same(snapshot.load(info).state, state)
    assert set(dcp.FileSystemReader(info.path).read_metadata().state_dict_metadata) == names
    if "model" in state:
        found = {name: torch.empty(3) for name, value in state["model"].items() if value is FULL}
        for wanted in (found, {"model": found}):
            dcp.load(wanted, checkpoint_id=info.path)
            assert all(torch.equal(tensor, FULL) for tensor in found.values())
            assert found


def test_an_agent_copies_a_last_snapshot_in_this_format(tmp_path: Path) -> None:
    slot = Slot.make("test")
    state = {"model": {"a": torch.arange(6.0).view(2, 3)}, "rng": {"cpu": [torch.get_rng_state()]}}
    draft = SlotDraft(state, {"format": "dcp"}, lambda tensor: False)
    writer = SlotWriter(slot)
    writer.write(draft, Header(1, 2, 3, EVALUATED, 0))
    said: list[Copied] = []
    job = CopyJob(1, 3, 2, str(tmp_path), now=True)
    done = copy(job, slot.tensors, slot.head, lambda: CommitAnswer(0, allowed=True), lambda: None, said.append)
    writer.close()
    slot.close()
    assert not done.error
    same(snapshot.load(snapshot.inspect(done.path)).state, state)
    found = {"model": {"a": torch.zeros(2, 3)}}
    dcp.load(found, checkpoint_id=done.path)
    same(found["model"], state["model"])


def test_a_changed_bit_is_found(tmp_path: Path) -> None:
    for file in (".metadata", "__0_0.distcp"):
        info = snapshot.write(tmp_path / file, {"model": {"a": torch.ones(9)}}, step=1, round=1, meta={"format": "dcp"})
        path = Path(info.path) / file
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(el.CheckpointReadError, match="does not match its checksum"):
            snapshot.load(info)


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("flat", [False, True], ids=["model", "titan"])
def test_a_training_begins_from_what_torch_has_saved(
    tmp_path: Path, scheme: str, flat: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = stepped()
    weights, moments = model.state_dict(), get_optimizer_state_dict(model, optimizer)
    state = {**weights, "optimizer": moments} if flat else {"model": weights, "optimizer": moments}
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    first, _ = train(el.Checkpoint(tmp_path / "own", start_from=f"{scheme}{tmp_path}/theirs"))
    same(first, {"model": weights, "optimizer": moments})
    assert "begins at step 0 with model, optimizer of the checkpoint" in caplog.text
    first, _ = train(el.Checkpoint(tmp_path / "tuned", start_from=tmp_path / "theirs", weights_only=True))
    same(first["model"], weights)
    assert first["optimizer"]["param_groups"][0]["lr"] == 0.2
    assert not made(0)[1].state_dict()["state"]


def saved(tmp_path: Path, state: Any) -> Path:
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    return tmp_path / "theirs"


def test_models_of_the_same_names_get_their_own_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as a model, its average and a teacher."""

    def valued(value: float) -> nn.Linear:
        layer = nn.Linear(2, 1, bias=False)
        nn.init.constant_(layer.weight, value)
        return layer

    def begun(state: dict[str, float], *, teacher: bool = True) -> list[float]:
        where = tmp_path / "-".join(state)
        dcp.save({name: valued(value).state_dict() for name, value in state.items()}, checkpoint_id=where)
        model, other = valued(0.0), valued(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        saving = el.Checkpoint(tmp_path / f"own-{where.name}", start_from=where, weights_only=True)
        with el.session() as run:
            if teacher:
                run.register("teacher", other)
            loader = el.ElasticLoader(torch.ones(8, 2), el.GlobalBatch(8, 8))
            for step in run.steps(loader, model, optimizer, until="1ba", checkpoint=saving):
                for x in step:
                    step.backward(step.model(x).mean())
                step.update()
        return [layer.weight[0, 0].item() for layer in (model, other)]

    assert begun({"model": 1, "ema": -7, "teacher": 5}) == [1, 5]
    assert begun({"net": 2}) == [2, 2]
    assert begun({"net": 2, "teacher": 3}) == [2, 3]
    assert begun({"state_dict": 4, "state_dict_ema": -7}, teacher=False) == [4, 0]
    with pytest.raises(UsageError, match=r"has the weights of model several times: under copy\., net\."):
        begun({"net": 2, "copy": -7}, teacher=False)


def test_what_does_not_fit_is_one_error(tmp_path: Path) -> None:
    model, optimizer = stepped()
    weights = model.state_dict()

    def refused(name: str, state: Any, message: str, **start: Any) -> None:
        place = saved(tmp_path / name, state)
        with pytest.raises(UsageError, match=message):
            train(el.Checkpoint(tmp_path / name / "own", start_from=place, **start))

    whole = {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer)}
    refused(
        "numbers", {"model": weights, "optimizer": optimizer.state_dict()}, "by numbers, without the names of param"
    )
    refused(
        "names",
        {"model": {f"x{name}": value for name, value in weights.items()}},
        "no weights under the names of model",
    )
    lacking = {name: value for name, value in weights.items() if name != "2.bias"}
    refused("lacking", {**whole, "model": lacking}, r"it has no '2\.bias'")
    refused(
        "more",
        {**whole, "model": {**weights, "2.more": torch.ones(1)}},
        r"it has '2\.more', and the model here has not",
    )
    refused(
        "wide",
        {"model": made(width=6)[0].state_dict()},
        r"has the shape \[.*6.*\], and here \[.*5.*\]",
        weights_only=True,
    )
    refused("alone", {"model": weights}, "has no optimizer, which this script has")


class Calls:
    """What unpickles to a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def theirs(tmp_path: Path) -> tuple[Path, Any]:
    place = saved(tmp_path, {"model": made()[0].state_dict()})
    return place, pickle.loads((place / ".metadata").read_bytes())


@pytest.mark.parametrize(
    "function", [os.mkdir, eval, torch.load, getattr, torch.hub.load], ids=lambda x: x.__qualname__
)
def test_a_pickle_that_calls_a_function_is_refused(tmp_path: Path, theirs: tuple[Path, Any], function: Any) -> None:
    place, metadata = theirs
    metadata.planner_data = Calls(function, str(tmp_path / "called"))
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(el.CheckpointReadError, match=r"names \S+, which is not for a checkpoint to name"):
        train(el.Checkpoint(tmp_path / "own", start_from=place, weights_only=True))
    assert not (tmp_path / "called").exists()


def test_a_blob_that_calls_a_function_is_refused(tmp_path: Path, theirs: tuple[Path, Any]) -> None:
    place, metadata = theirs
    (index,) = [key for key in metadata.storage_data if key.fqn == "model.0.bias"]
    torch.save(Calls(os.mkdir, str(tmp_path / "called")), place / "bad")
    metadata.storage_data[index].__dict__.update(relative_path="bad", offset=0, length=(place / "bad").stat().st_size)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(el.CheckpointReadError, match="bad cannot be read at 0"):
        train(el.Checkpoint(tmp_path / "own", start_from=place, weights_only=True))
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relative_path": "../theirs/__0_0.distcp"}, "is not a file in it"),
        ({"offset": -1}, "is not a file in it"),
        ({"length": 2**40}, "ends before"),
        ({"length": 7}, "cannot be read at"),
        ({"transform_descriptors": ["stream.zstd"]}, "compressed or encrypted"),
    ],
)
def test_a_blob_that_is_not_there_is_refused(
    tmp_path: Path, theirs: tuple[Path, Any], change: dict[str, Any], message: str
) -> None:
    place, metadata = theirs
    for info in metadata.storage_data.values():
        info.__dict__.update(change)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(el.CheckpointReadError, match=message):
        train(el.Checkpoint(tmp_path / "own", start_from=place, weights_only=True))


def test_parts_that_are_missing_or_of_another_shape_are_refused(tmp_path: Path, theirs: tuple[Path, Any]) -> None:
    place, metadata = theirs
    described = metadata.state_dict_metadata["model.0.weight"]
    for size, message in ((torch.Size([6, 3]), "parts of model.0.weight are missing"), (torch.Size([2, 3]), "outside")):
        described.size = size
        (place / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(el.CheckpointReadError, match=message):
            train(el.Checkpoint(tmp_path / "own", start_from=place, weights_only=True))


def test_another_format_is_an_error() -> None:
    with pytest.raises(UsageError, match="it is 'safetensors' or 'dcp'"):
        el.Checkpoint("own", format="hdf5")


@pytest.mark.slow
@pytest.mark.parametrize("wrote", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_sharded_states_go_from_torch_to_trainings_and_back(tmp_path: Path, job: Job, wrote: int) -> None:
    """Saved by one or two ranks of torch; begun with by one to three, plain and sharded; loaded by torch again."""
    theirs = tmp_path / "theirs"
    ranks(PLAIN, "save", str(theirs), str(tmp_path / "saved.pt"), "sharded", count=wrote)
    expected = torch.load(tmp_path / "saved.pt")
    for name, count, sharded in (("a", 2, []), ("b", 1, ["sharded"]), ("c", 3, ["sharded"])):
        own, begun = tmp_path / name, tmp_path / f"{name}.pt"
        flags = ["--standalone", "--nproc", str(count)]
        agent = job.launch(*flags, command=[OWN, str(own), str(theirs), str(begun), *sharded], name=name)
        assert agent.wait(90) == 0, agent.output
        same(torch.load(begun), expected)
        (place,) = own.glob("step-2.*")
        last = el.load_checkpoint(own)
        for what, reading in (("load", []), ("titan", ["sharded"])):
            read = tmp_path / f"{name}-{what}.pt"
            ranks(PLAIN, what, str(place), str(read), *reading, count=2 if reading else 1)
            found = torch.load(read)
            same(found["model"], dict(last["model"]))
            moments = [entries["exp_avg"] for entries in last["optimizer"]["state"].values()]
            same([entries["exp_avg"] for entries in found["optimizer"]["state"].values()], moments)

"""What a worker's record shows, and what is imported ahead because of it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from warm_processes import WAYS, both_ways, config_for, write

from elastic_agents.warm._import_watch import differs_at_import
from elastic_agents.warm._preload import Preload, first_of
from elastic_agents.warm._record import Learned, WorkerImports, length, read


def _recorded(directory: Path, text: str) -> WorkerImports:
    """Run a script with a recorder, and return what it has recorded."""
    learned = Learned()
    try:
        recorder = "import sys; from elastic_agents.warm._record import Recorder; Recorder(int(sys.argv.pop()), int)"
        subprocess.run(
            [sys.executable, "-c", f"{recorder}\n{text}", str(record := learned.begin())],
            pass_fds=[record],
            cwd=directory,
            check=True,
        )
        return learned.take()
    finally:
        learned.close()


def test_a_record_has_the_modules_in_their_order_with_their_files(tmp_path: Path) -> None:
    write(tmp_path, "mine.py", "import parts.inner")
    write(tmp_path, "parts/inner.py", "")
    found = _recorded(tmp_path, "import mine, safetensors\ntry:\n    import no_such_module\nexcept ImportError: pass")
    names = [
        name for name in found.modules if name in ("mine", "parts", "parts.inner", "safetensors", "no_such_module")
    ]
    assert names == ["mine", "parts", "parts.inner", "safetensors"]
    assert found.modules["parts"] == ""
    assert found.modules["parts.inner"].endswith("parts/inner.py")
    assert found.sets == {}


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("os.environ['HUB'] = '/x'\nimport safetensors", {"HUB": "/x"}),
        ("import safetensors\nos.environ['HUB'] = '/x'", {}),
        ("os.environ['HUB'] = '/x'\ndel os.environ['HUB'], os.environ['HOME']\nimport safetensors", {"HOME": None}),
    ],
)
def test_a_record_has_the_variables_that_were_set_before_the_last_import(
    text: str, sets: dict[str, str | None], tmp_path: Path
) -> None:
    assert _recorded(tmp_path, f"import os\n{text}").sets == sets


def test_what_is_learned_adds_up_over_workers() -> None:
    learned = Learned()
    first, second = {"a": "/a.py", "b": "/b.py"}, {"c": "/c.py", "a": "/new/a.py"}
    for modules, sets in ((first, {"X": "1"}), ({}, {}), (second, {"Y": "2"})):
        record = learned.begin()
        assert length(record) == 0
        kept = WorkerImports(modules, sets).put()
        os.pwrite(record, os.pread(kept, 8 + length(kept), 0), 0)
        os.close(kept)
    assert learned.length() > 0
    learned.end(record)
    known = learned.take()
    assert learned.length() == 0
    assert list(known.modules.items()) == [("a", "/new/a.py"), ("b", "/b.py"), ("c", "/c.py")]
    assert known.sets == {"X": "1", "Y": "2"}
    again = known.put()
    assert read(again) == known
    os.close(again)
    learned.close()


def test_installed_modules_are_wanted_in_their_order_and_the_users_own_are_not() -> None:
    place = str(Path(pytest.__file__).parent)
    modules = {"mine": "/home/me/mine.py", "pytest": f"{place}/__init__.py", "pytest.more": f"{place}/more.py"}
    modules |= {"json.tool": "/usr/lib/python3/json/tool.py", "space": "", "yaml": "/other/site-packages/yaml.py"}
    modules |= {"pytest.x.y": f"{place}/x/y.py"}
    sys.modules.pop("yaml", None)
    assert Preload((), ()).wanted(WorkerImports(modules, {})) == ["pytest", "pytest.more", "pytest.x.y"]
    assert Preload((), ["pytest.x"]).wanted(WorkerImports(modules, {})) == ["pytest", "pytest.more"]
    assert Preload((), ["pytest"]).wanted(WorkerImports(modules, {})) == []


@pytest.mark.parametrize(
    ("names", "first"),
    [(["numpy", "elastic_launch.training", "torch.nn", "yaml"], "torch"), (["yaml", "torch"], "yaml"), (["numpy"], "")],
)
def test_torch_may_come_first_if_nothing_but_harmless_modules_precede_it(names: list[str], first: str) -> None:
    assert first_of(names) == first


def test_a_variable_that_imports_read_or_native_code_does_is_doubtful_if_it_was_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preload = Preload((), ())
    preload.read = {"HUB", "SAME"}
    monkeypatch.setenv("SAME", "1")
    sets = {"HUB": "/x", "SAME": "1", "OTHER": "2", "PYTHONPATH": "lib"}
    assert preload.doubt(WorkerImports({}, sets)) == "the script sets HUB, which its imports read"
    assert preload.doubt(WorkerImports({}, {"OMP_PLACES": "x"})) == "the script sets OMP_PLACES, which its imports read"
    assert preload.doubt(WorkerImports({}, {"OTHER": "2", "SAME": "1"})) == ""


def test_environments_differ_by_what_matters_at_import_only() -> None:
    mine = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RESTART_COUNT": "0", "RANK": "0", "TORCH_LOGS": "x"}
    asked = {"OMP_NUM_THREADS": "2", "TORCHELASTIC_RESTART_COUNT": "1", "RANK": "1", "LD_PRELOAD": "y"}
    assert differs_at_import(mine, asked) == ["LD_PRELOAD", "OMP_NUM_THREADS", "TORCH_LOGS"]
    assert differs_at_import({"HF_HOME": "/a", "X": "1"}, {"HF_HOME": "/b", "X": "2"}, {"HF_HOME"}) == ["HF_HOME"]


@pytest.mark.parametrize("name", ["no_such_script.py", "compiled"])
def test_a_script_that_is_no_source_code_runs_or_fails_as_python_does_it(name: str, tmp_path: Path) -> None:
    source = write(tmp_path, "source.py", "print(__file__, __cached__, type(__loader__).__name__)")
    compile_it = f"import py_compile; py_compile.compile({source!r}, {str(tmp_path / 'compiled')!r})"
    subprocess.run([sys.executable, "-c", compile_it], check=True)
    script = str(tmp_path / name)
    with both_ways(config_for(tmp_path, script)) as starters:
        ends = [starters[way].run(script) for way in WAYS]
    told = [(end.code, end.stdout, end.stderr) for end in ends]
    assert told[0] == told[1]


@pytest.mark.parametrize("same", [True, False])
def test_a_module_that_goes_by_another_name_too_is_the_one_in_its_file(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """setuptools makes its own distutils that of the standard library, and the module then has the spec of that."""
    path = str(tmp_path / "known_twice.py")
    module = ModuleType("known_twice")
    module.__file__ = path
    module.__spec__ = ModuleSpec("other_name", None, origin=path)
    monkeypatch.setitem(sys.modules, "known_twice", module)
    found = WorkerImports({"known_twice": path if same else str(tmp_path / "elsewhere.py")}, {})
    assert ("known_twice" in Preload((), ()).doubt(found)) == (not same)

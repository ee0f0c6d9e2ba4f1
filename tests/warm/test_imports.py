"""The imports found in a script's source, without running it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from warm_processes import write

from elastic_agents.warm._script_imports import Import, Reading, differs_at_import, entry_point, read


def _read(directory: Path, text: str, module: str = "") -> Reading:
    write(directory, "script.py", text)
    return read(str(directory / "script.py"), str(directory), sys.path, module)


def test_imports_of_installed_modules_are_found_in_their_order(tmp_path: Path) -> None:
    text = """
from __future__ import annotations
import yaml, os
import torch.nn as nn
from torch.nn import functional as F, Linear
try:
    import numpy
except ImportError:
    import numpy.no_such
if os.environ.get("X"):
    import pytest
def f():
    import hypothesis
import yaml
import no_such_module_at_all
"""
    assert _read(tmp_path, text).imports == [
        Import("yaml"),
        Import("torch.nn"),
        Import("torch.nn", ("functional", "Linear")),
        Import("numpy"),
    ]


def test_the_users_own_modules_are_followed_and_not_imported(tmp_path: Path) -> None:
    write(tmp_path, "helpers/__init__.py", "import yaml\nfrom . import models\nraise RuntimeError('run')")
    write(tmp_path, "helpers/models.py", "from .deep.net import Net\nimport script")
    write(tmp_path, "helpers/deep/__init__.py", "")
    write(tmp_path, "helpers/deep/net.py", "import numpy\nfrom ...too_far import x")
    write(tmp_path, "plain.py", "from safetensors.torch import save_file")
    found = _read(tmp_path, "from helpers import models\nimport plain\nimport helpers.deep.net")
    assert [item.module for item in found.imports] == ["yaml", "numpy", "safetensors.torch"]
    assert "helpers" not in sys.modules


def test_a_package_of_the_user_that_hides_an_installed_one_is_read_instead_of_it(tmp_path: Path) -> None:
    write(tmp_path, "yaml.py", "import numpy")
    assert [item.module for item in _read(tmp_path, "import yaml").imports] == ["numpy"]


def test_relative_imports_of_a_module_run_by_name_are_followed(tmp_path: Path) -> None:
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/parts.py", "import yaml")
    path = write(tmp_path, "package/main.py", "from .parts import x")
    assert [item.module for item in read(path, str(tmp_path), sys.path, "package.main").imports] == ["yaml"]


@pytest.mark.parametrize("text", ["x = = 1", "\0", "# coding: no-such\n", "import " + ".".join(["a"] * 9)])
def test_a_script_that_cannot_be_read_is_left_to_itself(text: str, tmp_path: Path) -> None:
    assert _read(tmp_path, text) == Reading()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'", ["OMP_NUM_THREADS"]),
        ("from os import environ\nenviron['TORCH_LOGS'] = 'x'", ["TORCH_LOGS"]),
        ("import os\nos.environ.setdefault('MKL_NUM_THREADS', '4')", ["MKL_NUM_THREADS"]),
        ("import os\nos.environ.update({'KMP_AFFINITY': 'x'}, LD_PRELOAD='y')", ["KMP_AFFINITY", "LD_PRELOAD"]),
        ("import os\nos.environ.pop('OMP_PLACES', None)", ["OMP_PLACES"]),
        ("import os\ndel os.environ['OMP_PLACES']", ["OMP_PLACES"]),
        ("import os\nos.putenv('OMP_PLACES', 'cores')", ["OMP_PLACES"]),
        ("import os\nos.environ['PYTHONHASHSEED'] = '0'", []),
        ("import os\ndef f():\n    os.environ['OMP_PLACES'] = 'cores'", []),
        ("import os\nos.environ['MASTER_PORT'] = '1'\nprint(os.environ['OMP_NUM_THREADS'])\nd['OMP_X'] = 1", []),
    ],
)
def test_variables_for_native_code_that_a_script_sets_are_found(text: str, names: list[str], tmp_path: Path) -> None:
    assert _read(tmp_path, text).decisive == names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("os.environ['HF_HOME'] = '/x'\nimport yaml", {"HF_HOME"}),
        ("import yaml\nos.environ['HF_HOME'] = '/x'", set()),
        ("os.environ[name] = '/x'\nimport yaml", {""}),
        ("os.environ.update(names)\nimport yaml", {""}),
        ("os.environ.update(**names)\nimport yaml", {""}),
        ("os.environ |= names\nimport yaml", {""}),
        ("load_dotenv()\nimport yaml", {""}),
        ("dotenv.load_dotenv('x')\nimport yaml", {""}),
        ("os.environ.get('HF_HOME')\nimport yaml", set()),
    ],
)
def test_what_is_set_before_an_import_is_known(text: str, names: set[str], tmp_path: Path) -> None:
    assert _read(tmp_path, f"import os\n{text}").set_before([]) == names


def test_what_is_imported_besides_may_come_after_whatever_the_script_sets(tmp_path: Path) -> None:
    found = _read(tmp_path, "import os, yaml\nos.environ['HF_HOME'] = '/x'")
    assert found.set_before([Import("yaml")]) == set()
    assert found.set_before([Import("numpy")]) == {"HF_HOME"}


@pytest.mark.parametrize(
    "text",
    [
        "sys.path = ['lib']",
        "sys.path.insert(0, 'lib')",
        "sys.path.append(os.path.dirname(__file__))",
        "sys.path += ['lib']",
        "sys.path[:0] = ['lib']",
        "del sys.path[0]",
        "if 'lib' not in sys.path:\n    sys.path.append('lib')",
        "try:\n    pass\nexcept OSError:\n    sys.path.insert(0, 'lib')",
        "try:\n    sys.path.insert(0, 'lib')\nfinally:\n    pass",
        "sys.meta_path.append(None)",
        "sys.path_hooks.clear()",
        "sys.modules['numpy'] = None",
        "sys.modules.pop('numpy', None)",
        "sys.modules.setdefault('numpy', sys)",
        "add_to(sys.path)",
        "path = sys.path",
        "insert = lambda place: sys.path.insert(0, place)",
        "vars(sys)['path'] = []",
        "sys.__dict__['path'] = []",
        "setattr(sys, 'path', [])",
        "os.sys.path.append('lib')",
        "import sys as system",
        "from os import sys as system",
        "from sys import path",
        "from sys import *",
        "if True:\n    from sys import path as place",
        "import site\nsite.addsitedir('lib')",
        "from site import addsitedir as add\nadd('lib')",
        "def add(place):\n    sys.path.append(place)\nadd('lib')",
        "def add(path=sys.path):\n    path.insert(0, 'lib')\nadd()",
        "def add(place):\n    from sys import path\n    path.append(place)\nadd('lib')",
        "def add(p):\n    sys.path.insert(0, p)\ndef both():\n    add('a')\nboth()",
        "class Paths:\n    def add(self):\n        sys.path.append('lib')\nPaths().add()",
        "import edits",
        "from package import edits",
        "import package.edits",
        "if input():\n    import edits",
        "from package.adds import add as extend\nextend('lib')",
        "from namespace.inner import edits",
        "import namespace.inner.edits",
    ],
)
def test_the_reading_stops_where_later_imports_may_find_other_things(text: str, tmp_path: Path) -> None:
    write(tmp_path, "edits.py", "import sys\nsys.path.append('lib')")
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/edits.py", "from .adds import add\nadd('lib')")
    write(tmp_path, "package/adds.py", "import sys\ndef add(place):\n    sys.path.append(place)")
    write(tmp_path, "namespace/inner/edits.py", "import sys\nsys.path.append('lib')")
    found = _read(tmp_path, f"import os, sys, yaml\n{text}\nimport numpy")
    assert found.imports == [Import("yaml")]
    assert ", line " in found.stopped


def test_the_reading_names_the_place_where_it_stops_and_notes_variables_beyond(tmp_path: Path) -> None:
    write(tmp_path, "paths.py", "import sys\n\nsys.path.append('lib')")
    found = _read(tmp_path, "import os, yaml, paths, numpy\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch")
    assert (found.imports, found.stopped, found.decisive) == (
        [Import("yaml")],
        "paths.py, line 3",
        ["OMP_NUM_THREADS"],
    )


@pytest.mark.parametrize(
    "text",
    [
        "print(sys.path[0], 'x' in sys.modules, sys.modules.get('y'), sys.modules[__name__], sys.argv, os.path.sep)",
        "def add(place):\n    sys.path.append(place)",
        "def main():\n    import edits",
        "here = os.path.abspath(args.path if (args := None) else '.')",
        "os.environ['PYTHONPATH'] = 'lib'",
    ],
)
def test_what_changes_no_import_does_not_stop_the_reading(text: str, tmp_path: Path) -> None:
    write(tmp_path, "edits.py", "import sys\nsys.path.append('lib')")
    assert _read(tmp_path, f"import os, sys, yaml\n{text}\nimport numpy") == Reading(
        [Import("yaml"), Import("numpy")], [("PYTHONPATH", 1)] if "PYTHONPATH" in text else []
    )


def test_so_many_files_are_read_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_agents.warm._script_imports.MOST_FILES", 2)
    for name in ("a", "b", "c"):
        write(tmp_path, f"{name}.py", f"import {chr(ord(name) + 1)}")
    found = _read(tmp_path, "import yaml, a\nimport numpy")
    assert (found.imports, found.stopped) == ([Import("yaml")], "after 2 files")


def test_packages_without_init_files_are_followed(tmp_path: Path) -> None:
    write(tmp_path, "parts/nets/small.py", "import yaml\nfrom .. import other\nfrom . import large")
    write(tmp_path, "parts/nets/large.py", "import numpy")
    write(tmp_path, "parts/other.py", "import safetensors")
    found = _read(tmp_path, "from parts.nets import small")
    assert [item.module for item in found.imports] == ["yaml", "safetensors", "numpy"]


def test_a_file_of_the_user_that_hides_one_of_the_standard_library_is_followed(tmp_path: Path) -> None:
    write(tmp_path, "queue.py", "import yaml")
    assert _read(tmp_path, "import queue, json").imports == [Import("yaml")]


def test_a_statement_may_be_as_deep_as_python_takes(tmp_path: Path) -> None:
    text = f"import yaml\nx = {'+'.join(['input()'] * 1500)}\nimport numpy"
    compile(text, "script.py", "exec")
    assert _read(tmp_path, text).imports == [Import("yaml"), Import("numpy")]


def test_a_file_of_the_user_that_is_too_deep_for_the_parser_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "deep.py", f"x = {'-' * 50_000}1")
    assert _read(tmp_path, "import yaml\nimport deep\nimport numpy").imports == [Import("yaml"), Import("numpy")]


def test_environments_differ_by_what_matters_at_import_only() -> None:
    mine = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RESTART_COUNT": "0", "RANK": "0", "TORCH_LOGS": "x"}
    asked = {"OMP_NUM_THREADS": "2", "TORCHELASTIC_RESTART_COUNT": "1", "RANK": "1", "LD_PRELOAD": "y"}
    assert differs_at_import(mine, asked) == ["LD_PRELOAD", "OMP_NUM_THREADS", "TORCH_LOGS"]
    assert differs_at_import({"HF_HOME": "/a", "X": "1"}, {"HF_HOME": "/b", "X": "2"}, {"HF_HOME"}) == ["HF_HOME"]


def test_the_entry_point_of_each_form_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = write(tmp_path, "a/script.py", "")
    write(tmp_path, "a/__main__.py", "")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/link.py").symlink_to("../a/script.py")
    (tmp_path / "compiled").write_bytes(b"\xa7\x0d\x0d\x0a" if sys.version_info < (3, 12) else b"PK\3\4")
    here = str(tmp_path)
    assert entry_point([script, "x"]) == (script, f"{here}/a", "")
    assert entry_point(["b/link.py"]) == ("b/link.py", f"{here}/a", "")
    assert entry_point([f"{here}/a"]) == (f"{here}/a/__main__.py", f"{here}/a", "")
    assert entry_point(["-m", "a.script"]) == (script, here, "a.script")
    assert entry_point(["-m", "a"]) == (f"{here}/a/__main__.py", here, "a")
    write(tmp_path, "a/b/deep.py", "")
    assert entry_point(["-m", "a.b.deep"]) == (f"{here}/a/b/deep.py", here, "a.b.deep")
    assert entry_point(["-m", "elastic_launch.run_path", script, "x"]) == (script, f"{here}/a", "")
    assert entry_point(["-m", "no.such"])[0] == ""
    assert entry_point(["compiled"])[0] == ""

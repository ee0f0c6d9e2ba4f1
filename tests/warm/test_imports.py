"""What is read from a script's source, and that nothing of it is run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from warm_processes import write

from elastic_agents.warm.become import entry_point
from elastic_agents.warm.imports import Import, Reading, differs_at_import, read


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


def test_a_package_of_the_user_that_hides_an_installed_one_is_not_taken_for_it(tmp_path: Path) -> None:
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
    assert _read(tmp_path, text).before_imports == names


@pytest.mark.parametrize(
    "text",
    [
        "sys.path = ['third_party']",
        "sys.path.insert(0, input())",
        "sys.path.insert(0, __file__[:-9])",
        "sys.path.insert(0, 'no_such_directory')",
        "sys.path.insert(0, 'script.py')",
        "sys.path.append(input())",
        "sys.path.extend(input())",
        "sys.path += input()",
        "os.chdir('third_party')\nsys.path.insert(0, '..')",
        "os.chdir('third_party')\nsys.path.insert(0, os.path.abspath('..'))",
        "os.chdir('third_party')\nsys.path.insert(0, os.getcwd())",
        "os.chdir('third_party')\nsys.path.insert(0, str(Path('..').resolve()))",
        "root = 'third_party'\nif input():\n    root = '.'\nsys.path.insert(0, root)",
        "try:\n    root = 'third_party'\nexcept OSError:\n    root = '.'\nsys.path.insert(0, root)",
        "try:\n    pass\nexcept OSError:\n    root = '.'\nelse:\n    root = 'third_party'\nsys.path.insert(0, root)",
        "try:\n    import google.colab\n    root = 'third_party'\nexcept ImportError as root:\n    pass\n"
        "sys.path.insert(0, root)",
        "root = 'third_party'\nfrom settings import root\nsys.path.insert(0, root)",
        "root = 'third_party'\nfrom settings import *\nsys.path.insert(0, root)",
        "root = 'third_party'\ndef root(): pass\nsys.path.insert(0, root)",
        "root = 'third_party'\nother = (root := '.')\nsys.path.insert(0, root)",
        "root = 'third_party'\nmatch input():\n    case root:\n        sys.path.insert(0, root)",
        "class os:\n    fspath = input\nsys.path.insert(0, os.fspath('third_party'))",
        "from path import Path\nsys.path.insert(0, Path('third_party'))",
        "try:\n    from pathlib import Path\nexcept ImportError:\n    from path import Path\n"
        "sys.path.insert(0, str(Path('third_party')))",
        "def add(p):\n    if p not in sys.path:\n        sys.path.insert(0, p)\nadd('third_party')",
        "if True:\n    def add(p):\n        sys.path = [p]\nadd('third_party')",
        "def add(p):\n    sys.path.insert(0, p)\ndef both():\n    add('a')\nboth()",
        "from sys import path\npath += [input()]",
        "from sys import path\npath.insert(0, input())",
        "import sys as system\nsystem.path.insert(0, input())",
        "if True:\n    import sys as system\nsystem.path.insert(0, input())",
        "place = 'a'\nfor place in ['a', 'b']:\n    sys.path.insert(0, place)",
        "place = 'a'\nif sys.argv:\n    place = input()\nsys.path.insert(0, place)",
        "import moves\nsys.path.insert(0, 'third_party')",
        "def move():\n    os.chdir('third_party')\nmove()\nsys.path.insert(0, '..')",
        "root = 'third_party'\ndef f():\n    global root\n    root = '.'\nf()\nsys.path.insert(0, root)",
        "def f():\n    global root\n    root = '.'\nroot = 'third_party'\nf()\nsys.path.insert(0, root)",
        "path = sys.path\npath.insert(0, input())",
        "(path := sys.path).insert(0, input())",
        "path: list[str] = sys.path\npath.insert(0, input())",
        "path, other = sys.path, 1\npath.insert(0, input())",
        "for path in [sys.path]:\n    path.insert(0, input())",
        "def add(path=sys.path):\n    path.insert(0, input())\nadd()",
        "insert = sys.path.insert\ninsert(0, input())",
        "add_to(sys.path)",
        "add_to(path=sys.path)",
        "sys.path[:0] = ['third_party']",
        "sys.path.remove('third_party')",
        "try:\n    pass\nexcept OSError:\n    sys.path.insert(0, input())",
        "sys.meta_path.append(None)",
        "sys.modules['numpy'] = None",
        "import site\nsite.addsitedir('third_party')",
    ],
)
def test_the_reading_ends_where_later_imports_find_other_things(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "third_party").mkdir()
    write(tmp_path, "moves.py", "import os\nos.chdir('third_party')")
    text = f"import os, sys, yaml\nfrom pathlib import Path\n{text}\nimport numpy"
    assert _read(tmp_path, text).imports == [Import("yaml")]


@pytest.mark.parametrize(
    "text",
    [
        "sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + '/third_party')",
        "sys.path.insert(1, os.path.join(os.path.dirname(os.path.realpath(__file__)), '..', 'third_party'))",
        "sys.path.append(os.path.join(os.path.dirname(__file__), os.pardir, 'third_party'))",
        "sys.path += [str(Path(__file__).resolve().parent.parent / 'third_party')]",
        "sys.path.extend((str(pathlib.Path(__file__).parents[1].joinpath('third_party')), Path('no string')))",
        "import os.path as osp\nsys.path.insert(0, osp.join(osp.dirname(__file__), '../third_party'))",
        "from os.path import dirname, join\nsys.path.insert(0, join(dirname(dirname(__file__)), 'third_party'))",
        "os.chdir('/')\nsys.path.insert(0, os.path.abspath(os.path.dirname(__file__) + '/../third_party'))",
        "try:\n    root = 'third_party'\nfinally:\n    pass\nroot = 'third_party'\nsys.path.insert(0, root)",
        "def add(p):\n    sys.path.insert(0, p)\nsys.path.insert(0, 'third_party')",
        "from sys import path\npath.insert(0, 'third_party')",
        "from sys import path\npath += ['third_party']",
        "root = Path(__file__).resolve().parents[1]\nplace: str = str(root / 'third_party')\n"
        "if place not in sys.path:\n    sys.path.insert(0, place)",
        "try:\n    root = Path(__file__).parent.parent\n    sys.path.insert(0, str(root / 'third_party'))\n"
        "except OSError:\n    raise",
        "if os.getcwd() not in sys.path:\n    sys.path.append(os.getcwd() + '/third_party')",
        "print(len(sys.path), *sys.path)\nsys.path.append('third_party')",
        "os.environ['X'] = os.pathsep.join(sys.path)\nsys.path.append('third_party')",
        "print(f'{sys.path} %s' % sys.path)\nsys.path.append('third_party')",
        "os.environ['PYTHONPATH'] = os.pathsep.join(['x'] + sys.path)\nsys.path.append('third_party')",
        "if not sys.path:\n    raise SystemExit\nsys.path.append('third_party')",
        "for place in sys.path:\n    print(place, sys.path[0], sys.modules.get('x'))\nsys.path.append('third_party')",
    ],
)
def test_directories_that_a_script_adds_to_its_path_are_followed(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "third_party/nets.py", "import numpy")
    (tmp_path / "scripts").mkdir()
    text = f"import os, pathlib, sys, yaml\nfrom pathlib import Path\n{text}\nimport nets, safetensors\n"
    found = _read(tmp_path / "scripts", text)
    assert [item.module for item in found.imports] == ["yaml", "numpy", "safetensors"]
    place = str(tmp_path / "third_party")
    assert (found.directories, found.behind) == (([place], []) if "insert" in text else ([], [place]))


def test_a_statement_may_be_as_deep_as_python_takes(tmp_path: Path) -> None:
    text = f"import yaml\nx = {'+'.join(['input()'] * 1500)}\nimport numpy"
    compile(text, "script.py", "exec")
    assert _read(tmp_path, text).imports == [Import("yaml"), Import("numpy")]


def test_what_is_added_behind_the_others_or_is_no_string_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "third_party/yaml.py", "import numpy")
    for text in ("append('third_party')", "insert(0, Path('third_party'))"):
        found = _read(tmp_path, f"import sys\nfrom pathlib import Path\nsys.path.{text}\nimport yaml")
        assert (found.imports, found.directories) == ([Import("yaml")], [])
    found = _read(tmp_path, "import sys\nsys.path.insert(0, 'third_party')\nimport yaml")
    assert [item.module for item in found.imports] == ["numpy"]


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
    assert entry_point(["-m", "elastic_launch.run_path", script, "x"]) == (script, f"{here}/a", "")
    assert entry_point(["-m", "no.such"])[0] == ""
    assert entry_point(["compiled"])[0] == ""


def test_to_look_at_the_path_changes_nothing(tmp_path: Path) -> None:
    found = _read(tmp_path, "import sys\nprint(sys.path[0], 'x' in sys.modules, sys.modules.get('y'))\nimport yaml")
    assert found.imports == [Import("yaml")]

"""Which versions of Python and torch are tested: what is declared, and how scripts/matrix.py reads it."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from harness import SLOWNESS, alive, wait_for
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from elastic_launch.config import torch_options
from elastic_launch.config.torch_options import untested_torch

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DECLARED = PYPROJECT["tool"]["elastic-launch"]["matrix"]


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "scripts" / "matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["matrix"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


# What is declared.


def test_the_declared_versions_are_those_that_may_be_installed() -> None:
    project = PYPROJECT["project"]
    pythons, torches = DECLARED["python"], DECLARED["torch"]
    assert project["requires-python"] == f">={pythons[0]}"
    (torch,) = (need for need in map(Requirement, project["dependencies"]) if need.name == "torch")
    assert torch.specifier == SpecifierSet(f">={torches[0]}")
    assert numbers(torches[-1]) == torch_options.NEWEST_TORCH
    for versions in (pythons, torches):
        assert versions == sorted(versions, key=numbers)
    shown = [line for line in project["classifiers"] if "Python :: 3." in line]
    assert shown == [f"Programming Language :: Python :: {python}" for python in pythons]


def test_the_readme_names_them() -> None:
    words = " ".join((ROOT / "README.md").read_text().split())
    (pythons, torches) = ((DECLARED[name][0], DECLARED[name][-1]) for name in ("python", "torch"))
    assert "Supported: Python {} to {} and torch {} to {} on Linux".format(*pythons, *torches) in words


# A newer torch than these.


@pytest.mark.parametrize(
    ("text", "newer"),
    [
        ("__version__ = '2.16.0+cpu'\n", "2.16.0+cpu"),
        ("from typing import Optional\n__version__ = '3.0.0a0+git1'\ndebug = False\n", "3.0.0a0+git1"),
        ("__version__ = '2.15.0+cu132'\n", None),
        ("__version__ = '2.9.0'\n", None),
        ("nothing = 1\n", None),
        (None, None),
    ],
)
def test_a_torch_that_is_newer_than_the_tests_know_gets_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, newer: str | None
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('torch is imported')")
    if text is not None:
        (tmp_path / "torch" / "version.py").write_text(text)
    line = untested_torch()
    assert line == (
        newer and f"torch {newer} is newer than 2.15, the newest that this version of elastic-launch was tested with"
    )


def test_a_launch_logs_it_once_and_imports_no_torch_for_it(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('torch is imported')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '9.0.0'\n")
    done = subprocess.run(
        [sys.executable, "-m", "elastic_launch.cli.composer", "-n", "1", "-c", "true"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("torch 9.0.0 is newer") == len(done.stderr.splitlines()) == 1


# make matrix.


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "matrix.py"), *words]
    env = {name: value for name, value in os.environ.items() if name != "MATRIX"}
    return subprocess.run(command, env={**env, **environ}, capture_output=True, text=True, timeout=180)


def test_every_python_is_tested_with_every_torch(matrix: ModuleType) -> None:
    pairs = matrix.supported()
    assert len({*pairs}) == len(pairs) == len(DECLARED["python"]) * len(DECLARED["torch"])
    assert matrix.parse(["3.12:2.13", "/a/python:2.14.1"]) == [
        matrix.Pair("3.12", "2.13"),
        matrix.Pair("/a/python", "2.14.1"),
    ]


@pytest.mark.parametrize("word", ["3.12", "3.12:", ":2.13", "2.13:python", "3.12:2.13:", "three:2.13"])
def test_what_is_not_a_pair_is_named(word: str) -> None:
    done = run(MATRIX=f"3.11:2.13 {word}")
    assert done.returncode == 2
    assert f"{word!r} is not a pair" in done.stderr


def test_a_pair_that_cannot_be_installed_is_explained_and_nothing_tested_is_a_failure(tmp_path: Path) -> None:
    old = tmp_path / "python-of-old"
    old.write_text("#!/bin/sh\necho no module named venv >&2\nexit 1\n")
    old.chmod(0o755)
    done = run("--directory", str(tmp_path / "made"), "9.9:2.13", f"{old}:2.13", f"{tmp_path}/none:2.13")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-4:] == [
        "  9.9:2.13  not installable: no python9.9 on PATH, nor of pyenv or uv",
        f"  {old}:2.13  not installable: {old}: no module named venv",
        f"  {tmp_path}/none:2.13  not installable: {tmp_path}/none: No such file or directory",
        "matrix: of 3 pairs 0 passed, 0 failed, 3 not tested",
    ]
    assert "nothing was tested" in done.stderr
    assert list((tmp_path / "made").iterdir()) == []


def test_an_interpreter_is_found_on_path_and_where_pyenv_and_uv_keep_theirs(matrix: ModuleType, tmp_path: Path) -> None:
    version = "{}.{}".format(*sys.version_info)
    full = "{}.{}.{}".format(*sys.version_info)
    for place in ("bin", f".pyenv/versions/{full}/bin", f".local/share/uv/python/cpython-{full}-linux/bin"):
        link = tmp_path / place / f"python{version}"
        link.parent.mkdir(parents=True)
        link.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        link.chmod(0o755)
        environ = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
        assert matrix.find_python(version, environ) == (str(link), full)
        link.write_text("#!/bin/sh\nexit 1\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_was_started_and_names_what_was_not_run(tmp_path: Path, number: signal.Signals) -> None:
    # Prints its version, and then makes an environment that is never done.
    slow, started = tmp_path / "python-of-old", tmp_path / "started"
    slow.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] || exec echo 3.11.7\n'
        f'mkdir -p "$4" && echo $$ > {started}.new && mv {started}.new {started}\nexec sleep 600\n'
    )
    slow.chmod(0o755)
    command = [sys.executable, str(ROOT / "scripts" / "matrix.py"), "--directory", str(tmp_path / "made")]
    with subprocess.Popen([*command, f"{slow}:2.13", f"{slow}:2.14"], stdout=subprocess.PIPE, text=True) as matrix:
        wait_for("the beginning of an environment", started.exists)
        matrix.send_signal(number)
        out, _ = matrix.communicate(timeout=60 * SLOWNESS)
    assert matrix.returncode == 128 + number
    assert out.splitlines()[-3:] == [
        f"  {slow}:2.13  not run to its end: {number.name} came",
        f"  {slow}:2.14  not run to its end: {number.name} came",
        "matrix: of 2 pairs 0 passed, 0 failed, 2 not tested",
    ]
    wait_for("the end of what was started", lambda: not alive(int(started.read_text())))
    assert [path.suffix for path in (tmp_path / "made").iterdir()] == [".log"]


def test_tests_that_take_too_long_may_end_what_they_started(
    matrix: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "LIMIT", 1.0)
    log = tmp_path / "log"
    shell = "trap 'echo tidied; exit 2' INT; while :; do sleep 0.05; done"
    assert matrix.run(["sh", "-c", shell], log, os.environ) == 124
    assert log.read_text().splitlines()[-2:] == ["matrix: ended after 1 s", "tidied"]


SUITE = "<testsuites><testsuite tests='{}' failures='{}' errors='{}' skipped='{}'>{}</testsuite></testsuites>"
SKIPPED = "<testcase name='s'><skipped message='needs a GPU'/></testcase>"
CRASHED = "<testcase classname='a' name='b'><error message='worker crashed while running a::b'/></testcase>"
FAILED = "<testcase classname='a' name='b'><failure/></testcase><testcase name='c'/>"


@pytest.mark.parametrize(
    ("code", "report", "passed", "text"),
    [
        (0, SUITE.format(9, 0, 0, 0, ""), True, "passed 9, skipped 0"),
        (0, SUITE.format(9, 0, 0, 2, 2 * SKIPPED), True, "passed 7, skipped 2 (2: needs a GPU)"),
        (0, SUITE.format(2, 0, 0, 2, 2 * SKIPPED), False, "no test passed: passed 0, skipped 2 (2: needs a GPU)"),
        (0, SUITE.format(0, 0, 0, 0, ""), False, "no test was run (pytest ended with 0)"),
        (5, SUITE.format(0, 0, 0, 0, ""), False, "no test was run (pytest ended with 5)"),
        (1, SUITE.format(9, 0, 0, 0, ""), False, "failed 0, passed 9, skipped 0 (pytest ended with 1)"),
        (
            1,
            SUITE.format(3, 1, 1, 0, FAILED),
            False,
            "failed 2, passed 1, skipped 0 (pytest ended with 1)\n    a::b",
        ),
        (
            2,
            SUITE.format(2, 1, 0, 0, FAILED),
            False,
            "failed 1, passed 1, skipped 0 (pytest ended with 2: it was interrupted, and not all tests were run)"
            "\n    a::b",
        ),
        (
            1,
            SUITE.format(9, 0, 1, 0, CRASHED),
            False,
            "failed 1, passed 8, skipped 0 (pytest ended with 1: a process of the tests died, "
            "and not all tests were run)\n    a::b",
        ),
        (
            124,
            SUITE.format(9, 0, 0, 0, ""),
            False,
            "failed 0, passed 9, skipped 0 (pytest ended with 124: ended before all tests were run)",
        ),
        (124, "", False, "failed: pytest ended with 124 and left no report"),
    ],
)
def test_the_outcome_is_that_of_the_tests(
    matrix: ModuleType, tmp_path: Path, code: int, report: str, passed: bool, text: str
) -> None:
    (tmp_path / "report.xml").write_text(report)
    assert matrix.judged(code, tmp_path / "report.xml") == (passed, text)


def test_it_fails_when_a_pair_that_installed_fails_or_none_installed(matrix: ModuleType) -> None:
    pair = matrix.Pair("3.11", "2.13")
    good, bad = matrix.Result(pair, True, True, ""), matrix.Result(pair, True, False, "")
    absent = matrix.Result(pair, False, False, "")
    assert [matrix.exit_code(results) for results in ([good], [good, absent], [good, bad], [absent], [])] == [
        0,
        0,
        1,
        1,
        1,
    ]


def test_the_tests_that_it_runs_exist(matrix: ModuleType) -> None:
    files = matrix.tests()
    assert all((ROOT / file).is_file() for file in files)
    assert {"tests/training/test_exact.py", "tests/integration/test_one_node.py"} < set(files)
    assert "tests/integration/test_several_nodes.py" not in files

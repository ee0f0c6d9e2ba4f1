"""Tests of the workers' command: script, module or program, and arguments."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from command_lines import Parse, refused

# What belongs to the script.


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nproc", "7", "--nnodes=9"],
        ["--help"],
        ["--", "--version"],
        ["--unknown", "-x", "--n"],
        ["", " ", "--lr=1 2", "-"],
        ["train.py", "-m"],
    ],
)
def test_everything_after_the_script_is_passed_to_it(parse: Parse, arguments: list[str]) -> None:
    config = parse("--nproc", "2", "train.py", *arguments)
    assert config.nproc == 2
    assert config.command.argv == (sys.executable, "-u", "train.py", *arguments)
    assert config.command.display == ("train.py", *arguments)


def test_two_dashes_end_the_launchers_flags(parse: Parse) -> None:
    config = parse("--nproc 2 -- train.py -- --nproc 3")
    assert config.nproc == 2
    assert config.command.display == ("train.py", "--", "--nproc", "3")


def test_two_dashes_let_a_script_begin_with_a_dash(parse: Parse) -> None:
    Path("-x.py").touch()
    assert parse("-- -x.py").command.display == ("-x.py",)


@pytest.mark.parametrize("line", ["", "--nproc 2", "--", "-m", "--nproc 2 --"])
def test_no_script(parse: Parse, line: str) -> None:
    error = refused(parse, *line.split(), "--nproc=1") if line == "" else refused(parse, line)
    assert "no script" in error.message
    assert "elastic-launch [flags] script.py" in error.hint


# Python script, module, program.


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("nope.py", "there is no script 'nope.py' in {here}"),
        ("", "there is no script ''"),
        ("a" * 300, "there is no script"),
        ("folder", "'folder' is a directory without a __main__.py"),
    ],
)
def test_scripts_that_cannot_run(parse: Parse, tmp_path: Path, script: str, message: str) -> None:
    Path("folder").mkdir()
    assert message.format(here=tmp_path) in refused(parse, "--nproc", "1", script).message


def test_a_directory_with_a_main_is_a_script(parse: Parse) -> None:
    Path("folder").mkdir()
    Path("folder/__main__.py").touch()
    assert parse("folder").command.argv[2:] == ("folder",)


def test_a_script_that_can_be_read_only_once(parse: Parse) -> None:
    source, sink = os.pipe()
    os.mkfifo("pipe")
    for path in ("pipe", f"/dev/fd/{source}"):
        assert f"the script '{path}' is a pipe: each worker" in refused(parse, path).message
    os.close(source)
    os.close(sink)


def test_a_script_that_cannot_be_read(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by its permissions: they do not hold for root.
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != ("train.py", os.R_OK))
    assert "cannot be read" in refused(parse, "train.py").message


@pytest.mark.parametrize("flag", ["-m", "--module", "--mod"])
def test_module(parse: Parse, flag: str) -> None:
    command = parse(f"{flag} train --lr 1").command
    assert command.argv == (sys.executable, "-u", "-m", "train", "--lr", "1")
    assert command.display == ("-m", "train", "--lr", "1")


def test_existing_modules(parse: Parse) -> None:
    Path("package").mkdir()
    Path("package/__init__.py").write_text("raise AssertionError('imported')\n")
    Path("package/__main__.py").touch()
    for name in ("package", "package.anything", "json.tool"):
        assert parse(f"-m {name}").command.argv[3] == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere_to_be_found", "no module 'nowhere_to_be_found'"),
        ("nowhere.to.be", "no module 'nowhere'"),
        (".relative", "no module ''"),
        ("train.py", "'train' is a module and has no 'py' in it"),
        ("package", "'package' is a package without __main__.py"),
        ("./train", "no module ''"),
    ],
)
def test_modules_that_are_not(parse: Parse, name: str, message: str) -> None:
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    error = refused(parse, f"-m {name}")
    assert message in error.message
    assert error.message.startswith(f"-m {name}: ")


def test_no_python_finds_programs(parse: Parse, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for path in (tools / "tool", tmp_path / "local", tmp_path / "tool"):
        path.touch(mode=0o755)
    for script, found in [
        ("tool", "tool"),
        ("local", "./local"),
        ("./local", "./local"),
        ("tools/tool", "tools/tool"),
        (str(tools / "tool"), str(tools / "tool")),
    ]:
        command = parse("--no-python", script, "-c", "x y", PATH=str(tools)).command
        assert command.argv == (found, "-c", "x y")
        assert command.display == ("--no-python", script, "-c", "x y")


@pytest.mark.parametrize(
    ("script", "message", "hint"),
    [
        ("nope", "no such program on PATH or in {here}", "name"),
        ("folder", "is a directory", "program"),
        ("train.py", "is not executable", "chmod +x"),
    ],
)
def test_programs_that_cannot_run(parse: Parse, tmp_path: Path, script: str, message: str, hint: str) -> None:
    Path("folder").mkdir()
    error = refused(parse, f"--no-python {script}")
    assert error.message.startswith(f"--no-python {script}: ")
    assert message.format(here=tmp_path) in error.message
    assert hint in error.hint


def test_module_and_program_contradict(parse: Parse) -> None:
    error = refused(parse, "-m --no-python train")
    assert "--module" in error.message
    assert "--no-python" in error.message
    assert "Drop --no-python" in error.hint
    assert "--no-python comes from PET_NO_PYTHON=1" in refused(parse, "-m train", PET_NO_PYTHON="1").message


def test_python_exec(parse: Parse, tmp_path: Path) -> None:
    other = tmp_path / "python-of-mine"
    other.touch(mode=0o755)
    assert parse("train.py", PYTHON_EXEC=str(other)).command.argv[0] == str(other)
    # It may have modules that we have not.
    assert parse("-m nowhere_to_be_found", PYTHON_EXEC=str(other)).command.argv[3] == "nowhere_to_be_found"
    assert "PYTHON_EXEC=/no/python" in refused(parse, "train.py", PYTHON_EXEC="/no/python").message
    # Only Python commands need one.
    assert parse("--no-python sh", PYTHON_EXEC="/no/python").command.argv == ("sh",)


def test_digest_is_that_of_the_command_as_given(parse: Parse, tmp_path: Path) -> None:
    other = tmp_path / "python-of-mine"
    other.touch(mode=0o755)
    base = parse("train.py --lr 1").digest()
    for same in ("--nproc 4 train.py --lr 1", "--nnodes=1:1 --node-id x -- train.py --lr 1"):
        assert parse(same).digest() == base
    assert parse("train.py --lr 1", PYTHON_EXEC=str(other)).digest() == base
    Path("train").touch(mode=0o755)
    digests = {
        parse(line).digest()
        for line in (
            "train --lr 1",
            "-m train --lr 1",
            "--no-python train --lr 1",
        )
    }
    assert len(digests | {base}) == 4
    for same in ("train.py --lr 2", "--nnodes 1:2 train.py", "--max-restarts 1 ./train.py"):
        assert parse(same).digest() == base


def test_an_interpreter_that_is_gone_is_not_called_python_exec(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/gone/python")
    error = refused(parse, "train.py")
    assert error.message.startswith("this process' own interpreter, '/gone/python', is not")
    assert error.hint == "Name the workers' interpreter with PYTHON_EXEC=/path/to/python."

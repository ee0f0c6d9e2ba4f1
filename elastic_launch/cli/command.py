"""What the workers execute: a script, a module or a program, checked before anything starts."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from elastic_launch.cli.flags import USAGE, CommandLine, Values
from elastic_launch.config.launch_config import Command
from elastic_launch.errors import CommandLineError, UsageError
from elastic_launch.system.program import PROGRAM

log = logging.getLogger("elastic_launch.cli.main")


def read_command(line: CommandLine, values: Values) -> Command:
    """Return what the workers execute."""
    script, arguments = line.script, line.arguments
    if script is None:
        raise CommandLineError("there is no script to run.", f"Write {USAGE}; {PROGRAM} --help lists the flags.")
    module, no_python = values.switch("--module"), values.switch("--no-python")
    if values.switch("--run-path"):
        return _run_path(script, arguments, module=module, no_python=no_python, as_torchrun=values.torchrun)
    if module and no_python:
        raise UsageError(
            "-m/--module and --no-python contradict each other.",
            "Drop --no-python to run a Python module, or --module to run a program.",
        )
    if no_python:
        argv = (_program(script, values.environ), *arguments)
        return Command(argv, ("--no-python", script, *arguments))
    given = values.environ.get("PYTHON_EXEC")
    python = given or sys.executable
    if not shutil.which(python, path=values.environ.get("PATH")):
        if given:
            raise UsageError(f"PYTHON_EXEC={given} is not an executable file.", "Correct or unset it.")
        raise UsageError(
            f"this process' own interpreter, {python!r}, is not an executable file (any more).",
            "Name the workers' interpreter with PYTHON_EXEC=/path/to/python.",
        )
    if module:
        # Another interpreter may find modules that this one cannot.
        if python == sys.executable:
            _check_module(script)
        return Command((python, "-u", "-m", script, *arguments), ("-m", script, *arguments))
    _check_script(script)
    return Command((python, "-u", script, *arguments), (script, *arguments))


def _run_path(script: str, arguments: Sequence[str], *, module: bool, no_python: bool, as_torchrun: bool) -> Command:
    if module and not as_torchrun:
        raise UsageError(
            "-m/--module and --run-path contradict each other: one wants the name of a module, one a path.",
            "Drop --module to run a file, or --run-path to run a module.",
        )
    for flag, given in (("--module", module), ("--no-python", no_python)):
        if given:
            log.warning("%s has no effect: --run-path takes precedence.", flag)
    if not os.path.isabs(script) and not as_torchrun:
        raise UsageError(f"--run-path {script}: it is not a full path.", f"Write --run-path {os.path.abspath(script)}.")
    _check_script(script)
    argv = (sys.executable, "-u", "-m", "elastic_launch.run_path", script, *arguments)
    return Command(argv, ("--run-path", script, *arguments))


def check_directory() -> None:
    """Check that there is a working directory."""
    try:
        os.getcwd()
    except FileNotFoundError:  # torch cannot even be imported there: MKL ends the process
        raise UsageError("the working directory does not exist any more.", "Change to one that does.") from None


def here() -> str:
    """The working directory, for a message."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a working directory that is gone"


def _check_script(script: str) -> None:
    # os.path does not raise for a name that is too long or a directory without permission.
    if not os.path.exists(script):
        raise UsageError(
            f"there is no script {script!r} in {here()}.",
            "Correct the path, or give -m for a module or --no-python for a program.",
        )
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UsageError(f"the script {script!r} is a directory without a __main__.py.", "Name a file in it.")
    if Path(script).is_fifo():
        raise UsageError(
            f"the script {script!r} is a pipe: each worker, and each restart, has to read it again.",
            "Name a file, as in elastic-launch train.py.",
        )
    if not os.access(script, os.R_OK):
        raise UsageError(f"the script {script!r} cannot be read.", "Change its permissions.")


def _check_module(name: str) -> None:
    """Check that the top-level package or module exists; checking submodules would import it."""
    top, _, rest = name.partition(".")
    spec = find_module(top) if top else None
    if spec is None:
        raise UsageError(
            f"-m {name}: there is no module {top!r} in {here()} or on sys.path.",
            "Correct the name, change to the directory that has it, or install it.",
        )
    locations = spec.submodule_search_locations
    if rest and locations is None:
        raise UsageError(
            f"-m {name}: {top!r} is a module and has no {rest!r} in it.",
            f"Write -m {top}, or without -m the path of a script.",
        )
    if not rest and locations is not None and not PathFinder.find_spec(f"{top}.__main__", list(locations)):
        raise UsageError(
            f"-m {name}: {top!r} is a package without __main__.py.",
            "Name a module in it, as in -m package.module.",
        )


def find_module(top: str) -> ModuleSpec | None:
    """Find a top-level module as ``python -m`` would, without importing it."""
    importlib.invalidate_caches()
    # python -m looks in the working directory first.
    if found := PathFinder.find_spec(top, ["", *sys.path]):
        return found
    try:
        # Editable installs have their own finders.
        return importlib.util.find_spec(top)
    except ValueError:
        return None


def _program(script: str, environ: Mapping[str, str]) -> str:
    if shutil.which(script, path=environ.get("PATH")):
        return script
    if os.path.isdir(script):
        raise UsageError(f"--no-python {script}: it is a directory.", "Name a program in it.")
    if not os.path.exists(script):
        raise UsageError(f"--no-python {script}: there is no such program on PATH or in {here()}.", "Correct its name.")
    if not os.access(script, os.X_OK):
        raise UsageError(
            f"--no-python {script}: it is not executable.",
            "chmod +x it, or drop --no-python to run it by Python.",
        )
    # A name without a slash would be looked for on PATH only.
    return os.path.join(os.curdir, script)

"""Bring the environment that runs this script up to what pyproject.toml and constraints.txt ask for.

Started by the Makefile with the environment's own Python, before anything is installed: standard library
only. PIP_ARGS holds further arguments for every pip install.
"""

import argparse
import compileall
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

CONSTRAINTS = "constraints.txt"
LINK_NAME = "torch-of-another-interpreter.pth"
FRAMEWORKS = ("frameworks", "ray")
"""The extras that `make test-all` adds: only its tests need them."""

APART = "torchx"
"""The extra that it adds in an environment within the environment: it needs an older urllib3 than the others."""

AXE = "axe-playwright-python"
"""The package whose axe-core a test lets a browser run; what it depends on is not needed for that."""

LEFT_OUT = (*FRAMEWORKS, APART, "deepspeed")
"""The extras that an environment does not begin with."""

EXTRAS = ("dev", "examples")
"""The purpose of an environment: with the first, it has all other extras but these."""

DESCRIBE = """
import json, os, sys, torch
directories = [p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages")]
print(json.dumps([torch.__version__, list(sys.version_info[:2]), directories]))
"""


@dataclass(frozen=True)
class OtherTorch:
    interpreter: str
    version: str
    python: tuple[int, int]
    directories: list[str]


def pip_install(*arguments: str, constraints: str = CONSTRAINTS, into: Sequence[str] = ()) -> None:
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    # It would compile all that it installs on one processor.
    command = [sys.executable, "-m", "pip", *into, "install", "--no-compile", *extra, "-c", constraints, *arguments]
    print("env:", shlex.join(command[1:]), flush=True)
    if code := subprocess.run(command).returncode:
        sys.exit(f"env: pip failed with exit code {code}; its message is above. PIP_ARGS= reaches pip.")


def compile_packages(site_packages: Path) -> None:
    """Compile what is installed on all processors, except for the packages' own tests, which nothing imports."""
    # A file for another version of Python, as torch has, is not compiled; pip leaves it out, too.
    compileall.compile_dir(
        site_packages, quiet=2, workers=0, rx=re.compile(re.escape(str(site_packages)) + r".*/tests?/")
    )


def ensure_pip() -> None:
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        subprocess.run([sys.executable, "-m", "ensurepip"], check=True)


def find_torch(interpreter: str) -> OtherTorch | None:
    found = subprocess.run([interpreter, "-c", DESCRIBE], capture_output=True, text=True)
    if found.returncode:
        print(f"env: {interpreter} cannot import torch, so it is installed", flush=True)
        return None
    torch_version, (major, minor), directories = json.loads(found.stdout)
    return OtherTorch(interpreter, torch_version, (major, minor), directories)


def link_torch(torch: OtherTorch, site_packages: Path, extra: str) -> None:
    if torch.python != sys.version_info[:2]:
        sys.exit(
            f"env: {torch.interpreter} and the environment in {sys.prefix} differ in their Python version; "
            "remove that directory, or name another with VENV=path"
        )
    print(f"env: using torch {torch.version} of {torch.interpreter}", flush=True)
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    dependencies: list[str] = project["dependencies"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    skipped = ("torch", project["name"])
    names = [name for name in extras if name not in LEFT_OUT] if extra == "dev" else [extra]
    wanted = [
        line
        for line in (*dependencies, *(line for name in names for line in extras[name]))
        if re.split(r"[^\w.-]", line)[0] not in skipped
    ]
    # pip must not see the other interpreter's packages while it installs the tools: it would count
    # them as installed, and their commands would be missing from this environment.
    link = site_packages / LINK_NAME
    link.unlink(missing_ok=True)
    pip_install(*wanted, "packaging")
    link.write_text("".join(f"{directory}\n" for directory in torch.directories))
    pip_install("--no-deps", "-e", ".")

    # It is installed only now.
    from packaging.requirements import Requirement

    required = next(r for r in map(Requirement, dependencies) if r.name == "torch")
    if not required.specifier.contains(torch.version, prereleases=True):
        sys.exit(
            f"env: {required} is needed, {torch.interpreter} has {torch.version}; "
            "without PYTHON= the right one is installed"
        )


def add_frameworks() -> None:
    """Add the packages of the extras to a ready environment, whatever torch it has.

    Most of their modules are never imported, so that each is compiled when it is.
    """
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    together = [line for name in FRAMEWORKS for line in extras[name]]
    with pins_without("torch==", f"torch=={version('torch')}") as constraints:
        pip_install(*together, constraints=constraints)
    pip_install("--no-deps", AXE)
    apart = Path(sys.prefix) / APART
    venv.create(apart, symlinks=True)
    with pins_without("urllib3==") as constraints:
        pip_install(*extras[APART], constraints=constraints, into=("--python", str(apart)))


@contextlib.contextmanager
def pins_without(start: str, *others: str) -> Iterator[str]:
    """Write the constraints to a file, without those that begin so, and with others."""
    pins = [line for line in Path(CONSTRAINTS).read_text().splitlines() if not line.startswith(start)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join([*pins, *others]) + "\n")
        constraints.flush()
        yield constraints.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reuse-torch-of", metavar="PYTHON", help="use this interpreter's torch if it has one")
    parser.add_argument("--extra", choices=EXTRAS, default="dev", help="what the environment is for")
    parser.add_argument("--frameworks", action="store_true", help="add what only make test-all needs")
    args = parser.parse_args()
    if args.frameworks:
        add_frameworks()
        return
    interpreter = args.reuse_torch_of
    site_packages = Path(sysconfig.get_path("purelib"))
    ensure_pip()
    torch = find_torch(interpreter) if interpreter else None
    if torch is None:
        # constraints.txt pins torch: otherwise pip may download gigabytes of another build.
        pip_install("-e", f".[{args.extra}]")
    else:
        link_torch(torch, site_packages, args.extra)
    compile_packages(site_packages)
    print(f"env: ready in {sys.prefix} with torch {torch.version if torch else version('torch')}")


if __name__ == "__main__":
    main()

"""A replacement of ``torch.distributed.launch``: ``python -m elastic_launch.launch``, or this file run by its path.

It is ``elastic-launch``, except that the script gets its local rank as the first argument, and that there are no
restarts unless ``--max-restarts`` is given; see https://docs.pytorch.org/docs/stable/distributed.html#launch-utility.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not __package__:
    # If run by its path, this directory is searched first, and its files would shadow other modules of the same names.
    _here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != _here]

if __name__ == "__main__" and __package__:
    from elastic_launch.safe_path import leave_out_working_directory

    leave_out_working_directory()

if __name__ == "__main__":
    from elastic_launch.system.interrupts import end_quietly

    end_quietly()  # before the slow imports below

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

from elastic_launch.cli.command import find_module
from elastic_launch.cli.flags import Flag, Sourced, split
from elastic_launch.cli.job import Job
from elastic_launch.cli.main import launch
from elastic_launch.errors import UsageError
from elastic_launch.system.program import exiting, reported

LONGEST_SOURCE = 1 << 20
"""Characters of a script that are searched for the name of its argument."""

FLAGS = (
    Flag(("--use-env",), "hand the script no local rank; LOCAL_RANK has it", in_environment=False),
    Flag(("--local-rank-name",), "how the script spells --local-rank", "NAME", in_environment=False),
)

HELP = """
As torch.distributed.launch:
  The script's first argument is --local-rank=N, or --local_rank=N if that is what its source has.
  --use-env               hand the script no local rank; LOCAL_RANK has it
  --local-rank-name NAME  another name for that argument
  --max-restarts          is 0 by default
"""


def console_main() -> NoReturn:
    """``python -m elastic_launch.launch``, and the file itself."""
    exiting(lambda: main(whole=True))


def main(argv: Sequence[str] | None = None, *, whole: bool = False) -> int:
    """Run a launch from a command line for ``torch.distributed.launch``.

    Args:
        argv: arguments without the program's name; None for those of this process.
        whole: whether this process only serves the launch, see :func:`elastic_launch.cli.main.main`.

    Returns:
        The exit code, see :class:`~elastic_launch.errors.ExitCode`.
    """
    return reported(lambda: _main(sys.argv[1:] if argv is None else argv, whole))


def _main(argv: Sequence[str], whole: bool) -> int:
    line = split(argv, FLAGS)
    code = launch(
        replace(line, defaults={"--max-restarts": Sourced("0", "default of torch.distributed.launch")}),
        hand_local_rank,
        whole=whole,
    )
    if line.wants == "--help":
        sys.stdout.write(HELP)
    return code


def hand_local_rank(job: Job) -> None:
    """Put the local rank before the script's arguments, unless ``--use-env`` is given."""
    if "--use-env" in job.line.given or job.line.script is None:
        return
    if job.values.switch("--no-python"):
        raise UsageError(
            "--no-python without --use-env would hand the program a --local-rank.",
            "Add --use-env; the program finds its local rank in LOCAL_RANK.",
        )
    if (asked := job.line.given.get("--local-rank-name")) is not None:
        name = _named(asked[-1])
    else:
        name = spelling(_source(job.line.script, module=job.values.switch("--module")))
    # The agent puts the number there for each worker.
    job.line = replace(job.line, arguments=(f"{name}=${{local_rank}}", *job.line.arguments))


def spelling(source: str) -> str:
    """Return how a script spells the argument: with dashes, unless its source only has underscores.

    Quoted occurrences take precedence over those in comments or usage texts.
    """
    for quote in (r"""["']""", ""):
        found = set(re.findall(rf"{quote}(--local[-_]rank)(?![\w-]){quote}", source))
        if found:
            return "--local-rank" if "--local-rank" in found else "--local_rank"
    return "--local-rank"


def _named(text: str) -> str:
    name = text if text.startswith("-") else f"--{text}"
    if not re.fullmatch(r"-{1,2}[A-Za-z][\w.-]*", name):
        raise UsageError(
            f"--local-rank-name {text!r} is not a valid argument name.",
            "Write one, as in --local-rank-name local_rank.",
        )
    return name


def _source(script: str, *, module: bool) -> str:
    """Return the source of what the workers run, if it can be found without importing anything."""
    path = _module_file(script) if module else Path(script)
    if path is None:
        return ""
    if path.is_dir():
        path = path / "__main__.py"
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(LONGEST_SOURCE)
    except OSError:
        return ""  # building the command reports what is wrong


def _module_file(name: str) -> Path | None:
    top, *parts = name.split(".")
    spec = find_module(top) if top else None
    for depth in range(len(parts)):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join([top, *parts[: depth + 1]]), list(spec.submodule_search_locations))
    if spec is None or spec.origin is None:
        return None
    # A package is run by its __main__.
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


if __name__ == "__main__":
    console_main()

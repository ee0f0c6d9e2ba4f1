"""``elastic-composer``, and ``elastic-launch`` with ``--world_size`` or ``--base_rank``: a world of fixed size.

The flags and variables are those of MosaicML Composer's launcher, composer/cli/launcher.py in
https://github.com/mosaicml/composer, with their meaning there; ``--run_directory`` is that of its first releases.
"""

from __future__ import annotations

if __name__ == "__main__":
    from elastic_launch.system.interrupts import end_quietly

    end_quietly()  # before the slow imports below

import logging
import os
import socket
import string
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from elastic_agents.static_world import Rank, StaticWorld, run
from elastic_launch import __version__
from elastic_launch.cli.command import read_command
from elastic_launch.cli.flags import CommandLine, Flag, Values, split
from elastic_launch.cli.help import flag_lines
from elastic_launch.cli.output_flags import read_log_format
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.config.settings import Setting
from elastic_launch.errors import ExitCode, UsageError
from elastic_launch.system.program import check_kernel, exiting, reported

_log = logging.getLogger(__name__)

PROGRAM = "elastic-composer"
SUMMARY = "Run one node's part of a PyTorch training job whose world is fixed: no rendezvous, no restarts."
USAGE = f"{PROGRAM} [flags] script.py [arguments of the script]"

FLAGS = (
    Flag(("-n", "--nproc", "--nproc-per-node"), "processes here", "N", "GPUs, else 1", False, "LOCAL_WORLD_SIZE"),
    Flag(("--world-size",), "processes on all nodes", "N", "--nproc", False, "WORLD_SIZE"),
    Flag(("--base-rank",), "lowest rank on this node", "N", "node rank * nproc", False, "BASE_RANK"),
    Flag(("--node-rank",), "rank of this node", "N", "base rank / nproc", False, "NODE_RANK"),
    Flag(("--master-addr",), "address where the processes meet", "HOST", "127.0.0.1 on one node", False, "MASTER_ADDR"),
    Flag(("--master-port",), "port where the processes meet", "PORT", "any on one node", False, "MASTER_PORT"),
    Flag(("-m", "--module-mode", "--module"), "the script is a module"),
    Flag(("-c", "--command-mode", "--no-python"), "the script is a program, not Python"),
    Flag(("--stdout",), "file for stdout of all but local rank 0", "FORMAT"),
    Flag(("--stderr",), "file for stderr of all but local rank 0", "FORMAT"),
    Flag(("--run-directory",), "directory for files", "DIR", "runs/{timestamp}/"),
    Flag(("--shutdown-timeout",), "time from SIGTERM to SIGKILL", "S", "30"),
    Flag(("-v", "--verbose"), "log what succeeds, too"),
    Flag(("--log-format",), "launcher's lines: plain, time, json", "NAME", "time", False),
    Flag(("-h", "--help"), "show this and exit"),
    Flag(("--version",), "show the version and exit"),
)

_BY_NAME = {flag.name: flag for flag in FLAGS}

_FIXED = ("--world-size", "--base-rank")

FORMAT_NAMES = ("rank", "local_rank", "world_size", "node_rank", "local_world_size")
"""Names that ``--stdout`` and ``--stderr`` may have in braces."""

NOTES = (
    "Names take dashes or underscores.",
    f"FORMAT may hold {' '.join(f'{{{name}}}' for name in FORMAT_NAMES)}.",
    "In the script's arguments ~ and $RANK, $LOCAL_RANK and other variables are expanded for each rank.",
)


def console_main() -> NoReturn:
    exiting(main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's part of a fixed world as the command line requests.

    Returns:
        The exit code, see :class:`~elastic_launch.errors.ExitCode`.
    """
    return reported(lambda: start(sys.argv[1:] if argv is None else argv))


def wanted(argv: Sequence[str]) -> bool:
    """Whether a command line of ``elastic-launch`` that contains these flags' names requests a fixed world."""
    try:
        return not split(argv, FLAGS).given.keys().isdisjoint(_FIXED)
    except UsageError:
        pass
    try:
        split(argv)
    except UsageError:
        return True  # the parser of a fixed world reports what is wrong
    return False


def start(argv: Sequence[str]) -> int:
    """Carry out a command line, and return the exit code.

    Raises:
        ElasticLaunchError: if that fails.
    """
    line = split(argv, FLAGS)
    if line.wants == "--help":
        sys.stdout.write(help_text())
        return ExitCode.DONE
    if line.wants == "--version":
        print(f"{PROGRAM} {__version__}")
        return ExitCode.DONE
    fixed = world(line, os.environ)
    check_kernel()
    return run(fixed)


def world(line: CommandLine, environ: Mapping[str, str]) -> StaticWorld:
    """Convert a command line and environment to this node's part of a world."""
    for name in line.given:
        if name not in _BY_NAME:
            raise UsageError(
                f"{name} means nothing in a world of fixed size.",
                "Drop it; or drop --world_size and --base_rank, and use elastic-launch, if nodes may come and go.",
            )
    mine = {name: value for name, value in environ.items() if not name.startswith(("PET_", "ELASTIC_LAUNCH_"))}
    if mine.get("WORLD_SIZE") == mine.get("LOCAL_WORLD_SIZE"):
        mine.pop("WORLD_SIZE", None)  # one node, as in Composer: -n alone changes its size
    values = Values(line.given, mine, table=_BY_NAME)
    argv = _command(line, values)
    place = _place(values)
    timestamp = datetime.now().isoformat().replace(":", "-")
    runs = (values.text("--run-directory") or "runs/{timestamp}/").replace("{timestamp}", timestamp)
    directory = Path(os.path.abspath(runs))
    return StaticWorld(
        argv=argv,
        arguments=line.arguments,
        ranks=_ranks(values, place, directory),
        world_size=place.world_size,
        base_rank=place.base_rank,
        node_rank=place.node_rank,
        master_addr=place.master_addr,
        master_port=place.master_port or _free_port(),
        run_directory=directory,
        grace=values.seconds("--shutdown-timeout", LaunchConfig.shutdown_timeout),
        verbose="--verbose" in line.given,
        log_format=read_log_format(values),
    )


def _asked(values: Values, name: str) -> str:
    """Return a value with its name, as the user gave it."""
    return f"{values.asked(name)}{values.text(name)}{'' if name in values.given else ' in the environment'}"


def _number(values: Values, name: str, least: int) -> int | None:
    text = values.text(name)
    if text is None:
        return None
    number = Setting(values.asked(name), text).whole()
    if number < least:
        raise UsageError(f"{_asked(values, name)} is below {least}.", f"Give {least} or more.")
    return number


@dataclass(frozen=True, slots=True)
class _Place:
    nproc: int
    world_size: int
    base_rank: int
    node_rank: int
    master_addr: str
    master_port: int | None


def _place(values: Values) -> _Place:
    port = _number(values, "--master-port", 1)
    if port is not None and port > 65535:
        raise UsageError(f"{_asked(values, '--master-port')} is not a port.", "A port is a number from 1 to 65535.")
    address = values.text("--master-addr")
    base, node = _number(values, "--base-rank", 0), _number(values, "--node-rank", 0)
    size = _number(values, "--world-size", 1)
    nproc = _nproc(values)
    if size is not None and size < nproc:
        raise UsageError(
            f"{_asked(values, '--world-size')} is less than the {nproc} processes of this node.",
            "Give the number of processes on all nodes together, or fewer with --nproc.",
        )
    if size is None or size == nproc:
        return _alone(values, nproc, address or "127.0.0.1", port)
    base, node = _ranks_of_node(values, nproc, size, base, node)
    if base + nproc > size:
        raise UsageError(
            f"ranks {base} to {base + nproc - 1} of this node do not all exist in a world of {size}.",
            "Lower --base_rank, --node_rank or --nproc, or raise --world_size.",
        )
    for name, value in (("--master-addr", address), ("--master-port", port)):
        if value is None:
            raise UsageError(
                f"a world of {size} with {nproc} on this node has several nodes, and no {name} says where they meet.",
                "Give all nodes the same --master_addr and --master_port: where rank 0 runs, and a free port there.",
            )
    return _Place(nproc, size, base, node, str(address), port)


def _alone(values: Values, nproc: int, address: str, port: int | None) -> _Place:
    for name in ("--base-rank", "--node-rank"):
        if _number(values, name, 0):
            raise UsageError(
                f"{_asked(values, name)} puts other ranks before this node's, but the world is this node's {nproc}.",
                "Give the number of processes on all nodes with --world_size, or leave this rank out.",
            )
    return _Place(nproc, nproc, 0, 0, address, port)


def _ranks_of_node(values: Values, nproc: int, size: int, base: int | None, node: int | None) -> tuple[int, int]:
    """Return base rank and node rank; if only one is given, all nodes are assumed to have as many processes."""
    if base is not None and node is not None:
        return base, node
    if base is None and node is None:
        raise UsageError(
            f"a world of {size} with {nproc} on this node has several nodes, and the rank of this node is not given.",
            "Give --node_rank if all nodes have the same number of processes, else --base_rank and --node_rank.",
        )
    given, missing = ("--node-rank", "--base-rank") if base is None else ("--base-rank", "--node-rank")
    if size % nproc or (base or 0) % nproc:
        raise UsageError(
            f"{missing} does not follow from {_asked(values, given)}: {nproc} processes on each node do not make "
            f"{f'a world of {size}' if size % nproc else f'rank {base} the first of a node'}.",
            f"If nodes have different numbers of processes, give {missing.replace('-r', '_r')}, too.",
        )
    return (base, base // nproc) if base is not None else ((node or 0) * nproc, node or 0)


def _nproc(values: Values) -> int:
    given = "--nproc" in values.given
    # Platforms set LOCAL_WORLD_SIZE to 0 where there is no GPU.
    value = _number(values, "--nproc", 1 if given else 0)
    if value is None:
        import torch

        value = torch.cuda.device_count()
    return value or 1


def _command(line: CommandLine, values: Values) -> tuple[str, ...]:
    """Return what the workers execute, without the script's arguments."""
    if {"--module-mode", "--command-mode"} <= line.given.keys():
        raise UsageError(
            "-m/--module_mode and -c/--command_mode contradict each other.",
            "Drop -c to run a Python module, or -m to run a program.",
        )
    if line.script is None:
        raise UsageError("there is no script to run.", f"Write {PROGRAM} [flags] script.py [arguments of the script].")
    mode = {"--module-mode": "--module", "--command-mode": "--no-python"}
    given = {flag: [""] for name, flag in mode.items() if name in line.given}
    return read_command(CommandLine(given, line.script), Values(given, values.environ)).argv


def _platform_logs(environ: Mapping[str, str]) -> str | None:
    """Return the file format that MosaicML's platform expects for stdout and stderr together; None elsewhere."""
    if environ.get("MOSAICML_PLATFORM", "").lower() != "true":
        return None
    where = [environ.get(name, "") for name in ("MOSAICML_LOG_DIR", "MOSAICML_GPU_LOG_FILE_PREFIX")]
    if any(value.lower() in ("", "false") for value in where):
        return None
    return "/".join(where).replace("{", "{{").replace("}", "}}") + "{local_rank}.txt"


def _ranks(values: Values, place: _Place, directory: Path) -> tuple[Rank, ...]:
    platform = _platform_logs(values.environ)
    for name in ("--stdout", "--stderr"):
        if platform is not None and name in values.given:
            _log.warning("%s has no effect: output goes to MOSAICML_LOG_DIR, unless that is false.", name)
    logs = [directory / f"rank_{place.base_rank + index}" / "logs" for index in range(place.nproc)]
    found: list[tuple[Path | None, Path | None]] = [(None, None)]
    for index in range(1, place.nproc):
        default = str(logs[index] / f"rank_{place.base_rank + index}").replace("{", "{{").replace("}", "}}")
        out_format = platform or values.text("--stdout") or f"{default}.stdout.txt"
        err_format = platform or values.text("--stderr") or f"{default}.stderr.txt"
        out = _formatted("--stdout", out_format, place, index)
        err = _formatted("--stderr", err_format, place, index)
        if other := next((rank for rank, files in enumerate(found) if {out, err} & {*files}), None):
            (shared, *_) = {out, err} & {*found[other]}
            raise UsageError(
                f"local ranks {other} and {index} would both write to {shared}.",
                "Put {rank} or {local_rank} into --stdout and --stderr.",
            )
        found.append((out, err))
    return tuple(Rank(*files, error_file=log / "error.json") for files, log in zip(found, logs, strict=True))


def _formatted(name: str, text: str, place: _Place, local_rank: int) -> Path:
    numbers = place.base_rank + local_rank, local_rank, place.world_size, place.node_rank, place.nproc
    values = dict(zip(FORMAT_NAMES, numbers, strict=True))
    hint = f"Known: {', '.join(f'{{{known}}}' for known in FORMAT_NAMES)}; a brace itself is written twice."
    try:
        unknown = [field for _, field, _, _ in string.Formatter().parse(text) if field not in (None, *values)]
        if unknown:
            raise UsageError(f"{name} {text} has the unknown field {{{unknown[0]}}}.", hint)
        # Absolute, since workers may change their directory and the path is relative to this process's.
        return Path(os.path.abspath(text.format(**values)))
    except ValueError as error:
        raise UsageError(f"{name} {text} is not a valid format: {error}.", hint) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def help_text() -> str:
    """Return the help: the flags, one line each, with the variables that give their defaults."""
    flags = [
        line + (f" ({flag.fallback})" if flag.fallback else "")
        for flag, line in zip(FLAGS, flag_lines(FLAGS, {}), strict=True)
    ]
    notes = ["", "Variables in parentheses give defaults.", *NOTES]
    return "\n".join([f"usage: {USAGE}", "", SUMMARY, "", *flags, *notes]) + "\n"


if __name__ == "__main__":
    console_main()

"""The workers' output: which streams are shown, with which prefix, and which files they go to.

The settings are torchrun's, with torchrun's meaning, except that every stream is kept in a file.
"""

from __future__ import annotations

import enum
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from string import Template

from elastic_launch.contract import NoPlacement, Placement
from elastic_launch.errors import UsageError

LAYOUTS = ("rounds", "torchrun")

LATEST = "latest"
"""Name of the link to the newest run's directory."""

LOGS_SPECS_GROUP = "torchrun.logs_specs"
"""torch's group of entry points for --logs-specs."""

LOG_FORMATS = ("plain", "time", "json")
"""Formats of the launcher's own lines."""

PROGRESS = ("auto", "live", "plain", "none")
"""How a run is shown on a terminal: a view that is kept up to date, lines, or only warnings and errors."""

TORCH_HEADER = "[${role_name}${local_rank}]:"
"""torchrun's default prefix of each line of a tee'd stream."""


class Std(enum.IntFlag):
    """A worker's streams, with torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True, slots=True)
class Streams:
    """A choice of streams.

    Attributes:
        others: the streams of every local rank that is not in ``ranks``.
        ranks: pairs of a local rank and its streams.
    """

    others: Std = Std.NONE
    ranks: tuple[tuple[int, Std], ...] = ()

    def of(self, local_rank: int) -> Std:
        """Return the streams chosen for a local rank."""
        return dict(self.ranks).get(local_rank, self.others)

    def named(self) -> frozenset[int]:
        """The local ranks with their own choice."""
        return frozenset(rank for rank, _ in self.ranks)

    def __bool__(self) -> bool:
        return bool(self.others) or any(std for _, std in self.ranks)


@dataclass(frozen=True, slots=True)
class Route:
    """Where one stream of one worker goes.

    Attributes:
        console: whether it also goes to the agent's own stream.
        path: the file that receives all of it, byte for byte; None for no file.
        prefix: prefix of each line on the console; with a prefix, lines are not mixed.
        rank: the worker's rank, which selects the prefix's colour on a terminal with colours.
        filters: a line that contains one of these also goes to ``matching``.
        header: prefix of each line in ``matching``.
    """

    console: bool = True
    path: Path | None = None
    prefix: str = ""
    rank: int = 0
    filters: tuple[str, ...] = ()
    matching: Path | None = None
    header: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """How the output of a node's workers is shown and kept.

    Attributes:
        redirects: streams that are not shown on the console.
        tee: streams that are shown in spite of that, each line prefixed with ``header``.
        local_ranks: the local ranks whose output is shown; empty for all.
        stdout_filters, stderr_filters: lines that contain one of these are also kept in one file for all ranks of the
            node. They apply to the tee'd streams if there are any, else to all; and only to streams that are shown.
        prefix: whether to put ``[node:rank]`` before each line that is shown.
        header: template of the prefix of tee'd lines, with ``${role_name}``, ``${local_rank}``, ``${rank}`` and
            ``${hostname}``.
        keep: whether streams are kept in the log directory.
        layout: naming of the directories below the run's, one of LAYOUTS.
        logs_specs: entry point of the group ``torchrun.logs_specs`` that decides on files and console; empty for none.
        specs: such an object that a Python program created; None for none.
    """

    redirects: Streams = Streams()
    tee: Streams = Streams()
    local_ranks: frozenset[int] = frozenset()
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    prefix: bool = False
    header: str = TORCH_HEADER
    keep: bool = True
    logs_specs: str = ""
    specs: object = None
    layout: str = "rounds"

    def shows(self, local_rank: int, std: Std) -> bool:
        """Whether a stream is shown on the console."""
        if self.local_ranks and local_rank not in self.local_ranks:
            return False
        return std in self.tee.of(local_rank) or std not in self.redirects.of(local_rank)

    def filters(self, local_rank: int, std: Std) -> tuple[str, ...]:
        """Return a stream's filters: none if it is not shown, or if only other streams are tee'd."""
        if not self.shows(local_rank, std) or (self.tee and std not in self.tee.of(local_rank)):
            return ()
        return self.stdout_filters if std is Std.OUT else self.stderr_filters

    def routes(
        self, placement: Placement | NoPlacement, directory: Path, *, role: str, node_id: str
    ) -> tuple[Route, Route]:
        """Return where a worker's stdout and stderr go."""
        out = self._route(placement, directory, Std.OUT, role, node_id)
        return out, self._route(placement, directory, Std.ERR, role, node_id)

    def _route(self, placement: Placement | NoPlacement, directory: Path, std: Std, role: str, node_id: str) -> Route:
        name = "stdout" if std is Std.OUT else "stderr"
        kept = directory if self.keep else None
        header = self.header_of(placement, role=role, node_id=node_id)
        filters = self.filters(placement.local_rank, std) if kept else ()
        matching = f"filtered_{name}.log" if self.layout == "torchrun" else f"filtered_{name}-{node_id}.log"
        return Route(
            console=self.shows(placement.local_rank, std),
            path=kept / self.worker_directory(placement) / f"{name}.log" if kept else None,
            prefix=header if self.prefix or std in self.tee.of(placement.local_rank) else "",
            rank=placement.rank or 0,
            filters=filters,
            matching=kept / matching if kept and filters else None,
            header=header,
        )

    def round_directory(self, number: int) -> str:
        """Return the name of a round's directory in the run's directory."""
        return f"attempt_{number - 1}" if self.layout == "torchrun" else f"round_{number}"

    def worker_directory(self, placement: Placement | NoPlacement) -> str:
        """Return the name of a worker's directory in the round's directory.

        A worker that is started ahead of a round has no rank yet.
        """
        return str(placement.local_rank if self.layout == "torchrun" or placement.rank is None else placement.rank)

    def header_of(self, placement: Placement | NoPlacement, *, role: str, node_id: str) -> str:
        """Return the prefix of a worker's lines where they have one."""
        rank = -1 if placement.rank is None else placement.rank  # as of torch's workers
        if self.prefix:
            return f"[{node_id}:{rank}] "
        return Template(self.header).safe_substitute(
            role_name=role, local_rank=placement.local_rank, rank=rank, hostname=socket.gethostname()
        )


def parse_streams(asked: str, text: str) -> Streams:
    """Parse torchrun's syntax: ``3`` for all local ranks, or ``0:1,1:2`` for some; 0 none, 1 stdout, 2 stderr, 3 both.

    Unlike in torchrun, local ranks may have several digits.
    """
    text = text.strip()
    if re.fullmatch("[0-3]", text):
        return Streams(Std(int(text)))
    if not re.fullmatch(r"[0-9]{1,9}:[0-3](,[0-9]{1,9}:[0-3])*", text):
        raise UsageError(
            f"{asked} {text!r} is not a choice of streams.",
            "Write 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or by local rank, as in 0:3,1:2.",
        )
    pairs = [item.split(":") for item in text.split(",")]
    return Streams(ranks=tuple({int(rank): Std(int(std)) for rank, std in pairs}.items()))


def parse_ranks(text: str) -> frozenset[int]:
    """Parse the comma-separated local ranks of ``--local-ranks-filter``."""
    items = [item.strip() for item in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", item) for item in items):
        problem = f"--local-ranks-filter {text!r} is not a list of local ranks."
        raise UsageError(problem, "Write them with commas, as in 0,1,2.")
    return frozenset(map(int, items))

"""Logs specs of other packages: torchrun's way to choose the files for the workers' output.

The class is a subclass of torch's ``LogsSpecs``, found through the entry point group ``torchrun.logs_specs``, as in
torch.distributed.run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing import Std as TorchStd

from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.config.output import LOGS_SPECS_GROUP, Route, Streams
from elastic_launch.contract import NoPlacement, Placement
from elastic_launch.errors import UsageError


class LogsSpecsFailed(Exception):
    """Logs specs of another package raised, or returned something invalid."""


class NamedLogs:
    """The routes requested by named logs specs.

    Raises:
        UsageError: if they cannot be loaded or created.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._asked = f"--logs-specs {config.output.logs_specs or type(config.output.specs).__name__}"
        self._specs = torch_logs_specs(config)

    def places(
        self, placements: Sequence[Placement | NoPlacement], envs: dict[int, dict[str, str]]
    ) -> dict[int, tuple[Route, Route, Path | None]]:
        """Return the routes of stdout and stderr and the error file (if there is one), by local rank.

        Args:
            envs: the workers' environments by local rank; the specs may change them, and do so for the error file.

        Raises:
            LogsSpecsFailed: if the specs fail.
        """
        try:
            dest = self._specs.reify(envs)
            return {place.local_rank: self._place(place, dest) for place in placements}
        except Exception as error:  # third-party code may raise anything
            raise LogsSpecsFailed(f"{self._asked} cannot say where the logs go: {error!r}") from error

    def _place(self, placement: Placement | NoPlacement, dest: LogsDest) -> tuple[Route, Route, Path | None]:
        output = self._config.output
        out = self._route(placement, dest.stdouts, dest.tee_stdouts, output.stdout_filters, dest.filtered_stdout)
        err = self._route(placement, dest.stderrs, dest.tee_stderrs, output.stderr_filters, dest.filtered_stderr)
        return out, err, _file(dest.error_files.get(placement.local_rank, ""))

    def _route(
        self,
        placement: Placement | NoPlacement,
        files: Mapping[int, str],
        tee: Mapping[int, str],
        filters: tuple[str, ...],
        matching: str,
    ) -> Route:
        output, local_rank = self._config.output, placement.local_rank
        header = output.header_of(placement, role=self._config.role, node_id=self._config.node_id)
        filtered = filters if local_rank in tee else ()
        return Route(
            # An empty name means the console only; a tee'd file is shown as well.
            console=files[local_rank] == "" or tee.get(local_rank, os.devnull) != os.devnull,
            path=_file(files[local_rank]),
            prefix=header if output.prefix or local_rank in tee else "",
            rank=placement.rank or 0,
            filters=filtered,
            matching=_file(matching) if filtered else None,
            header=header,
        )


def torch_logs_specs(config: LaunchConfig) -> LogsSpecs:
    """Return the named logs specs, or torch's own, configured for the requested output.

    Raises:
        UsageError: if they cannot be loaded or created.
    """
    name, output = config.output.logs_specs, config.output
    if isinstance(output.specs, LogsSpecs):
        return output.specs
    asked = f"--logs-specs {name}"
    try:
        made: type[LogsSpecs] = DefaultLogsSpecs
        if name:
            (point,) = entry_points(group=LOGS_SPECS_GROUP, name=name)
            made = point.load()
        specs = made(
            log_dir=str(config.log_dir) if output.keep else os.devnull,
            redirects=_torch_std(output.redirects),
            tee=_torch_std(output.tee),
            local_ranks_filter=set(output.local_ranks) or None,
        )
    except Exception as error:  # third-party code may raise anything
        raise UsageError(f"{asked} cannot be loaded: {error!r}.", "Correct its package, or drop it.") from error
    if not isinstance(specs, LogsSpecs):
        raise UsageError(f"{asked} is a {type(specs).__name__}, not a LogsSpecs.", "Name another, or drop it.")
    return specs


def _file(text: str) -> Path | None:
    return None if text in ("", os.devnull) else Path(os.path.abspath(text))


def _torch_std(streams: Streams) -> TorchStd | dict[int, TorchStd]:
    if streams.ranks:
        return {local_rank: TorchStd(int(std)) for local_rank, std in streams.ranks}
    return TorchStd(int(streams.others))

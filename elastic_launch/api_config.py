"""Converts a Python program's arguments to a configuration: torch's ``LaunchConfig``, ``LogsSpecs``, and functions.

What is not a valid launch is refused with a UsageError.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs
from torch.distributed.elastic.multiprocessing import Std as TorchStd
from torch.distributed.launcher.api import LaunchConfig as TorchConfig

from elastic_launch.cli.command import here, read_command
from elastic_launch.cli.flags import CommandLine, Values
from elastic_launch.cli.main import build
from elastic_launch.config.launch_config import Command, LaunchConfig, check_seconds
from elastic_launch.config.output import Std, Streams
from elastic_launch.config.settings import default_node_id
from elastic_launch.config.torch_options import STOP_SIGNALS
from elastic_launch.errors import UsageError

log = logging.getLogger(__name__)

Entrypoint = Callable[..., object] | str

TORCHS_TIMEOUT = 900
"""The timeout that torch's ``LaunchConfig`` adds to every rendezvous; only older handlers use it."""

TORCHS_SIGNALS = ",".join(number.name for number in STOP_SIGNALS)


def from_torch(config: TorchConfig) -> LaunchConfig:
    """Convert torch's configuration, without a command."""
    if config.rdzv_backend == "etcd" and not config.rdzv_endpoint:
        raise UsageError(
            "rdzv_backend is etcd, which is torch's default, and rdzv_endpoint names no cluster.",
            'Give rdzv_backend="c10d", or the addresses of the cluster as rdzv_endpoint.',
        )
    given = {
        "--nnodes": [f"{config.min_nodes}:{config.max_nodes}"],
        "--nproc": [str(config.nproc_per_node)],
        "--max-restarts": [str(config.max_restarts)],
        "--rdzv-backend": [config.rdzv_backend],
        "--no-python": [""],
    }
    # torch 2.11 does not have this field. Without it, TORCH_ELASTIC_SHUTDOWN_TIMEOUT counts, as in later versions.
    if (shutdown_timeout := getattr(config, "shutdown_timeout", None)) is not None:
        given["--shutdown-timeout"] = [str(shutdown_timeout)]
    endpoint = config.rdzv_endpoint
    if not endpoint and config.rdzv_backend == "c10d" and config.max_nodes > 1:
        endpoint = "localhost"  # torch's default; processes of one host can meet there
    conf = {key: value for key, value in config.rdzv_configs.items() if value is not None}
    if conf.get("timeout") == TORCHS_TIMEOUT:
        del conf["timeout"]
    rank = conf.pop("rank", None)
    texts = {
        "--rdzv-endpoint": endpoint,
        "--rdzv-id": config.run_id or _fresh_id(config.max_nodes),
        "--rdzv-conf": ",".join(f"{key}={value}" for key, value in conf.items()),
        "--node-rank": "" if rank is None or int(rank) < 0 else str(rank),
        "--role": config.role,
        "--local-addr": config.local_addr or "",
        "--log-line-prefix-template": config.log_line_prefix_template or "",
        "--event-log-handler": config.event_log_handler if config.event_log_handler != "null" else "",
        "--numa-binding": config.numa_options.affinity_mode.value if config.numa_options else "",
        # Ignored signals stay ignored unless they are named, for nohup.
        "--signals-to-handle": config.signals_to_handle if config.signals_to_handle != TORCHS_SIGNALS else "",
    }
    given |= {name: [text] for name, text in texts.items() if text}
    if config.virtual_local_rank:
        given["--virtual-local-rank"] = [""]
    found = build(CommandLine(given, sys.executable), Values(given, _environment()))
    output = replace(
        found.output,
        stdout_filters=tuple(config.duplicate_stdout_filters or ()),
        stderr_filters=tuple(config.duplicate_stderr_filters or ()),
    )
    check_seconds(f"monitor_interval {config.monitor_interval:g}", config.monitor_interval, zero=False)
    options = replace(found.options, start_method=config.start_method, monitor_interval=config.monitor_interval)
    assert config.logs_specs is not None
    return with_logs(replace(found, output=output, options=options), config.logs_specs)


def _environment() -> dict[str, str]:
    """Return the environment without ``PET_*``: as in torch, a Python call does not read them."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PET_")}


def _fresh_id(max_nodes: int) -> str:
    """Return a name for a run without one."""
    run_id = str(uuid.uuid4().int)
    if max_nodes > 1:
        log.warning("the configuration has no run_id; this node's is %s, and others cannot know it", run_id)
    return run_id


def own(config: LaunchConfig) -> LaunchConfig:
    """Return this project's configuration, with names that were not chosen made unique."""
    if config.run_id == LaunchConfig.run_id and config.endpoint is None:
        config = replace(config, run_id=_fresh_id(1))
    if config.node_id == LaunchConfig.node_id:
        config = replace(config, node_id=default_node_id())
    return config


def with_logs(config: LaunchConfig, specs: LogsSpecs) -> LaunchConfig:
    """Return a configuration with the workers' output as in torch's specs."""
    if type(specs) is not DefaultLogsSpecs:
        if type(specs).__module__ == "__main__":
            raise UsageError(
                f"logs_specs is a {type(specs).__name__}, which is defined in __main__.",
                "Define it in a module: the agent's process must be able to import it.",
            )
        return replace(config, output=replace(config.output, specs=specs))
    directory = specs.root_log_dir
    keep = directory != os.devnull
    output = replace(
        config.output,
        redirects=_streams(specs._redirects),
        tee=_streams(specs._tee),
        local_ranks=frozenset(specs._local_ranks_filter or ()),
        keep=keep,
        layout="torchrun",
    )
    name = f"{config.run_id}_{secrets.token_hex(4)}"
    if not keep:
        return replace(config, output=output, log_name=name)
    return replace(config, output=output, log_name=name, log_dir=Path(os.path.abspath(directory)), link_dir=None)


def _streams(std: TorchStd | dict[int, TorchStd]) -> Streams:
    if isinstance(std, dict):
        return Streams(ranks=tuple((rank, Std(int(one))) for rank, one in std.items()))
    return Streams(Std(int(std)))


def of_strings(entrypoint: str, args: Sequence[object]) -> Command:
    """Return the command for an entry point that is a path: a program, or Python and a script or module.

    A Python script that is not executable is run by this interpreter.
    """
    texts = tuple(map(str, args))

    def command(script: str, arguments: tuple[str, ...], *flags: str) -> Command:
        given = {flag: [""] for flag in flags}
        return read_command(CommandLine(given, script, arguments), Values(given, _environment()))

    if entrypoint == sys.executable and texts[:1] == ("-u",) and len(texts) > 1:
        if texts[1] == "-m" and len(texts) > 2:
            return command(texts[2], texts[3:], "--module")
        if not texts[1].startswith("-"):
            _check_there(texts[1], "script")
            return command(texts[1], texts[2:])
    if entrypoint.endswith(".py") and os.path.isfile(entrypoint) and not os.access(entrypoint, os.X_OK):
        return command(entrypoint, texts)
    _check_program(entrypoint)
    return command(entrypoint, texts, "--no-python")


def _check_program(entrypoint: str) -> None:
    if shutil.which(entrypoint):
        return
    if entrypoint.endswith(".py"):
        _check_there(entrypoint, "script")
    _check_there(entrypoint, "program on PATH or")
    if os.path.isdir(entrypoint):
        raise UsageError(f"entrypoint {entrypoint!r} is a directory.", "Name a program or a Python script in it.")
    if not os.access(entrypoint, os.X_OK):
        raise UsageError(
            f"entrypoint {entrypoint!r} is not executable.",
            f"chmod +x it, or have Python run it: elastic_launch(config, sys.executable)('-u', {entrypoint!r}, ...).",
        )


def _check_there(path: str, what: str) -> None:
    if not os.path.exists(path):
        raise UsageError(f"entrypoint {path!r}: there is no such {what} in {here()}.", "Correct the path.")

"""Reads :class:`~elastic_launch.config.output.Output` and the log directory from flags and environment."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from elastic_launch.cli.flags import Values
from elastic_launch.config.launch_config import KEPT_RUNS, LaunchConfig, state_directory, writable
from elastic_launch.config.output import (
    LAYOUTS,
    LOG_FORMATS,
    LOGS_SPECS_GROUP,
    PROGRESS,
    TORCH_HEADER,
    Output,
    Std,
    parse_ranks,
    parse_streams,
)
from elastic_launch.errors import UsageError
from elastic_launch.system.private_files import make_private, untrusted
from elastic_launch.system.threads import within

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds for which the file system of the logs may take to answer at the start; it may have to be mounted first."""

_IMPOSSIBLE = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
)
"""Errors that show that no directory can be created at a path, whenever it is tried."""


def read_output(values: Values) -> Output:
    """Build the settings of the workers' output."""
    ranks = values.text("--local-ranks-filter")
    out, err = _filters(values, "--duplicate-stdout-filters"), _filters(values, "--duplicate-stderr-filters")
    output = Output(
        redirects=parse_streams("--redirects", values.text("--redirects") or "0"),
        tee=parse_streams("--tee", values.text("--tee") or "0"),
        local_ranks=parse_ranks(ranks) if ranks else frozenset(),
        stdout_filters=out,
        stderr_filters=err,
        prefix=values.switch("--prefix"),
        header=values.text("--log-line-prefix-template") or TORCH_HEADER,
        keep=values.text("--log-dir") != os.devnull,
        logs_specs=_logs_specs(values),
        layout=values.choice("--log-layout", LAYOUTS, "is not a layout of log files") or LAYOUTS[0],
    )
    _tell_without_effect(output)
    return output


def read_log_format(values: Values) -> str:
    """Return the format of the launcher's own lines."""
    return values.choice("--log-format", LOG_FORMATS, "is not a log format") or LaunchConfig.log_format


def read_progress(values: Values, *, own_agent: bool) -> str:
    """Return how the run is shown, see :attr:`LaunchConfig.progress`.

    Args:
        own_agent: whether this project's agent runs the workers; torch's has no view.
    """
    asked = values.choice("--progress", PROGRESS) or "auto"
    if asked in ("plain", "none"):
        return asked
    if not own_agent:
        reason = "torch's own agent runs the workers"
    elif values.text("--log-format") == "json":
        reason = "--log-format json"
    elif not os.isatty(2):
        reason = "stderr is not a terminal"
    elif values.environ.get("TERM", "") in ("", "dumb", "unknown"):
        reason = "TERM names no terminal on which lines can be overwritten"
    elif "JPY_PARENT_PID" in values.environ:  # a Jupyter kernel sets it
        reason = "the output of a notebook's cell keeps all that is drawn"
    else:
        return "plain" if asked == "auto" and values.torchrun else "live"
    if asked == "live":
        log.warning("--progress live prints lines here: %s.", reason)
    return "plain"


def read_log_dir(values: Values) -> tuple[Path, Path | None]:
    """Return the base directory of the logs, and that of the link to the newest run if it is elsewhere."""
    text = values.text("--log-dir")
    return _in_time(text, lambda: _log_dir(text, values))


def _log_dir(text: str | None, values: Values) -> tuple[Path, Path | None]:
    if text is None and values.torchrun:
        return _writable(_temporary(tempfile.gettempdir) / f"torchelastic_{secrets.token_hex(4)}"), None
    if text is None or text == os.devnull:  # elasticctl finds a run by its files, even if no logs are kept
        base = state_directory(values.environ)
        path = base / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}"
        if not writable(path):
            raise UsageError(
                "there is no place for this run's files: neither the home directory nor one for temporary files can be "
                "written.",
                "Name a directory with --log-dir DIR, or with XDG_STATE_HOME.",
            )
        return path, base
    # Absolute: workers may change their directory, and still have to find their error files.
    return _writable(Path(os.path.abspath(text))), None


def read_keep_runs(values: Values, *, own: bool) -> int | None:
    """Return how many of the newest launches keep their directories; None for all.

    Args:
        own: whether the directories are where only launches without ``--log-dir`` have theirs. Elsewhere nothing is
            removed unless the user says so.
    """
    setting = values.setting("--keep-runs")
    if setting is None:
        return KEPT_RUNS if own else None
    return None if setting.text == "all" else setting.positive()


def make_run_directory(config: LaunchConfig) -> LaunchConfig:
    """Create the run's directory, accessible only to this user, where no other user can have prepared it.

    Returns:
        The configuration; with another log directory if another user may control the default one.
    """
    return _in_time(str(config.log_dir), lambda: _make_run_directory(config))


def _make_run_directory(config: LaunchConfig) -> LaunchConfig:
    if config.link_dir is None:
        if reason := untrusted(config.run_directory, exclusive=False):
            raise UsageError(
                f"--log-dir {config.log_dir}: {reason}.",
                "Name a directory of yours with --log-dir, or another --rdzv-id.",
            )
    else:
        with contextlib.suppress(OSError):  # reported when something is written
            make_private(config.link_dir)
        if reason := untrusted(config.link_dir, exclusive=True):
            return _moved(config, reason)
    try:
        make_private(config.log_dir if config.foreign else config.run_directory)
    except OSError as error:
        if error.errno not in _IMPOSSIBLE:  # a full or failing file system must not keep a node from training
            return config
        if config.link_dir is None:
            raise UsageError(
                f"--log-dir {config.log_dir}: the run's directory cannot be created: {error}.",
                "Name another directory.",
            ) from error
        return _moved(config, f"the run's directory cannot be created: {error}")
    return config


def _in_time(where: str | None, look: Callable[[], T]) -> T:
    """Return what a look at a log directory returns, if its file system answers.

    Args:
        where: the directory; None: the default one.
    """
    try:
        return within(PATIENCE, "the file system", look)
    except TimeoutError as error:
        raise UsageError(
            f"--log-dir {where or '(its default)'}: the file system does not answer.",
            "Name a directory on another one with --log-dir.",
        ) from error


def _moved(config: LaunchConfig, reason: str) -> LaunchConfig:
    """Return a configuration whose logs are in a new directory for temporary files, and log that."""
    fresh = _temporary(lambda: tempfile.mkdtemp(prefix="elastic-launch-"))
    log.warning("%s: logs go to %s instead, where elasticctl finds the run with --log-dir", reason, fresh)
    config = replace(config, log_dir=fresh / config.log_dir.name, link_dir=fresh)
    with contextlib.suppress(OSError):
        make_private(config.log_dir if config.foreign else config.run_directory)
    return config


def _temporary(find: Callable[[], str]) -> Path:
    try:
        return Path(find())
    except OSError as error:
        raise UsageError(f"there is no directory for logs: {error}.", "Name one of yours with --log-dir.") from error


def _writable(path: Path) -> Path:
    if writable(path):
        return path
    base = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    if not os.path.isdir(base):
        raise UsageError(f"--log-dir {path}: {base} is not a directory.", "Name another directory.")
    read_only = os.statvfs(base).f_flag & os.ST_RDONLY
    reason = f"{base} is on a read-only file system" if read_only else f"no permission to write to {base}"
    raise UsageError(f"--log-dir {path}: {reason}.", "Name a directory of yours with --log-dir.")


def _tell_without_effect(output: Output) -> None:
    """Log which flags have no effect in combination with others."""
    named = output.redirects.named() | output.tee.named() | output.local_ranks
    ranks = [*named, max(named, default=-1) + 1]  # the last one represents all others
    for name, std, filters in (("stdout", Std.OUT, output.stdout_filters), ("stderr", Std.ERR, output.stderr_filters)):
        if not filters or output.logs_specs:
            continue
        flag = f"--duplicate-{name}-filters"
        if not output.keep:
            log.warning("%s has no effect: --log-dir %s keeps no files.", flag, os.devnull)
        elif not any(output.filters(rank, std) for rank in ranks):
            log.warning("%s has no effect: it filters output that is shown or tee'd, and %s is neither.", flag, name)


def _filters(values: Values, name: str) -> tuple[str, ...]:
    """Split at commas; a double comma is a literal comma, as in torchrun."""
    text = values.text(name)
    if text is None:
        return ()
    found = tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))
    if not all(found):
        raise UsageError(
            f"{name} {text!r} has an empty filter, which every line would pass.",
            "Write texts with commas between them; a double comma stands for one.",
        )
    return found


def _logs_specs(values: Values) -> str:
    name = values.text("--logs-specs")
    if name is None or name == "default":  # torch's own specs: same settings, but not the same layout
        return ""
    from importlib.metadata import entry_points  # slow to import

    known = sorted({point.name for point in entry_points(group=LOGS_SPECS_GROUP)} | {"default"})
    if name not in known:
        raise UsageError(
            f"--logs-specs {name}: no installed package has an entry point of this name in {LOGS_SPECS_GROUP}.",
            f"Known: {', '.join(known)}.",
        )
    return name

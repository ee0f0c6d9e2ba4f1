"""The help, generated from the table of flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic_launch.cli.flags import FLAGS, GROUPS, USAGE, Flag
from elastic_launch.config.notice_sources import SPELLINGS
from elastic_launch.config.torchrun_mode import DEFAULTS
from elastic_launch.errors import ExitCode

SUMMARY = "Run a PyTorch training job on nodes that may shrink and grow while it runs."

EXIT_CODES: tuple[tuple[ExitCode, str], ...] = (
    (ExitCode.DONE, "all workers of all nodes are done"),
    (ExitCode.TRAINING_FAILED, "failed, and no worker's own exit code applies"),
    (ExitCode.USAGE, "an invalid flag or value"),
    (ExitCode.STARTUP_FAILURE, "the script cannot run as it is (not under --max-restarts 0)"),
    (ExitCode.BUDGET_SPENT, "--max-restarts is spent"),
    (ExitCode.NO_PROGRESS, "--max-restarts is spent by restarts without progress"),
    (ExitCode.DO_NOT_RETRY, "a retry would fail: a worker says so, a mistake, or a failed last save"),
    (ExitCode.TOO_FEW_NODES, "below the minimum of nodes for --min-wait"),
    (ExitCode.RENDEZVOUS, "the rendezvous was lost, or refused this node"),
    (ExitCode.INTERRUPTED, "interrupted, as by Ctrl-C"),
    (ExitCode.TERMINATED, "terminated by SIGTERM or a notice"),
)

_CODES_OF_TORCHRUN = (
    "  0     all workers of all nodes are done",
    "  1     failed, or stopped by a signal",
    "  2     a flag that is unknown, has no value, or has one of another type",
)


def flag_lines(flags: Sequence[Flag], defaults: Mapping[str, str]) -> list[str]:
    """Return a line for each flag: its names, its purpose, and its default, unless ``defaults`` has another."""
    names = [", ".join(flag.names) + (f" {flag.metavar}" if flag.metavar else "") for flag in flags]
    column = 2 + max(map(len, names)) + 2
    found = []
    for flag, text in zip(flags, names, strict=True):
        default = defaults.get(flag.name, flag.default)
        found.append(f"  {text}".ljust(column) + flag.purpose + (f" [{default}]" if default else ""))
    return found


def help_text(*, as_torchrun: bool = False) -> str:
    """Return the help: flags by group, one line each, then the environment and the exit codes.

    Args:
        as_torchrun: whether defaults and exit codes are torchrun's.
    """
    defaults = DEFAULTS if as_torchrun else {}
    shown = dict(zip(FLAGS, flag_lines(FLAGS, defaults), strict=True))
    lines = [f"usage: {USAGE}", "", SUMMARY]
    for title, flags in GROUPS.items():
        lines += ["", f"{title}:", *(shown[flag] for flag in flags)]
    lines += [
        "",
        "Names take dashes or underscores and may be shortened while they stay unique.",
        "PET_<NAME>, as in PET_NNODES=1:4, gives a flag's default.",
        "With ELASTIC_LAUNCH_TORCHRUN=1, or called by a link named torchrun,",
        "defaults and exit codes are those of torchrun.",
        "",
        "Sources of --notice:",
        f"  {', '.join([*SPELLINGS, 'none'])}",
        "",
        "Keys of --rdzv-conf; torch's own mean the same as in torchrun:",
        "  join_settle, resize_delay, dead_after, return_after, min_wait, beat,",
        "  join_timeout, read_timeout, start_wait, is_host, reuse;",
        "  last_call_timeout, keep_alive_interval, keep_alive_max_attempt, timeout;",
        "  without effect: cas_backoff_max_seconds, close_timeout,",
        "  heartbeat_timeout, store_type",
        "",
        "Exit codes:",
    ]
    if as_torchrun:
        return "\n".join([*lines, *_CODES_OF_TORCHRUN]) + "\n"
    lines += [f"  {code.value:<6}{meaning}" for code, meaning in EXIT_CODES]
    lines += ["  other a failed worker's own code, or 128 + N if signal N ended it"]
    return "\n".join(lines) + "\n"

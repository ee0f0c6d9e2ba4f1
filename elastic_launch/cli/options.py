"""Reads limits, signals, notices and torchrun's options from flags, except those for the rendezvous."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Sequence

from elastic_launch.cli.flags import Values
from elastic_launch.config.launch_config import Limits, parse_nnodes
from elastic_launch.config.notice_sources import AUTO, UNTOUCHABLE, NoticeSource, named_signal, parse_source
from elastic_launch.config.settings import nearest
from elastic_launch.config.torch_options import STOP_SIGNALS, Signals, TorchOptions
from elastic_launch.errors import UsageError
from elastic_launch.faults import FaultPlan
from elastic_launch.system.private_files import read_bounded

MOST_OF_A_DRILL = 1024 * 1024
"""Bytes of a plan of faults at most."""

log = logging.getLogger("elastic_launch.cli.main")

BY_DEFAULT = (*STOP_SIGNALS, *Signals().forward)
"""The signals that the agent handles by default."""

_OF_TORCHS_AGENT = {
    "--monitor-interval": "an exit is seen when it happens, without polling",
    "--start-method": "workers are programs, not functions of this process",
}
"""Flags without an effect on this project's own agent, and why."""


def read_torch_options(values: Values, *, own_agent: bool) -> TorchOptions:
    """Read torchrun's options, and log which have no effect.

    Args:
        own_agent: whether this project's own agent runs the workers, not torch's.
    """
    default = TorchOptions()
    options = TorchOptions(
        event_log_handler=values.text("--event-log-handler") or default.event_log_handler,
        numa_binding=values.text("--numa-binding"),
        virtual_local_rank=values.switch("--virtual-local-rank"),
        monitor_interval=values.seconds("--monitor-interval", default.monitor_interval, zero=False),
        start_method=values.text("--start-method") or default.start_method,
    )
    for name, why in _OF_TORCHS_AGENT.items():
        if own_agent and values.text(name) is not None:
            log.warning("%s has no effect: %s.", values.origin(name), why)
    return options


def read_notices(values: Values, *, own_agent: bool) -> tuple[NoticeSource, ...]:
    """Read the sources of preemption notices; the flag may be given several times."""
    text = values.text("--notice")
    if text is None:
        return (AUTO,) if own_agent else ()
    if not own_agent:
        log.warning("%s has no effect: torch's own agent runs the workers.", values.origin("--notice"))
        return ()
    words = [part for given in values.given.get("--notice") or [text] for part in given.split(",") if part.strip()]
    sources = [parse_source(word) for word in words]
    found = tuple(dict.fromkeys(source for source in sources if source is not None))
    if not words or (found and None in sources):
        raise UsageError(
            f"--notice {','.join(words)} names {'none beside others' if words else 'nothing'}.",
            "Give none alone, or drop it.",
        )
    timed: dict[signal.Signals, float] = {}
    for source in found:
        if source.number is None or source.seconds is None:
            continue
        if timed.setdefault(source.number, source.seconds) != source.seconds:
            raise UsageError(
                f"--notice {','.join(words)} gives two times for {source.number.name}.", "Give one of them."
            )
    return found


def read_limits(values: Values) -> Limits:
    """Read the limits of the whole run."""
    low, high = parse_nnodes(values.text("--nnodes") or "1:1")
    default = Limits()
    return Limits(
        low,
        high,
        values.integer("--max-restarts", default.max_restarts),
        values.seconds("--restart-refill", default.restart_refill),
        values.integer("--max-idle-restarts", default.max_idle_restarts),
    )


def read_exit_codes(values: Values) -> frozenset[int]:
    """Read the exit codes of workers after which a restart would fail again, such as ``3,64-78``."""
    codes: set[int] = set()
    for part in (values.text("--fatal-exit-codes") or "").split(","):
        if not part.strip():
            continue
        found = re.fullmatch(r"\s*([0-9]{1,3})(?:\s*-\s*([0-9]{1,3}))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 0 < first <= last < 256:
            raise UsageError(
                f"--fatal-exit-codes {part.strip()!r} is not an exit code, nor a range of them.",
                "Give numbers from 1 to 255, as in 3,64-78; 128 + N stands for signal N.",
            )
        codes.update(range(first, last + 1))
    return frozenset(codes)


def read_drill(values: Values, *, own_agent: bool) -> FaultPlan:
    """Read the planned faults of a drill.

    Args:
        own_agent: whether the run has a leader, which remembers them.
    """
    path = values.text("--drill")
    if path is None:
        return FaultPlan()
    if not own_agent:
        raise UsageError("--drill needs this project's own rendezvous.", "Use --rdzv-backend c10d or etcd.")
    try:
        plan = FaultPlan.of_drill(read_bounded(path, MOST_OF_A_DRILL).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--drill {path} cannot be read: {error}.", "Name a file with a list of faults.") from None
    except UsageError as error:
        raise UsageError(f"--drill {path}: {error.message}", error.hint) from None
    log.warning("--drill %s: faults planned in this run: %d.", path, len(plan.faults))
    return plan


def read_hang_timeout(values: Values) -> float | None:
    """Return the seconds after which idle workers without known steps hang; 0: never; None: no worker is watched."""
    word = (values.text("--hang-timeout") or "auto").strip()
    if word in ("auto", "off"):
        return None if word == "off" else 0.0
    try:
        return values.seconds("--hang-timeout", 0.0, zero=False)
    except UsageError as error:
        raise type(error)(error.message, f"{error.hint.rstrip('.')}; or auto, or off.") from None


def read_signals(values: Values, claimed: Sequence[signal.Signals] = ()) -> Signals:
    """Read which signals make the agent leave and which are forwarded to the workers.

    A signal that is ignored when this process starts is left out of the defaults: its parent wants it to survive that
    signal, as nohup does, and a shell without job control for the processes that it starts in the background.

    Args:
        claimed: signals that are notices; they are left out of the defaults.
    """
    leave = _signals("--signals-to-handle", values)
    forward = _signals("--signals-to-forward", values)
    ignored = tuple(number for number in BY_DEFAULT if signal.getsignal(number) is signal.SIG_IGN)
    if leave is None:
        leave = tuple(number for number in STOP_SIGNALS if number not in (*(forward or ()), *claimed, *ignored))
    if forward is None:
        forward = tuple(number for number in Signals().forward if number not in (*leave, *claimed, *ignored))
    for flag, numbers in (("--signals-to-handle", leave), ("--signals-to-forward", forward)):
        if twice := [number.name for number in numbers if number in claimed]:
            raise UsageError(
                f"--notice and {flag} both take {', '.join(twice)}.",
                f"Drop it from {flag} if it is a notice; --notice slurm takes SIGUSR1.",
            )
    if both := [number.name for number in forward if number in leave]:
        raise UsageError(
            f"--signals-to-handle and --signals-to-forward both name {', '.join(both)}.",
            "Drop it from the first if it is to reach the workers only, from the second if it is to end this node.",
        )
    return Signals(leave, forward, tuple(number for number in ignored if number not in (*leave, *forward, *claimed)))


def _signals(flag: str, values: Values) -> tuple[signal.Signals, ...] | None:
    text = values.text(flag)
    if text is None or (flag == "--signals-to-forward" and text.strip().lower() == "none"):
        return None if text is None else ()
    names = filter(None, (part.strip().upper() for part in text.split(",")))
    return tuple(dict.fromkeys(_signal(flag, name) for name in names))


def _signal(flag: str, name: str) -> signal.Signals:
    full, number = named_signal(name)
    if number is None:
        meant = nearest(full, signal.Signals.__members__)
        first = f"Did you mean {meant}? " if meant else ""
        raise UsageError(f"{flag} names {name}, which is not a signal.", f"{first}Write names, as in SIGTERM,SIGUSR1.")
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise UsageError(f"{flag} names {full}, which no process can handle.", f"Drop {full}.")
    if number in UNTOUCHABLE:
        raise UsageError(f"{flag} names {full}, which says something of this process only.", f"Drop {full}.")
    return number

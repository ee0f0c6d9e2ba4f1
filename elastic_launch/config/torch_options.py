"""Options that come from torchrun and concern how workers are started and what they are told; and torch's version."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from elastic_launch.errors import CommandLineError, UsageError

__all__ = [
    "NEWEST_TORCH",
    "NUMA_MODES",
    "START_METHODS",
    "STOP_SIGNALS",
    "Foreign",
    "Signals",
    "TorchOptions",
    "untested_torch",
    "visible_device",
]

NEWEST_TORCH = (2, 14)
"""The newest torch that the tests run with; a test compares it with pyproject.toml."""

NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
"""What torch.numa.binding.AffinityMode knows; a test compares them, since its import costs seconds."""

START_METHODS = ("spawn", "fork", "forkserver")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Signals:
    """What signals to the agent do.

    Attributes:
        leave: make this node leave the run.
        forward: go to the workers and end nothing.
        ignored: were ignored as this process began, and stay so.
    """

    leave: tuple[signal.Signals, ...] = STOP_SIGNALS
    forward: tuple[signal.Signals, ...] = (signal.SIGUSR1, signal.SIGUSR2)
    ignored: tuple[signal.Signals, ...] = ()


@dataclass(frozen=True, slots=True)
class Foreign:
    """A rendezvous of somebody else's, registered with torch, under which torch's own agent runs the workers.

    Attributes:
        endpoint: as the user gave it; the handler alone knows what it means.
        conf: what is in ``--rdzv-conf``, unread.
    """

    endpoint: str
    conf: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Options of torchrun's.

    Attributes:
        event_log_handler: a log handler known to torch's elastic events, which is told how agent and workers end.
        numa_binding: which CPUs near its GPU a worker is bound to, one of NUMA_MODES; None: it is not bound.
        virtual_local_rank: each worker sees one GPU only, its own, and is told the local rank 0.
        monitor_interval: seconds between two looks of torch's own agent at the workers; this project's sees an exit at
            once, and for a Python caller it is the time between two metrics of their state.
        start_method: how Python functions are started.
    """

    event_log_handler: str = "null"
    numa_binding: str | None = None
    virtual_local_rank: bool = False
    monitor_interval: float = 0.1
    start_method: str = "spawn"

    def __post_init__(self) -> None:
        _one_of("--numa-binding", self.numa_binding or NUMA_MODES[0], NUMA_MODES)
        _one_of("--start-method", self.start_method, START_METHODS)


def visible_device(local_rank: int, environ: Mapping[str, str]) -> str:
    """Return the one GPU that a worker may see, as ``CUDA_VISIBLE_DEVICES`` names it.

    Args:
        environ: the agent's, in which the variable may hold a choice already.

    Raises:
        UsageError: if there is none left for it.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return str(local_rank)
    devices = chosen.split(",")
    if local_rank >= len(devices):
        raise UsageError(
            f"--virtual-local-rank: local rank {local_rank} has no GPU of its own in CUDA_VISIBLE_DEVICES={chosen}.",
            "Drop --virtual-local-rank, or start at most as many workers as there are GPUs.",
        )
    return devices[local_rank].strip()


def _one_of(flag: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise CommandLineError(f"{flag} {value} is none that torch knows.", f"Give one of {', '.join(known)}.")


def untested_torch() -> str | None:
    """Return a line to be logged if the torch here is newer than the tests know; it is not imported for that."""
    try:
        spec = find_spec("torch")
        places = spec.submodule_search_locations if spec else None
        text = Path(places[0], "version.py").read_text() if places else ""
    except (OSError, ValueError):  # ValueError: somebody has put a torch without a spec in its place
        return None
    found = re.search(r"^__version__ *= *['\"]((\d+)\.(\d+)[^'\"]*)", text, re.MULTILINE)
    if found is None or (int(found[2]), int(found[3])) <= NEWEST_TORCH:
        return None
    newest = "{}.{}".format(*NEWEST_TORCH)
    return f"torch {found[1]} is newer than {newest}, the newest that this version of elastic-launch was tested with"

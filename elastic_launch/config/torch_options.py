"""torchrun's options for starting workers and their environment; and torch's version."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from elastic_launch.errors import CommandLineError, UsageError

NEWEST_TORCH = (2, 15)
"""The newest torch that the tests run with; a test compares it with pyproject.toml."""

NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
"""The values of torch.numa.binding.AffinityMode; a test compares them, since its import takes seconds."""

EVENT_LOG_HANDLERS = ("null", "console")
"""The handlers of torch's elastic events that every torch has; others are found only by importing it."""

START_METHODS = ("spawn", "fork", "forkserver")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Signals:
    """The handling of signals to the agent.

    Attributes:
        leave: signals that make this node leave the run.
        forward: signals that are forwarded to the workers and end nothing.
        ignored: signals that were ignored when this process started, and stay ignored.
    """

    leave: tuple[signal.Signals, ...] = STOP_SIGNALS
    forward: tuple[signal.Signals, ...] = (signal.SIGUSR1, signal.SIGUSR2)
    ignored: tuple[signal.Signals, ...] = ()

    @property
    def reset(self) -> tuple[signal.Signals, ...]:
        """Ignored signals that have their default action in workers, as under torchrun, which handles them itself."""
        return tuple(number for number in self.ignored if number in STOP_SIGNALS)


@dataclass(frozen=True, slots=True)
class Foreign:
    """A third-party rendezvous that is registered with torch; torch's own agent runs the workers under it.

    Attributes:
        endpoint: as the user gave it; only the handler interprets it.
        conf: the content of ``--rdzv-conf``, unparsed.
    """

    endpoint: str
    conf: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """torchrun's options.

    Attributes:
        event_log_handler: a log handler known to torch's elastic events; it receives how agent and workers end.
        numa_binding: which CPUs near its GPU a worker is bound to, one of NUMA_MODES; None for no binding.
        virtual_local_rank: each worker sees only its own GPU, and gets the local rank 0.
        monitor_interval: seconds between two checks of the workers by torch's own agent. This project's agent notices
            an exit at once; for a Python caller, this is the time between two metrics of the workers' state.
        start_method: how Python functions are started.
        master_addr, master_port: what workers get as ``MASTER_ADDR`` and ``MASTER_PORT`` instead of the round's; only
            from a ``WorkerSpec`` of torch's.
    """

    event_log_handler: str = "null"
    numa_binding: str | None = None
    virtual_local_rank: bool = False
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    master_addr: str | None = None
    master_port: int | None = None

    def __post_init__(self) -> None:
        _one_of("--numa-binding", self.numa_binding or NUMA_MODES[0], NUMA_MODES)
        _one_of("--start-method", self.start_method, START_METHODS)


def visible_device(local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a worker sees one GPU only, its own.

    ``HIP_VISIBLE_DEVICES``, where the agent has it, is what ROCm heeds first, so it is set as well, as torch 2.15 does.

    Args:
        environ: the agent's environment, in which these variables may already select GPUs.
    """
    names = ["CUDA_VISIBLE_DEVICES"] + (["HIP_VISIBLE_DEVICES"] if environ.get("HIP_VISIBLE_DEVICES") else [])
    chosen = environ.get(names[-1])
    if chosen is None:
        return dict.fromkeys(names, str(local_rank))
    devices = chosen.split(",")
    if local_rank >= len(devices):
        raise UsageError(
            f"--virtual-local-rank: local rank {local_rank} has no GPU of its own in {names[-1]}={chosen}.",
            "Drop --virtual-local-rank, or start at most as many workers as there are GPUs.",
        )
    return dict.fromkeys(names, devices[local_rank].strip())


def _one_of(flag: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise CommandLineError(f"{flag} {value} is not one that torch knows.", f"Give one of {', '.join(known)}.")


def installed_torch() -> str:
    """Return the installed torch's version, such as ``2.13.0+cpu``, without importing it; "" if there is none."""
    try:
        spec = find_spec("torch")
        places = spec.submodule_search_locations if spec else None
        text = Path(places[0], "version.py").read_text() if places else ""
    except (OSError, ValueError):  # ValueError: a replaced torch module without a spec
        return ""
    found = re.search(r"^__version__ *= *['\"]([^'\"]+)", text, re.MULTILINE)
    return found[1] if found else ""


def untested_torch() -> str | None:
    """Return a line to log if the installed torch is newer than the tested ones; this does not import torch."""
    version = installed_torch()
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) <= NEWEST_TORCH:
        return None
    newest = "{}.{}".format(*NEWEST_TORCH)
    return f"torch {version} is newer than {newest}, the newest that this version of elastic-launch was tested with"

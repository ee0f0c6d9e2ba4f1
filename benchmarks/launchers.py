"""The contenders, and how each is started: two launchers with two scripts, on one node or as one of two."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from jobs import RUN_ID, Job, descendants, free_port, program, signal_all

__all__ = ["ALL", "BOTH", "CONTENDERS", "LIVE", "LIVE_ON_GPUS", "Contender", "Node", "Nodes", "start_alone"]

RESTARTS = ["--max-restarts", "1000"]
"""Passed to all: with torchrun's default, the first fault would end a run."""

UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, torch 2.13 often hangs after a restart."""

PATIENT = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
"""torch accepts whole seconds only; with one second, a node that is two seconds late would be lost."""


@dataclass(frozen=True)
class Contender:
    """A launcher with its settings, and a script.

    Attributes:
        ours: whether it is elastic-launch.
        library: whether the script trains with this project's library; otherwise it saves and loads by itself.
        options: additional options of the launcher.
        conf: of its rendezvous, with several nodes.
        script_options: additional options of the library's script.
    """

    title: str
    ours: bool
    library: bool = False
    options: tuple[str, ...] = ()
    conf: str = ""
    script_options: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)

    def script(self, job: Job, *options: str) -> list[str]:
        """The command of the script."""
        if self.library:
            return job.script("elastic_workload.py", *self.script_options, *options)
        return job.script("workload.py", "--snapshot", str(job.directory / "snapshot.pt"), *options)

    def start(self, job: Job, nproc: int, node: str, options: list[str], script: list[str]) -> tuple[int, float]:
        """Start an agent; return its pid and the time just before the start."""
        common = ["--nproc-per-node", str(nproc), "--rdzv-id", RUN_ID, *RESTARTS, *self.options, *options]
        if self.ours:
            own = ["--node-id", node, "--log-dir", str(job.directory / "logs")]
            return job.start([program("elastic-launch"), *common, *own, *script], self.environ)
        return job.start([program("torchrun"), *common, *script], self.environ)


CONTENDERS = {
    "ours": Contender("elastic-launch, library", True, library=True),
    "ours-plain": Contender("elastic-launch, plain script", True),
    "torchrun": Contender(
        "torchrun, best settings", False, options=("--monitor-interval", "0.05"), conf=PATIENT, environ=UNSHARED
    ),
    "torchrun-default": Contender("torchrun, defaults", False),
    "no-live": Contender("elastic-launch --no-live, library", True, library=True, options=("--no-live",)),
    "ours-confirmed": Contender(
        'elastic-launch, library, live="confirmed"', True, library=True, script_options=("--live", "confirmed")
    ),
}
ALL = ("ours", "ours-plain", "torchrun", "torchrun-default")
BOTH = ("ours", "torchrun")
LIVE = ("ours", "no-live", "torchrun")
LIVE_ON_GPUS = ("ours", "ours-confirmed", "no-live", "torchrun")


def start_alone(job: Job, who: str, nproc: int = 2, *options: str) -> tuple[int, float]:
    """Start a run of one node with additional script options; return the agent's pid and the time just before."""
    contender = CONTENDERS[who]
    return contender.start(job, nproc, "host", ["--standalone"], contender.script(job, *options))


@dataclass(frozen=True)
class Node:
    """An agent with all its processes."""

    pid: int
    began: float

    def signal(self, number: signal.Signals) -> None:
        """Signal all of them, the agent first, as when a host freezes or loses power."""
        below = descendants(self.pid)
        signal_all([self.pid, *below], number)


class Nodes:
    """A run of several nodes, all on this host.

    Args:
        nnodes: minimum and maximum, as in the flag.
        flags: further ones.
    """

    def __init__(self, job: Job, who: str, nnodes: str = "1:2", *flags: str) -> None:
        self._job = job
        self._flags = flags
        self._contender = CONTENDERS[who]
        self._nnodes = nnodes
        self._port = free_port()

    def start(self, name: str, nproc: int = 1, *script_options: str, script: list[str] | None = None) -> Node:
        """Start a node; the one named ``host`` holds the store.

        Args:
            script: another one than the contender's.
        """
        conf = ",".join(filter(None, [f"is_host={int(name == 'host')}", self._contender.conf]))
        options = ["--nnodes", self._nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self._port}"]
        options += ["--rdzv-conf", conf, "--local-addr", "localhost", *self._flags]
        script = script or self._contender.script(self._job, *script_options)
        return Node(*self._contender.start(self._job, nproc, name, options, script))

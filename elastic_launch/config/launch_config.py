"""The configuration of a launch: frozen dataclasses, validated on construction.

The command line produces a :class:`LaunchConfig`, and the agent consumes it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from elastic_launch.config.backends import BackendKind, kind_of
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.notice_sources import NoticeSource
from elastic_launch.config.output import LATEST, Output
from elastic_launch.config.torch_options import Foreign, Signals, TorchOptions
from elastic_launch.errors import UsageError
from elastic_launch.faults import FaultPlan
from elastic_launch.secret import Token

LONGEST_WAIT = 1e6
"""Longest wait in seconds: eleven days. poll(2) takes milliseconds in an int, so waits beyond 24 days overflow."""

BEATS_PER_SECOND = 1000
"""Beats that a leader reads, and sends, per second before nodes beat less often than ``beat`` says."""

KEPT_RUNS = 100
"""Number of launches without ``--log-dir`` whose directories stay by default."""

MOST_WORKERS = 4096
"""Most workers of a node: more than any has devices, so that a mistyped number does not start a flood of processes."""

ZERO_ALLOWED = frozenset({"join_settle", "resize_delay", "start_wait"})
"""The fields of :class:`Timing` that may be 0."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the whole run: those of its first node, unless the run is resized.

    Attributes:
        restart_refill: seconds of rounds with new steps that give one charged restart back; 0: none is given back.
        max_idle_restarts: restarts in a row without a new step after which the run ends; 0: no such limit.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: int = 3
    restart_refill: float = 0.0
    max_idle_restarts: int = 0

    def __post_init__(self) -> None:
        if self.min_nodes < 1:
            raise UsageError(
                f"--nnodes asks for at least {self.min_nodes} nodes.",
                "The minimum must be 1 or more, as in --nnodes 1:4.",
            )
        if self.max_nodes < self.min_nodes:
            raise UsageError(
                f"--nnodes {self.min_nodes}:{self.max_nodes} has a maximum below its minimum.",
                f"Write MIN:MAX, as in --nnodes {self.max_nodes}:{self.min_nodes}.",
            )
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts is {self.max_restarts}.", "Give 0 (never restart) or more.")
        check_seconds(f"--restart-refill {self.restart_refill:g}", self.restart_refill, zero=True)
        if self.max_idle_restarts < 0:
            raise UsageError(
                f"--max-idle-restarts is {self.max_idle_restarts}.", "Give 1 or more, or 0 for no such limit."
            )

    def resized(self, min_nodes: int, max_nodes: int) -> Limits:
        """Return these limits with other numbers of nodes."""
        return replace(self, min_nodes=min_nodes, max_nodes=max_nodes)

    def __str__(self) -> str:
        refill = f" --restart-refill {self.restart_refill:g}" if self.restart_refill else ""
        idle = f" --max-idle-restarts {self.max_idle_restarts}" if self.max_idle_restarts else ""
        return f"--nnodes {self.min_nodes}:{self.max_nodes} --max-restarts {self.max_restarts}{refill}{idle}"


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines of the rendezvous, in seconds; the keys of ``--rdzv-conf``.

    Attributes:
        join_settle: how long the first round, once it has min nodes, waits for another arrival.
        dead_after: silence after which a node counts as dead.
        min_wait: how long a run below min nodes stays parked before it ends with 94.
        return_after: how long a live member may take to stop its workers after a break, beyond its shutdown timeout.
        resize_delay: quiet time after an arrival before a running round is resized.
        beat: interval of the beats on a link.
        join_timeout: how long to search for the endpoint, and to wait for members to start a round's workers.
        read_timeout: deadline of one call to the control store.
        start_wait: how long a worker's start may be expected to take for live workers to wait for it.
    """

    join_settle: float = 2.0
    dead_after: float = 5.0
    min_wait: float = 600.0
    return_after: float = 15.0
    resize_delay: float = 1.0
    beat: float = 1.0
    join_timeout: float = 600.0
    read_timeout: float = 60.0
    start_wait: float = 1.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            check_seconds(f"--rdzv-conf {item.name}={value:g}", value, zero=item.name in ZERO_ALLOWED)
        if self.dead_after < 2 * self.beat:
            raise UsageError(
                f"dead_after={self.dead_after:g} leaves no room for beats every {self.beat:g} s.",
                f"Give dead_after={2 * self.beat:g} or more, or a smaller beat.",
            )

    def beat_among(self, nodes: int) -> float:
        """Return the interval of beats in seconds for so many nodes: together at most BEATS_PER_SECOND, if possible.

        The maximum is a fifth of ``dead_after``, by which a node considers itself cut off before its leader does.
        """
        return max(self.beat, min(nodes / BEATS_PER_SECOND, self.dead_after / 5))


@dataclass(frozen=True, slots=True)
class Command:
    """What every worker executes.

    Attributes:
        argv: the complete argument vector of the process.
        display: script and arguments as the user gave them, after ``-m`` or ``--no-python`` if given; without the
            interpreter, whose path may differ by node. Can be appended to the launcher's flags. For a Python function,
            its name.
        inherit: descriptors of the agent that the process inherits.
        function: whether it calls a Python function that was passed to :mod:`elastic_launch.api`.
        forked: whether workers are forked from the process that passed the function; then ``argv`` is not executed.
    """

    argv: tuple[str, ...]
    display: tuple[str, ...]
    inherit: tuple[int, ...] = ()
    function: bool = False
    forked: bool = False

    def __str__(self) -> str:
        return f"function {self.display[0]}" if self.function else shlex.join(self.display)

    @property
    def target(self) -> tuple[str, str]:
        """What is run: a script or program by its file name, since paths may differ by node; a module by its name.

        ``--run-path`` makes no difference.
        """
        first, *rest = self.display
        if self.function:
            return "function", first
        if first == "-m":
            return "module", rest[0]
        if first in ("--no-python", "--run-path"):
            return "program" if first == "--no-python" else "script", _file_name(rest[0])
        return "script", _file_name(first)


@dataclass(frozen=True)
class LaunchConfig:
    """One node's part in one run.

    Attributes:
        command: what the workers execute; :mod:`elastic_launch.api` sets it from its call.
        nproc: workers on this node: whole replicas.
        replica_size: workers of a replica, which are on one node.
        idle: workers beyond whole replicas that this node was asked for; they are not started.
        endpoint: where the control store is; None if this node hosts it.
        endpoints: all addresses of the service that keeps the record, or of the hosts that do so together; the first is
            ``endpoint``. Empty on c10d with one endpoint.
        announce: whether to print how to join, since this node chose the endpoint itself and others may join.
        found_out: the defaults that this node derived by itself, as text.
        node_id: name of this node, unique in the run; a second agent with the same name replaces the first.
        node_rank: requested rank of this node, or None.
        local_addr: address to advertise, verbatim; None for the source address of the route to the endpoint.
        is_host: whether this node hosts the run; None: if the endpoint is an address of this host.
        health_port: port of this agent's health probes, or None.
        health_host: address of the health probes; None for the address that the node advertises.
        http: where this agent serves its metrics and status, or None; port 0 for any free port.
        http_hosts: names by which these may be asked for, besides this host's own: of a service or a proxy.
        reuse: whether to begin a new run if the run with this id has ended.
        fatal_exit_codes: exit codes of workers, 128 + N for signal N, after which the run ends without a restart.
        shutdown_timeout: time that workers have between SIGTERM and SIGKILL, in seconds.
        wait_for_children: seconds that processes which finished workers have left behind get to end, at the run's end.
        hang_timeout: seconds without output and use of CPU after which workers hang whose steps are not known; 0: these
            are not watched; None: none is.
        log_dir: base directory; the run's files go to ``<log_dir>/<run_id>``.
        log_name: name of the run's directory in ``log_dir``; empty for the run id.
        keep_runs: number of the newest launches whose directories stay, in ``link_dir`` or else ``log_dir``; None: all.
        link_dir: where the link ``latest`` to the run's directory is; None for ``log_dir``.
        output: how the workers' output is shown and kept.
        progress: how the run is shown on this process' terminal, one of :data:`elastic_launch.config.output.PROGRESS`
            other than ``auto``.
        log_format: format of the launcher's own lines, one of :data:`elastic_launch.config.output.LOG_FORMATS`.
        token: the run's secret, or None; never part of any output or digest.
        own_token: whether this agent generated it, and keeps it in a file for elasticctl.
        live: suspend workers where possible instead of ending them when a round ends, and keep them in the next one.
        exclude_corrupt: leave this node out for a while once other ranks have found that it computes wrong.
        snapshots: have workers keep snapshots in this node's memory.
        split_snapshots: split those of sharded models among three or more nodes.
        warm: fork workers from a process that has already done their imports, where possible.
        preload, no_preload: modules that it imports before it knows what workers import, or leaves out.
        notices: sources of preemption notices.
        drill: the planned faults of a drill.
        node_check: whether to test this node before it joins.
        foreign: the rendezvous of another package's handler, which ``backend`` names; None for this project's own.
        torchrun: whether every failure counts as a crash and ends in torchrun's exit codes.
    """

    command: Command = Command((), ())
    limits: Limits = field(default_factory=Limits)
    nproc: int = 1
    replica_size: int = 1
    idle: int = 0
    run_id: str = "none"
    backend: str = "c10d"
    endpoint: Endpoint | None = None
    endpoints: tuple[Endpoint, ...] = ()
    announce: bool = False
    found_out: str = ""
    timing: Timing = field(default_factory=Timing)
    node_id: str = "node"
    node_rank: int | None = None
    local_addr: str | None = None
    is_host: bool | None = None
    health_port: int | None = None
    health_host: str | None = None
    http: Endpoint | None = None
    http_hosts: tuple[str, ...] = ()
    reuse: bool = False
    role: str = "default"
    fatal_exit_codes: frozenset[int] = frozenset()
    shutdown_timeout: float = 30.0
    wait_for_children: float = 30.0
    hang_timeout: float | None = 0.0
    log_dir: Path = field(default_factory=lambda: state_directory())
    keep_runs: int | None = None
    link_dir: Path | None = None
    log_name: str = ""
    output: Output = field(default_factory=Output)
    progress: str = "plain"
    log_format: str = "time"
    token: Token | None = field(default=None, repr=False)
    own_token: bool = False
    live: bool = True
    exclude_corrupt: bool = True
    snapshots: bool = True
    split_snapshots: bool = False
    warm: bool = True
    preload: tuple[str, ...] = ()
    no_preload: tuple[str, ...] = ()
    signals: Signals = field(default_factory=Signals)
    notices: tuple[NoticeSource, ...] = ()
    drill: FaultPlan = field(default_factory=FaultPlan)
    node_check: bool = False
    options: TorchOptions = field(default_factory=TorchOptions)
    foreign: Foreign | None = None
    torchrun: bool = False

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise UsageError(f"--nproc {self.nproc} starts no worker.", "Give 1 or more, or auto, cpu or gpu.")
        if self.nproc > MOST_WORKERS:
            raise UsageError(
                f"--nproc {self.nproc} is more than the {MOST_WORKERS} workers that a node may have.",
                "Give the number of workers on this node, or auto, cpu or gpu.",
            )
        if self.replica_size < 1:
            raise UsageError(f"--replica-size is {self.replica_size}.", "Give 1 or more: the workers of a replica.")
        if self.nproc < self.replica_size:
            raise UsageError(
                f"--nproc {self.nproc} is less than the {self.replica_size} workers of a replica (--replica-size), "
                "which must be on one node.",
                f"Give --nproc {self.replica_size} or more on each node, or a lower --replica-size.",
            )
        if idle := self.nproc % self.replica_size:
            object.__setattr__(self, "nproc", self.nproc - idle)
            object.__setattr__(self, "idle", idle)
        check_seconds(f"--shutdown-timeout {self.shutdown_timeout:g}", self.shutdown_timeout, zero=True)
        check_seconds(f"--wait-for-children {self.wait_for_children:g}", self.wait_for_children, zero=True)
        if self.hang_timeout is not None:
            check_seconds(f"--hang-timeout {self.hang_timeout:g}", self.hang_timeout, zero=True)
        if not _names_a_file(self.run_id) or self.run_id == LATEST:
            raise UsageError(
                f"--rdzv-id {self.run_id!r} cannot name a run.",
                f"Give 1 to 200 printable bytes without a slash, such as a job id; not {LATEST}.",
            )
        if not _names_a_file(self.node_id):
            raise UsageError(
                f"--node-id {self.node_id!r} cannot name a node.",
                "Give 1 to 200 printable bytes without a slash, such as a host name.",
            )
        if self.health_port is not None and not 0 < self.health_port < 65536:
            raise UsageError(f"--health-port {self.health_port} is not a port.", "Give 1 to 65535.")
        if self.http is not None and not 0 <= self.http.port < 65536:
            raise UsageError(f"--http {self.http.port} is not a port.", "Give 1 to 65535, or 0 for any free port.")
        if self.node_rank is not None and self.node_rank < 0:
            raise UsageError(f"--node-rank {self.node_rank} is not a rank.", "Give 0 or more, or leave it out.")

    @property
    def kind(self) -> BackendKind:
        """The kind of the backend."""
        return kind_of(self.backend, len(self.endpoints))

    @property
    def keeps_workers(self) -> bool:
        """Whether workers that can live through a change of membership do; in a static world they meet only once."""
        return self.live and not self.kind.fixed_ranks

    @property
    def run_directory(self) -> Path:
        """Directory of this run's logs and events."""
        return self.log_dir / (self.log_name or self.run_id)

    @property
    def shared(self) -> str:
        """What must be the same on all nodes, as users see it: the command, and the size of replicas."""
        return f"--replica-size {self.replica_size} {self.command}" if self.replica_size > 1 else str(self.command)

    @property
    def title(self) -> str:
        """What readers know the run by: its id, or what it runs if it was given none."""
        return f"run {self.run_id}" if self.run_id != LaunchConfig.run_id else f"run of {self.command.target[1]}"

    @property
    def alone(self) -> bool:
        """Whether no other node can join: the run has one node, and its store's port is not published."""
        unknown = self.endpoint is None or self.endpoint.port == 0
        return self.limits.max_nodes == 1 and unknown and self.foreign is None

    def digest(self) -> str:
        """Return the SHA-256 over what must be equal on all nodes: what is run, the backend, its voters, replicas."""
        value: list[str | int] = [*self.command.target, self.backend]
        if self.replica_size > 1:
            value.append(self.replica_size)
        if self.kind.voting:
            value += sorted(map(str, self.endpoints))
        return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _file_name(path: str) -> str:
    """Return the last part of a path, also for ``.`` and for a directory with a trailing slash."""
    name = os.path.basename(os.path.normpath(path))
    return name if name not in (os.curdir, os.pardir) else os.path.basename(os.path.abspath(path))


def check_seconds(asked: str, value: float, *, zero: bool) -> float:
    """Return ``value`` if it is a valid time to wait.

    Args:
        asked: the setting as the user wrote it, for the error.
        zero: whether 0 is allowed.
    """
    if not math.isfinite(value) or value < 0 or value > LONGEST_WAIT or (value == 0 and not zero):
        raise UsageError(
            f"{asked} is not a time to wait.",
            f"Give {'at least' if zero else 'more than'} 0 seconds, at most {LONGEST_WAIT:.0f}.",
        )
    return value


def _names_a_file(text: str) -> bool:
    fits = 0 < len(os.fsencode(text)) <= 200
    return fits and text.isprintable() and "/" not in text and text not in (".", "..")


def parse_nnodes(text: str, asker: str = "--nnodes", what: str = "nodes") -> tuple[int, int]:
    """Parse ``N`` or ``MIN:MAX``; ``asker`` is the flag or command that has it, ``what`` is counted."""
    found = re.fullmatch(r"(-?[0-9]{1,9})(?::(-?[0-9]{1,9}))?", text.strip())
    if not found:
        raise UsageError(f"{asker} {text!r} is not a number of {what}.", f"Write N or MIN:MAX, as in {asker} 1:4.")
    low, high = found.groups()
    return int(low), int(high or low)


def state_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return the user's state directory for this program (XDG Base Directory Specification 0.8).

    A user without a writable home directory, as in some containers, gets a directory for temporary files, so that a
    user who comes from torchrun does not have to set a flag.

    Args:
        environ: the environment variables; None for those of this process.
    """
    variables = os.environ if environ is None else environ
    base = variables.get("XDG_STATE_HOME", "")
    if not base.startswith("/"):
        home = variables.get("HOME", "")
        try:
            base = str((Path(home) if home.startswith("/") else Path.home()) / ".local" / "state")
        except RuntimeError:
            base = ""
    if base and writable(Path(base)):
        return Path(base) / "elastic-launch"
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # no directory is writable; callers that need one report it
        temporary = "/tmp"
    return Path(temporary) / f"elastic-launch-{os.getuid()}"


def writable(path: Path) -> bool:
    """Whether a directory is writable, or can be created."""
    base = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    return os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK)

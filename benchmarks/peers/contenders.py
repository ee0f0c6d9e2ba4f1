"""The launchers of this benchmark, each at its best settings. README.md has the reasons."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jobs import RUN_ID, Job, free_port
from launchers import PATIENT, RESTARTS, UNSHARED

HERE = Path(__file__).resolve().parent
VERSIONS = """
import json, sys
from importlib.metadata import version
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""
HANG_TIMEOUT = 10
"""Seconds until a hang counts as one, for each launcher that wants a number."""


@dataclass(frozen=True)
class Contender:
    """A launcher, and how its nodes are started.

    Attributes:
        packages: what the result names the versions of.
        start: starts a node with so many workers in a job and returns the pid of its agent.
        environment: the folder of its virtual environment, inside the one given; empty: the project's own.
        elastic: whether it trains with a number of nodes that changes.
    """

    packages: tuple[str, ...]
    start: Callable[[Run, str, int], int]
    environment: str = ""
    elastic: bool = True


class Run:
    """A run of one contender: its nodes are all on this host, and the first one is named ``host``.

    Args:
        nodes: the most that will be started.
    """

    def __init__(self, contender: Contender, job: Job, environments: Path, nodes: int) -> None:
        self._contender = contender
        self._environments = environments
        self.job = job
        self.nodes = nodes
        self.port = free_port()

    def program(self, name: str) -> str:
        return str(self.python().with_name(name))

    def python(self) -> Path:
        return interpreter(self._contender, self._environments)

    def start(self, node: str, nproc: int) -> int:
        """Start a node; return the pid of its agent."""
        return self._contender.start(self, node, nproc)

    def launch(self, command: list[str], script: str, *options: str, **environ: str) -> int:
        """Start a launcher with a script of this directory."""
        noted = self.job.script(script, *options)
        noted[0] = str(HERE / script)
        return self.job.start([*command, *noted], {"PYTHONPATH": str(HERE.parent), **environ})[0]

    def rendezvous(self, node: str) -> list[str]:
        """The flags of torchrun and of launchers that are made from it."""
        conf = f"is_host={int(node == 'host')},{PATIENT}"
        common = ["--nnodes", f"1:{self.nodes}", "--rdzv-backend", "c10d", "--rdzv-id", RUN_ID, "--rdzv-conf", conf]
        return [*common, "--rdzv-endpoint", f"localhost:{self.port}", "--local-addr", "localhost", *RESTARTS]

    def plain(self, command: list[str], *options: str, **environ: str) -> int:
        saved = ["--snapshot", str(self.job.directory / "snapshot.pt"), "--collective-timeout", str(HANG_TIMEOUT)]
        return self.launch(command, "plain.py", *saved, *options, **environ)


def interpreter(contender: Contender, environments: Path) -> Path:
    if not contender.environment:
        return Path(sys.executable)
    return environments.resolve() / contender.environment / "bin" / "python"


def versions(contender: Contender, environments: Path) -> dict[str, str]:
    """The versions of its packages.

    Raises:
        subprocess.CalledProcessError, OSError: it is not installed.
    """
    command = [str(interpreter(contender, environments)), "-c", VERSIONS, *contender.packages]
    found: dict[str, str] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def start_ours(run: Run, node: str, nproc: int) -> int:
    flags = ["--nnodes", f"1:{run.nodes}", "--rdzv-endpoint", f"localhost:{run.port}", "--rdzv-id", RUN_ID, *RESTARTS]
    flags += ["--rdzv-conf", f"is_host={int(node == 'host')}", "--local-addr", "localhost"]
    flags += ["--nproc", str(nproc), "--node-id", node]
    flags += ["--log-dir", str(run.job.directory / "logs")]
    return run.launch([run.program("elastic-launch"), *flags], "library.py")


def start_torchrun(run: Run, node: str, nproc: int) -> int:
    flags = [*run.rendezvous(node), "--nproc-per-node", str(nproc), "--monitor-interval", "0.05"]
    return run.plain([run.program("torchrun"), *flags], **UNSHARED)


def start_ft_launcher(run: Run, node: str, nproc: int) -> int:
    flags = [*run.rendezvous(node), "--nproc-per-node", str(nproc), "--monitor-interval", "0.05"]
    flags += ["--ft-rank-heartbeat-timeout", str(HANG_TIMEOUT), "--ft-initial-rank-heartbeat-timeout", "60"]
    flags += ["--ft-workload-check-interval", "0.5", "--ft-max-no-progress-cycles", "0"]
    program = [str(run.python()), "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
    return run.plain([*program, *flags], "--heartbeats", **UNSHARED)


def start_torchft(run: Run, node: str, nproc: int) -> int:
    """A node's workers are replica groups, each with a torchrun; the host has the lighthouse as well."""
    if node == "host":
        times = ["--quorum_tick_ms", "20", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"]
        command = [run.program("torchft_lighthouse"), "--bind", f"[::]:{run.port}", "--min_replicas", "1", *times]
        run.job.start(command)
    return [start_replica(run, int(node != "host") + number) for number in range(nproc)][-1]


def start_replica(run: Run, number: int) -> int:
    flags = ["--nnodes", "1", "--nproc-per-node", "1", "--monitor-interval", "0.05", *RESTARTS]
    flags += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"localhost:{free_port()}",
        "--rdzv-id",
        f"{RUN_ID}-{number}",
    ]
    environ = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{run.port}", "REPLICA_GROUP_ID": str(number)}
    command = [str(run.python()), "-m", "torch.distributed.run", *flags]
    return run.launch(command, "replicas.py", "--timeout", str(HANG_TIMEOUT), **environ)


RAY = {
    # The controller looks at its workers; Ray's control service at its nodes, of which one that does not answer twice
    # within half a second each counts as dead. A start that got a place on a node that is gone is given up after 3 s.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.05",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "3",
    "RAY_health_check_period_ms": "250",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "2",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.2",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def start_ray(run: Run, node: str, nproc: int) -> int:
    """A node of a Ray cluster; the host runs the driver as well. Return the pid of what keeps the node up."""
    address, storage = f"127.0.0.1:{run.port}", str(run.job.directory)
    place = ["--address", address]
    if node == "host":
        place = ["--head", "--port", str(run.port), "--include-dashboard", "false", "--temp-dir", f"{storage}/ray"]
    command = [run.program("ray"), "start", "--block", "--num-cpus", str(nproc), *place]
    # Its workers import the script's modules.
    agent = run.job.start([*command, "--node-ip-address", "127.0.0.1"], {"PYTHONPATH": f"{HERE.parent}:{HERE}", **RAY})
    if node == "host":
        options = ["--address", address, "--storage", storage, "--timeout", str(HANG_TIMEOUT)]
        options += ["--workers", str(max(nproc, run.nodes)), *(["--fixed"] if run.nodes == 1 else [])]
        run.launch([str(run.python())], "ray_train.py", *options, **RAY)
    return agent[0]


CONTENDERS = {
    "elastic-launch": Contender(("elastic-launch", "torch"), start_ours),
    "torchrun": Contender(("torch",), start_torchrun),
    "torchrun 2.14": Contender(("torch",), start_torchrun, "torch214"),
    "ft_launcher": Contender(("nvidia-resiliency-ext", "torch"), start_ft_launcher, "nvrx", elastic=False),
    "torchft": Contender(("torchft", "torch"), start_torchft, "torchft"),
    "Ray Train": Contender(("ray", "torch"), start_ray, "ray"),
}

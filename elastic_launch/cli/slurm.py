"""Defaults in a job step of Slurm: the number of nodes, the endpoint, the run's id, this node's id and rank.

srun starts one agent per node, and describes the job and the step in variables
(https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES). A run's nodes are those of the step. If
``--nnodes`` names more, as where the agent of each node has a step of its own, they are the job's.

The first node hosts the run because it is the first, not because it can bind the address: with several jobs on a node,
the port may be another run's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_launch.cli.flags import Sourced, Values
from elastic_launch.cli.rendezvous_flags import asked_backend
from elastic_launch.config.backends import kind_of
from elastic_launch.config.endpoints import parse_endpoint
from elastic_launch.config.launch_config import parse_nnodes
from elastic_launch.errors import UsageError

SOURCE = "Slurm job "

OWN_STEPS = 0xFFFF_FF00
"""Slurm's own steps have numbers above: a batch script, and the shell that salloc opens on a node."""

PORTS = range(20_000, 30_000)
"""Below the ephemeral ports; two jobs on one node have the same one only if their numbers differ by 10,000."""

_TOLD = ("--nnodes", "--rdzv-endpoint", "--master-addr", "--rdzv-id", "--node-id", "--node-rank")
"""The flags that are reported, in this order."""

_EVERY_HOST = re.compile(r"localhost(\.localdomain)?|127\.[\d.]+|::1", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class JobStep:
    """The job, and the step in which srun has started this process.

    Attributes:
        number: number of the step; empty outside of srun.
        nodes: the names of the step's nodes, in order; outside of srun those of the job.
        allocated: the names of the job's nodes.
        listed: the names of the job's nodes, as Slurm writes them.
        name: this node's name.
        tasks: the number of processes that srun has started on this node.
    """

    job: str
    number: str
    nodes: tuple[str, ...]
    allocated: tuple[str, ...]
    listed: str
    name: str
    tasks: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> JobStep | None:
        """Read Slurm's variables; None outside of a job, and in one of several components (``SLURM_HET_SIZE``)."""
        job, listed, name = (environ.get(f"SLURM{what}", "") for what in ("_JOB_ID", "_JOB_NODELIST", "D_NODENAME"))
        number, of_step = environ.get("SLURM_STEP_ID", ""), environ.get("SLURM_STEP_NODELIST", "")
        if not (job.isdecimal() and listed) or "SLURM_HET_SIZE" in environ:
            return None
        try:
            allocated = expand(listed)
            if not (number.isdecimal() and of_step) or int(number) >= OWN_STEPS:
                return cls(job, "", allocated, allocated, listed, name, 1)
            nodes = expand(of_step)
            tasks = dict(zip(nodes, _repeated(environ.get("SLURM_STEP_TASKS_PER_NODE", "")), strict=False))
        except ValueError:
            return None
        return cls(job, number, nodes, allocated, listed, name, tasks.get(name, 1))

    def has(self, host: str) -> bool:
        """Whether a host name may be that of one of the job's nodes: ``n1``, ``n1.example.org``, ``n1-ib0``."""
        short = host.lower().partition(".")[0]
        return any(re.match(rf"{re.escape(node.lower().partition('.')[0])}(?!\w)", short) for node in self.allocated)


def expand(text: str) -> tuple[str, ...]:
    """Return the hosts of a list as Slurm writes it: ``rack[1-2]n[07-09,12],login``.

    Raises:
        ValueError: if it is none.
    """
    found: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        parts = re.split(r"\[([^\]]*)\]", item)
        found += map("".join, itertools.product(*(_numbers(p) if i % 2 else [p] for i, p in enumerate(parts))))
    return tuple(found)


def _numbers(text: str) -> list[str]:
    ends = [part.partition("-")[::2] for part in text.split(",")]
    return [f"{number:0{len(low)}}" for low, high in ends for number in range(int(low), int(high or low) + 1)]


def _repeated(text: str) -> list[int]:
    """Return the numbers of a list as Slurm writes it: ``2(x3),1``."""
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    return [number for match in found if match for number in [int(match[1])] * int(match[2] or 1)]


def found_out(values: Values) -> Mapping[str, Sourced]:
    """Return defaults for unset flags, by flag name, derived from Slurm's variables; empty outside of a job."""
    step = JobStep.of(values.environ)
    if step is None or values.switch("--standalone"):
        return {}
    given = values.text("--nnodes")
    low, high = parse_nnodes(given) if given else (len(step.nodes), len(step.nodes))
    _check_start(step, high)
    endpoint, master = values.text("--rdzv-endpoint"), values.text("--master-addr")
    backend = asked_backend(values)
    kind = kind_of(backend, 1 + (endpoint or "").count(","))
    if high < 2 or not kind.own:  # alone, or with torch's own agent
        return {}
    if not kind.elected and not _hosted_as_told(values):
        _check_place(step, values, low)
    nodes = step.nodes if high <= len(step.nodes) else step.allocated
    first = nodes[0]
    told = {} if given else {"--nnodes": str(high)}
    if high <= len(nodes) and step.name in nodes:
        told["--node-rank"] = str(nodes.index(step.name))
    if not kind.fixed_ranks and step.name:
        # A run that is larger than the job may have agents of several jobs on a node.
        told["--node-id"] = step.name if high <= len(nodes) else f"{step.name}-{step.job}"
    of_run = {"--rdzv-id": f"{step.job}.{step.number}" if step.number and nodes is step.nodes else step.job}
    if kind.elected:
        told |= of_run
    elif kind.fixed_ranks and endpoint is None and master is None:
        told["--master-addr"] = first
    elif endpoint is None and not kind.fixed_ranks:
        told |= {"--rdzv-endpoint": f"{first}:{PORTS[int(step.job) % len(PORTS)]}", **of_run}
        told["--rdzv-conf"] = f"is_host={str(step.name == first).lower()}"
    return {flag: Sourced(text, f"{SOURCE}{step.job}") for flag, text in told.items()}


def _hosted_as_told(values: Values) -> bool:
    texts = (*values.given.get("--rdzv-conf", ()), values.text("--rdzv-conf") or "")
    return any("is_host" in text for text in texts)


def _check_start(step: JobStep, high: int) -> None:
    """Check that this process is the only agent of this node, and not the only one of the run."""
    if step.tasks > 1:
        raise UsageError(
            f"srun has started {step.tasks} agents on node {step.name}, one for each task. A node takes one, which "
            "starts all its workers.",
            "Give srun --ntasks-per-node=1, and the number of workers with --nproc. With --standalone each task is a "
            "run of its own.",
        )
    if not step.number and high > 1 and len(step.allocated) > 1:
        raise UsageError(
            f"srun has not started this agent, so it is the only one: on this host, not on each of the "
            f"{len(step.allocated)} nodes of {SOURCE}{step.job} ({step.listed}).",
            "Write srun --ntasks-per-node=1 before the command, or give --standalone to train on this host only.",
        )


def _check_place(step: JobStep, values: Values, low: int) -> None:
    """Check that the run's host, and enough nodes, are in the job."""
    for flag in ("--rdzv-endpoint", "--master-addr"):
        if (text := values.text(flag)) is None:
            continue
        host = parse_endpoint(text, asker=flag).host
        if _EVERY_HOST.fullmatch(host) and len(step.allocated) > 1:
            what = "is each host's own address, not that of one"
        elif re.search("[a-z]", host, re.IGNORECASE) and ":" not in host and not step.has(host):
            what = "is not one"
        else:  # an address may be of a network that Slurm does not know
            continue
        elsewhere = " If another host does, add --rdzv-conf is_host=false." if flag == "--rdzv-endpoint" else ""
        raise UsageError(
            f"{flag} {text} {what} of the nodes of {SOURCE}{step.job} ({step.listed}).",
            f"Leave it out: {step.nodes[0]} hosts the run then.{elsewhere}",
        )
    if low > len(step.allocated):
        raise UsageError(
            f"--nnodes {values.text('--nnodes')} asks for more nodes than {SOURCE}{step.job} has: "
            f"{len(step.allocated)} ({step.listed}).",
            "Ask for fewer, or get more with sbatch --nodes. A run of several jobs takes --rdzv-backend etcd.",
        )


def sentence(values: Values) -> str:
    """Return a sentence on the derived values, or an empty string."""
    told = [name for name in _TOLD if (values.origin(name) or "").startswith(SOURCE)]
    if not told:
        return ""
    given = ", ".join(f"{name} {values.text(name)}" for name in told)
    endpoint = values.text("--rdzv-endpoint") if "--rdzv-endpoint" in told else None
    hosts = f"; {parse_endpoint(endpoint).host} hosts" if endpoint else ""
    count = values.environ.get("SLURM_RESTART_COUNT", "0")
    return f"{values.origin(told[0])} gives {given}{hosts}{f'; SLURM_RESTART_COUNT={count}' if count != '0' else ''}"

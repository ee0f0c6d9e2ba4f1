"""A real Slurm for tests: a controller and nodes, each a host of its own (a network namespace with its own host name).

Nothing outside its directory is used but the programs, and nothing outlives it. Needs root, iproute2, and Debian's
munge, slurmctld, slurmd and slurm-client.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import netns
from harness import SLOWNESS, name_of, wait_for
from netns import Host, net

__all__ = ["Cluster", "cluster", "missing"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")

CONF = """
ClusterName=test
SlurmctldHost=ctl({controller})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={directory}/munge.socket
SlurmctldPort=17000
SlurmdPort=17001
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/ctl.pid
SlurmctldLogFile={directory}/ctl.log
SlurmdSpoolDir={directory}/%n.spool
SlurmdPidFile={directory}/%n.pid
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
SlurmdTimeout=5
ReturnToService=2
MailProg=/bin/true
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=100
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str:
    """Return what this machine lacks to run Slurm, or nothing."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"needs {', '.join(lacking)} for Slurm" if lacking else netns.missing()


class Cluster:
    """A running cluster of nodes ``n1``, ``n2`` and so on.

    Attributes:
        controller: the host of slurmctld, on which commands are run, too.
        env: the environment of commands and jobs.
    """

    def __init__(self, directory: Path, controller: Host, hosts: Mapping[str, Host]) -> None:
        self.directory = directory
        self.controller = controller
        self.hosts = hosts
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PYTEST"))}
        self.env = {**own, "SLURM_CONF": str(directory / "slurm.conf"), "PATH": path, **controller.env}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        nodes = "\n".join(f"NodeName={name} NodeAddr={host.address} CPUs=8" for name, host in self.hosts.items())
        conf = CONF.format(directory=self.directory, controller=self.controller.address, nodes=nodes)
        (self.directory / "slurm.conf").write_text(conf)
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not used, but looked for
        lines = [f"{host.address} {name}\n" for name, host in {"ctl": self.controller, **self.hosts}.items()]
        (self.directory / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        (self.directory / "state").mkdir()
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{name}={self.directory}/munge.{end}" for name, end in files.items()]
        self._run("munged", ["munged", "--foreground", "--force", f"--key-file={key}", *options])
        wait_for("munged", (self.directory / "munge.socket").exists)
        self._run("ctl", [*self._on("ctl", self.controller), "slurmctld", "-D"])
        for name in self.hosts:
            self.start_node(name)
        wait_for("idle nodes", lambda: self.states() == dict.fromkeys(self.hosts, "idle"))

    def start_node(self, name: str) -> None:
        """Start a node's slurmd."""
        self._run(name, [*self._on(name, self.hosts[name]), "slurmd", "-D", "-N", name])

    def kill_node(self, name: str) -> None:
        """End all processes of a node at once, as a loss of power does."""
        netns.kill_all(self.hosts[name].name)
        self._daemons[name].wait(10)

    def kill_agent(self, name: str) -> None:
        """Kill the agent on a node, which srun has started, and leave the rest to itself."""
        pids = map(int, netns.ip("netns", "pids", self.hosts[name].name).split())
        (agent,) = [pid for pid in pids if name_of(parent(pid)) == "slurmstepd" and "elastic" in arguments(pid)]
        os.kill(agent, signal.SIGKILL)

    def states(self) -> dict[str, str]:
        """The states of the nodes, without their flags."""
        lines = self.command("sinfo", "--noheader", "--Node", "--partition=low", "--format=%N %t", check=False)
        return {name: state.rstrip("*~#$@^-") for name, state in (line.split() for line in lines.splitlines())}

    def command(self, *arguments: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Run a command on the controller's host, and return its stdout."""
        command = [*self.controller.prefix, *arguments]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=30 * SLOWNESS,
            env={**self.env, **(env or {})},
            cwd=self.directory,
        )
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a batch script; return the job's number."""
        return self.command("sbatch", "--parsable", *arguments, env=env).strip()

    def show(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job, by name."""
        shown = self.command("scontrol", "--oneliner", "show", "job", job, check=False)
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def reaches(self, job: str, *states: str, timeout: float = 60.0) -> str:
        """Wait until a job is in one of the states, and return it."""

        def probe() -> str:
            state = self.show(job).get("JobState", "")
            return state if state in states else ""

        try:
            return wait_for(f"job {job} to be {' or '.join(states)}", probe, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.show(job)}\n{self.logs()}") from None

    def ends(self, job: str, timeout: float = 60.0) -> str:
        """Wait for the end of a job, and return its state."""
        return self.reaches(job, *ENDED, timeout=timeout)

    def logs(self) -> str:
        """The outputs of all jobs, and the end of the controller's log."""
        texts = {path.name: path.read_text(errors="replace") for path in sorted(self.directory.glob("*.out"))}
        texts["ctl.log"] = (self.directory / "ctl.log").read_text(errors="replace")[-3000:]
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items())

    def close(self) -> None:
        """End the daemons; the processes of jobs end with their hosts."""
        for daemon in self._daemons.values():
            daemon.kill()
        for daemon in self._daemons.values():
            daemon.wait(10)

    def _on(self, name: str, host: Host) -> list[str]:
        """A prefix that runs a command on a host that has its own name, and knows those of the others."""
        inside = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        network = ["nsenter", f"--net=/run/netns/{host.name}", "unshare", "--uts", "--mount"]
        return [*network, "sh", "-c", inside, name, str(self.directory / "hosts")]

    def _run(self, name: str, command: list[str]) -> None:
        with (self.directory / f"{name}.daemon").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env, start_new_session=True
            )


def parent(pid: int) -> int:
    """Return a process' parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def arguments(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


@contextlib.contextmanager
def cluster(directory: Path, size: int) -> Iterator[Cluster]:
    """Start a cluster whose nodes are idle; kill everything at the end."""
    with net(size + 1) as (controller, *others):
        made = Cluster(directory, controller, {f"n{number}": host for number, host in enumerate(others, 1)})
        try:
            made.start()
            yield made
        finally:
            made.close()

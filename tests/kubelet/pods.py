"""The kubelet, for one pod with one container and its init containers: start, probes, restarts, end.

As documented in https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/ (container restarts, termination,
probes), https://kubernetes.io/docs/concepts/containers/container-lifecycle-hooks/ and
https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/ (termination message).

The container's root, Python and project code are this host's instead of an image's. So the container runs as root,
whatever user the manifest asks for, and its resources are not limited.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from netns import Host

from kubelet.manifests import Manifest
from kubelet.probes import Probe

__all__ = ["Pod", "PodFiles", "container_environment"]

ENTER = Path(__file__).with_name("enter.sh")

BACK_OFF, LONGEST_BACK_OFF = 10.0, 300.0
"""Seconds before a container is restarted: the initial value, doubled each time, and the maximum."""

NODE_LOST = 340.0
"""Seconds until the pods of a silent node are deleted: 40 until it counts as unreachable, 300 of toleration."""

EXTENSION = 2.0
"""Seconds that a container gets beyond the grace period if its preStop hook used all of it."""

IMAGE = {
    "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    "HOME": "/tmp",
}
"""The environment that an image would define."""

PROGRAMS = {str(Path(place).resolve()) for place in (sys.prefix, sys.base_prefix, Path(__file__).parents[2])}
"""Directories that an image would contain; a container has its own /tmp, in which these may lie."""


@dataclass(frozen=True)
class PodFiles:
    """The objects of a cluster that a pod uses.

    Attributes:
        volumes: a directory for each of the template's volumes, by its name.
        secrets: the keys of each secret.
    """

    volumes: dict[str, Path]
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)


def container_environment(container: Manifest, metadata: Manifest, address: str, files: PodFiles) -> dict[str, str]:
    """Return a container's environment: the image's and what the manifest adds, with the pod's own fields filled in."""
    env = dict(IMAGE)
    fields = {"metadata.name": metadata["name"], "metadata.namespace": "default", "status.podIP": address}
    for kind in ("labels", "annotations"):
        fields |= {f"metadata.{kind}['{key}']": text for key, text in metadata[kind].items()}
    for source in container.get("envFrom", ()):
        secret = source["secretRef"]
        assert secret.get("optional") or secret["name"] in files.secrets, f"CreateContainerConfigError: {secret}"
        env |= files.secrets.get(secret["name"], {})
    for entry in container.get("env", ()):
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            env[entry["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            secret = source["secretKeyRef"]
            found = files.secrets.get(secret["name"], {}).get(secret["key"])
            assert found is not None or secret.get("optional"), f"CreateContainerConfigError: {secret}"
            env |= {} if found is None else {entry["name"]: found}
        else:
            env[entry["name"]] = _expanded(entry.get("value", ""), env)
    return env


def _expanded(text: str, env: dict[str, str]) -> str:
    return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda found: env.get(found[1], found[0]), text)


class Pod:
    """A pod on its own host.

    Args:
        template: the spec of the pod's template.
        metadata: name, labels and annotations.
        domain: what follows the host name in the pod's full name, or nothing.
        directory: for the pod's files.
        nameserver: the cluster's DNS.
        haste: factor by which it backs off faster than Kubernetes.
    """

    def __init__(
        self,
        template: Manifest,
        metadata: Manifest,
        hostname: str,
        domain: str,
        host: Host,
        directory: Path,
        files: PodFiles,
        nameserver: str,
        haste: float = 100.0,
    ) -> None:
        (self._container,) = template["containers"]
        self._template, self.metadata = template, metadata
        self.hostname, self.domain, self.host = hostname, domain, host
        self._directory, self._files, self._haste = directory, files, haste
        self.env = container_environment(self._container, metadata, host.address, files)
        self._before = list(template.get("initContainers", ()))  # init containers that have not ended
        self.exit_code: int | None = None
        """The container's exit code, once the pod has ended."""
        self.disrupted = False
        """Whether it has the condition DisruptionTarget."""
        self.restarts = 0
        self.events: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._hook: subprocess.Popen[bytes] | None = None
        self._restart_at = 0.0
        self._ends_at = 0.0  # when SIGKILL is due, once the pod is being ended
        self._killed = False
        self._told = False  # whether SIGTERM was sent
        self._lost_at = 0.0  # when all components have learned that its node is lost
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "log"
        self._message = directory / "termination-log"
        self._message.touch()
        names = f"{hostname}.{domain}\t{hostname}" if domain else hostname
        (directory / "hosts").write_text(f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{host.address}\t{names}\n")
        search = "default.svc.cluster.local svc.cluster.local cluster.local"
        (directory / "resolv").write_text(f"search {search}\nnameserver {nameserver}\noptions ndots:5\n")
        self._start()

    @property
    def message(self) -> str:
        """The text that ``kubectl describe pod`` shows about the container's end."""
        return self._message.read_text()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def ready(self) -> bool:
        """Whether the pod has the condition Ready."""
        return self.running and self._probes["readiness"].good

    @property
    def running(self) -> bool:
        """Whether its container runs, undisturbed so far."""
        runs = self._process is not None and self._process.poll() is None and not self._before
        return runs and self.exit_code is None and not self._ends_at and not self._lost_at and not self._killed

    @property
    def init(self) -> int:
        """The pid of the container's process 1 on this host; 0 before it exists."""
        assert self._process is not None
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
            return int(children[0]) if children else 0
        return 0

    def catches(self, number: signal.Signals) -> bool:
        """Whether process 1 has a handler for a signal: without one it does not receive it (pid_namespaces(7))."""
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{self.init}/status").read_text().splitlines()  # see proc_pid_status(5)
            return any(int(line.split()[1], 16) >> (number - 1) & 1 for line in lines if line.startswith("SigCgt:"))
        return False

    def _start(self) -> None:
        container, env = self._container, self.env
        if self._before:
            container = self._before[0]
            env = container_environment(container, self.metadata, self.host.address, self._files)
        words = [*container["command"], *container.get("args", ())]
        command = [_expanded(text, env) for text in words]
        mounts = []
        for mount in container.get("volumeMounts", ()):
            mode = "ro" if mount.get("readOnly") else "rw"
            mounts += [str(self._files.volumes[mount["name"]]), mount["mountPath"], mode]
        mounts += [word for place in sorted(PROGRAMS) if place.startswith("/tmp/") for word in (place, place, "rw")]
        access = "ro" if container.get("securityContext", {}).get("readOnlyRootFilesystem") else "rw"
        root = self._directory / "root"
        root.mkdir(exist_ok=True)
        own = [str(self._directory / name) for name in ("hosts", "resolv", "termination-log")]
        enter = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "sh", str(ENTER), str(root), access]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.host.prefix, *enter, self.hostname, *own, *mounts, "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.DEVNULL,  # unshare's own message; the container's stderr goes with its stdout
                env=env,
                cwd="/",
                start_new_session=True,
            )
        self._killed = False
        self._probes = {
            kind: Probe(self._container.get(f"{kind}Probe"), self._container, self.host)
            for kind in ("startup", "liveness", "readiness")
        }

    # Actions on the pod.

    def terminate(self, *, disrupted: bool = False) -> None:
        """End it as a deleted pod is ended: preStop hook, SIGTERM, and SIGKILL after the grace period."""
        if self._ends_at:
            return
        self.disrupted = disrupted
        self._ends_at = time.monotonic() + self._template["terminationGracePeriodSeconds"]
        hook = self._container.get("lifecycle", {}).get("preStop")
        if hook is not None and self._process is not None:
            inside = ["nsenter", "--target", str(self.init), "--mount", "--uts", "--net", "--pid", "--root", "--wd"]
            self._hook = subprocess.Popen(
                [*inside, *hook["exec"]["command"]], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=self.env
            )

    def lose(self) -> None:
        """Lose its node: it falls silent at once, closes nothing, and is declared lost later."""
        self.host.cut()
        self.disrupted = True
        self._kill()
        self._lost_at = time.monotonic() + NODE_LOST / self._haste

    def crash(self) -> None:
        """Kill the container, as when out of memory; the kernel closes its connections."""
        self._kill()

    def _kill(self) -> None:
        assert self._process is not None
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init or self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End everything at once."""
        for process in (self._process, self._hook):
            if process is not None and process.poll() is None:
                process.kill()  # and with it the container: unshare --kill-child
            if process is not None:
                process.wait()

    # Consequences.

    def turn(self) -> None:
        """Check once, and do what is due."""
        if self.exit_code is not None:
            return
        if self._lost_at:
            if time.monotonic() >= self._lost_at:
                self.exit_code = 137
            return
        if self._process is None:
            if time.monotonic() >= self._restart_at:
                self._start()
            return
        if (code := self._process.poll()) is not None:
            # unshare cannot end by the SIGKILL that ended its child, and says 1.
            self._ended(137 if self._killed else code)
        elif self._ends_at:
            self._end()
        else:
            self._probe()

    def _ended(self, code: int) -> None:
        if self._before and code == 0 and not self._ends_at:
            del self._before[0]
            self._start()
            return
        policy = self._template.get("restartPolicy", "Always")
        again = policy == "Always" or (policy == "OnFailure" and code != 0)
        if self._hook is not None and self._hook.poll() is None:
            self._hook.kill()  # it ends with the container
            self._hook.wait()
        if not again or self._ends_at or self.disrupted:
            self.exit_code = code
            return
        self._process = None
        self._restart_at = time.monotonic() + min(BACK_OFF * 2**self.restarts, LONGEST_BACK_OFF) / self._haste
        self.restarts += 1
        self.events.append(f"Back-off restarting failed container, exit code {code}")

    def _end(self) -> None:
        over = time.monotonic() >= self._ends_at
        if self._hook is not None and self._hook.poll() is None and not over:
            return
        if not self._told:
            self._told = True
            if self._hook is not None and (self._hook.poll() or over):
                self.events.append("FailedPreStopHook")
            if over:
                self._ends_at += EXTENSION
            if init := self.init:
                os.kill(init, signal.SIGTERM)
        elif over:
            self._kill()

    def _probe(self) -> None:
        if self._before:
            return
        startup, liveness, readiness = (self._probes[kind] for kind in ("startup", "liveness", "readiness"))
        startup.turn()
        if startup.good:
            liveness.turn()
            readiness.turn()
        for kind, probe in (("startup", startup), ("liveness", liveness)):
            if probe.failed:
                self.events.append(f"Unhealthy: {kind} probe failed: {probe.found}")
                self._kill()


def metadata_of(job: str, uid: str, index: int, suffix: str) -> dict[str, Any]:
    """Return what the job controller writes into a pod's metadata."""
    at = {"batch.kubernetes.io/job-completion-index": str(index)}
    labels = {"batch.kubernetes.io/job-name": job, "batch.kubernetes.io/controller-uid": uid, **at}
    labels["training.kubeflow.org/job-name"] = job.removesuffix("-worker")  # set by the training operator only
    return {"name": f"{job}-{index}-{suffix}", "labels": labels, "annotations": at}

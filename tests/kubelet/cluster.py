"""A cluster with one node per pod: network, DNS, volumes, and the job that runs in it."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from harness import SLOWNESS
from netns import Host, Net, ip

from kubelet.dns import Dns
from kubelet.jobs import IndexedJob
from kubelet.manifests import Manifest, find
from kubelet.pods import Pod, PodFiles, metadata_of
from kubelet.probes import inside

__all__ = ["UID", "Cluster", "cluster"]

NAMESERVER = "10.77.0.254"
DOMAIN = "default.svc.cluster.local"
SECRETS = {
    "train": {"token": "0123456789abcdef0123456789abcdef"},
    "etcd": {"root-password": "of-root", "password": "of-the-run"},
}
"""The secrets that docs/how-to/kubernetes.md tells the user to create."""
UID = "7d0c5a2e-1f0b-4a63-9d1c-0c7a1f5e2b64"

T = TypeVar("T")


class Cluster:
    """Runs the job of some manifests, with its service, its script and its volume.

    Args:
        manifests: as rendered.
        directory: for all files.
    """

    def __init__(self, net: Net, manifests: list[Manifest], directory: Path) -> None:
        self._net, self._manifests, self._directory = net, manifests, directory
        self.claims = directory / "claims"
        """The content of the persistent volumes, by the name of the claim."""
        self._numbers = itertools.count(1)
        self.pods: list[Pod] = []
        """All pods that have existed."""
        self.kept: list[Pod] = []
        """The pods of stateful sets, which are never replaced here, only restarted."""
        self._removed: list[Host] = []
        job = find(manifests, "Job")
        self._indexed = "batch/v1" in job.get("apiVersion", "")
        self._job, self._template = job, job["spec"]["template"]["spec"]
        self.job = IndexedJob(job["spec"], self._create)
        ip("-n", net.switch, "addr", "add", f"{NAMESERVER}/24", "dev", "bridge0")
        listener = inside(net.switch, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        listener.bind((NAMESERVER, 53))
        self._dns = Dns(listener, self._addresses)
        for manifest in manifests:
            if manifest["kind"] == "StatefulSet":
                self._keep(manifest)

    def close(self) -> None:
        for pod in (*self.pods, *self.kept):
            pod.close()
        self._dns.close()

    def _addresses(self, name: str) -> list[str]:
        """Called from the DNS thread."""
        # Without a domain each pod has its own service, as Kubeflow's training operator creates them.
        pods = [*self.job.pods.values(), *self.kept]
        return [pod.host.address for pod in pods if name == f"{pod.hostname}.{pod.domain or DOMAIN}"]

    def _keep(self, manifest: Manifest) -> None:
        """Start the pods of a stateful set, all at once; each has its own volume."""
        name, spec = manifest["metadata"]["name"], manifest["spec"]
        assert spec["podManagementPolicy"] == "Parallel"
        template = {"terminationGracePeriodSeconds": 30, **spec["template"]["spec"]}
        for index in range(spec["replicas"]):
            metadata = {"name": f"{name}-{index}", "annotations": {}, **spec["template"]["metadata"]}
            claims = [claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]]
            volumes = {claim: self.claims / f"{claim}-{metadata['name']}" for claim in claims}
            for path in volumes.values():
                path.mkdir(parents=True)
            domain, directory = f"{spec['serviceName']}.{DOMAIN}", self._directory / metadata["name"]
            where = (self._net.add(), directory, PodFiles(volumes), NAMESERVER)
            self.kept.append(Pod(template, metadata, metadata["name"], domain, *where))

    def _create(self, index: int) -> Pod:
        name = self._job["metadata"]["name"]
        metadata = metadata_of(name, UID, index, f"n{next(self._numbers)}")
        container = self._template["containers"][0]
        # For an indexed job only; first, so that other variables can refer to it.
        env = [{"name": "JOB_COMPLETION_INDEX", "value": str(index)}] if self._indexed else []
        template = self._template | {"containers": [container | {"env": [*env, *container.get("env", ())]}]}
        service = self._template.get("subdomain")
        directory = self._directory / metadata["name"]
        pod = Pod(
            template,
            metadata,
            f"{name}-{index}",
            f"{service}.{DOMAIN}" if service else "",
            self._net.add(),
            directory,
            PodFiles(
                {volume["name"]: self._volume(volume, directory) for volume in template.get("volumes", ())}, SECRETS
            ),
            NAMESERVER,
        )
        self.pods.append(pod)
        return pod

    def _volume(self, volume: Manifest, directory: Path) -> Path:
        if "configMap" in volume:
            path = directory / f"volume-{volume['name']}"
            path.mkdir(parents=True, exist_ok=True)
            maps = [m for m in self._manifests if m["kind"] == "ConfigMap"]
            (data,) = [m["data"] for m in maps if m["metadata"]["name"] == volume["configMap"]["name"]]
            for file, text in data.items():
                (path / file).write_text(text)
            return path
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        path = self.claims / claim if claim else directory / f"volume-{volume['name']}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def until(self, what: str, probe: Callable[[], T], timeout: float = 60.0) -> T:
        """Run the cluster until something is true, and return it."""
        timeout *= SLOWNESS
        deadline = time.monotonic() + timeout
        while True:
            self._turn()
            if value := probe():
                return value
            assert time.monotonic() < deadline, f"not seen within {timeout:g} s: {what}\n{self.outputs()}"
            time.sleep(0.02)

    def _turn(self) -> None:
        self.job.turn()
        for pod in self.kept:
            pod.turn()
        for pod in self.pods:
            if pod.exit_code is not None and pod.host not in self._removed:
                self._removed.append(pod.host)
                self._net.remove(pod.host)

    def outputs(self) -> str:
        pods = (*self.pods, *self.kept)
        told = [(pod.metadata["name"], pod.exit_code, pod.events, pod.output[-8000:]) for pod in pods]
        return "\n".join(f"--- {name} {code} {events}\n{output}" for name, code, events, output in told)


@contextlib.contextmanager
def cluster(manifests: list[Manifest], directory: Path) -> Iterator[Cluster]:
    """Make a cluster; nothing outlives it."""
    net = Net()
    try:
        net.open(0)
        made: Any = Cluster(net, manifests, directory)
        try:
            yield made
        finally:
            made.close()
    finally:
        net.close()

"""Defaults in a pod of an indexed Kubernetes job: the endpoint, the run id, and the node id.

Such pods have the variable ``JOB_COMPLETION_INDEX`` and the host name ``<job>-<index>``. With a headless service as the
template's ``subdomain``, the kubelet writes ``<job>-<index>.<service>.<namespace>.svc.<cluster domain>`` before it in
the pod's /etc/hosts, and the cluster's DNS resolves the corresponding names of the other pods
(https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode,
https://kubernetes.io/docs/concepts/services-networking/dns-pod-service/). Pods of JobSet and Kubeflow Trainer are such
pods, too.

Pod 0 hosts the run because of its index, not because it can bind the address: an address that DNS still returns for a
former pod 0 may by now belong to another pod. For the same reason, a pod is not a voter if the endpoints name only
other pods of its job.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_launch.cli.flags import Sourced, Values
from elastic_launch.cli.rendezvous_flags import asked_backend
from elastic_launch.config.backends import kind_of
from elastic_launch.config.endpoints import PORT
from elastic_launch.config.launch_config import parse_nnodes
from elastic_launch.errors import UsageError

ENV_INDEX = "JOB_COMPLETION_INDEX"

_TOLD = ("--rdzv-endpoint", "--rdzv-id", "--node-id")
"""The flags that are reported, in this order."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of an indexed job, by its names.

    Attributes:
        domain: the domain of all pods of the job, or empty without a headless service.
    """

    index: int
    job: str
    domain: str

    @classmethod
    def of(cls, index: str, name: str) -> Pod | None:
        """Parse a pod's full host name; None if it does not belong to an indexed job."""
        host, _, domain = name.partition(".")
        job = host.removesuffix(f"-{index}")
        return cls(int(index), job, domain) if index.isdecimal() and job not in ("", host) else None

    @property
    def endpoint(self) -> str:
        """The address at which pod 0 hosts the run, or empty if it cannot be found."""
        return f"{self.job}-0.{self.domain}:{PORT}" if self.domain else ""


def full_name() -> str:
    """Return this host's name with its domain, if /etc/hosts or DNS has one."""
    name = socket.gethostname()
    if "." in name:  # setHostnameAsFQDN
        return name
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME)[0][3]
    except OSError:
        return name
    return found if found.startswith(f"{name}.") else name


def found_out(values: Values, name: str | None = None) -> Mapping[str, Sourced]:
    """Return defaults for unset flags, by flag name, derived from this pod's names; empty outside of such a pod.

    Args:
        name: this host's full name; None to look it up.
    """
    index = values.environ.get(ENV_INDEX, "")
    if not index.isdecimal() or not _meets_by_itself(values):
        return {}
    name = name or full_name()
    pod = Pod.of(index, name)
    endpoint = values.text("--rdzv-endpoint")
    elected = kind_of(asked_backend(values), 1 + (endpoint or "").count(",")).elected
    if endpoint is None and not elected and (pod is None or not pod.endpoint):
        raise UsageError(
            f"{ENV_INDEX}={index} says that this pod is one of several, but its host name, {name}, does not tell "
            "where pod 0 is: that takes JOB-INDEX.SERVICE.",
            "Give the pod template the name of a headless service as subdomain, or name the endpoint by "
            "--rdzv-endpoint.",
        )
    if pod is None:
        return {}
    source = f"{ENV_INDEX}={index} of {name}"
    told = {"--node-id": f"{pod.job}-{index}"}
    if endpoint is None and not elected:
        hosts = "true" if pod.index == 0 else "false"
        told |= {"--rdzv-endpoint": pod.endpoint, "--rdzv-id": pod.job, "--rdzv-conf": f"is_host={hosts}"}
    elif endpoint is not None and _is_of_others(pod, endpoint):
        told["--rdzv-conf"] = "is_host=false"
    return {flag: Sourced(text, source) for flag, text in told.items()}


def _is_of_others(pod: Pod, endpoint: str) -> bool:
    """Whether several endpoints name pods of this pod's job, but not this one."""
    hosts = {part.strip().partition(":")[0].partition(".")[0] for part in endpoint.split(",")}
    named = {host for host in hosts if host.startswith(f"{pod.job}-") and host.rpartition("-")[2].isdecimal()}
    return len(hosts) > 1 and bool(named) and f"{pod.job}-{pod.index}" not in named


def _meets_by_itself(values: Values) -> bool:
    """Whether this is one of several nodes on one of this project's backends, without fixed ranks."""
    if values.switch("--standalone") or parse_nnodes(values.text("--nnodes") or "1:1")[1] < 2:
        return False
    kind = kind_of(asked_backend(values))
    return kind.own and not kind.fixed_ranks


def sentence(values: Values) -> str:
    """Return a sentence on the derived values, or an empty string."""
    told = [name for name in _TOLD if (values.origin(name) or "").startswith(f"{ENV_INDEX}=")]
    if not told:
        return ""
    given = ", ".join(f"{name} {values.text(name)}" for name in told)
    return f"{values.origin(told[0])} gives {given}{'; pod 0 hosts' if '--rdzv-endpoint' in told else ''}"

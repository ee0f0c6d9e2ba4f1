"""What operators create from their resources: pods with names and variables, here as a job and its service.

Trainer 2: https://www.kubeflow.org/docs/components/trainer/operator-guides/ml-policy and its torch plugin; JobSet's
names: https://jobset.sigs.k8s.io/docs/concepts. Training operator 1.9: what its controller of PyTorchJobs sets.
"""

from __future__ import annotations

import copy

from kubelet.manifests import Manifest, find

__all__ = ["as_jobset", "as_trainer", "as_training_operator"]


def as_jobset(manifests: list[Manifest], nodes: int) -> list[Manifest]:
    """Return what a JobSet with one job of this many nodes creates; its service has its name."""
    found = copy.deepcopy(find(manifests, "JobSet"))
    name, (replicated,) = found["metadata"]["name"], found["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    assert found["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    spec = replicated["template"]["spec"] | {"completions": nodes, "parallelism": nodes}
    spec["template"]["spec"]["subdomain"] = name
    return [*_maps(manifests), _job(f"{name}-{replicated['name']}-0", spec, "batch/v1")]


def as_trainer(manifests: list[Manifest], nodes: int) -> list[Manifest]:
    """Return what a TrainJob of this many nodes creates, with the TrainingRuntime that it names."""
    train, runtime = find(manifests, "TrainJob"), copy.deepcopy(find(manifests, "TrainingRuntime"))
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    name = train["metadata"]["name"]
    spec = replicated["template"]["spec"] | {"completions": nodes, "parallelism": nodes}
    spec["template"]["spec"]["subdomain"] = name
    _add(
        spec,
        PET_NNODES=str(nodes),
        PET_NPROC_PER_NODE=str(train["spec"]["trainer"]["numProcPerNode"]),
        PET_NODE_RANK="$(JOB_COMPLETION_INDEX)",
        PET_MASTER_ADDR=f"{name}-{replicated['name']}-0-0.{name}",
        PET_MASTER_PORT="29500",
    )
    return [*_maps(manifests), _job(f"{name}-{replicated['name']}-0", spec, "batch/v1")]


def as_training_operator(manifests: list[Manifest], nodes: int) -> list[Manifest]:
    """Return what a PyTorchJob with the restart policy ExitCode and this many workers creates."""
    train = copy.deepcopy(find(manifests, "PyTorchJob"))
    name, spec = train["metadata"]["name"], train["spec"]
    worker, elastic = spec["pytorchReplicaSpecs"]["Worker"], spec["elasticPolicy"]
    assert worker["restartPolicy"] == "ExitCode"
    template = worker["template"]
    template["spec"]["restartPolicy"] = "Never"
    (container,) = template["spec"]["containers"]
    (port,) = [port["containerPort"] for port in container["ports"] if port["name"] == "pytorchjob-port"]
    permanent = {"operator": "In", "values": list(range(1, 128))}
    job = {
        "completionMode": "Indexed",
        "completions": nodes,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": permanent}]},
        "backoffLimitPerIndex": 100,
        "maxFailedIndexes": 0,
        "template": template,
    }
    _add(
        job,
        PYTHONUNBUFFERED="1",
        PET_RDZV_ENDPOINT=f"{name}-worker-0:{port}",
        PET_RDZV_BACKEND=elastic["rdzvBackend"],
        PET_NNODES=f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
        PET_MAX_RESTARTS=str(elastic["maxRestarts"]),
        PET_NPROC_PER_NODE=spec["nprocPerNode"],
    )
    return [*_maps(manifests), _job(f"{name}-worker", job, "")]


def _job(name: str, spec: Manifest, version: str) -> Manifest:
    return {"apiVersion": version, "kind": "Job", "metadata": {"name": name}, "spec": spec}


def _maps(manifests: list[Manifest]) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == "ConfigMap"]


def _add(job: Manifest, **variables: str) -> None:
    (container,) = job["template"]["spec"]["containers"]
    container["env"] = [*container["env"], *({"name": name, "value": text} for name, text in variables.items())]

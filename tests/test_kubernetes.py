"""Tests of the manifests in ``examples/kubernetes``, and of their documentation."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubelet.jobs import IndexedJob, decide
from kubelet.manifests import EXAMPLES, RENDERED, VERSIONS, Manifest, documents, find, judge, pod_of, rendered

from elastic_launch.cli.main import parse
from elastic_launch.errors import ExitCode

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "kubernetes.md"
TRAINING = ("Job", "JobSet", "TrainingRuntime", "PyTorchJob")
PARTS = ("kustomization.yaml", "images.yaml", "components/*/job.yaml", "overlays/*/job.yaml")
WHOLE = sorted(
    str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.yaml") if not any(path.match(part) for part in PARTS)
)
"""Files that hold whole objects, not patches of some."""

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl to render")


def job() -> Manifest:
    (found,) = documents(EXAMPLES / "base" / "job.yaml")
    return found


def training_pods() -> list[Manifest]:
    found = [manifest for file in WHOLE for manifest in documents(EXAMPLES / file)]
    return [pod_of(manifest) for manifest in found if manifest["kind"] in TRAINING]


def variables(container: Manifest) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "from-elsewhere") for entry in container["env"]}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", WHOLE)
def test_each_file_fits_the_schemas(file: str, version: str) -> None:
    for manifest in documents(EXAMPLES / file):
        judge(manifest, version)


@needs_kubectl
@pytest.mark.parametrize("directory", RENDERED)
def test_what_would_be_applied_fits_the_schemas(directory: str) -> None:
    """Patches apply where intended: the sum of grace and timeout is right, and every image is named."""
    manifests = rendered(directory)
    for manifest in manifests:
        for version in VERSIONS:
            judge(manifest, version)
    for pod in (pod_of(manifest) for manifest in manifests if manifest["kind"] in TRAINING):
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["image"] == "elastic-launch:latest"
        assert_grace_suffices(pod)
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


@needs_kubectl
def test_overlays_change_what_they_are_for() -> None:
    bare = pod_of(find(rendered("base"), "Job"))
    assert "nodeSelector" not in bare
    assert "CHECKPOINT" not in variables(bare["containers"][0])
    places = {
        "gke": ("cloud.google.com/gke-spot", "gs://"),
        "eks": ("eks.amazonaws.com/capacityType", "s3://"),
        "aks": ("kubernetes.azure.com/scalesetpriority", "/checkpoints/"),
    }
    for cloud, (label, where) in places.items():
        pod = pod_of(find(rendered(f"overlays/{cloud}"), "Job"))
        assert [*pod["nodeSelector"]] == [toleration["key"] for toleration in pod["tolerations"]] == [label]
        assert variables(pod["containers"][0])["CHECKPOINT"].startswith(where)
    on_etcd = find(rendered("overlays/etcd"), "Job")["spec"]
    assert "successPolicy" not in on_etcd
    assert variables(on_etcd["template"]["spec"]["containers"][0])["PET_RDZV_BACKEND"] == "etcd"


@needs_kubectl
def test_the_voters_are_pods_of_the_job_that_find_each_other() -> None:
    manifests = rendered("overlays/voters")
    job, service = find(manifests, "Job"), find(manifests, "Service")["metadata"]["name"]
    (container,) = pod_of(job)["containers"]
    config = parse([*container["args"][:-1], __file__], {**variables(container), "ELASTIC_LAUNCH_TOKEN": "0" * 16})
    names = [f"{job['metadata']['name']}-{index}.{service}" for index in range(3)]
    assert [(endpoint.host, endpoint.port) for endpoint in config.endpoints] == [(name, 29400) for name in names]
    assert job["spec"]["completions"] >= 3
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededCount": 1}]}


@needs_kubectl
@pytest.mark.parametrize("directory", ["overlays/kueue-elastic", "overlays/kueue-partial"])
def test_kueue_would_admit_the_jobs(directory: str) -> None:
    """By the rules of its webhook for jobs, which no schema has."""
    found = find(rendered(directory), "Job")
    spec, notes = found["spec"], found["metadata"]["annotations"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert ("kueue.x-k8s.io/elastic-job" in notes) is not ("kueue.x-k8s.io/job-min-parallelism" in notes)
    limits = parse([*pod_of(found)["containers"][0]["args"][:-1], __file__], {"PET_RDZV_ENDPOINT": "a:1"}).limits
    if "partial" in directory:
        assert limits.min_nodes == int(notes["kueue.x-k8s.io/job-min-parallelism"]) < spec["parallelism"]
        assert spec["maxFailedIndexes"] <= limits.min_nodes, "it must not exceed the completions of the smallest job"
    _, of_cluster, of_namespace = documents(EXAMPLES / "queues" / "queues.yaml")
    assert found["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": of_namespace["metadata"]["name"]}
    (group,) = of_cluster["spec"]["resourceGroups"]
    assert {*pod_of(found)["containers"][0]["resources"]["requests"]} <= {*group["coveredResources"]}


def patched(manifest: Any, patch: Any) -> Any:
    """Apply a merge patch, or a JSON patch of replacements."""
    if isinstance(patch, dict):
        base = manifest if isinstance(manifest, dict) else {}
        return base | {key: patched(base.get(key), value) for key, value in patch.items()}
    if isinstance(manifest, dict):
        for step in patch:
            *where, last = step["path"].strip("/").split("/")
            inner = manifest
            for key in where:
                inner = inner[int(key) if isinstance(inner, list) else key]
            assert step["op"] == "replace"
            assert last in inner
            inner[last] = step["value"]
        return manifest
    return patch


def resizes() -> list[tuple[str, str]]:
    """The kind and the patch of each command on the page that changes a number of pods."""
    commands = re.findall(r"^kubectl patch [^'\n]*'[^']*'", PAGE.read_text(), re.MULTILINE)
    found = [shlex.split(command) for command in commands]
    return [(words[2], words[-1]) for words in found]


@pytest.mark.parametrize(("kind", "patch"), resizes())
def test_the_commands_that_resize_a_job_change_both_numbers_alike(kind: str, patch: str) -> None:
    """An indexed job's completions can only be changed together with its parallelism, and to the same number."""
    file = {"job": "base/job.yaml", "jobset": "jobset/jobset.yaml"}[kind]
    (before,), (manifest,) = documents(EXAMPLES / file), documents(EXAMPLES / file)
    after = patched(manifest, json.loads(patch))
    for version in VERSIONS:
        judge(after, version)

    def of_job(found: Manifest) -> Manifest:
        spec = found["spec"]
        return dict(spec["replicatedJobs"][0]["template"]["spec"] if kind == "jobset" else spec)

    numbers = {"completions", "parallelism"}
    assert of_job(after)["completions"] == of_job(after)["parallelism"] != of_job(before)["parallelism"]
    assert {k: v for k, v in of_job(after).items() if k not in numbers} == {
        k: v for k, v in of_job(before).items() if k not in numbers
    }


def test_the_page_resizes_jobs_and_jobsets() -> None:
    assert {kind for kind, _ in resizes()} == {"job", "jobset"}


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("base/job.yaml", ("spec", "completionsMode"), "Indexed"),
        ("base/job.yaml", ("spec", "template", "spec", "containers", 0, "livenessProbe", "path"), "/livez"),
        ("jobset/jobset.yaml", ("spec", "replicatedJobs", 0, "template", "spec", "subdomain"), "train"),
        ("trainjob/trainjob.yaml", ("spec", "trainer", "numNode"), 4),
        ("trainjob/trainjob.yaml", ("spec", "trainer", "env"), [{"name": "PET_NNODES", "value": "4"}]),
        ("trainjob/runtime.yaml", ("spec", "template", "spec", "replicatedJobs", 0, "replica"), 1),
        ("pytorchjob/pytorchjob.yaml", ("spec", "elasticPolicy", "minNodes"), 2),
        ("trainjob/trainjob.yaml", ("spec", "trainer", "numProcPerNode"), "auto"),
        ("queues/queues.yaml", ("spec", "queue"), "train"),
    ],
)
def test_the_schemas_know_no_other_fields(file: str, path: tuple[str | int, ...], value: object) -> None:
    *_, manifest = documents(EXAMPLES / file)
    inner: Any = manifest
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        judge(manifest, VERSIONS[-1])


def all_pods() -> list[Manifest]:
    """Every pod that any file creates, including etcd's; for patches, what they contain."""
    files = [*WHOLE, *(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("components/*/job.yaml"))]
    found = [manifest for file in files for manifest in documents(EXAMPLES / file)]
    return [pod_of(manifest) for manifest in found if manifest["kind"] in (*TRAINING, "StatefulSet")]


@pytest.mark.parametrize("pod", all_pods())
def test_no_pod_has_rights_that_it_does_not_need(pod: Manifest) -> None:
    whole = "securityContext" in pod
    if whole:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
    for container in [*(pod["containers"] if whole else ()), *pod.get("initContainers", ())]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("pod", all_pods())
def test_a_secret_whose_name_is_misspelt_starts_no_pod_without_it(pod: Manifest) -> None:
    """Otherwise the run would be open to all."""
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        secrets = [entry["valueFrom"].get("secretKeyRef") for entry in container.get("env", ()) if "valueFrom" in entry]
        assert not any(secret.get("optional") for secret in secrets if secret)
    text = PAGE.read_text()
    for name in ("train", "etcd", "object-store"):
        assert f"kubectl create secret generic {name} " in text


@pytest.mark.parametrize("file", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_no_part_of_a_pod_is_optional(file: Path) -> None:
    """Patches, too: a pod without credentials for its bucket would train, and save nothing."""
    assert "optional:" not in file.read_text()


@pytest.mark.parametrize("pod", training_pods())
def test_a_run_has_the_id_of_what_made_it_and_a_token(pod: Manifest) -> None:
    env = {entry["name"]: entry.get("valueFrom", {}) for entry in pod["containers"][0]["env"]}
    label = env["PET_RDZV_ID"]["fieldRef"]["fieldPath"]
    of_operator = pod["containers"][0]["name"] == "pytorch"  # which gives its pods no uid of the job
    wanted = "training.kubeflow.org/job-name" if of_operator else "batch.kubernetes.io/controller-uid"
    assert label == f"metadata.labels['{wanted}']"
    assert env["ELASTIC_LAUNCH_TOKEN"]["secretKeyRef"] == {"name": "train", "key": "token"}
    assert env["PET_LOCAL_ADDR"]["fieldRef"] == {"fieldPath": "status.podIP"}


@needs_kubectl
@pytest.mark.parametrize("directory", [directory for directory in RENDERED if directory != "queues"])
def test_each_run_is_closed_to_pods_of_others(directory: str) -> None:
    manifests = rendered(directory)
    policies = {found["metadata"]["name"]: found["spec"] for found in manifests if found["kind"] == "NetworkPolicy"}
    spec = policies["train"]
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    metrics = {"from": [monitoring], "ports": [{"port": "http"}]}
    assert spec["ingress"] == [{"from": [{"podSelector": spec["podSelector"]}]}, metrics]
    assert set(spec["podSelector"]["matchLabels"].values()) == {"train"}
    assert ("etcd" in policies) is any(found["kind"] == "StatefulSet" for found in manifests)
    if "etcd" in policies:
        ports = [[port["port"] for port in rule["ports"]] for rule in policies["etcd"]["ingress"]]
        assert ports == [["client"], ["client", "peer"]]


def assert_grace_suffices(pod: Manifest) -> None:
    """The hook, the workers' grace and an agent's exit fit into the pod's grace period, which includes the hook."""
    (container,) = pod["containers"]
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [""])
    waits = sum(map(int, re.findall(r"\bsleep (\d+)", hook[-1])))
    assert waits + int(variables(container)["PET_SHUTDOWN_TIMEOUT"]) + 5 <= pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("pod", training_pods())
def test_the_pods_run_a_command_that_can_work(pod: Manifest, tmp_path: Path) -> None:
    (container,) = pod["containers"]
    assert container["command"] == ["elastic-launch"]
    script = tmp_path / "train.py"
    script.touch()
    arguments = [str(script) if argument == "/app/train.py" else argument for argument in container["args"]]
    assert str(script) in arguments
    operators = {"PET_NNODES": "2:4", "PET_RDZV_ENDPOINT": "train-worker-0:29400"}
    env = {**operators, **variables(container), "ELASTIC_LAUNCH_TOKEN": "0123456789abcdef"}
    config = parse(arguments, env)
    assert (config.limits.min_nodes, config.limits.max_nodes) == (2, 4)
    ports = {port["containerPort"] for port in container["ports"]}
    env["PET_HTTP"] = env["PET_HTTP"].replace("$(PET_LOCAL_ADDR)", "10.0.0.1")
    http = parse(arguments, env).http
    assert ports == {config.endpoint.port if config.endpoint else 0, config.health_port, http.port if http else 0}
    assert_grace_suffices(pod)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == "health"


def test_names_that_must_be_the_same_are() -> None:
    base = {manifest["kind"]: manifest for file in WHOLE if "base" in file for manifest in documents(EXAMPLES / file)}
    label = {"batch.kubernetes.io/job-name": base["Job"]["metadata"]["name"]}
    service = base["Service"]
    assert pod_of(base["Job"])["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == label
    assert base["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == label
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    (script,) = (volume for volume in pod_of(base["Job"])["volumes"] if volume["name"] == "script")
    kustomization = yaml.safe_load((EXAMPLES / "script" / "kustomization.yaml").read_text())
    assert script["configMap"]["name"] == kustomization["configMapGenerator"][0]["name"]


def test_the_budget_and_the_failed_indexes_leave_the_run_its_minimum() -> None:
    spec = job()["spec"]
    config = parse([*pod_of(job())["containers"][0]["args"][:-1], __file__], {"PET_RDZV_ENDPOINT": "a:1"})
    assert spec["completions"] == spec["parallelism"] == config.limits.max_nodes
    assert spec["completions"] - spec["maxFailedIndexes"] >= config.limits.min_nodes


def documented() -> dict[int, str]:
    """The meaning of each exit code in the page's table."""
    section = PAGE.read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    lines = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    return {int(code): line[2].strip().strip("`") for line in lines for code in re.findall(r"`(\d+)`", line[1])}


def test_the_page_states_what_the_job_does_for_each_exit_code() -> None:
    table = documented()
    assert set(table) >= {code.value for code in ExitCode} - {0}
    for code, action in table.items():
        assert decide(job()["spec"], code, disrupted=False) == action, code


class Pod:
    """One that does nothing until a test gives it an exit code."""

    disrupted = False

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.terminated = False

    def turn(self) -> None:
        """Do nothing."""

    def terminate(self) -> None:
        self.terminated = True


def specs() -> list[Manifest]:
    """Of the jobs that each kind makes."""
    found = [m for file in WHOLE for m in documents(EXAMPLES / file)]
    sets = [find(found, "JobSet")["spec"], find(found, "TrainingRuntime")["spec"]["template"]["spec"]]
    made = [job()["spec"], *(one["replicatedJobs"][0]["template"]["spec"] for one in sets)]
    return [{**spec, "completions": 4, "parallelism": 4} for spec in made]  # Trainer fills in its number of nodes


@pytest.mark.parametrize("code", [2, 90, 93])
@pytest.mark.parametrize("spec", specs(), ids=["Job", "JobSet", "TrainJob"])
def test_a_pod_that_cannot_take_part_ends_no_other(spec: Manifest, code: int) -> None:
    pods = [Pod() for _ in range(4)]
    made = IndexedJob(spec, lambda index: pods[index])
    made.turn()
    pods[3].exit_code = code
    for _ in range(2):
        made.turn()
    assert (made.over, sorted(made.pods)) == ("", [0, 1, 2]), "it is not replaced either"
    assert not any(pod.terminated for pod in pods)
    pods[0].exit_code = 0
    made.turn()
    assert made.over == "Complete"


@pytest.mark.parametrize("code", [2, 90, 91, 92, 93])
@pytest.mark.parametrize("spec", specs(), ids=["Job", "JobSet", "TrainJob"])
def test_a_verdict_of_the_smallest_run_ends_the_job(spec: Manifest, code: int) -> None:
    """The other pods may not have been started yet, for want of room."""
    pods = [Pod() for _ in range(4)]
    made = IndexedJob(spec, lambda index: pods[index])
    made.turn()
    pods[0].exit_code = pods[1].exit_code = code
    made.turn()
    assert made.over == "Failed"
    assert pods[2].terminated
    assert pods[3].terminated


@pytest.mark.parametrize("code", [1, 91, 95, 137, 143])
def test_a_pod_that_was_evicted_or_lost_is_replaced_whatever_its_exit_code(code: int) -> None:
    assert decide(job()["spec"], code, disrupted=True) == "Ignore"


@pytest.mark.parametrize("kind", ["JobSet", "TrainingRuntime"])
def test_other_kinds_decide_alike(kind: str) -> None:
    found = find([m for file in WHOLE for m in documents(EXAMPLES / file)], kind)
    inner = found["spec"]["template"]["spec"] if kind == "TrainingRuntime" else found["spec"]
    spec = inner["replicatedJobs"][0]["template"]["spec"]
    for code in documented():
        for disrupted in (False, True):
            assert decide(spec, code, disrupted=disrupted) == decide(job()["spec"], code, disrupted=disrupted)

"""The manifests of ``examples/kubernetes``: as files, rendered by kubectl, and validated by the API's schemas."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate import utils
from packaging.version import Version
from referencing import Registry, Resource

__all__ = ["EXAMPLES", "RENDERED", "VERSIONS", "Manifest", "documents", "find", "judge", "pod_of", "rendered"]

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"

RENDERED = sorted(
    str(path.parent.relative_to(EXAMPLES))
    for path in EXAMPLES.rglob("kustomization.yaml")
    if "kind: Kustomization" in path.read_text() and path.parent.name != "script"
)
"""What can be applied, by directory: everything except the script alone, and components, which only others can use."""

VERSIONS = sorted((x for x in utils.all_versions() if Version(x) >= Version("1.33")), key=Version)
"""The versions of Kubernetes that are supported, as far as there are schemas."""

CRDS = Path(__file__).with_name("crds.yaml")

Manifest = dict[str, Any]

# Otherwise each validation parses megabytes of schemas.
utils.schema_contents = functools.cache(utils.schema_contents)

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C takes a tenth of the time, and all processes of pytest load all manifests."""


def documents(path: Path) -> list[Manifest]:
    """Return the objects in a file."""
    return [document for document in yaml.load_all(path.read_text(), LOADER) if document]


def rendered(directory: str) -> list[Manifest]:
    """Return what ``kubectl apply -k`` would apply; it needs no cluster."""
    return [document for document in yaml.load_all(_kustomized(directory), LOADER) if document]


@functools.cache
def _kustomized(directory: str) -> str:
    kubectl = shutil.which("kubectl")
    assert kubectl is not None
    command = [kubectl, "kustomize", str(EXAMPLES / directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def find(manifests: list[Manifest], kind: str, name: str = "") -> Manifest:
    """Return the only object of a kind, or the one with the given name."""
    found = [manifest for manifest in manifests if manifest["kind"] == kind]
    (one,) = [manifest for manifest in found if name in ("", manifest["metadata"]["name"])]
    return one


def judge(manifest: Manifest, version: str) -> None:
    """Validate an object against the schema of its kind, in which unknown fields are errors.

    Raises:
        jsonschema.ValidationError: naming the field.
    """
    if manifest["kind"] in _crds():
        _validator(manifest["kind"], version).validate(manifest)
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


@functools.cache
def _crds() -> dict[str, Any]:
    found: dict[str, Any] = yaml.load(CRDS.read_text(), LOADER)["$defs"]
    return found


@functools.cache
def _validator(kind: str, version: str) -> jsonschema.Draft202012Validator:
    """Validate a custom resource; parts that have Kubernetes' own types are validated by Kubernetes' schemas."""
    schemas = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}-local-strict"
    core = json.loads((schemas / "_definitions.json").read_text())
    own = {"$schema": core["$schema"], "$id": "https://kubernetes.io/api/crds.json", "$defs": _crds()}
    registry: Registry[Any] = Registry()
    for schema in (core, own):
        registry = Resource.from_contents(schema) @ registry
    return jsonschema.Draft202012Validator({"$ref": f"{own['$id']}#/$defs/{kind}"}, registry=registry)


def pod_of(manifest: Manifest) -> Manifest:
    """Return the pod template's spec of an object that creates training pods."""
    spec = manifest["spec"]
    if manifest["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    if manifest["kind"] in ("JobSet", "TrainingRuntime"):
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    if manifest["kind"] == "PyTorchJob":
        spec = spec["pytorchReplicaSpecs"]["Worker"]
    return dict(spec["template"]["spec"])

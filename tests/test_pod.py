"""Tests of the settings that a pod of an indexed job derives from its names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_launch.cli.flags import Values, split
from elastic_launch.cli.kubernetes import Pod, found_out, sentence
from elastic_launch.cli.main import parse
from elastic_launch.errors import UsageError

NAME = "digits-2.workers.lab.svc.cluster.local"
ENDPOINT = "digits-0.workers.lab.svc.cluster.local:29400"
TOLD = {
    "--node-id": "digits-2",
    "--rdzv-endpoint": ENDPOINT,
    "--rdzv-id": "digits",
    "--rdzv-conf": "is_host=false",
}


def told(*flags: str, name: str = NAME, **environ: str) -> dict[str, str]:
    given = split([*flags, "train.py"]).given
    found = found_out(Values(given, {"JOB_COMPLETION_INDEX": "2", **environ}), name)
    return {flag: value.text for flag, value in found.items()}


def test_endpoint_run_and_node_are_derived_from_a_pods_name() -> None:
    assert told("--nnodes", "2:4") == TOLD
    assert told(PET_NNODES="4") == TOLD
    assert told("--nnodes", "4", "--rdzv-backend", "c10d", PET_MASTER_ADDR="digits-0.workers") == TOLD
    first = told("--nnodes", "2:4", name=NAME.replace("-2", "-0"), JOB_COMPLETION_INDEX="0")
    assert first == {**TOLD, "--node-id": "digits-0", "--rdzv-conf": "is_host=true"}


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        ((), {}),
        (("--standalone",), {"PET_NNODES": "4"}),
        (("--nnodes", "4"), {"PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500", "PET_NODE_RANK": "2"}),
        (("--nnodes", "4", "--rdzv-backend", "static"), {}),
        (("--nnodes", "4", "--rdzv-backend", "etcd-v2"), {}),
        (("--nnodes", "4"), {"JOB_COMPLETION_INDEX": ""}),
    ],
)
def test_a_node_that_is_alone_or_has_its_place_derives_nothing_from_its_pod(
    flags: tuple[str, ...], environ: dict[str, str]
) -> None:
    assert told(*flags, **environ) == {}


def test_with_the_users_rendezvous_settings_only_the_nodes_name_is_derived() -> None:
    assert told("--nnodes", "2:4", PET_RDZV_ENDPOINT="store:29400") == {"--node-id": "digits-2"}
    assert told("--nnodes", "2:4", "--rdzv-backend", "etcd", "--rdzv-endpoint", "etcd:2379") == {
        "--node-id": "digits-2"
    }


def test_a_pod_that_the_endpoints_do_not_name_is_no_voter() -> None:
    """An address that DNS still has for one of them may be this pod's by now."""

    def settings(*indexes: int) -> str | None:
        endpoints = ",".join(f"digits-{index}.workers:29400" for index in indexes)
        return told("--nnodes", "2:4", PET_RDZV_ENDPOINT=endpoints).get("--rdzv-conf")

    assert settings(0, 1, 3) == "is_host=false"
    assert settings(0, 1, 2) is None
    assert "--rdzv-conf" not in told("--nnodes", "2:4", PET_RDZV_ENDPOINT="node-a:1,node-b:1,node-c:1")


def test_an_endpoint_is_enough_if_the_name_is_not_of_a_job() -> None:
    assert told("--nnodes", "2:4", "--rdzv-endpoint", "a:1", name="node17") == {}


@pytest.mark.parametrize("name", ["digits-2", "node17.lab", "digits-3.workers"])
def test_pods_that_cannot_find_each_other_do_not_each_train_alone(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        told("--nnodes", "2:4", name=name)
    assert "JOB_COMPLETION_INDEX=2 says that this pod is one of several" in refused.value.message
    assert name in refused.value.message
    assert "subdomain" in refused.value.hint


@pytest.mark.parametrize(
    ("index", "name", "pod"),
    [
        ("12", "a-b-12.c", Pod(12, "a-b", "c")),
        ("0", "set-node-0-0.set.ns.svc.x", Pod(0, "set-node-0", "set.ns.svc.x")),
        ("2", "-2.c", None),
        ("2", "a2.c", None),
        ("", "a-.c", None),
    ],
)
def test_names_of_pods(index: str, name: str, pod: Pod | None) -> None:
    assert Pod.of(index, name) == pod


def test_a_line_names_the_derived_values_and_their_source() -> None:
    values = Values({"--nnodes": ["2:4"], "--rdzv-id": ["mine"]}, {"JOB_COMPLETION_INDEX": "2"})
    values.beneath = (found_out(values, NAME),)
    assert (
        sentence(values)
        == f"JOB_COMPLETION_INDEX=2 of {NAME} gives --rdzv-endpoint {ENDPOINT}, --node-id digits-2; pod 0 hosts"
    )
    values = Values({"--nnodes": ["2:4"], "--rdzv-endpoint": ["a:1"]}, {"JOB_COMPLETION_INDEX": "2"})
    values.beneath = (found_out(values, NAME),)
    assert sentence(values) == f"JOB_COMPLETION_INDEX=2 of {NAME} gives --node-id digits-2"
    assert sentence(Values({}, {})) == ""


def test_elsewhere_nothing_is_looked_up_or_logged(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert parse(["--nnodes", "2:4", str(tmp_path / "train.py")], {}).found_out == ""


@pytest.mark.system
def test_the_name_comes_from_the_pods_own_file_of_hosts(tmp_path: Path) -> None:
    hosts, script = tmp_path / "hosts", tmp_path / "train.py"
    hosts.write_text(f"127.0.0.1 localhost\n10.1.2.3\t{NAME}\tdigits-2\n")
    script.touch()
    inside = 'hostname digits-2 && mount --bind "$0" /etc/hosts && exec "$@"'
    command = [sys.executable, "-m", "elastic_launch", "--nnodes", "2:4", "--print-config", str(script)]
    done = subprocess.run(
        ["unshare", "--uts", "--mount", "sh", "-c", inside, str(hosts), *command],
        env={**os.environ, "JOB_COMPLETION_INDEX": "2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    for flag, value in TOLD.items():
        assert f"{flag[2:]}: {value}" in done.stdout
    assert f"# JOB_COMPLETION_INDEX=2 of {NAME}" in done.stdout

"""Tests of the settings that an agent derives from Slurm's variables, and of the mistakes that these show."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_launch.cli.flags import Values, split
from elastic_launch.cli.main import parse
from elastic_launch.cli.slurm import JobStep, expand, found_out, sentence
from elastic_launch.errors import UsageError

STEP = {
    "SLURM_JOB_ID": "10017",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURMD_NODENAME": "n2",
}
SMALLER = {"SLURM_STEP_NODELIST": "n2", "SLURM_STEP_TASKS_PER_NODE": "1"}
BATCH = {name: value for name, value in STEP.items() if "STEP" not in name} | {"SLURMD_NODENAME": "n1"}
MEETING = {"--rdzv-endpoint": "n1:20017", "--rdzv-conf": "is_host=false", "--node-id": "n2", "--node-rank": "1"}


def values(*flags: str, step: dict[str, str] = STEP, **environ: str) -> Values:
    return Values(split([*flags, "train.py"]).given, {**step, **environ})


def told(*flags: str, step: dict[str, str] = STEP, **environ: str) -> dict[str, str]:
    return {flag: value.text for flag, value in found_out(values(*flags, step=step, **environ)).items()}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n[1-3,7],gpu1", "n1 n2 n3 n7 gpu1"),
        ("n[08-10]-ib", "n08-ib n09-ib n10-ib"),
        ("r[1-2]n[1,3]", "r1n1 r1n3 r2n1 r2n3"),
    ],
)
def test_lists_of_hosts(text: str, hosts: str) -> None:
    assert " ".join(expand(text)) == hosts


def test_all_that_the_nodes_of_a_step_need_comes_from_slurm() -> None:
    assert told() == {**MEETING, "--nnodes": "3", "--rdzv-id": "10017.0"}
    assert told("--nnodes", "1:3") == {**MEETING, "--rdzv-id": "10017.0"}
    assert told(PET_NNODES="2")["--node-rank"] == "1"
    assert told(SLURMD_NODENAME="n1")["--rdzv-conf"] == "is_host=true"


def test_agents_with_a_step_each_are_one_run_of_the_jobs_nodes() -> None:
    assert told("--nnodes", "1:3", **SMALLER) == {**MEETING, "--rdzv-id": "10017"}
    assert told("--nnodes", "1:3", **SMALLER, SLURM_STEP_ID="5") == {**MEETING, "--rdzv-id": "10017"}


def test_two_steps_of_half_a_job_are_two_runs() -> None:
    half = told(SLURM_STEP_NODELIST="n[2-3]", SLURM_STEP_ID="1")
    assert half["--rdzv-endpoint"].startswith("n2:")
    assert (half["--nnodes"], half["--rdzv-id"], half["--node-rank"]) == ("2", "10017.1", "0")


def test_what_the_user_sets_wins() -> None:
    place = {"--node-id": "n2", "--node-rank": "1"}
    assert told("--nnodes", "3", PET_RDZV_ENDPOINT="n3:29400") == place
    assert told("--nnodes", "3", "--rdzv-endpoint", "10.9.8.7:1") == place
    etcd = ("--rdzv-backend", "etcd", "--rdzv-endpoint", "etcd0:2379")
    assert told("--nnodes", "3", *etcd) == {**place, "--rdzv-id": "10017.0"}
    parsed = values("--nnodes", "1:3", "--rdzv-id", "mine", PET_NODE_ID="here")
    parsed.beneath = (found_out(parsed),)
    assert sentence(parsed) == "Slurm job 10017 gives --rdzv-endpoint n1:20017, --node-rank 1; n1 hosts"


def test_a_run_larger_than_its_job_is_one_of_several_jobs() -> None:
    etcd = ("--rdzv-backend", "etcd", "--rdzv-endpoint", "etcd0:2379", "--rdzv-id", "sweep")
    assert told("--nnodes", "4:8", *etcd) == {"--node-id": "n2-10017", "--rdzv-id": "10017"}


def test_the_ranks_of_the_static_backend_are_those_of_the_step() -> None:
    assert told("--master-addr", "n1", "--nnodes", "3") == {"--node-rank": "1"}
    assert told("--rdzv-backend", "static") == {"--nnodes": "3", "--node-rank": "1", "--master-addr": "n1"}


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (("--standalone",), {"SLURM_STEP_TASKS_PER_NODE": "8(x3)"}),
        (("--nnodes", "1"), {}),
        ((), SMALLER),
        (("--rdzv-backend", "etcd-v2", "--nnodes", "3"), {}),
        ((), {"SLURM_HET_SIZE": "2"}),
        ((), {"SLURM_JOB_NODELIST": "n[a-b]"}),
        ((), {"SLURM_JOB_ID": ""}),
    ],
)
def test_a_node_that_is_alone_derives_nothing(flags: tuple[str, ...], environ: dict[str, str]) -> None:
    assert told(*flags, **environ) == {}


def test_a_batch_script_on_one_node_needs_no_srun() -> None:
    alone = {**BATCH, "SLURM_JOB_NODELIST": "n1"}
    assert told(step=alone) == {}
    found = told("--nnodes", "1:4", "--rdzv-endpoint", "n1:29400", step=alone)
    assert found == {"--node-id": "n1-10017"}


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        ((), {"SLURM_STEP_TASKS_PER_NODE": "1,8(x2)"}, "srun has started 8 agents on node n2, one for each task."),
        (("--nnodes", "1"), {"SLURM_STEP_TASKS_PER_NODE": "8(x3)"}, "srun has started 8 agents"),
        (("--nnodes", "4"), {}, "--nnodes 4 asks for more nodes than Slurm job 10017 has: 3 (n[1-3])."),
        (
            ("--nnodes", "3", "--rdzv-endpoint", "login:1"),
            {},
            "--rdzv-endpoint login:1 is not one of the nodes of Slurm",
        ),
        (("--nnodes", "3", "--rdzv-endpoint", "n12:1"), {}, "--rdzv-endpoint n12:1 is not one of the nodes"),
        (
            ("--rdzv-endpoint", "localhost:1"),
            {},
            "localhost:1 is each host's own address, not that of one",
        ),
        (("--master-addr", "127.0.0.1"), {}, "--master-addr 127.0.0.1 is each host's own address"),
    ],
)
def test_a_mistake_is_one_clear_error(flags: tuple[str, ...], environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        told(*flags, **environ)
    assert words in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize("flags", [(), ("--nnodes", "3"), ("--nnodes", "1:3", "--rdzv-endpoint", "n1:29400")])
@pytest.mark.parametrize("number", ["", "4294967290", "4294967291"])
def test_an_agent_that_srun_has_not_started_would_be_the_only_one(flags: tuple[str, ...], number: str) -> None:
    step = {**BATCH, "SLURM_STEP_ID": number, "SLURM_STEP_NODELIST": "n1"}
    with pytest.raises(UsageError) as refused:
        told(*flags, step=step)
    assert "only one: on this host, not on each of the 3 nodes of Slurm job 10017 (n[1-3])" in refused.value.message
    assert told("--standalone", step=step) == told("--nnodes", "1", step=step) == {}


@pytest.mark.parametrize("endpoint", ["n1.lab.example.org:1", "N1-ib0", "10.0.0.9:29400", "[fd00::1]:29400"])
def test_other_names_and_addresses_of_the_nodes_are_taken(endpoint: str) -> None:
    assert told("--nnodes", "3", "--rdzv-endpoint", endpoint) == {"--node-id": "n2", "--node-rank": "1"}


def test_a_host_outside_of_the_job_is_one_that_the_user_says_there_is() -> None:
    assert "--node-id" in told("--nnodes", "2:8", "--rdzv-endpoint", "login:1", "--rdzv-conf", "is_host=false")


def test_a_requeued_job_says_so() -> None:
    again = values("--nnodes", "1:3", SLURM_RESTART_COUNT="2")
    again.beneath = (found_out(again),)
    assert sentence(again).endswith("; n1 hosts; SLURM_RESTART_COUNT=2")


def test_a_step_without_a_node_name_has_no_rank() -> None:
    step = JobStep.of({**STEP, "SLURMD_NODENAME": ""})
    assert step is not None
    assert step.tasks == 1
    assert "--node-rank" not in told(SLURMD_NODENAME="")


def test_the_configuration_and_the_sources_of_its_errors(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    config = parse([str(script)], STEP)
    assert (str(config.endpoint), config.run_id, config.node_id) == ("n1:20017", "10017.0", "n2")
    assert (config.limits.min_nodes, config.limits.max_nodes, config.node_rank, config.is_host) == (3, 3, 1, False)
    assert config.found_out.startswith("Slurm job 10017 gives --nnodes 3, --rdzv-endpoint n1:20017, --rdzv-id 10017.0")
    assert parse([str(script)], {**STEP, "ELASTIC_LAUNCH_TORCHRUN": "1"}).limits.max_nodes == 1

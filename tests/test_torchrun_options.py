"""Tests that all options in torch's own parser are accepted, and that those without effect are reported."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from contextlib import closing
from copy import copy
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any

import pytest
from command_lines import Parse, refused
from torch.distributed.elastic.agent.server.health_check_server import HealthCheckServer
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher import api as launcher
from torch.distributed.run import get_args_parser
from torch.numa.binding import AffinityMode

from elastic_agents.calls.function import Results
from elastic_agents.torch_agent import torch_config
from elastic_launch import api
from elastic_launch.api_config import from_torch
from elastic_launch.cli.flags import BY_NAME, TORCHRUN, TORCHRUN_2_14, split
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.torch_options import NUMA_MODES, START_METHODS, Foreign, visible_device
from elastic_launch.errors import UsageError

ACTIONS = [action for action in get_args_parser()._actions if action.option_strings]

LONG = sorted({name.replace("_", "-") for a in ACTIONS for name in a.option_strings if name.startswith("--")})

# The names.


def test_the_list_of_torchruns_names_is_that_of_its_parser() -> None:
    assert set(LONG) in (TORCHRUN - {"--shutdown-timeout"}, TORCHRUN, TORCHRUN_2_14)  # the first is torch 2.11's


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.dest)
def test_every_option_of_torchrun_is_accepted_in_all_its_spellings(action: argparse.Action) -> None:
    names = {BY_NAME[name.replace("_", "-")].name for name in action.option_strings}
    assert len(names) == 1
    switch = action.nargs == 0
    for name in action.option_strings:
        words = [name] if switch else [name, "1"]
        line = split([*words, "train.py"])
        assert line.wants or (line.given.keys() == names and line.script == "train.py")


@pytest.mark.parametrize(
    "action", [a for a in ACTIONS if type(a).__name__ in ("env", "check_env")], ids=lambda action: action.dest
)
def test_its_variable_is_also_read_here(action: argparse.Action) -> None:
    """torch's ``env`` and ``check_env`` look into ``PET_<DEST>``; the others have none."""
    flag = BY_NAME[next(name for name in action.option_strings if name.startswith("--")).replace("_", "-")]
    assert f"PET_{action.dest.upper()}" in flag.variables


def unambiguous() -> list[tuple[str, str]]:
    found = []
    for name in LONG:
        for end in range(3, len(name)):
            prefix = name[:end]
            if prefix not in LONG and [other for other in LONG if other.startswith(prefix)] == [name]:
                found.append((prefix, name))
    return found


def test_what_is_unambiguous_for_torchrun_is_so_here() -> None:
    assert len(unambiguous()) > 100
    for prefix, name in unambiguous():
        flag = BY_NAME[name]
        line = split([prefix, "1", "train.py"] if flag.metavar else [prefix, "train.py"])
        assert line.wants == name or list(line.given) == [flag.name], prefix


@pytest.mark.parametrize(
    ("prefix", "name"),
    [("--log-", "--log-dir"), ("--log-l", "--log-line-prefix-template"), ("--pri", "--print-completion")],
)
def test_of_two_versions_of_torchrun_the_older_one_comes_first(prefix: str, name: str) -> None:
    line = split([prefix, "bash", "train.py"])
    assert list(line.given) == [name]


@pytest.mark.parametrize("token", ["--transport", "--rdzv-transport", "--nproc-per-nodes"])
def test_what_a_later_torch_may_add_is_unknown_and_not_the_scripts(parse: Parse, token: str) -> None:
    assert f"unknown flag {token}." in refused(parse, f"{token} 1 train.py").message


def test_the_choices_are_torchs() -> None:
    assert [mode.value for mode in AffinityMode] == list(NUMA_MODES)
    (choices,) = [action.choices for action in ACTIONS if action.dest == "start_method"]
    assert choices is not None
    assert list(choices) == list(START_METHODS)


# What has no effect says so, once; the rest is silent.


@pytest.mark.parametrize(
    ("line", "environ", "said"),
    [
        ("--monitor-interval 1 train.py", {}, "--monitor-interval has no effect"),
        ("train.py", {"PET_MONITOR_INTERVAL": "1"}, "PET_MONITOR_INTERVAL has no effect"),
        ("--start-method fork train.py", {}, "--start-method has no effect"),
        ("--master-addr node0 train.py", {}, "--master-addr has no effect"),
        ("--nnodes 2 --rdzv-backend c10d --master-port 1 train.py", {}, "--master-port has no effect"),
        ("--rdzv-endpoint node0 --master-addr node1 train.py", {}, "--master-addr has no effect"),
        ("--standalone --master-addr node1 train.py", {}, "--standalone ignores --master-addr node1"),
        ("--standalone --rdzv-backend static train.py", {}, "--standalone ignores --rdzv-backend static"),
        ("--rdzv-conf close_timeout=3 train.py", {}, "close_timeout=3 has no effect"),
        ("--rdzv-conf heartbeat_timeout=3 train.py", {}, "heartbeat_timeout=3 has no effect"),
        ("--rdzv-conf cas_backoff_max_seconds=1 train.py", {}, "cas_backoff_max_seconds=1 has no effect"),
        ("--run-path --no-python /dev/null", {}, "--no-python has no effect"),
        ("--rdzv-backend etcd-v2 --node-rank 1 train.py", {}, "--node-rank has no effect under --rdzv-backend etcd-v2"),
    ],
)
def test_options_without_effect_are_reported_once(
    parse: Parse, caplog: pytest.LogCaptureFixture, line: str, environ: dict[str, str], said: str
) -> None:
    parse(line, **environ)
    assert [said in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(
    "line",
    [
        "--rdzv-conf store_type=tcp train.py",
        "--rdzv-backend etcd-v2 --rdzv-endpoint e:1 --monitor-interval 1 --start-method fork train.py",
        "--nnodes 2 --node-rank 0 --master-addr node0 train.py",
    ],
)
def test_what_has_an_effect_is_silent(parse: Parse, caplog: pytest.LogCaptureFixture, line: str) -> None:
    parse(line)
    assert not caplog.records


# Backends.


@pytest.mark.parametrize(
    ("name", "backend", "foreign"),
    [("elastic-c10d", "c10d", False), ("etcd-v2", "etcd-v2", True), ("mine", "mine", True)],
)
def test_registered_backends_are_taken(
    parse: Parse, monkeypatch: pytest.MonkeyPatch, name: str, backend: str, foreign: bool
) -> None:
    monkeypatch.setitem(rendezvous_handler_registry._registry, "mine", lambda params: None)
    line = f"--rdzv-backend {name} --rdzv-endpoint e:1 --rdzv-conf a=1,b=2 --rdzv-conf b=3 train.py"
    config = parse(line if foreign else f"--rdzv-backend {name} --rdzv-endpoint e:1 train.py")
    assert config.backend == backend
    assert config.foreign == (Foreign("e:1", (("a", "1"), ("b", "3"))) if foreign else None)


def test_xpu_is_refused_if_torch_finds_none(parse: Parse) -> None:
    """No test machine has one: torch finds none, and neither does the launcher."""
    assert "--nproc xpu" in refused(parse, "--nproc xpu train.py").message


# Static, as torchrun has it.


@pytest.mark.parametrize(
    ("line", "endpoint", "rank"),
    [
        ("--nnodes 2 --node-rank 1 --master-addr node0 train.py", Endpoint("node0", 29500), 1),
        ("--nnodes 2 --node-rank 0 --master-port 5 train.py", Endpoint("127.0.0.1", 5), 0),
        ("--nnodes 2 --node-rank 0 --rdzv-backend static train.py", Endpoint("127.0.0.1", 29500), 0),
        ("--rdzv-backend static --master-port 5 train.py", Endpoint("127.0.0.1", 5), 0),
        ("--nnodes 2:2 --node-rank 1 --master-addr [::1] --master-port 5 train.py", Endpoint("::1", 5), 1),
        ("--nnodes 2 --node-rank 1 --master-addr fd00::7 --master-port 5 train.py", Endpoint("fd00::7", 5), 1),
        ("--nnodes 2 --node-rank 1 --rdzv-backend static --rdzv-endpoint n:7 train.py", Endpoint("n", 7), 1),
    ],
)
def test_static_is_selected_by_the_masters_address_or_the_backend(
    parse: Parse, line: str, endpoint: Endpoint, rank: int
) -> None:
    config = parse(line)
    assert (config.backend, config.endpoint, config.node_rank) == ("static", endpoint, rank)
    assert (config.node_id, config.is_host, config.announce) == (f"node-{rank}", rank == 0, False)


@pytest.mark.parametrize(
    "line",
    [
        "--rdzv-backend static train.py",
        "--master-port 0 train.py",
        "--rdzv-backend static --rdzv-endpoint localhost:0 train.py",
    ],
)
def test_one_node_needs_no_address(parse: Parse, line: str) -> None:
    config = parse(line)
    assert (config.backend, config.alone) == ("c10d", True)


@pytest.mark.parametrize(
    ("line", "both", "hint"),
    [
        ("--nnodes 1:2 --node-rank 0 --master-addr a", ["--master-addr", "--nnodes 1:2"], "--rdzv-endpoint"),
        ("--nnodes 1:2 --rdzv-backend static", ["--rdzv-backend static", "--nnodes 1:2"], "Give --nnodes 2"),
        ("--nnodes 2 --master-addr a", ["--master-addr", "--nnodes 2"], "--node-rank, 0 to 1"),
        ("--nnodes 2 --master-addr a --node-rank 2", ["--node-rank 2", "--nnodes"], "0 to 1"),
        ("--nnodes 2 --master-addr a --node-rank 0 --node-id x", ["--master-addr", "--node-id x"], "Drop --node-id"),
        ("--nnodes 2 --master-addr a:7 --node-rank 0", ["--master-addr a:7"], "--master-addr a and --master-port"),
        ("--nnodes 2 --master-addr a --node-rank 0 --master-port 70000", ["--master-port 70000"], "65535"),
        ("--nnodes 2 --master-addr a --node-rank 0 --master-port 0", ["port is 0"], "Give a port"),
        (
            "--nnodes 2 --master-addr a --node-rank 0 --rdzv-conf is_host=1",
            ["is_host", "--rdzv-backend static"],
            "Drop is_host",
        ),
        ("--run-path -m /dev/null", ["--module", "--run-path"], "Drop --module"),
        ("--run-path train.py", ["--run-path train.py"], "/train.py"),
        (
            "--signals-to-handle USR1 --signals-to-forward SIGUSR1",
            ["--signals-to-handle", "--signals-to-forward", "SIGUSR1"],
            "Drop it from the first",
        ),
        ("--signals-to-handle SIGTREM", ["--signals-to-handle names SIGTREM"], "Did you mean SIGTERM?"),
        ("--signals-to-handle TERM,KILL", ["SIGKILL"], "Drop SIGKILL"),
        ("--signals-to-forward CHLD", ["SIGCHLD"], "Drop SIGCHLD"),
        ("--numa-binding nodes", ["--numa-binding nodes"], "core-complex"),
        ("--start-method thread", ["--start-method thread"], "forkserver"),
        ("--monitor-interval 0", ["--monitor-interval 0"], "more than 0"),
        ("--rdzv-conf store_type=file", ["store_type=file"], "Drop store_type"),
    ],
)
def test_what_contradicts_is_named_with_what_to_drop(parse: Parse, line: str, both: list[str], hint: str) -> None:
    script = "" if line.startswith("--run-path") else " train.py"
    error = refused(parse, line + script)
    assert all(text in error.message for text in both), error.message
    assert hint in error.hint


def test_timeout_is_torchs_name_for_join_timeout(parse: Parse) -> None:
    assert parse("--rdzv-conf timeout=33 train.py").timing.join_timeout == 33
    assert parse("--rdzv-conf timeout=33,join_timeout=44 train.py").timing.join_timeout == 44


# GPUs.


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "4, 6"}, {"CUDA_VISIBLE_DEVICES": "6"}),
        ({"CUDA_VISIBLE_DEVICES": "a,b,c"}, {"CUDA_VISIBLE_DEVICES": "b"}),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, {"CUDA_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3"}),
        (
            {"CUDA_VISIBLE_DEVICES": "4,6", "HIP_VISIBLE_DEVICES": "2,3"},
            {"CUDA_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3"},
        ),
        ({"CUDA_VISIBLE_DEVICES": "4,6", "HIP_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "6"}),
    ],
)
def test_a_worker_sees_one_of_the_gpus_that_are_seen_here(environ: dict[str, str], expected: dict[str, str]) -> None:
    assert visible_device(1, environ) == expected


def test_more_workers_than_gpus_are_refused(parse: Parse) -> None:
    error = refused(parse, "--virtual-local-rank --nproc 2 train.py", CUDA_VISIBLE_DEVICES="4")
    assert "local rank 1 has no GPU of its own in CUDA_VISIBLE_DEVICES=4" in error.message
    assert "Drop --virtual-local-rank" in error.hint
    error = refused(
        parse, "--virtual-local-rank --nproc 2 train.py", CUDA_VISIBLE_DEVICES="4,5", HIP_VISIBLE_DEVICES="3"
    )
    assert "local rank 1 has no GPU of its own in HIP_VISIBLE_DEVICES=3" in error.message


def test_virtual_local_rank_is_a_switch_of_the_environment_too(parse: Parse, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse("train.py", PET_VIRTUAL_LOCAL_RANK="1").options.virtual_local_rank
    assert not caplog.records


# Older versions of torch.


@pytest.fixture
def older() -> Callable[..., Any]:
    """torch 2.11's ``LaunchConfig``: that of the installed torch without the field that 2.12 adds."""
    kept = [(field.name, Any, copy(field)) for field in fields(launcher.LaunchConfig)]
    return make_dataclass("LaunchConfig", [field for field in kept if field[0] != "shutdown_timeout"])


def test_the_default_backend_of_torchs_configuration_needs_an_endpoint() -> None:
    with pytest.raises(UsageError, match="rdzv_backend is etcd, which is torch's default") as caught:
        from_torch(launcher.LaunchConfig(1, 1, 1))
    assert 'rdzv_backend="c10d"' in caught.value.hint


def test_a_configuration_of_torch_2_11_has_no_shutdown_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: Callable[..., Any]
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")
    options = {"logs_specs": DefaultLogsSpecs(log_dir=str(tmp_path)), "rdzv_backend": "c10d"}
    assert from_torch(older(1, 1, 1, **options)).shutdown_timeout == 5


def test_nor_is_it_given_to_the_agent_of_torch_2_11(
    parse: Parse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, older: Callable[..., Any]
) -> None:
    monkeypatch.setattr(launcher, "LaunchConfig", older)
    line = "--rdzv-backend etcd-v2 --rdzv-endpoint e:1 train.py"
    assert torch_config(parse(line)).rdzv_backend == "etcd-v2"
    assert not caplog.records
    torch_config(parse(f"--shutdown-timeout 5 {line}"))
    assert "--shutdown-timeout has no effect: torch's own agent waits 30 s before torch 2.12" in caplog.text


def test_a_health_check_server_is_refused_by_torchs_launcher_before_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch_agent(config: object, entrypoint: object, args: object) -> None:
        pytest.fail("torch's launcher was called")

    monkeypatch.setattr(api, "launch_torchs_agent", launch_agent)
    config = api.LaunchConfig(1, 1, 1, rdzv_backend="etcd-v2", rdzv_endpoint="localhost:1")
    with pytest.raises(ValueError, match=r"health_check_server: .* torch 2\.13"):
        api.elastic_launch(config, "train.py", HealthCheckServer(lambda: 0, 1, 1))()


def test_workers_without_a_place_at_the_end_have_no_result_which_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [{"global_rank": rank} for rank in (-1, 4, -1)]
    report = {"code": 0, "cause": "all workers finished", "round": 3, "workers": workers}
    monkeypatch.setattr(Results, "result", lambda self, local_rank, number: (local_rank, number))
    with closing(Results(len, 3)) as call, caplog.at_level(logging.WARNING, "elastic_launch"):
        assert api._result(api.AgentEnd(report, 0, 0, 1), call, None).return_values == {4: (1, 3)}
    (told,) = caplog.messages
    assert told.startswith("no result of local ranks 0, 2 of this node:")

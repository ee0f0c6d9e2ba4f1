"""Tests of the command line: the effect of every flag, and the response to mistakes."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2
from types import SimpleNamespace

import pytest
from command_lines import Parse, refused

from elastic_launch.cli.flags import FLAGS
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.launch_config import Limits, Timing
from elastic_launch.config.notice_sources import NoticeSource
from elastic_launch.config.output import Output, Std, Streams
from elastic_launch.config.torch_options import Signals, TorchOptions
from elastic_launch.errors import UsageError
from elastic_launch.faults import Fault, FaultPlan
from elastic_launch.secret import Token

# What comes out of a bare command line.


def test_defaults(parse: Parse, tmp_path: Path) -> None:
    config = parse("train.py")
    assert config.limits == Limits(1, 1, 3)
    assert (config.nproc, config.backend, config.role) == (1, "c10d", "default")
    assert (config.endpoint, config.announce, config.is_host) == (None, False, None)
    assert config.timing == Timing()
    assert (config.node_rank, config.local_addr, config.shutdown_timeout) == (None, None, 30)
    assert config.log_dir.parent == tmp_path / ".local" / "state" / "elastic-launch"
    assert re.fullmatch(rf"\d{{8}}T\d{{6}}Z-{os.getpid()}", config.log_dir.name)
    assert re.fullmatch(r".+-[0-9a-f]{6}", config.node_id)
    assert config.command.argv == (sys.executable, "-u", "train.py")


def test_parsing_leaves_nothing_on_disk(parse: Parse, tmp_path: Path) -> None:
    parse("train.py")
    parse("--log-dir logs/deep train.py")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_ids_of_two_agents_differ(parse: Parse) -> None:
    first, second = parse("train.py"), parse("train.py")
    assert first.node_id != second.node_id
    assert first.run_id != second.run_id


@pytest.mark.parametrize(
    ("line", "run_id"),
    [
        ("--rdzv-endpoint node0 train.py", "none"),
        ("--rdzv-endpoint node0 --rdzv-id job7 train.py", "job7"),
        ("--rdzv-id job7 train.py", "job7"),
        ("--standalone --rdzv-id job7 train.py", "job7"),
    ],
)
def test_run_id(parse: Parse, line: str, run_id: str) -> None:
    assert parse(line).run_id == run_id


# One flag at a time, in all its spellings.

VALUES: list[tuple[str, str, str, object]] = [
    # flag, value, field of the configuration, what it becomes
    ("nnodes", "3", "limits", Limits(3, 3)),
    ("nnodes", "1:4", "limits", Limits(1, 4)),
    ("nproc", "2", "nproc", 2),
    ("nproc-per-node", "2", "nproc", 2),
    ("nproc", "cpu", "nproc", len(os.sched_getaffinity(0))),
    ("replica-size", "1", "replica_size", 1),
    ("rdzv-backend", "c10d", "backend", "c10d"),
    ("rdzv-endpoint", "[::1]:1", "endpoint", Endpoint("::1", 1)),
    ("rdzv-id", "-5", "run_id", "-5"),
    ("rdzv-conf", "beat=0.5", "timing", Timing(beat=0.5)),
    ("node-rank", "3", "node_rank", 3),
    ("health-port", "29480", "health_port", 29480),
    ("health-port", "127.0.0.1:29480", "health_host", "127.0.0.1"),
    ("health-port", "fd00::5:29480", "health_host", "fd00::5"),
    ("health-port", "[fd00::5]:29480", "health_host", "fd00::5"),
    ("http", "9400", "http", Endpoint("127.0.0.1", 9400)),
    ("http", "0", "http", Endpoint("127.0.0.1", 0)),
    ("http", "fd00::5:9400", "http", Endpoint("fd00::5", 9400)),
    ("http-host", "Runs.Example.org.,train", "http_hosts", ("runs.example.org", "train")),
    ("node-id", "rack1", "node_id", "rack1"),
    ("local-addr", "10.0.0.7", "local_addr", "10.0.0.7"),
    ("join-settle", "0", "timing", Timing(join_settle=0)),
    ("dead-after", "7.5", "timing", Timing(dead_after=7.5)),
    ("min-wait", "1e3", "timing", Timing(min_wait=1000)),
    ("return-after", "9", "timing", Timing(return_after=9)),
    ("resize-delay", "0", "timing", Timing(resize_delay=0)),
    ("max-restarts", "0", "limits", Limits(1, 1, 0)),
    ("restart-refill", "3600", "limits", Limits(restart_refill=3600.0)),
    ("max-idle-restarts", "5", "limits", Limits(max_idle_restarts=5)),
    ("fatal-exit-codes", "3,64-66", "fatal_exit_codes", frozenset({3, 64, 65, 66})),
    ("drill", "drill.yaml", "drill", FaultPlan((Fault(rank=1, step=20, round=None),))),
    ("shutdown-timeout", "1.5", "shutdown_timeout", 1.5),
    ("wait-for-children", "0", "wait_for_children", 0.0),
    ("keep-runs", "3", "keep_runs", 3),
    ("keep-runs", "all", "keep_runs", None),
    ("hang-timeout", "auto", "hang_timeout", 0.0),
    ("hang-timeout", "off", "hang_timeout", None),
    ("hang-timeout", "900", "hang_timeout", 900.0),
    ("role", "trainer", "role", "trainer"),
    ("log-dir", "/tmp/../var/logs", "log_dir", Path("/var/logs")),
    ("preload", "numpy,torch.nn", "preload", ("numpy", "torch.nn")),
    ("no-preload", "numpy", "no_preload", ("numpy",)),
    ("redirects", "0:3,1:2", "output", Output(redirects=Streams(ranks=((0, Std.ALL), (1, Std.ERR))))),
    ("tee", "1", "output", Output(tee=Streams(Std.OUT))),
    ("local-ranks-filter", "0,2", "output", Output(local_ranks=frozenset({0, 2}))),
    ("duplicate-stdout-filters", "loss,a,,b", "output", Output(stdout_filters=("loss", "a,b"))),
    ("duplicate-stderr-filters", "Error", "output", Output(stderr_filters=("Error",))),
    ("progress", "none", "progress", "none"),
    ("log-format", "json", "log_format", "json"),
    ("log-layout", "torchrun", "output", Output(layout="torchrun")),
    ("logs-specs", "default", "output", Output()),
    ("log-line-prefix-template", "${rank}", "output", Output(header="${rank}")),
    ("config", "job.yaml", "role", "from-a-file"),
    ("master-addr", "10.0.0.7", "options", TorchOptions()),
    ("master-port", "29501", "endpoint", Endpoint("127.0.0.1", 29501)),
    ("numa-binding", "core-complex", "options", TorchOptions(numa_binding="core-complex")),
    ("signals-to-handle", "USR2,SIGTERM", "signals", Signals((SIGUSR2, SIGTERM), (SIGUSR1,))),
    ("signals-to-forward", "SIGINT", "signals", Signals((SIGTERM, SIGHUP, SIGQUIT), (SIGINT,))),
    ("notice", "file:/a b", "notices", (NoticeSource("file", path="/a b"),)),
    ("event-log-handler", "console", "options", TorchOptions(event_log_handler="console")),
    ("monitor-interval", "5", "options", TorchOptions(monitor_interval=5)),
    ("start-method", "fork", "options", TorchOptions(start_method="fork")),
    ("token-file", "secret", "token", Token("correct-horse-battery-staple", "test")),
]


@pytest.mark.parametrize(("name", "text", "attribute", "expected"), VALUES)
def test_every_spelling_of_a_flag_with_a_value(
    parse: Parse, name: str, text: str, attribute: str, expected: object
) -> None:
    Path("secret").write_text("correct-horse-battery-staple\n")
    Path("job.yaml").write_text("role: from-a-file\n")
    Path("drill.yaml").write_text("[{rank: 1, step: 20}]\n")
    under = name.replace("-", "_")
    variable = f"PET_{under.upper()}"
    for line in (
        [f"--{name}", text],
        [f"--{name}={text}"],
        [f"--{under}", text],
        [f"--{under}={text}"],
        [f"--{name.replace('-', '_', 1)}", text],
    ):
        assert getattr(parse(*line, "train.py"), attribute) == expected
    assert getattr(parse("train.py", **{variable: text}), attribute) == expected
    if name != "rdzv-conf":  # whose values merge
        assert getattr(parse(f"--{name}={text}", "train.py", **{variable: "nonsense"}), attribute) == expected


@pytest.mark.parametrize(("nproc", "workers", "idle"), [("6", 4, 2), ("8", 8, 0), ("4", 4, 0), ("cpu", 4, 1)])
def test_a_node_has_whole_replicas(
    parse: Parse, monkeypatch: pytest.MonkeyPatch, nproc: str, workers: int, idle: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(5))
    config = parse("--nproc", nproc, "--replica-size", "4", "train.py")
    assert (config.nproc, config.idle, config.replica_size) == (workers, idle, 4)
    changed = replace(config, node_id="b")
    assert (changed.nproc, changed.idle) == (workers, idle)


def test_replicas_need_this_projects_rendezvous(parse: Parse) -> None:
    line = "--nproc 2 --replica-size 2 --rdzv-backend etcd-v2 --rdzv-endpoint h:1 train.py"
    error = refused(parse, line)
    assert error.message == "--replica-size needs this project's own rendezvous."


def test_every_flag_is_tested() -> None:
    tested = {f"--{name}" for name, *_ in VALUES}
    switches = {flag.name for flag in FLAGS if not flag.metavar}
    assert {flag.name for flag in FLAGS} - tested - {"--print-completion"} == switches  # which shows, and exits
    assert switches == {
        *("--standalone", "--module", "--no-python", "--no-warm", "--no-live", "--no-snapshots", "--split-snapshots"),
        *("--prefix", "--print-config", "--help", "--version", "--run-path", "--virtual-local-rank", "--node-check"),
        "--no-exclude-corrupt",
    }


@pytest.mark.parametrize(
    ("line", "nproc"),
    [
        ("-n 3 train.py", 3),
        ("-n3 train.py", 3),
        ("-n=3 train.py", 3),
        ("--nproc 2 -n 3 train.py", 3),
        ("-n 3 --nproc_per_node 2 train.py", 2),
    ],
)
def test_the_last_spelling_of_nproc_wins(parse: Parse, line: str, nproc: int) -> None:
    assert parse(line).nproc == nproc


# Where nodes meet.


@pytest.mark.parametrize(
    ("line", "endpoint", "announce"),
    [
        ("train.py", None, False),
        ("--nnodes 1:1 train.py", None, False),
        ("--standalone train.py", None, False),
        ("--nnodes 2 train.py", None, True),
        ("--nnodes 1:4 train.py", None, True),
        ("--nnodes 1:4 --rdzv-endpoint node0:1 train.py", Endpoint("node0", 1), False),
        ("--rdzv-endpoint [::1]:0 train.py", Endpoint("::1", 0), False),
    ],
)
def test_endpoint(parse: Parse, line: str, endpoint: Endpoint | None, announce: bool) -> None:
    config = parse(line)
    assert (config.endpoint, config.announce) == (endpoint, announce)


@pytest.mark.parametrize(
    ("line", "environ", "named"),
    [
        ("--standalone --rdzv-endpoint node0 train.py", {}, "--rdzv-endpoint node0:29400"),
        ("--standalone train.py", {"PET_RDZV_ENDPOINT": "node0"}, "PET_RDZV_ENDPOINT node0:29400"),
        ("--rdzv-endpoint=node0 train.py", {"PET_STANDALONE": "1"}, "--rdzv-endpoint node0:29400"),
    ],
)
def test_standalone_ignores_an_endpoint_with_a_warning(
    parse: Parse, caplog: pytest.LogCaptureFixture, line: str, environ: dict[str, str], named: str
) -> None:
    with caplog.at_level(logging.WARNING, logger="elastic_launch"):
        config = parse(line, **environ)
    assert config.endpoint is None
    assert config.run_id != "none"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"--standalone ignores {named}" in caplog.text


@pytest.mark.parametrize("nnodes", ["2", "1:4"])
def test_standalone_is_one_node(parse: Parse, nnodes: str) -> None:
    error = refused(parse, f"--standalone --nnodes {nnodes} train.py")
    assert f"--nnodes {nnodes}" in error.message
    assert "--standalone" in error.message
    assert "Drop --nnodes" in error.hint
    error = refused(parse, f"--nnodes {nnodes} train.py", PET_STANDALONE="1")
    assert "--standalone comes from PET_STANDALONE=1 in the environment" in error.message


@pytest.mark.parametrize("backend", ["statics", "zeus", "C10D"])
def test_other_backends_name_what_is_supported(parse: Parse, backend: str) -> None:
    error = refused(parse, f"--rdzv-backend {backend} train.py")
    assert backend in error.message
    assert "c10d" in error.hint
    error = refused(parse, "train.py", PET_RDZV_BACKEND=backend)
    assert f"PET_RDZV_BACKEND={backend}" in error.message


def test_etcd_takes_several_addresses(parse: Parse) -> None:
    config = parse("--rdzv-backend etcd --rdzv-endpoint a:1,b,[::1]:3 --rdzv-id x train.py")
    assert config.endpoints == (Endpoint("a", 1), Endpoint("b", 2379), Endpoint("::1", 3))
    assert config.endpoint == config.endpoints[0]
    assert not config.announce


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--rdzv-backend etcd --rdzv-id x train.py", "needs the addresses of the cluster"),
        ("--rdzv-backend etcd --rdzv-endpoint a train.py", "needs a name for the run"),
        ("--rdzv-backend etcd --rdzv-endpoint a,,b --rdzv-id x train.py", "--rdzv-endpoint"),
    ],
)
def test_settings_that_etcd_needs_are_reported(parse: Parse, line: str, message: str) -> None:
    assert message in refused(parse, line).message


def test_standalone_ignores_another_backend_with_a_warning(parse: Parse, caplog: pytest.LogCaptureFixture) -> None:
    config = parse("--standalone --rdzv-backend etcd train.py")
    assert config.backend == "c10d"
    assert "--standalone ignores --rdzv-backend etcd" in caplog.text


# Values that cannot work, from a flag and from the environment.


@pytest.mark.parametrize(
    ("name", "text", "message", "hint"),
    [
        ("nnodes", "a", "--nnodes 'a'", "MIN:MAX"),
        ("nnodes", "4:1", "--nnodes 4:1", "--nnodes 1:4"),
        ("nnodes", "0", "--nnodes asks for at least 0", "1 or more"),
        ("nproc", "0", "--nproc 0", "auto, cpu or gpu"),
        ("nproc", "-2", "--nproc -2", "1 or more"),
        ("nproc", "many", "--nproc many", "auto, cpu or gpu"),
        ("nproc", "1.5", "--nproc 1.5", "auto, cpu or gpu"),
        ("nproc", "9" * 5000, "--nproc 999", "auto, cpu or gpu"),
        ("replica-size", "0", "--replica-size is 0", "1 or more"),
        ("replica-size", "two", "--replica-size two", "4"),
        (
            "replica-size",
            "2",
            "--nproc 1 is less than the 2 workers of a replica (--re",
            "--nproc 2 or more",
        ),
        ("max-restarts", "-1", "--max-restarts is -1", "0"),
        ("max-restarts", "few", "--max-restarts few", "4"),
        ("max-idle-restarts", "-1", "--max-idle-restarts is -1", "0"),
        ("restart-refill", "-1", "--restart-refill -1", "0 seconds"),
        ("restart-refill", "1d", "--restart-refill 1d", "2.5"),
        ("fatal-exit-codes", "3,256", "--fatal-exit-codes '256'", "1 to 255"),
        ("fatal-exit-codes", "0", "--fatal-exit-codes '0'", "1 to 255"),
        ("fatal-exit-codes", "9-3", "--fatal-exit-codes '9-3'", "1 to 255"),
        ("fatal-exit-codes", "SIGKILL", "--fatal-exit-codes 'SIGKILL'", "1 to 255"),
        ("hang-timeout", "0", "--hang-timeout 0", "more than 0 seconds"),
        ("hang-timeout", "on", "--hang-timeout on", "2.5; or auto, or off."),
        ("node-rank", "-1", "--node-rank -1", "0 or more"),
        ("node-rank", "first", "--node-rank first", "4"),
        ("node-id", "a/b", "--node-id 'a/b'", "slash"),
        ("rdzv-id", "a/b", "--rdzv-id 'a/b'", "slash"),
        ("rdzv-endpoint", "node0:x", "--rdzv-endpoint 'node0:x'", "65535"),
        ("shutdown-timeout", "-1", "--shutdown-timeout -1", "0 seconds"),
        ("keep-runs", "0", "--keep-runs 0", "1 or more"),
        ("shutdown-timeout", "long", "--shutdown-timeout long", "2.5"),
    ],
)
def test_values_that_cannot_work(parse: Parse, name: str, text: str, message: str, hint: str) -> None:
    error = refused(parse, f"--{name}={text}", "train.py")
    assert message in error.message
    assert hint in error.hint
    assert "environment" not in str(error)
    variable = f"PET_{name.upper().replace('-', '_')}"
    error = refused(parse, "train.py", **{variable: text})
    assert message in error.message
    assert f"--{name} comes from {variable}={text} in the environment." in error.message


@pytest.mark.parametrize("name", sorted({name for name, *_ in VALUES} - {"rdzv-conf"}))
def test_an_empty_value_is_a_mistake_as_a_flag_and_none_in_the_environment(parse: Parse, name: str) -> None:
    assert f"--{name.removesuffix('-per-node')} has an empty value" in refused(parse, f"--{name}=", "train.py").message
    assert parse("train.py", **{f"PET_{name.upper().replace('-', '_')}": ""}).limits == Limits()


@pytest.mark.parametrize(
    ("text", "standalone"), [("1", True), ("true", True), ("0", False), ("", False), ("no", False)]
)
def test_switches_in_the_environment(
    parse: Parse, caplog: pytest.LogCaptureFixture, text: str, standalone: bool
) -> None:
    config = parse("--rdzv-endpoint node0 train.py", PET_STANDALONE=text)
    assert (config.endpoint is None) is standalone
    assert bool(caplog.records) is standalone


def test_a_switch_in_the_environment_that_is_neither(parse: Parse) -> None:
    assert "PET_STANDALONE=2 is neither yes nor no" in refused(parse, "train.py", PET_STANDALONE="2").message


def test_module_from_the_environment(parse: Parse) -> None:
    assert parse("train", PET_MODULE="1").command.argv[2:] == ("-m", "train")


@pytest.mark.parametrize(
    ("line", "environ", "expected"),
    [
        ("", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, 5),
        ("", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5", "PET_SHUTDOWN_TIMEOUT": "6"}, 6),
        ("--shutdown-timeout 7", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5", "PET_SHUTDOWN_TIMEOUT": "6"}, 7),
    ],
)
def test_shutdown_timeout(parse: Parse, line: str, environ: dict[str, str], expected: float) -> None:
    assert parse(f"{line} train.py", **environ).shutdown_timeout == expected


def test_a_bad_default_of_torch_is_named(parse: Parse) -> None:
    message = refused(parse, "train.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="x").message
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=x in the environment" in message


# Devices, by a torch that has what the test says.


def fake_torch(cuda: int = 0, accelerators: int = 0) -> SimpleNamespace:
    def available(count: int) -> SimpleNamespace:
        return SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count)

    return SimpleNamespace(__version__="2.fake", cuda=available(cuda), accelerator=available(accelerators))


@pytest.mark.parametrize(
    ("text", "torch", "expected"),
    [
        ("gpu", fake_torch(cuda=4, accelerators=4), 4),
        ("auto", fake_torch(cuda=4, accelerators=4), 4),
        ("auto", fake_torch(accelerators=2), 2),
        ("auto", fake_torch(), len(os.sched_getaffinity(0))),
        ("cpu", fake_torch(cuda=4, accelerators=4), len(os.sched_getaffinity(0))),
    ],
)
def test_nproc_by_devices(
    parse: Parse, monkeypatch: pytest.MonkeyPatch, text: str, torch: SimpleNamespace, expected: int
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert parse(f"--nproc {text} train.py").nproc == expected
    assert parse("train.py", PET_NPROC_PER_NODE=text).nproc == expected


def test_nproc_gpu_without_one(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(accelerators=1))
    error = refused(parse, "--nproc gpu train.py")
    assert "--nproc gpu: torch 2.fake finds no CUDA device" in error.message
    assert "cpu" in error.hint


def test_a_misspelled_nproc_is_an_error_without_an_import_of_torch(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would fail
    error = refused(parse, "--nproc two train.py")
    assert error.message == "--nproc two is not a number of workers."


# Logs.


def test_log_dir_is_absolute_for_workers_that_change_directory(parse: Parse, tmp_path: Path) -> None:
    assert parse("--log-dir logs train.py").log_dir == tmp_path / "logs"


def test_a_log_dir_below_a_file(parse: Parse) -> None:
    assert "train.py is not a directory" in refused(parse, "--log-dir train.py/logs train.py").message


@pytest.mark.parametrize(
    "text", ["999.1.1.1", "10.0.0.7:80", "[::1]", "node 0", "a/b", "::g", "node0:", "http://node0"]
)
def test_a_local_address_must_be_one(parse: Parse, text: str) -> None:
    error = refused(parse, "--local-addr", text, "train.py")
    assert f"--local-addr {text!r} is not the address of a host" in error.message


@pytest.mark.parametrize(
    "text", ["::1", "fe80::1%eth0", "node0.example.org", "my_host", "10.0.0.7", "127.1", "123456789012"]
)
def test_local_addresses(parse: Parse, text: str) -> None:
    assert parse("--local-addr", f" {text}", "train.py").local_addr == text


def test_an_event_log_handler_must_be_known(parse: Parse) -> None:
    error = refused(parse, "--event-log-handler", "consle", "train.py")
    assert "--event-log-handler consle is not one that torch knows" in error.message
    assert "null or console" in error.hint


def test_a_node_has_not_arbitrarily_many_workers(parse: Parse) -> None:
    assert parse("--nproc", "4096", "train.py").nproc == 4096
    assert "--nproc 99999 is more than the 4096 workers" in refused(parse, "--nproc", "99999", "train.py").message


def test_local_ranks_that_no_worker_has(parse: Parse, caplog: pytest.LogCaptureFixture) -> None:
    parse("--nproc", "2", "--local-ranks-filter", "1,7", "train.py")
    assert not caplog.messages
    parse("--nproc", "2", "--local-ranks-filter", "7", "train.py")
    assert caplog.messages == ["--local-ranks-filter shows no output: this node has the local ranks 0 to 1."]


def test_a_log_dir_that_cannot_be_written(parse: Parse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by its permissions: they do not hold for root.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    error = refused(parse, "--log-dir logs train.py")
    assert f"no permission to write to {tmp_path}" in error.message
    assert "--log-dir" in error.hint


def test_a_log_dir_on_a_read_only_file_system(tmp_path: Path) -> None:
    inside = 'mount -t tmpfs -o ro none "$0" && echo mounted && exec "$@"'
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inside, str(tmp_path)]
    command = [sys.executable, "-m", "elastic_launch", "--log-dir", str(tmp_path / "logs"), __file__]
    if shutil.which("unshare") is None:
        pytest.skip("needs leave to mount, and unshare")
    done = subprocess.run([*enter, *command], capture_output=True, text=True, timeout=60)
    if not done.stdout.startswith("mounted\n"):
        pytest.skip("needs leave to mount")
    assert done.returncode == 2
    assert f"--log-dir {tmp_path}/logs: {tmp_path} is on a read-only file system." in done.stderr


@pytest.mark.parametrize("name", ["http://train", "train:9400", "*", "a..b", "-train", "a/b", "<b>"])
def test_names_of_hosts_are_checked(parse: Parse, name: str) -> None:
    with pytest.raises(UsageError, match=r"--http-host .* is not the name of a host"):
        parse(f"--http-host={name}", "train.py")


def test_modules_to_load_ahead_add_up_and_have_names(parse: Parse) -> None:
    assert parse("--preload", "numpy", "--preload=yaml,", "train.py").preload == ("numpy", "yaml")
    with pytest.raises(UsageError, match="--no-preload '-x' is not the name of a module"):
        parse("--no-preload=-x", "train.py")
    assert parse("--no-warm", "train.py").warm is False


def test_preloading_without_a_warm_server(parse: Parse, caplog: pytest.LogCaptureFixture) -> None:
    parse("--preload", "numpy", "--no-warm", "train.py")
    assert caplog.messages == ["--preload has no effect: --no-warm."]


def test_snapshots_are_kept_unless_they_are_switched_off(parse: Parse) -> None:
    assert parse("train.py").snapshots
    assert not parse("--no-snapshots", "train.py").snapshots
    assert parse("--split-snapshots", "train.py").split_snapshots


def test_nodes_that_compute_wrong_are_left_out_unless_that_is_switched_off(parse: Parse) -> None:
    assert parse("train.py").exclude_corrupt
    assert not parse("--no-exclude-corrupt", "train.py").exclude_corrupt


def test_workers_are_kept_where_they_can_be(parse: Parse) -> None:
    assert parse("train.py").keeps_workers
    assert not parse("--no-live", "train.py").keeps_workers
    assert not parse("train.py", PET_NO_LIVE="1").keeps_workers
    assert not parse("--rdzv-backend", "static", "--nnodes", "2", "--node-rank", "0", "train.py").keeps_workers

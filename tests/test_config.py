"""Tests of the configuration's values: what they refuse, and what makes two nodes' runs the same run."""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from pathlib import Path

import pytest

from elastic_launch.config.endpoints import Endpoint, parse_endpoint
from elastic_launch.config.launch_config import (
    LONGEST_WAIT,
    ZERO_ALLOWED,
    Command,
    LaunchConfig,
    Limits,
    Timing,
    parse_nnodes,
    state_directory,
)
from elastic_launch.errors import ExitCode, UsageError
from elastic_launch.rendezvous.stores.etcd_service import EtcdService

COMMAND = Command(("/usr/bin/python3", "-u", "train.py", "--lr", "1"), ("train.py", "--lr", "1"))
CONFIG = LaunchConfig(command=COMMAND, log_dir=Path("/logs"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", (1, 1)), ("4", (4, 4)), ("1:4", (1, 4)), ("2:2", (2, 2)), (" 1:4 ", (1, 4)), ("4:1", (4, 1))],
)
def test_nnodes(text: str, expected: tuple[int, int]) -> None:
    assert parse_nnodes(text) == expected


@pytest.mark.parametrize("text", ["", ":", "1:", ":4", "1:2:3", "a", "1.5", "1-4", "1_0", "9" * 5000])
def test_nnodes_that_are_no_number(text: str) -> None:
    with pytest.raises(UsageError, match=r"--nnodes .* is not a number of nodes") as caught:
        parse_nnodes(text)
    assert "MIN:MAX" in caught.value.hint


@pytest.mark.parametrize(
    ("limits", "message", "hint"),
    [
        ({"min_nodes": 0}, "--nnodes asks for at least 0 nodes", "1 or more"),
        ({"min_nodes": -2, "max_nodes": 4}, "--nnodes asks for at least -2", "1 or more"),
        ({"min_nodes": 4, "max_nodes": 1}, "--nnodes 4:1", "--nnodes 1:4"),
        ({"max_restarts": -1}, "--max-restarts is -1", "0"),
    ],
)
def test_limits_that_hold_nothing(limits: dict[str, int], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        Limits(**limits)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node0", "node0", 29400),
        ("node0:", "node0", 29400),
        ("node0:1234", "node0", 1234),
        (" node0:1234\n", "node0", 1234),
        ("localhost:0", "localhost", 0),
        ("10.0.0.1:65535", "10.0.0.1", 65535),
        ("127.1", "127.1", 29400),
        ("::1", "::1", 29400),
        ("fe80::1%eth0", "fe80::1%eth0", 29400),
        ("[::1]", "::1", 29400),
        ("[::1]:", "::1", 29400),
        ("[::1]:1234", "::1", 1234),
        ("[2001:db8::2%eth0]:80", "2001:db8::2%eth0", 80),
    ],
)
def test_endpoint(text: str, host: str, port: int) -> None:
    endpoint = parse_endpoint(text)
    assert endpoint == Endpoint(host, port)
    assert parse_endpoint(str(endpoint)) == endpoint


def test_endpoints_of_etcd_are_several_and_may_be_ipv6() -> None:
    assert EtcdService().parse("h1, h2:2380,[::1]:2381,http://h4:1/") == (
        Endpoint("h1", 2379),
        Endpoint("h2", 2380),
        Endpoint("::1", 2381),
        Endpoint("h4", 1),
    )


@pytest.mark.parametrize("text", ["", "h1,", "h1:x", "[::1", "h1:0", "https://h1:2379", "h1/x", "http://"])
def test_endpoints_of_etcd_that_cannot_work_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint") as caught:
        EtcdService().parse(text)
    assert caught.value.hint


def test_a_request_for_tls_to_etcd_is_refused_with_a_hint() -> None:
    with pytest.raises(UsageError, match="asks for TLS") as caught:
        EtcdService().parse("https://h1:2379")
    assert "grpc-proxy" in caught.value.hint


def test_endpoint_takes_the_default_port_that_it_is_given() -> None:
    assert parse_endpoint("node0", default_port=2379) == Endpoint("node0", 2379)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        (":29400", "names no host"),
        ("[]:29400", "names no host"),
        ("[::1", "bracket"),
        ("[::1]29400", "bracket"),
        ("[node0]:29400", "'node0' where an IPv6 address belongs"),
        ("node0:29400:1", "'node0:29400:1' where an IPv6 address belongs"),
        ("tcp://node0:29400", "where an IPv6 address belongs"),
        ("node0/1:29400", "'node0/1' where a host name belongs"),
        ("node 0:29400", "'node 0' where a host name belongs"),
        ("999.1.1.1:29400", "'999.1.1.1' where a host name belongs"),
        ("node0:http", "the port 'http'"),
        ("node0:-1", "the port '-1'"),
        ("node0:65536", "the port '65536'"),
        ("node0:" + "9" * 5000, "the port '999"),
        ("node0:\u0661", "the port"),
    ],
)
def test_invalid_endpoints(text: str, message: str) -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint") as caught:
        parse_endpoint(text)
    assert message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(Timing)])
@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan, math.inf, -math.inf, 2 * LONGEST_WAIT])
def test_times_that_cannot_be_waited_for(name: str, value: float) -> None:
    if value == 0 and name in ZERO_ALLOWED:
        assert getattr(Timing(**{name: value}), name) == 0
        return
    with pytest.raises(UsageError, match=f"--rdzv-conf {name}=.* is not a time to wait") as caught:
        Timing(**{name: value})
    assert "seconds" in caught.value.hint


def test_beats_have_to_fit_into_the_silence() -> None:
    assert Timing(dead_after=2, beat=1)
    with pytest.raises(UsageError, match="dead_after=5 leaves no room for beats every 3 s") as caught:
        Timing(beat=3)
    assert "dead_after=6" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nproc": 0}, "--nproc 0 starts no worker"),
        ({"nproc": -1}, "--nproc -1"),
        ({"shutdown_timeout": -1.0}, "--shutdown-timeout -1"),
        ({"shutdown_timeout": math.nan}, "--shutdown-timeout nan"),
        ({"run_id": ""}, "--rdzv-id ''"),
        ({"run_id": ".."}, "--rdzv-id '..'"),
        ({"run_id": "a/b"}, "--rdzv-id 'a/b'"),
        ({"run_id": "a\nb"}, "--rdzv-id 'a\\nb'"),
        ({"run_id": "a" * 201}, "--rdzv-id"),
        ({"run_id": "\u00e4" * 101}, "--rdzv-id"),
        ({"node_id": ""}, "--node-id ''"),
        ({"node_id": "rack/1"}, "--node-id 'rack/1'"),
        ({"node_rank": -1}, "--node-rank -1"),
    ],
)
def test_configs_that_cannot_work(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        dataclasses.replace(CONFIG, **change)  # type: ignore[arg-type]
    assert message in caught.value.message
    assert caught.value.hint


def test_bounds_that_do_work() -> None:
    config = dataclasses.replace(CONFIG, run_id="a" * 200, node_id="job 7.node-0", shutdown_timeout=0.0, node_rank=0)
    assert config.run_directory == Path("/logs") / ("a" * 200)


@pytest.mark.parametrize(
    "change",
    [
        {"nproc": 8},
        {"command": dataclasses.replace(COMMAND, argv=("/opt/bin/python", *COMMAND.argv[1:]))},
        {"node_id": "other", "node_rank": 1},
        {"endpoint": Endpoint("::1", 1), "local_addr": "10.0.0.2"},
        {"timing": Timing(join_settle=0)},
        {"log_dir": Path("/elsewhere")},
        {"shutdown_timeout": 1.0},
        {"command": Command(COMMAND.argv, ("train.py", "--lr", "2"))},
        {"command": Command(COMMAND.argv, ("../job/train.py",))},
        {"command": Command(COMMAND.argv, ("--run-path", "/job/train.py"))},
        {"limits": Limits(1, 2, 4)},
    ],
)
def test_digest_ignores_what_may_differ_between_nodes(change: dict[str, object]) -> None:
    assert dataclasses.replace(CONFIG, **change).digest() == CONFIG.digest()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"command": Command(COMMAND.argv, ("other.py", "--lr", "1"))},
        {"command": Command(COMMAND.argv, ("-m", "train.py", "--lr", "1"))},
        {"command": Command(COMMAND.argv, ("--no-python", "train.py", "--lr", "1"))},
        {"backend": "etcd"},
    ],
)
def test_digest_distinguishes_scripts(change: dict[str, object]) -> None:
    assert dataclasses.replace(CONFIG, **change).digest() != CONFIG.digest()  # type: ignore[arg-type]


def test_a_functions_name_is_not_read_as_a_flag_or_script() -> None:
    function, script = Command(("x",), ("-m",), function=True), Command(("x",), ("--function",))
    assert (function.target, str(function)) == (("function", "-m"), "function -m")
    assert script.target == ("script", "--function")


@pytest.mark.parametrize(
    ("display", "expected"),
    [
        (("/a/job/train.py", "x"), ("script", "train.py")),
        (("/a/job/", "x"), ("script", "job")),
        (("/a/job/.",), ("script", "job")),
        ((".",), ("script", "here")),
        (("--run-path", "/a/train.py"), ("script", "train.py")),
        (("-m", "pack.train", "x"), ("module", "pack.train")),
        (("--no-python", "./train"), ("program", "train")),
    ],
)
def test_a_commands_target(
    display: tuple[str, ...], expected: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert Command(("x",), display).target == expected


def test_digest_accepts_any_bytes_of_a_command_line() -> None:
    config = dataclasses.replace(CONFIG, command=Command(("x",), ("\udcff.py",)))
    assert len(config.digest()) == 64


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_STATE_HOME": "/state", "HOME": "/home/a"}, "/state/elastic-launch"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/home/a"}, "/home/a/.local/state/elastic-launch"),
        ({"XDG_STATE_HOME": "", "HOME": "/home/a"}, "/home/a/.local/state/elastic-launch"),
        ({"HOME": "/home/a"}, "/home/a/.local/state/elastic-launch"),
    ],
)
def test_state_directory(environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert state_directory(environ) == Path(expected)
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert state_directory() == Path(expected)


def test_state_directory_of_a_user_without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert state_directory({}) == Path(tempfile.gettempdir()) / f"elastic-launch-{os.getuid()}"


def test_state_directory_where_home_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    assert state_directory({"HOME": str(tmp_path / "home")}).parent == Path(tempfile.gettempdir())

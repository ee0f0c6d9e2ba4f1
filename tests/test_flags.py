"""Tests of how a command line is split, and of the help."""

from __future__ import annotations

import re

import pytest
from command_lines import refused

from elastic_launch.cli.flags import FLAGS, CommandLine, Values, split
from elastic_launch.cli.help import EXIT_CODES, help_text
from elastic_launch.config.settings import CONF_KEYS
from elastic_launch.errors import ExitCode


@pytest.mark.parametrize(
    ("prefix", "name"),
    [
        ("--nn", "--nnodes"),
        ("--np", "--nproc"),
        ("--nproc-p", "--nproc"),
        ("--nproc_per", "--nproc"),
        ("--rdzv-en", "--rdzv-endpoint"),
        ("--rdzv_c", "--rdzv-conf"),
        ("--node-r", "--node-rank"),
        ("--max", "--max-restarts"),
        ("--j", "--join-settle"),
        ("--sh", "--shutdown-timeout"),
    ],
)
def test_prefixes(prefix: str, name: str) -> None:
    assert split([prefix, "1", "train.py"]).given == {name: ["1"]}
    assert split([f"{prefix}=1", "train.py"]).given == {name: ["1"]}


@pytest.mark.parametrize(
    ("token", "candidates"),
    [
        (
            "--n",
            [
                *("--nnodes", "--nproc", "--node-rank", "--node-id", "--no-python", "--no-warm", "--no-live"),
                *("--no-exclude-corrupt", "--no-snapshots", "--no-preload"),
                *("--node-check", "--numa-binding", "--notice"),
            ],
        ),
        (
            "--no",
            [
                *("--node-rank", "--node-id", "--node-check"),
                *("--no-python", "--no-warm", "--no-live", "--no-exclude-corrupt"),
                *("--no-snapshots", "--no-preload", "--notice"),
            ],
        ),
        ("--master_", ["--master-addr", "--master-port"]),
        ("--rdzv=3", ["--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"]),
    ],
)
def test_ambiguous_prefixes_name_the_candidates(token: str, candidates: list[str]) -> None:
    message = refused(split, [token, "1", "train.py"]).message
    assert message.startswith(token.partition("=")[0] + " could be ")
    assert sorted(re.findall(r"--[a-z-]+", message.partition("could be")[2])) == sorted(candidates)


@pytest.mark.parametrize(
    ("token", "meant"),
    [
        ("--nporc", "--nproc"),
        ("--nporc=2", "--nproc"),
        ("--nnode_s", "--nnodes"),
        ("--max_restart_s", "--max-restarts"),
        ("-nnodes", "--nnodes"),
        ("-nproc_per_node=4", "--nproc-per-node"),
        ("--standalnoe", "--standalone"),
        ("--zzz", None),
        ("-x", None),
    ],
)
def test_unknown_flags_name_the_nearest(token: str, meant: str | None) -> None:
    error = refused(split, [token, "2", "train.py"])
    assert error.message == f"unknown flag {token.partition('=')[0]}."
    assert (f"Did you mean {meant}?" in error.hint) if meant else ("Did you mean" not in error.hint)
    assert "after the script" in error.hint


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nproc", "--nproc needs a value, the command ends there"),
        ("--nproc --nnodes 2 train.py", "--nproc needs a value, found --nnodes"),
        ("-n -m train", "-n needs a value, found -m"),
        ("--standalone=1 train.py", "--standalone=1 gives a value to a switch"),
        ("--module=train", "--module=train gives a value to a switch"),
    ],
)
def test_values_that_are_missing_or_too_much(line: str, message: str) -> None:
    assert message in refused(split, line.split()).message


def test_exact_names_win_over_longer_ones() -> None:
    assert split(["--nproc", "2", "train.py"]).given == {"--nproc": ["2"]}


def test_every_value_of_a_flag_is_kept_in_order() -> None:
    line = split(["--rdzv-conf", "a=1", "--rdzv_conf=b=2", "--standalone", "train.py"])
    assert line.given == {"--rdzv-conf": ["a=1", "b=2"], "--standalone": [""]}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["train.py"], CommandLine(script="train.py")),
        (["train.py", "--", "--nproc", "2"], CommandLine(script="train.py", arguments=("--", "--nproc", "2"))),
        (["--", "train.py", "--", "x"], CommandLine(script="train.py", arguments=("--", "x"))),
        (["--", "--nproc", "2"], CommandLine(script="--nproc", arguments=("2",))),
        (["-", "x"], CommandLine(script="-", arguments=("x",))),
        (["", "x"], CommandLine(script="", arguments=("x",))),
        (["--"], CommandLine()),
        ([], CommandLine()),
        (["train.py", "--help"], CommandLine(script="train.py", arguments=("--help",))),
        (["--help", "--zzz"], CommandLine(wants="--help")),
        (["-n", "2", "--vers"], CommandLine(given={"--nproc": ["2"]}, wants="--version")),
    ],
)
def test_split(argv: list[str], line: CommandLine) -> None:
    assert split(argv) == line


def test_environment_gives_what_the_command_line_does_not() -> None:
    environ = {"PET_NPROC_PER_NODE": "8", "PET_NNODES": "2", "PET_ROLE": "", "PET_HELP": "1"}
    values = Values({"--nnodes": ["1", "3"]}, environ)
    assert (values.text("--nproc"), values.text("--nnodes"), values.text("--role")) == ("8", "3", None)
    assert not values.switch("--help")
    assert Values({}, environ | {"PET_NPROC": "4"}).text("--nproc") == "4"


def test_help_fits_a_terminal() -> None:
    assert max(map(len, help_text().splitlines())) <= 80


def test_help_has_one_line_per_flag_with_its_purpose() -> None:
    lines = help_text().splitlines()
    for flag in FLAGS:
        own = [line for line in lines if re.match(f"  {flag.names[0]}(?![a-z-])", line)]
        assert len(own) == 1, flag
        assert all(name in own[0] for name in flag.names)
        assert flag.purpose in own[0]
        assert f"[{flag.default}]" in own[0] or not flag.default


def test_help_ends_with_every_exit_code() -> None:
    assert {code for code, _ in EXIT_CODES} == set(ExitCode)
    codes = help_text().partition("Exit codes:\n")[2].splitlines()
    assert [line.split()[0] for line in codes] == [*(str(int(code)) for code in ExitCode), "other"]


def test_help_names_every_key_of_rdzv_conf() -> None:
    words = set(re.findall(r"\w+", help_text()))
    assert set(CONF_KEYS) <= words

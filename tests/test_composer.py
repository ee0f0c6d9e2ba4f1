"""Tests of Composer's command line: the resulting world, what each rank is started with, and invalid worlds."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_agents.static_world import StaticWorld, expanded
from elastic_launch.cli import composer
from elastic_launch.cli import main as cli
from elastic_launch.cli.flags import split
from elastic_launch.errors import UsageError

Parse = Callable[..., StaticWorld]


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Parse a command line, given as one string, beside a ``train.py``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def parse_it(line: str, **environ: str) -> StaticWorld:
        return composer.world(
            split(line.split(), composer.FLAGS), {"HOME": str(tmp_path), "PATH": os.environ["PATH"], **environ}
        )

    return parse_it


def ranks(world: StaticWorld) -> tuple[int, int, int, int]:
    """How many start here, the world's size, base rank and node rank."""
    return len(world.ranks), world.world_size, world.base_rank, world.node_rank


MASTER = "--master_addr node0 --master_port 29500"


@pytest.mark.parametrize(
    ("line", "environ", "expected"),
    [
        ("-n 2", {}, (2, 2, 0, 0)),
        ("-n2 --world_size 2 --base_rank 0 --node_rank 0", {}, (2, 2, 0, 0)),
        (f"-n 2 --world_size 6 --node_rank 1 {MASTER}", {}, (2, 6, 2, 1)),
        (f"-n 2 --world_size 6 --base_rank 4 {MASTER}", {}, (2, 6, 4, 2)),
        (f"--nproc 1 --world-size=4 --base-rank=3 --node-rank=1 {MASTER}", {}, (1, 4, 3, 1)),
        (f"-n 3 --world_size 4 --base_rank 0 --node_rank 0 {MASTER}", {}, (3, 4, 0, 0)),
        ("", {"LOCAL_WORLD_SIZE": "3"}, (3, 3, 0, 0)),
        ("", {"LOCAL_WORLD_SIZE": "0"}, (1, 1, 0, 0)),
        ("-n 2", {"LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "", "PET_NPROC": "7"}, (2, 2, 0, 0)),
        (MASTER, {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "NODE_RANK": "1"}, (2, 4, 2, 1)),
        (f"{MASTER} --base_rank 2", {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "BASE_RANK": "0"}, (2, 4, 2, 1)),
    ],
)
def test_worlds(parse: Parse, line: str, environ: dict[str, str], expected: tuple[int, int, int, int]) -> None:
    assert ranks(parse(f"{line} train.py", **environ)) == expected


def test_without_a_number_there_is_one_process_for_each_gpu(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    for found, expected in ((4, 4), (0, 1)):
        monkeypatch.setattr("torch.cuda.device_count", lambda found=found: found)
        assert len(parse("train.py").ranks) == expected


def test_the_master_is_as_given_or_on_this_node(parse: Parse) -> None:
    world = parse(f"-n 1 {MASTER} train.py")
    assert (world.master_addr, world.master_port) == ("node0", 29500)
    world = parse("-n 1 train.py", MASTER_ADDR="node1", MASTER_PORT="7")
    assert (world.master_addr, world.master_port) == ("node1", 7)
    world = parse("-n 1 train.py")
    assert world.master_addr == "127.0.0.1"
    assert 1024 <= world.master_port < 65536


SEVERAL = "-n 2 --world_size 4 --node_rank 0"


@pytest.mark.parametrize(
    ("line", "environ", "problem", "hint"),
    [
        ("-n 0", {}, "--nproc 0 is below 1", "1 or more"),
        ("-n many", {}, "--nproc many is not a whole number", "as in 4"),
        ("-n 2", {"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a whole number", "as in 4"),
        ("-n 2 --world_size 0", {}, "--world-size 0 is below 1", "1 or more"),
        ("-n 2 --world_size 1", {}, "--world-size 1 is less than the 2 processes", "on all nodes together"),
        ("-n 2", {"WORLD_SIZE": "1"}, "WORLD_SIZE=1 in the environment is less than", "on all nodes together"),
        ("-n 2 --base_rank 2", {}, "--base-rank 2 puts other ranks before this node's", "--world_size"),
        ("-n 2", {"NODE_RANK": "1"}, "NODE_RANK=1 in the environment puts other ranks", "--world_size"),
        ("-n 2 --base_rank -1", {}, "--base-rank -1 is below 0", "0 or more"),
        (f"-n 2 --world_size 4 {MASTER}", {}, "the rank of this node is not given", "--node_rank"),
        (f"-n 2 --world_size 5 --node_rank 1 {MASTER}", {}, "do not make a world of 5", "give --base_rank, too"),
        (f"-n 2 --world_size 5 --base_rank 2 {MASTER}", {}, "do not make a world of 5", "give --node_rank, too"),
        (f"-n 2 --world_size 6 --base_rank 3 {MASTER}", {}, "rank 3 the first of a node", "give --node_rank, too"),
        (
            f"-n 2 --world_size 4 --node_rank 2 {MASTER}",
            {},
            "ranks 4 to 5 of this node do not all exist",
            "--node_rank",
        ),
        (f"{SEVERAL} --master_port 1", {}, "no --master-addr says where", "--master_addr"),
        (f"{SEVERAL} --master_addr a", {}, "no --master-port says where", "--master_port"),
        ("-n 2 --master_port 65536", {}, "--master-port 65536 is not a port", "1 to 65535"),
        ("-n 2 --master_addr=", {}, "--master-addr has an empty value", "leave the flag out"),
        ("-n 2 -m -c", {}, "contradict each other", "Drop -c"),
        ("-n 2 --nnodes 1:4", {}, "--nnodes means nothing in a world of fixed size", "elastic-launch"),
        ("-n 2 --shutdown-timeout soon", {}, "is not a number of seconds", "as in 2.5"),
        ("-n 3 --stdout a.txt", {}, "local ranks 1 and 2 would both write to", "{rank} or {local_rank}"),
        ("-n 3 --stdout {node_rank}", {}, "local ranks 1 and 2 would both write to", "{rank} or {local_rank}"),
        ("-n 2 --stderr {ranks}", {}, "--stderr {ranks} has the unknown field {ranks}", "{local_world_size}"),
        ("-n 2 --stdout {rank.__class__}", {}, "has the unknown field {rank.__class__}", "{rank}"),
        ("-n 2 --stdout {}", {}, "has the unknown field {}", "{rank}"),
        ("-n 2 --stdout {rank", {}, "is not a valid format", "a brace itself is written twice"),
    ],
)
def test_an_impossible_world_is_reported(
    parse: Parse, line: str, environ: dict[str, str], problem: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse(f"{line} train.py", **environ)
    assert problem in caught.value.message
    assert hint in caught.value.hint


def test_a_missing_script_is_reported(parse: Parse) -> None:
    for line, problem in (("-n 1", "there is no script to run"), ("-n 1 none.py", "there is no script 'none.py'")):
        with pytest.raises(UsageError, match=problem):
            parse(line)


def test_scripts_modules_and_programs(parse: Parse) -> None:
    assert parse("-n 1 train.py -n 5 -v").argv == (sys.executable, "-u", "train.py")
    assert parse("-n 1 train.py -n 5 -v").arguments == ("-n", "5", "-v")
    for flag in ("-m", "--module_mode", "--module"):
        assert parse(f"-n 1 {flag} train").argv == (sys.executable, "-u", "-m", "train")
    for flag in ("-c", "--command_mode", "--no-python"):
        assert parse(f"-n 1 {flag} env A=1").argv == ("env",)
    assert parse("-n 1 train.py", PET_MODULE="1", PET_NNODES="1:4").argv[-1] == "train.py"


def test_local_rank_0_has_the_console_and_the_others_files(parse: Parse, tmp_path: Path) -> None:
    world = parse(f"-n 2 --world_size 8 --node_rank 3 --run_directory my {MASTER} train.py")
    assert world.run_directory == tmp_path / "my"
    first, second = world.ranks
    assert (first.stdout, first.stderr) == (None, None)
    assert second.stdout == tmp_path / "my/rank_7/logs/rank_7.stdout.txt"
    assert second.stderr == tmp_path / "my/rank_7/logs/rank_7.stderr.txt"
    formats = (
        "--stdout out/{rank:03d}-{local_rank}-{world_size} --stderr /err/{node_rank}.{local_world_size}.{rank}{{}}"
    )
    _, second = parse(f"-n 2 --world_size 8 --node_rank 3 {formats} {MASTER} train.py").ranks
    assert second.stdout == tmp_path / "out/007-1-8"
    assert second.stderr == Path("/err/3.2.7{}")


def test_the_run_directory_is_named_by_the_time(parse: Parse, tmp_path: Path) -> None:
    stamp = r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(\.\d+)?"
    assert re.fullmatch(f"{tmp_path}/runs/{stamp}", str(parse("-n 1 train.py").run_directory))
    world = parse("-n 2 --run_directory {x}/{timestamp}/y train.py")
    assert re.fullmatch(rf"{tmp_path}/{{x}}/{stamp}/y", str(world.run_directory))
    assert world.ranks[1].stdout == world.run_directory / "rank_1/logs/rank_1.stdout.txt"


def test_a_rank_gets_composers_variables_and_none_of_another_launcher(parse: Parse) -> None:
    world = parse(f"-n 2 --world_size 4 --node_rank 1 --run_directory my {MASTER} train.py")
    before = {"A": "1", "RANK": "9", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "1", "ROLE_NAME": "x"}
    env = world.environment(1, {**before, "ELASTIC_LAUNCH_SOCKET": "@x", "ELASTIC_LAUNCH_TOKEN": "secret"})
    assert env == {
        "A": "1",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "COMPOSER_RUN_DIRECTORY": str(world.run_directory),
        "TORCHELASTIC_ERROR_FILE": str(world.run_directory / "rank_3/logs/error.json"),
    }


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("$RANK", "3"),
        ("a$RANK.txt", "a3.txt"),
        ("${RANK}0", "30"),
        ("$RANKS ${RANKS} $", "$RANKS ${RANKS} $"),
        ("$$RANK", "$3"),
        ("~/x/$RANK", "/home/me/x/3"),
        ("a~", "a~"),
        ("${}", "${}"),
    ],
)
def test_arguments_are_expanded(text: str, becomes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded(text, {"RANK": "3"}) == becomes
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("RANKS", raising=False)
    assert os.path.expandvars(os.path.expanduser(text)) == becomes, "Composer expands otherwise"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--world_size 2 train.py", True),
        ("--base-rank=2 train.py", True),
        ("-n 2 --stdout x -v --world-size 2 train.py", True),
        ("train.py --world_size 2", False),
        ("--nproc 2 train.py --base_rank 2", False),
        ("-- train.py --world_size 2", False),
        ("--stdout x train.py --world_size 2", False),
        ("--nporc 2 --world_size 2 train.py", True),
        ("--world_size", True),
    ],
)
def test_elastic_launch_recognizes_a_request_for_a_fixed_world(line: str, expected: bool) -> None:
    assert composer.wanted(line.split()) is expected


def test_elastic_launch_hands_over(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--nporc", "2", "--world_size", "2", "train.py"]) == 2
    assert "unknown flag --nporc" in capsys.readouterr().err
    assert cli.main(["-n", "2", "--world_size", "1", "train.py"]) == 2
    assert "--world-size 1 is less than" in capsys.readouterr().err
    assert cli.main(["--world_size", "1", "--help"]) == 0
    assert capsys.readouterr().out == composer.help_text()


def test_the_help_has_every_flag_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert composer.main(["--help"]) == 0
    out = capsys.readouterr().out
    for flag in composer.FLAGS:
        assert all(name in out for name in (*flag.names, flag.fallback))
    assert composer.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("elastic-composer ")

"""Each name in the tables of docs/reference/composer.md that compare Composer's launcher with ours, as a real run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import elastic_launch

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "composer.md"

# It needs no torch: it says what it was started with, in a file and on both streams.
SCRIPT = """
import json, os, pathlib, sys
rank = os.environ["RANK"]
pathlib.Path(f"rank-{rank}.json").write_text(json.dumps([dict(os.environ), sys.argv[1:]]))
print("out", rank)
print("err", rank, file=sys.stderr)
"""

SEVERAL = ("--master_addr", "node0", "--master_port", "29500")


@dataclass(frozen=True)
class Launch:
    """A directory in which ``elastic-composer`` runs ``said.py``, and its results."""

    here: Path

    def __call__(
        self, *flags: str, script: tuple[str, ...] = ("said.py",), **environ: str
    ) -> dict[str, dict[str, str]]:
        """Return the environment of each rank, by rank."""
        done = self.done(*flags, script=script, **environ)
        assert done.returncode == 0, done.stderr
        found = {path: json.loads(path.read_text()) for path in self.here.glob("rank-*.json")}
        for path in found:
            path.unlink()
        return {
            environment["RANK"]: {**environment, "arguments": arguments} for environment, arguments in found.values()
        }

    def done(
        self, *flags: str, script: tuple[str, ...] = ("said.py",), **environ: str
    ) -> subprocess.CompletedProcess[str]:
        composers = ("RANK", "SIZE", "MASTER", "MOSAICML", "PYTHONUNBUFFERED", "TORCH_NCCL")
        mine = {name: value for name, value in os.environ.items() if not any(part in name for part in composers)}
        command = [sys.executable, "-m", "elastic_launch.cli.composer", *flags, *script]
        return subprocess.run(
            command, cwd=self.here, env={**mine, **environ}, capture_output=True, text=True, timeout=180
        )

    def text(self, pattern: str) -> str:
        """The text of the only file of this name."""
        (path,) = self.here.glob(pattern)
        return path.read_text()


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    (tmp_path / "said.py").write_text(SCRIPT)
    return Launch(tmp_path)


@pytest.fixture(scope="module")
def second_of_three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of rank 4, which is local rank 1 of 2 on node 1 of a world of 6."""
    here = tmp_path_factory.mktemp("rows")
    (here / "said.py").write_text(SCRIPT)
    flags = ("-n", "2", "--world_size", "6", "--base_rank", "3", "--node_rank", "1", *SEVERAL)
    ranks = Launch(here)(*flags)
    assert sorted(ranks) == ["3", "4"]
    return ranks["4"]


def number(launch: Launch) -> None:
    assert sorted(launch("--nproc", "2")) == ["0", "1"]  # the others take -n


def stdout(launch: Launch) -> None:
    launch("-n", "2", "--stdout", "{rank}-{local_rank}-{world_size}-{node_rank}-{local_world_size}.txt")
    assert launch.text("1-1-2-0-2.txt") == "out 1\n"


def stderr(launch: Launch) -> None:
    launch("-n", "2", "--stderr", "{rank}-{local_rank}-{world_size}-{node_rank}-{local_world_size}.txt")
    assert launch.text("1-1-2-0-2.txt") == "err 1\n"
    assert launch.text("runs/*/rank_1/logs/rank_1.stdout.txt") == "out 1\n", "where it is without a flag"


def verbose(launch: Launch) -> None:
    assert "rank 0 finished" in launch.done("-n", "1", "--verbose").stderr


def module_mode(launch: Launch) -> None:
    assert launch("-n", "1", "--module_mode", script=("said", "x"))["0"]["arguments"] == ["x"]


def command_mode(launch: Launch) -> None:
    assert launch.done("-n", "1", "--command_mode", script=("echo", "$RANK")).stdout == "0\n"


def world_size(launch: Launch) -> None:
    ranks = launch("-n", "1", "--world_size", "4", "--node_rank", "2", *SEVERAL)
    assert ranks["2"]["WORLD_SIZE"] == "4"


def base_rank(launch: Launch) -> None:
    ranks = launch("-n", "2", "--world_size", "6", "--base_rank", "4", *SEVERAL)
    assert {rank: said["NODE_RANK"] for rank, said in ranks.items()} == {"4": "2", "5": "2"}


def node_rank(launch: Launch) -> None:
    ranks = launch("-n", "2", "--world_size", "6", "--node_rank", "2", *SEVERAL)
    assert sorted(ranks) == ["4", "5"]


def master_addr(launch: Launch) -> None:
    assert launch("-n", "1", "--master_addr", "node0")["0"]["MASTER_ADDR"] == "node0"


def master_port(launch: Launch) -> None:
    assert launch("-n", "1", "--master_port", "29500")["0"]["MASTER_PORT"] == "29500"


def training_script(launch: Launch) -> None:
    done = launch.done("-n", "1", script=("none.py",))
    assert done.returncode == 2
    assert "there is no script 'none.py'" in done.stderr


def training_script_args(launch: Launch) -> None:
    ranks = launch("-n", "2", script=("said.py", "-n", "5", "$LOCAL_RANK", "~/a", "${WORLD_SIZE}"), HOME="/home/me")
    assert ranks["1"]["arguments"] == ["-n", "5", "1", "/home/me/a", "2"]


def shows_help(launch: Launch) -> None:
    assert "--base-rank" in launch.done("-h", script=()).stdout


def shows_version(launch: Launch) -> None:
    assert launch.done("--version", script=()).stdout == f"elastic-composer {elastic_launch.__version__}\n"


def reads_local_world_size(launch: Launch) -> None:
    assert sorted(launch(LOCAL_WORLD_SIZE="2")) == ["0", "1"]


def reads_world_size(launch: Launch) -> None:
    ranks = launch("-n", "1", "--node_rank", "2", *SEVERAL, WORLD_SIZE="4")
    assert ranks["2"]["WORLD_SIZE"] == "4"
    ranks = launch("-n", "2", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    assert [said["WORLD_SIZE"] for said in ranks.values()] == ["2", "2"]


def reads_base_rank(launch: Launch) -> None:
    assert sorted(launch("-n", "2", "--world_size", "6", *SEVERAL, BASE_RANK="4")) == ["4", "5"]


def reads_node_rank(launch: Launch) -> None:
    assert sorted(launch("-n", "2", "--world_size", "6", *SEVERAL, NODE_RANK="2")) == ["4", "5"]


def reads_master_addr(launch: Launch) -> None:
    assert launch("-n", "1", MASTER_ADDR="node0")["0"]["MASTER_ADDR"] == "node0"


def reads_master_port(launch: Launch) -> None:
    assert launch("-n", "1", MASTER_PORT="29500")["0"]["MASTER_PORT"] == "29500"


PLATFORM = {"MOSAICML_PLATFORM": "True", "MOSAICML_LOG_DIR": "logs", "MOSAICML_GPU_LOG_FILE_PREFIX": "gpu_"}


def on_the_platform(launch: Launch) -> None:
    done = launch.done("-n", "2", "--stdout", "{rank}.txt", **PLATFORM)
    assert (done.returncode, done.stdout) == (0, "out 0\n")
    assert "--stdout has no effect" in done.stderr
    assert sorted(launch.text("logs/gpu_1.txt").splitlines()) == ["err 1", "out 1"]
    assert not (launch.here / "1.txt").exists()


def without(name: str, value: str) -> Callable[[Launch], None]:
    """Without one of the platform's variables the other two have no meaning."""

    def check(launch: Launch) -> None:
        launch("-n", "2", "--stdout", "{rank}.txt", **{**PLATFORM, name: value})
        assert launch.text("1.txt") == "out 1\n"
        assert not (launch.here / "logs").exists()

    return check


FLAGS: dict[str, Callable[[Launch], None]] = {
    "-n": number,
    "--stdout": stdout,
    "--stderr": stderr,
    "-v": verbose,
    "-m": module_mode,
    "-c": command_mode,
    "--world_size": world_size,
    "--base_rank": base_rank,
    "--node_rank": node_rank,
    "--master_addr": master_addr,
    "--master_port": master_port,
    "training_script": training_script,
    "training_script_args": training_script_args,
    "-h": shows_help,
    "--version": shows_version,
}

READ: dict[str, Callable[[Launch], None]] = {
    "LOCAL_WORLD_SIZE": reads_local_world_size,
    "WORLD_SIZE": reads_world_size,
    "BASE_RANK": reads_base_rank,
    "NODE_RANK": reads_node_rank,
    "MASTER_ADDR": reads_master_addr,
    "MASTER_PORT": reads_master_port,
    "MOSAICML_PLATFORM": on_the_platform,
    "MOSAICML_LOG_DIR": without("MOSAICML_LOG_DIR", "false"),
    "MOSAICML_GPU_LOG_FILE_PREFIX": without("MOSAICML_GPU_LOG_FILE_PREFIX", "FALSE"),
}

SAME = {"--nproc", "--verbose", "--module_mode", "--command_mode", "--help"}
"""Long names of flags that the page shows, too."""

SET = {
    "RANK": "4",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "PYTHONUNBUFFERED": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}


@pytest.mark.parametrize("row", FLAGS)
def test_a_flag(launch: Launch, row: str) -> None:
    FLAGS[row](launch)


@pytest.mark.parametrize("row", READ)
def test_a_variable_that_is_read(launch: Launch, row: str) -> None:
    READ[row](launch)


@pytest.mark.parametrize("row", SET)
def test_a_variable_that_is_set(second_of_three: dict[str, str], row: str) -> None:
    assert second_of_three[row] == SET[row]


@pytest.mark.parametrize(
    ("title", "tested"),
    [("Flags of composer", FLAGS), ("Variables that composer reads", READ), ("Variables that composer sets", SET)],
)
def test_the_rows_are_those_that_are_tested(title: str, tested: dict[str, object]) -> None:
    section = PAGE.read_text().partition(f"### {title}\n")[2].partition("\n#")[0]
    cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    shown = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell) if name not in SAME]
    assert sorted(shown) == sorted(tested)

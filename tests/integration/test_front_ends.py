"""The commands of others with one word changed: real processes for each form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FIND_FILE = (
    "from os import path; import elastic_launch; print(path.join(path.dirname(elastic_launch.__file__), 'launch.py'))"
)

# As in torch's examples: only the underscores are known, and strangers are refused.
EXAMPLE = """
import argparse, json, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--local_world_size", type=int, default=1)
arguments = parser.parse_args()
names = {"rank": "RANK", "world": "WORLD_SIZE", "restarts": "TORCHELASTIC_MAX_RESTARTS", "added": "ADDED"}
found = {key: os.environ.get(name) for key, name in names.items()}
sys.stdout.write(json.dumps({"argv": sys.argv[1:], "path": sys.path, **found}) + "\\n")
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "example.py").write_text(EXAMPLE)
    return tmp_path


def run(here: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; state goes below the working directory."""
    env = {**os.environ, "XDG_STATE_HOME": str(here / "state"), **environ}
    return subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=60)


def said(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    """What each worker of ``example.py`` printed, in rank order."""
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda worker: int(worker["rank"]))


TUTORIAL = ["--nproc_per_node=4", "--nnode=1", "--node_rank=0", "example.py", "--local_world_size=4"]


def test_the_tutorials_command_runs_as_a_module(here: Path) -> None:
    workers = said(run(here, sys.executable, "-m", "elastic_launch.launch", *TUTORIAL))
    assert [worker["argv"] for worker in workers] == [
        [f"--local_rank={rank}", "--local_world_size=4"] for rank in range(4)
    ]
    assert {worker["restarts"] for worker in workers} == {"0"}


def test_the_file_runs_by_its_path_and_shadows_nobodys_modules(here: Path) -> None:
    path = run(here, sys.executable, "-c", FIND_FILE).stdout.strip()
    # What the launcher imports must not be taken from its own directory, wherever it was started.
    check = "import sys; assert not [x for x in sys.path if x.rstrip('/').endswith('elastic_launch')], sys.path"
    (here / "sitecustomize.py").write_text(f"import atexit\natexit.register(lambda: exec({check!r}))\n")
    done = run(
        here,
        *(sys.executable, path, "--nproc_per_node=2", "example.py", "--local_world_size=2"),
        PYTHONPATH=os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
    )
    workers = said(done)
    assert [worker["argv"][0] for worker in workers] == ["--local_rank=0", "--local_rank=1"]
    assert "AssertionError" not in done.stderr
    assert str(Path(path).parent) not in workers[0]["path"]


def test_with_use_env_the_script_gets_no_argument(here: Path) -> None:
    (worker,) = said(run(here, sys.executable, "-m", "elastic_launch.launch", "--use-env", "example.py"))
    assert worker["argv"] == []


def test_a_job_file_runs_with_its_variables(here: Path) -> None:
    (here / "job.yaml").write_text(
        "nproc: 1\nmax-restarts: 5\nscript: example.py\nargs: [--local_rank, 7]\nenv: {ADDED: 010}\n"
    )
    workers = said(
        run(here, sys.executable, "-m", "elastic_launch", "--config", "job.yaml", "-n2", "--", "--local_world_size=9")
    )
    assert [worker["argv"] for worker in workers] == [["--local_rank", "7", "--local_world_size=9"]] * 2
    assert (workers[0]["added"], workers[0]["restarts"]) == ("010", "5")

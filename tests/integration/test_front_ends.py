"""Other launchers' commands with one word changed: real processes for each form."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import LOOP, Job, alive, free_port, read_lines, wait_for

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
    return subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=180)


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


def test_the_file_runs_by_its_path_and_shadows_no_modules(here: Path) -> None:
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


@pytest.mark.slow  # tests/test_launch.py has the arguments for each flag
def test_with_use_env_the_script_gets_no_argument(here: Path) -> None:
    (worker,) = said(run(here, sys.executable, "-m", "elastic_launch.launch", "--use-env", "example.py"))
    assert worker["argv"] == []


@pytest.mark.slow
def test_torchs_own_module_hands_over_the_same(here: Path) -> None:
    source = (here / "example.py").read_text().replace('"--local_rank"', '"--local-rank"')
    (here / "example.py").write_text(source)
    theirs, ours = (
        said(run(here, sys.executable, "-m", module, "--nproc_per_node=2", "example.py", "--local_world_size=2"))
        for module in ("torch.distributed.launch", "elastic_launch.launch")
    )
    assert [worker["argv"][0] for worker in theirs] == ["--local-rank=0", "--local-rank=1"]
    assert ours == theirs


def test_a_job_file_runs_with_its_variables(here: Path, job: Job) -> None:
    (here / "job.yaml").write_text(
        "nproc: 1\nmax-restarts: 5\nscript: example.py\nargs: [--local_rank, 7]\nenv: {ADDED: 010}\n"
    )
    agent = job.launch("--config", "job.yaml", "-n2", "--", "--local_world_size=9", command=[], cwd=here)
    assert agent.wait() == 0, agent.output
    lines = [json.loads(line) for line in agent.output.splitlines() if line.startswith("{")]
    workers = sorted(lines, key=lambda worker: int(worker["rank"]))
    assert [worker["argv"] for worker in workers] == [["--local_rank", "7", "--local_world_size=9"]] * 2
    assert (workers[0]["added"], workers[0]["restarts"]) == ("010", "5")


# Composer's command: fixed worlds.

ELASTIC_LAUNCH = [sys.executable, "-m", "elastic_launch"]
COMPOSER = [sys.executable, "-m", "elastic_launch.cli.composer"]

# They sum the ranks of the world that their environment describes: by torch, and, much quicker, by themselves.
SUM_BY_TORCH = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
print(total.item(), os.environ["NODE_RANK"], *sys.argv[1:], flush=True)
dist.destroy_process_group()
"""
SUM = """
import os, socket, sys, time
rank, others = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(where) as server:
        files = [server.accept()[0].makefile("rw") for _ in range(others)]
    total = sum(int(file.readline()) for file in files)
    for file in files:
        print(total, file=file, flush=True)
else:
    while True:
        try:
            file = socket.create_connection(where).makefile("rw")
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    print(rank, file=file, flush=True)
    total = int(file.readline())
print(total, os.environ["NODE_RANK"], *sys.argv[1:], flush=True)
"""


def started(directory: Path) -> list[int]:
    """The pids of workers of ``loop.py`` and of their child processes."""
    return [pid for line in read_lines(directory / "started.jsonl") for pid in (line["pid"], *line["children"])]


@pytest.fixture
def loop(here: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start ``loop.py`` by Composer's command; no process may be left at the end."""
    processes = []

    def start(*flags: str, script: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = [*COMPOSER, "--run_directory", "my", *flags, LOOP, str(here), *script]
        processes.append(subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()
    wait_for("the end of all workers", lambda: not any(map(alive, started(here))), 10.0)


@pytest.mark.parametrize("script", [SUM, pytest.param(SUM_BY_TORCH, marks=pytest.mark.slow)], ids=["plain", "torch"])
def test_nodes_of_different_sizes_make_one_world(here: Path, script: str) -> None:
    (here / "sum.py").write_text(script)
    several = ["--world_size", "3", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    # One by the flags of elastic-launch, one by the variables of Composer.
    first = subprocess.Popen(
        [*ELASTIC_LAUNCH, "-n", "1", "--base_rank=0", "--node_rank=0", *several, "sum.py", "$RANK"],
        cwd=here,
        stdout=subprocess.PIPE,
        text=True,
    )
    done = run(
        here,
        *(*COMPOSER, "--stdout", "{rank}-{local_rank}.txt", *several, "sum.py", "$RANK", "~"),
        LOCAL_WORLD_SIZE="2",
        BASE_RANK="1",
        NODE_RANK="1",
        HOME="/home/me",
    )
    out, _ = first.communicate(timeout=180)
    assert (first.returncode, done.returncode) == (0, 0), done.stderr
    assert out == "3 0 0\n"
    assert done.stdout == "3 1 1 /home/me\n"
    assert (here / "2-1.txt").read_text() == "3 1 2 /home/me\n"


def test_a_crash_ends_the_others_and_shows_the_ranks_output(
    here: Path, loop: Callable[..., subprocess.Popen[str]]
) -> None:
    process = loop("-n", "3", script=("--child",))
    wait_for("three workers", lambda: len(started(here)) == 6)
    (here / "exit-2").write_text("17")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 17
    assert out == "rank 0 of 3 in round None\n"
    assert "root cause: rank 2" in err
    assert "ended with exit code 17" in err
    assert "        rank 2 of 3 in round None\n" in err
    assert "        rank 2 leaves with 17\n" in err
    assert "rank 1 (pid" not in err, "it was told to end, which is no crash"
    assert (here / "my/rank_1/logs/rank_1.stdout.txt").read_text() == "rank 1 of 3 in round None\n"


# As torch's record writes it, without torch's import.
RECORDED = """
import json, os
STACK = "Traceback (most recent call last):\\n  in main\\nRuntimeError: told to\\n"
text = {"message": "RuntimeError: told to", "extraInfo": {"py_callstack": STACK, "timestamp": "1700000000"}}
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": text}, file)
raise SystemExit(1)
"""
RECORDED_BY_TORCH = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main(): raise RuntimeError('told to')
main()
"""


@pytest.mark.parametrize(
    "script", [RECORDED, pytest.param(RECORDED_BY_TORCH, marks=pytest.mark.slow)], ids=["plain", "torch"]
)
def test_an_exception_recorded_by_torch_is_shown(here: Path, script: str) -> None:
    (here / "fails.py").write_text(script)
    done = run(here, *COMPOSER, "-n", "1", "fails.py")
    assert done.returncode == 1
    assert "RuntimeError: told to" in done.stderr.partition("root cause: rank 0")[2]


@pytest.mark.parametrize(("code", "expected"), [("2", 1), ("95", 1), ("5", 5)])
def test_codes_that_have_a_meaning_here_become_1(
    here: Path, loop: Callable[..., subprocess.Popen[str]], code: str, expected: int
) -> None:
    (here / "exit-0").write_text(code)
    process = loop("-n", "1")
    process.communicate(timeout=100)
    assert process.returncode == expected


def test_workers_that_do_not_heed_sigterm_are_killed_after_their_grace(
    here: Path, loop: Callable[..., subprocess.Popen[str]]
) -> None:
    process = loop("-n", "2", "--shutdown-timeout", "0.2", script=("--ignore-term", "--child"))
    wait_for("two workers", lambda: len(started(here)) == 4)
    os.kill(started(here)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 137
    assert "signal 9 (SIGKILL): stopping rank" in err
    assert "still there after 0.2 s" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_the_workers_and_a_second_one_kills(
    here: Path, loop: Callable[..., subprocess.Popen[str]], number: int, code: int
) -> None:
    process = loop("-n", "2", script=("--ignore-term",))
    wait_for("two workers", lambda: len(started(here)) == 2)
    process.send_signal(number)
    assert process.stderr is not None
    assert "stopping rank 0, 1" in process.stderr.readline()
    process.send_signal(number)  # of the same moment: wrappers send two
    time.sleep(1.1)
    assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == code
    assert "a second signal" in err
    assert "root cause" not in err


def test_the_killed_launchers_workers_die_with_it(here: Path, loop: Callable[..., subprocess.Popen[str]]) -> None:
    process = loop("-n", "2", script=("--child",))
    wait_for("two workers", lambda: len(started(here)) == 4)
    process.kill()
    wait_for("the end of all workers", lambda: not any(map(alive, started(here))), 10.0)


def test_a_program_that_cannot_be_executed_ends_with_90(here: Path) -> None:
    program = here / "program"
    program.write_text("#!/nowhere/interpreter\n")
    program.chmod(0o755)
    done = run(here, *COMPOSER, "-n", "2", "-c", "./program")
    assert done.returncode == 90
    assert "rank 0 cannot be started" in done.stderr


def test_programs_modules_and_verbose(here: Path) -> None:
    done = run(here, *COMPOSER, "-n", "1", "-v", "-c", "echo", "${LOCAL_RANK}/$WORLD_SIZE")
    assert (done.returncode, done.stdout) == (0, "0/1\n")
    assert "ranks 0 to 0 of 1 start on node 0" in done.stderr
    assert "rank 0 finished" in done.stderr
    done = run(here, *COMPOSER, "-n", "1", "-m", "example", "--local_world_size", "$WORLD_SIZE")
    assert json.loads(done.stdout)["argv"] == ["--local_world_size", "1"]
    assert done.stderr == ""


def test_output_that_cannot_be_written_starts_nothing(here: Path) -> None:
    (here / "file").touch()
    done = run(here, *COMPOSER, "-n", "2", "--stderr", "file/{rank}", "example.py")
    assert done.returncode == 2
    assert "file/1 cannot be written: [Errno 17] File exists" in done.stderr
    assert done.stdout == ""

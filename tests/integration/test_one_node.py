"""One node: start, faults, budget, signals, output."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from harness import Job, alive, name_of, round_of, tree, wait_for

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "0",
    "ROLE_RANK": "1",
    "ROLE_NAME": "default",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "OMP_NUM_THREADS": "1",
    "NODE_RANK": "0",
    "ELASTIC_LAUNCH_ROUND": "1",
    "ELASTIC_LAUNCH_START_REASON": "first",
}

PARSES = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('x')\nparser.parse_args()\n"


def test_workers_get_every_variable_of_torchrun_and_their_arguments(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    agent = job.launch("--standalone", "--nproc", "2", "--rdzv-id", "abc", script_flags=["--nproc", "a b", "--", "-x"])
    worker = job.world(2)[1]
    job.finish()
    assert agent.wait() == 0
    assert {name: worker["env"].get(name) for name in TORCHRUN} == TORCHRUN
    assert worker["env"]["MASTER_ADDR"] == "127.0.0.1"
    assert int(worker["env"]["MASTER_PORT"]) > 0
    assert worker["env"]["TORCHELASTIC_ERROR_FILE"].endswith("round_1/1/error.json")
    assert worker["argv"][1:] == ["--nproc", "a b", "--", "-x"]
    assert re.fullmatch("[0-9a-f]{16}", worker["env"]["ELASTIC_LAUNCH_RUN_NUMBER"])
    assert f"logs in {job.logs}/abc" in agent.output.splitlines()[0]
    assert "done: all workers finished; restarts: 0; logs in" in agent.output.splitlines()[-1]


def test_a_killed_worker_ends_the_round_and_the_next_one_starts(job: Job) -> None:
    agent = job.launch("--standalone", "--nproc", "2", "--wait-for-children", "0", script_flags=["--child"])
    first = job.world(2)
    os.kill(first[0]["pid"], signal.SIGKILL)
    second = job.world(2, after=1)
    assert [worker["env"]["TORCHELASTIC_RESTART_COUNT"] for worker in second] == ["1", "1"]
    assert not [pid for worker in first for pid in (worker["pid"], *worker["children"]) if alive(pid)]
    job.finish()
    assert agent.wait() == 0
    for child in (pid for worker in second for pid in worker["children"]):
        os.kill(child, signal.SIGKILL)  # what finished workers leave behind goes on
    assert "signal 9 (SIGKILL)" in agent.output
    assert "restart 1 of 3 (--max-restarts 3)" in agent.output
    names = [event["event"] for event in job.events()]
    assert names.count("round_formed") == 2
    assert names.count("round_broken") == names.count("restart_charged") == 1
    assert names.count("worker_started") == names.count("worker_exited") == 4


def test_an_exit_is_seen_at_once(job: Job) -> None:
    agent = job.launch("--standalone", "--nproc", "1")
    worker = job.world(1)[0]
    os.kill(worker["pid"], signal.SIGKILL)
    job.world(1, after=1)
    job.finish()
    assert agent.wait() == 0
    exited = next(event for event in job.events("worker_exited") if event["exit_code"] == -9)
    broken = job.event("round_broken")
    assert broken["clock"] >= exited["clock"]
    assert not broken["cause"].startswith("node")


@pytest.mark.parametrize(("code", "expected"), [("3", 3), ("2", 1), ("91", 1)])
def test_without_restarts_the_code_is_the_workers_own(job: Job, code: str, expected: int) -> None:
    agent = job.launch("--standalone", "--max-restarts", "0")
    job.world(1)
    job.tell("exit-0", code)
    assert agent.wait() == expected
    lines = agent.output.splitlines()
    assert any("no restart allowed (--max-restarts 0)" in line for line in lines)
    assert any("root cause: rank 0 on node" in line and f"exit code {code}" in line for line in lines)
    assert f"    rank 0 leaves with {code}" in lines


def test_a_signal_without_restarts_is_128_plus_its_number(job: Job) -> None:
    agent = job.launch("--standalone", "--max-restarts", "0")
    os.kill(job.world(1)[0]["pid"], signal.SIGSEGV)
    assert agent.wait() == 128 + signal.SIGSEGV
    assert "signal 11 (SIGSEGV)" in agent.output


def test_the_spent_budget_ends_the_run_with_91(job: Job) -> None:
    agent = job.launch("--standalone", "--max-restarts", "1")
    os.kill(job.world(1)[0]["pid"], signal.SIGKILL)
    os.kill(job.world(1, after=1)[0]["pid"], signal.SIGKILL)
    assert agent.wait() == 91
    assert "all restarts spent (--max-restarts 1)" in agent.output


def test_restarts_without_a_new_step_end_the_run_with_92(job: Job) -> None:
    agent = job.launch("--standalone", "--max-restarts", "9", "--max-idle-restarts", "1")
    os.kill(job.world(1)[0]["pid"], signal.SIGKILL)
    os.kill(job.world(1, after=1)[0]["pid"], signal.SIGKILL)
    assert agent.wait() == 92
    assert "no new step in 1 restart (--max-idle-restarts 1)" in agent.output


@pytest.mark.parametrize(("code", "codes"), [("7", "7"), ("65", "3,64-78")])
def test_a_fatal_exit_code_ends_the_run_with_93(job: Job, code: str, codes: str) -> None:
    agent = job.launch("--standalone", "--fatal-exit-codes", codes)
    job.world(1)
    job.tell("exit-0", code)
    assert agent.wait() == 93
    assert f"exit code {code}, which --fatal-exit-codes names" in agent.output


def test_a_fatal_signal_is_given_by_its_exit_code(job: Job) -> None:
    agent = job.launch("--standalone", "--fatal-exit-codes", str(128 + signal.SIGSEGV))
    os.kill(job.world(1)[0]["pid"], signal.SIGSEGV)
    assert agent.wait() == 93
    assert "signal 11 (SIGSEGV), which --fatal-exit-codes names" in agent.output


def test_failures_at_the_start_are_retried_within_the_budget(job: Job) -> None:
    """What is missing may exist at the next attempt."""
    job.tell("raise-0")
    agent = job.launch("--standalone", "--max-restarts", "1")
    agent.says("restart 1 of 1")
    job.tell("raise-0")
    assert agent.wait() == 91
    assert "OSError: rank 0 was told to fail" in agent.output.split("root cause")[-1]
    assert "Traceback (most recent call last):" in agent.output.split("root cause")[-1]
    assert agent.output.count("a round forms") == 2, "at the start, and once more"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(:\n", "SyntaxError"),
        ("# caf\xe9\n", "SyntaxError: Non-UTF-8 code"),
        ("import nosuchmodule\n", "No module named 'nosuchmodule'"),
        (PARSES, ": x"),
    ],
    ids=["a syntax error", "not in UTF-8", "a missing module", "wrong arguments"],
)
def test_a_script_that_cannot_run_ends_the_run_at_the_first_attempt(
    job: Job, tmp_path: Path, text: str, says: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text, encoding="latin-1")
    agent = job.launch("--standalone", command=[str(script)])
    assert agent.wait() == 90
    assert says in agent.output.split("root cause")[-1]
    assert len(job.events("round_formed")) == 1


def test_a_worker_that_reports_that_a_retry_would_not_help_ends_the_run(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "hopeless.py"
    script.write_text("import torch\nimport elastic_launch as el\nel.do_not_retry('the data set is not complete')\n")
    agent = job.launch("--standalone", command=[str(script)])
    assert agent.wait() == 93
    cause = agent.output.split("root cause")[-1]
    assert "exit code 93: the data set is not complete" in cause
    assert [line.split(",")[0].strip() for line in cause.splitlines() if "File " in line] == [f'File "{script}"']
    assert "restart 1" not in agent.output
    assert not job.events("restart_charged")


def test_an_exception_recorded_by_torch_is_the_root_cause(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "recorded.py"
    script.write_text(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise ValueError('bad batch')\nmain()\n"
    )
    agent = job.launch("--standalone", "--max-restarts", "0", command=[str(script)])
    assert agent.wait() == 1
    cause = agent.output.split("root cause")[-1]
    assert "ValueError: bad batch" in cause
    assert "recorded.py" in cause


@pytest.mark.parametrize("recorded", [True, False])
def test_the_launchers_error_file_gets_the_first_failure(job: Job, tmp_path: Path, recorded: bool) -> None:
    """As under torchrun, which writes it only if the script uses ``@record`` or the launcher itself fails."""
    script = tmp_path / "failing.py"
    write = (
        "import json; json.dump({'message': {'message': 'ValueError: bad', 'extraInfo': {'py_callstack': 'at line 3',"
        " 'timestamp': '1700000000'}}}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\n"
    )
    script.write_text(f"import os, sys\n{write if recorded else ''}print('bad', file=sys.stderr)\nos._exit(9)\n")
    path = tmp_path / "error.json"
    agent = job.launch(
        "--standalone", "--max-restarts", "0", command=[str(script)], env={"TORCHELASTIC_ERROR_FILE": str(path)}
    )
    assert agent.wait() == 9
    found = json.loads(path.read_text())["message"]
    assert found["errorCode"] == 9
    assert found["extraInfo"]["timestamp"].isdigit()
    told = (found["message"], found["extraInfo"]["py_callstack"])
    assert told == (("ValueError: bad", "at line 3") if recorded else ("exit code 9", "bad"))


def test_ctrl_c_reaches_a_plain_script_as_an_interrupt(job: Job, tmp_path: Path) -> None:
    """As under torchrun: scripts save what they have in ``except KeyboardInterrupt``."""
    script = tmp_path / "interrupted.py"
    script.write_text(
        "import os, pathlib, sys, time, numpy\n"  # so workers are forked
        "here, rank = pathlib.Path(sys.argv[1]), os.environ['RANK']\n"
        "try:\n"
        "    (here / f'begun-{rank}').touch()\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(0.3)\n"
        "    (here / f'saved-{rank}').write_text('all of it')\n"
    )
    agent = job.launch("--standalone", "--nproc", "2", command=[str(script), str(tmp_path)])
    wait_for("both workers", lambda: len(list(tmp_path.glob("begun-*"))) == 2)
    agent.signal(signal.SIGINT)
    assert agent.wait() == 130
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["all of it"] * 2
    assert "exit code 130: stopped by SIGINT" in agent.output
    assert [event["exit_code"] for event in job.events("worker_exited")] == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_program_gets_the_launchers_signal(job: Job, tmp_path: Path, number: signal.Signals) -> None:
    # A shell that waits for a program ends by Ctrl-C only if that does: the whole group has to get the signal.
    program = tmp_path / "program.sh"
    program.write_text(f"trap 'echo got {number.name}; exit 7' {number.name[3:]}\necho begun\nsleep 600\n")
    flags = ["--standalone", "--shutdown-timeout", "600", "--no-python"]
    agent = job.launch(*flags, command=["bash", str(program)])
    agent.says("begun")
    # Before that, bash's child may lose the signal, and bash waits for it.
    wait_for("the program's sleep", lambda: "sleep" in map(name_of, tree(agent.process.pid)))
    agent.signal(number)
    assert agent.wait() == 128 + number
    assert f"got {number.name}" in agent.output


SAVING = """
import signal, sys, time

def save(*_):
    time.sleep(0.5)
    open(sys.argv[1], "w").close()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("begun", flush=True)
time.sleep(600)
"""


def test_a_script_behind_a_shell_saves_before_it_ends(job: Job, tmp_path: Path) -> None:
    script, program, saved = tmp_path / "saving.py", tmp_path / "program.sh", tmp_path / "saved"
    script.write_text(SAVING)
    program.write_text(f"{sys.executable} {script} {saved}\necho python ended with $?\n")
    flags = ["--standalone", "--shutdown-timeout", "600", "--no-python"]
    agent = job.launch(*flags, command=["bash", str(program)])
    agent.says("begun")
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143
    assert saved.exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_the_workers_and_their_children(job: Job, number: int, code: int) -> None:
    agent = job.launch("--standalone", "--nproc", "2", script_flags=["--child"])
    workers = job.world(2)
    agent.signal(number)
    assert agent.wait() == code
    assert not [pid for worker in workers for pid in (worker["pid"], *worker["children"]) if alive(pid)]
    assert ("Traceback" in agent.output) == (number == signal.SIGINT)  # the workers', of their KeyboardInterrupt
    assert "elastic_agents" not in agent.output


def test_workers_that_ignore_the_signal_are_killed_after_their_grace(job: Job) -> None:
    agent = job.launch("--standalone", "--shutdown-timeout", "1", script_flags=["--ignore-term"])
    job.world(1)
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143
    exits = job.events("worker_exited")
    assert [event["exit_code"] for event in exits] == [-9]


def test_the_second_signal_kills(job: Job) -> None:
    agent = job.launch("--standalone", "--shutdown-timeout", "600", script_flags=["--ignore-term"])
    job.world(1)
    agent.signal(signal.SIGINT)
    agent.says("SIGINT received")
    time.sleep(1.1)  # what comes at once is the same signal
    agent.signal(signal.SIGINT)
    assert agent.wait() == 130


def test_a_signal_before_the_first_rendezvous_ends_cleanly(job: Job) -> None:
    agent = job.launch("--standalone")
    agent.says("logs in")
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143
    assert "Traceback" not in agent.output


def test_a_worker_ended_by_sigterm_is_a_free_restart(job: Job) -> None:
    agent = job.launch("--standalone", "--max-restarts", "0")
    os.kill(job.world(1)[0]["pid"], signal.SIGTERM)
    job.world(1, after=1)
    job.finish()
    assert agent.wait() == 0
    assert "restarts: 0" in agent.output


def test_the_killed_agents_workers_die_with_it(job: Job) -> None:
    agent = job.launch("--standalone", "--nproc", "2", script_flags=["--child", "--ignore-term"])
    workers = job.world(2)
    agent.kill()
    # The fixture waits for the workers and their children, and fails if any stays.
    assert len(workers) == 2


def test_output_goes_to_the_console_and_to_files(job: Job) -> None:
    agent = job.launch("--standalone", "--nproc", "2", "--rdzv-id", "out")
    job.world(2)
    job.finish()
    assert agent.wait() == 0
    assert "rank 1 of 2 in round 1" in agent.output
    assert (job.logs / "out/round_1/1/stdout.log").read_text() == "rank 1 of 2 in round 1\n"
    for line in next((job.logs / "out").glob("events-*.jsonl")).read_text().splitlines():
        assert {"event", "time", "clock"} <= json.loads(line).keys()


def test_a_module_and_a_program_run_as_well(job: Job) -> None:
    agent = job.launch("--standalone", "-m", command=["json.tool", "--help"])
    assert agent.wait() == 0
    program = job.launch("--standalone", "--no-python", command=["bash", "-c", "echo rank $RANK; exit 0"])
    assert program.wait() == 0
    assert "rank 0" in program.output


def test_rounds_are_numbered_over_restarts(job: Job) -> None:
    agent = job.launch("--standalone", "--max-restarts", "5")
    number = 0
    for _ in range(3):
        worker = job.world(1, after=number)[0]
        number = round_of(worker)
        os.kill(worker["pid"], signal.SIGKILL)
    assert round_of(job.world(1, after=number)[0]) == 4
    job.finish()
    assert agent.wait() == 0

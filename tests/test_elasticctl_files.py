"""The commands of elasticctl that ask no leader: events from files, and the division of a global batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_launch.batch import GlobalBatch
from elastic_launch.cli.elasticctl import main, shown
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import ExitCode
from elastic_launch.rendezvous.admin import messages as a
from elastic_launch.rendezvous.run_file import RunAddress, RunFile
from elastic_launch.system.host_load import GpuLoad, HostLoad


def record(path: Path, ago: float, **event: object) -> None:
    moment = datetime.now(UTC) - timedelta(seconds=ago)
    line = json.dumps({"time": moment.isoformat(timespec="milliseconds"), "clock": 100.0 - ago, **event})
    with path.open("a") as file:
        file.write(line + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory with two nodes' files."""
    record(tmp_path / "events-a.jsonl", 50, event="worker_kept", round=2, rank=0, local_rank=0, pid=7)
    record(tmp_path / "events-a.jsonl", 10, event="node_lost", node="b", cause="silent", detect_s=5, broke=0, next="on")
    record(tmp_path / "events-b.jsonl", 30, event="node_ended", code=0, cause="all done")
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_events_of_all_nodes_are_in_the_order_of_their_times(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--log-dir", str(run)]) == 0
    kept, ended, lost = printed(capsys)
    assert kept.split("Z  ")[1] == "a  worker_kept: a worker kept its process (pid 7) and is rank 0 in round 2"
    assert ended.split("Z  ")[1] == "b  node_ended: this node's part of the run ended with exit code 0: all done"
    assert lost.split("Z  ")[1] == "a  node_lost: node b lost (silent); on"


def test_only_the_last_seconds_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--log-dir", str(run), "--since", "20"]) == 0
    (line,) = printed(capsys)
    assert "node_lost" in line


def test_lines_are_shown_as_they_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--log-dir", str(run), "--json"]) == 0
    assert [json.loads(line)["event"] for line in printed(capsys)] == ["worker_kept", "node_ended", "node_lost"]


def test_events_of_a_run_that_is_over_are_not_followed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--log-dir", str(run), "--follow"]) == 0
    assert len(printed(capsys)) == 3


def test_logs_are_those_of_the_last_run_of_an_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The earlier one had come to a later round, and its node had another id."""
    formed = {"event": "round_formed", "term": 1, "nodes": ["a"], "world_size": 1, "restarts": 0, "cause": "first"}
    for node, ago, rounds in (("earlier", 90.0, 2), ("last", 50.0, 1)):
        for number in range(1, rounds + 1):
            path = tmp_path / f"events-{node}.jsonl"
            record(path, ago - number, round=number, form_s=0.1, **formed)
            worker = {"rank": 0, "local_rank": 0, "pid": 7 + number, "cause": "first", "start_s": 0.1}
            record(path, ago - number, event="worker_started", round=number, **worker)
    for number in (1, 2):
        (tmp_path / f"round_{number}" / "0").mkdir(parents=True)
        (tmp_path / f"round_{number}" / "0" / "stdout.log").write_text(f"in round {number}\n")
    assert main(["logs", "0", "--log-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "in round 1\n"


def test_logs_are_those_of_the_last_run_in_a_file(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """As of a Slurm job that was requeued: its run has the same directory, and its node the same id."""
    path = tmp_path / "events-a.jsonl"

    def start(number: int, pid: int, cause: str) -> None:
        record(path, 5, event="order_received", order="form", round=number, term=1, cause=cause)
        worker(path, "worker_started", number, 0, pid)

    for number in (1, 2):
        start(number, number, "crash" if number > 1 else "first")
        printed_by(tmp_path / f"round_{number}" / "0", f"in round {number}\n")
        ended = {"round": number, "rank": 0, "local_rank": 0, "pid": number, "ran_s": 1.0}
        record(path, 5, event="worker_exited", exit_code=1, stopped=False, **ended)
    start(1, 7, "first")
    assert main(["logs", "0", "--log-dir", str(tmp_path)]) == 0
    assert capfdbinary.readouterr() == (b"in round 1\n", b"")
    start(2, 8, "crash")
    assert main(["logs", "0", "--log-dir", str(tmp_path)]) == 0
    assert capfdbinary.readouterr() == (b"in round 2\n", b""), "the failure was one of the earlier run"


PROGRAM = (sys.executable, "-c", "from elastic_launch.cli.elasticctl import console_main; console_main()")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_a_full_disk_is_an_error_without_a_traceback(run: Path, unbuffered: str) -> None:
    command, environ = [*PROGRAM, "events", "--log-dir", str(run)], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=environ)
    assert done.stderr == "elasticctl: error: the output could not be written: No space left on device.\n"
    assert done.returncode == 120


def test_without_a_stdout_nothing_is_printed(run: Path) -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *PROGRAM, "report", "--log-dir", str(run)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_locale_cannot_express_is_escaped(run: Path) -> None:
    record(run / "events-a.jsonl", 5, event="node_ended", code=1, cause="no file étude.py")
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    done = subprocess.run(
        [*PROGRAM, "events", "--log-dir", str(run)], capture_output=True, text=True, timeout=60, env=environ
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "no file \\xe9tude.py" in done.stdout


def test_broken_lines_are_named_and_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "events-a.jsonl").open("ab") as file:
        file.write(b'\xff\x00nothing\n{"event": "node_ended", "clock": 1}\n{"event": "from_later", "clock": 1.0}\n{"ev')
    assert main(["events", "--log-dir", str(run)]) == 0
    out, err = capsys.readouterr()
    (said,) = err.splitlines()
    assert "events-a.jsonl: 2 of 5 lines cannot be used, the first is line 3: no JSON" in said
    assert said.endswith("; 1 of 5 lines is of kinds unknown here (from_later)")
    assert "from_later: an event of another version" in out, "the last line is not complete yet"
    assert len(out.splitlines()) == 4


def test_a_file_of_something_else_is_named_once_and_has_no_figures(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "events-b.jsonl").unlink()
    with (run / "events-a.jsonl").open("ab") as file:
        file.write(b"\x7fELF\x00\xff\x1b[2J\n" * 1000)
    assert main(["events", "--log-dir", str(run)]) == 0
    out, err = capsys.readouterr()
    assert (len(out.splitlines()), len(err.splitlines())) == (2, 1)
    assert "1000 of 1002 lines cannot be used" in err
    assert "\x1b" not in err
    assert main(["report", "--log-dir", str(run)]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert "1000 of 1002 lines cannot be used" in err
    assert "is mostly readable" in err


@pytest.mark.parametrize(
    ("content", "complaint"), [(b"", " is empty"), (b"\x7fELF\r\x00", ": 1 of 1 lines cannot be used")]
)
def test_a_file_without_a_line_is_named(
    content: bytes, complaint: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "events-c.jsonl").write_bytes(content)
    for command in ("events", "report"):
        assert main([command, "--log-dir", str(run)]) == 0
        assert capsys.readouterr().err.startswith(f"{run}/events-c.jsonl{complaint}")


def test_a_file_of_another_version_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(run / "events-c.jsonl", 5, event="from_later", version="9.9")
    assert main(["report", "--log-dir", str(run)]) == 0
    assert "1 of 1 lines is of kinds unknown here (from_later); the file is of version 9.9" in capsys.readouterr().err


def test_a_directory_without_events_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--log-dir", str(tmp_path)]) == ExitCode.RENDEZVOUS
    assert f"There is no run in {tmp_path}" in capsys.readouterr().err


def test_a_damaged_file_of_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "run.json"
    file.write_text("{")
    for directory in (tmp_path, tmp_path / "a"):
        assert main(["status", "--log-dir", str(directory)]) == ExitCode.RENDEZVOUS
        said = capsys.readouterr().err
        assert f"There is no run in {directory}, but {file}, which is damaged or cannot be read." in said


def test_events_are_not_asked_of_a_leader(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--rdzv-endpoint", "10.0.0.5:29400"]) == ExitCode.USAGE
    assert "--log-dir" in capsys.readouterr().err


def test_the_report_is_a_table_an_object_or_a_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--log-dir", str(run)]) == 0
    assert "0 incidents" in capsys.readouterr().out
    assert main(["report", "--log-dir", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["node"] in ("a", "b")
    assert main(["report", "--log-dir", str(run), "--html", str(run / "x.html")]) == 0
    assert (run / "x.html").read_text().startswith("<!doctype html>")


def test_the_report_names_its_run_by_a_directory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert "0 incidents" in capsys.readouterr().out
    assert main(["report", str(run), "--rdzv-id", "x"]) == ExitCode.USAGE
    assert "Name it once" in capsys.readouterr().err
    assert main(["report", "no-such-run", "--log-dir", str(run.parent / "nowhere")]) == ExitCode.RENDEZVOUS
    assert "no-such-run" in capsys.readouterr().err


def test_the_status_of_a_run_that_has_ended_names_it_by_a_directory(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = RunFile(run)
    file.write(RunAddress("mine", "c10d", "127.0.0.1:1", "a"))
    file.end(91, "a worker failed")
    assert main(["status", str(run)]) == ExitCode.TRAINING_FAILED
    assert "Run 'mine' has ended with exit code 91: a worker failed." in capsys.readouterr().err
    assert main(["status", str(run), "--json"]) == ExitCode.TRAINING_FAILED
    assert json.loads(capsys.readouterr().out)["ended"] == 91
    assert main(["status", str(run), "--rdzv-id", "mine"]) == ExitCode.USAGE
    assert "Name it once" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [True, False], ids=["flag", "variable"])
def test_a_run_that_keeps_no_output_is_found(
    flag: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """elastic-launch --log-dir /dev/null has its own files in the state directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PET_LOG_DIR", str(tmp_path / "elsewhere") if flag else os.devnull)
    given = ["--log-dir", os.devnull] if flag else []
    directory = tmp_path / "elastic-launch" / "20260101T000000Z-7" / "mine"
    directory.mkdir(parents=True, mode=0o700)
    record(directory / "events-a.jsonl", 30, event="node_ended", code=0, cause="all done")
    file = RunFile(directory)
    file.write(RunAddress("mine", "c10d", "127.0.0.1:1", "a"))
    file.end(0, "all done")
    assert main(["status", "--rdzv-id", "mine", *given]) == ExitCode.TRAINING_FAILED
    assert "Run 'mine' has ended with exit code 0: all done." in capsys.readouterr().err
    assert main(["events", "--rdzv-id", "mine", *given]) == 0
    assert "all done" in capsys.readouterr().out
    assert main(["prune", *given]) == 0
    assert capsys.readouterr().out.endswith(f" left in {tmp_path / 'elastic-launch'}\n")
    examined: list[Path] = []
    monkeypatch.setattr("elastic_launch.cli.elasticctl.examine", lambda address, logs, *_: examined.append(logs) or 0)
    assert main(["doctor", *given]) == 0
    assert examined == [tmp_path / "elastic-launch"]


@pytest.mark.parametrize("command", [["events"], ["report"], ["logs", "0"]])
def test_another_id_than_that_of_the_directory_is_an_error(
    command: list[str], run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = [*command, "--log-dir", str(run)]
    assert main([*where, "--rdzv-id", "no-such-run"]) == ExitCode.RENDEZVOUS
    assert f"There is no run 'no-such-run' in {run}: it is the directory of run {run.name}." in capsys.readouterr().err
    file = RunFile(run)
    file.write(RunAddress("mine", "c10d", "127.0.0.1:29400", "a"))
    file.end(0, "done")
    assert main([*where, "--rdzv-id", run.name]) == ExitCode.RENDEZVOUS
    assert "it is the directory of run mine." in capsys.readouterr().err
    assert "no run" not in (main([*where, "--rdzv-id", "mine"]), capsys.readouterr().err)[1]
    monkeypatch.setenv("PET_RDZV_ID", "no-such-run")
    assert "no run" not in (main(where), capsys.readouterr().err)[1], "the flag says more than the variable"
    monkeypatch.setenv("PET_LOG_DIR", str(run))
    assert main(command) == ExitCode.RENDEZVOUS
    assert "There is no run 'no-such-run'" in capsys.readouterr().err


def test_a_report_by_the_id_of_another_run_is_an_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "no-such-run", "--log-dir", str(run)]) == ExitCode.RENDEZVOUS
    assert "There is no run 'no-such-run'" in capsys.readouterr().err


def test_a_plan_shows_each_world(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--global-batch", "96", "--micro-batch", "8", "--world", "5:8"]) == 0
    lines = printed(capsys)
    assert lines[0] == "global batch 96, micro-batch 8: 12 forward and backward passes in a step"
    assert [line.split("  ")[-1].strip() for line in lines[3:]] == ["80.0%", "100.0%", "85.7%", "75.0%"]
    page = Path(__file__).parents[1] / "docs" / "reference" / "elasticctl.md"
    assert "\n".join(lines) in page.read_text()


@given(size=st.integers(1, 200), data=st.data(), world=st.integers(1, 60))
def test_a_plan_is_that_of_the_training(size: int, data: st.DataObject, world: int) -> None:
    micro = data.draw(st.integers(1, size))
    with pytest.MonkeyPatch.context() as patch:
        shown: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: shown.append(" ".join(map(str, words))))
        assert main(["plan", "--global-batch", str(size), "--micro-batch", str(micro), "--world", str(world)]) == 0
    passes = [GlobalBatch(size, micro).plan(world, rank).grad_accum for rank in range(world)]
    row = shown[-1].split()
    expected = {str(n) for n in passes}
    assert set(row[1:-2]) - {"or"} == expected
    assert int(row[-2]) == passes.count(0)
    assert row[-1] == f"{sum(passes) / (world * max(passes)):.1%}"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--global-batch", "0", "--micro-batch", "1"], "--global-batch '0'"),
        (["--global-batch", "9" * 40, "--micro-batch", "1"], "--global-batch"),
        (["--global-batch", "8", "--micro-batch", "9"], "micro=9"),
        (["--global-batch", "8", "--micro-batch", "x"], "--micro-batch 'x'"),
        (["--global-batch", "8", "--micro-batch", "2", "--world", "4:2"], "--world 4:2"),
        (["--global-batch", "8", "--micro-batch", "2", "--world", "1:9999999"], "--world 1:9999999"),
        (["--global-batch", "8", "--micro-batch", "2", "--world", "a"], "--world 'a'"),
    ],
)
def test_numbers_that_are_none_are_refused(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags]) == ExitCode.USAGE
    assert named in capsys.readouterr().err


# Logs.


def worker(path: Path, event: str, number: int, rank: int, pid: int) -> None:
    record(path, 5, event=event, round=number, rank=rank, local_rank=0, pid=pid, cause="first", start_s=0.1)


def printed_by(directory: Path, out: str, err: str = "") -> None:
    directory.mkdir(parents=True)
    (directory / "stdout.log").write_text(out)
    (directory / "stderr.log").write_text(err)


def test_the_log_of_a_rank_is_where_its_worker_was_started(
    run: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    for name in ("a", "b"):
        worker(run / f"events-{name}.jsonl", "worker_started", 1, "ab".index(name), 10)
        printed_by(run / "round_1" / str("ab".index(name)), f"of {name}\n", "oh\n")
    printed_by(run / "round_2" / "0", "of another\n")
    worker(run / "events-b.jsonl", "worker_kept", 2, 0, 10)
    assert main(["logs", "0", "--log-dir", str(run)]) == 0
    assert capfdbinary.readouterr() == (b"of b\n", b"oh\n")
    worker(run / "events-a.jsonl", "worker_started", 3, 0, 11)
    printed_by(run / "round_3" / "0", "the third\n")
    assert main(["logs", "0", "--log-dir", str(run), "--follow"]) == 0
    assert capfdbinary.readouterr()[0] == b"the third\n"


def test_the_output_of_the_worker_that_failed_before_is_named(
    run: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = run / "events-a.jsonl"
    worker(path, "worker_started", 3, 0, 10)
    printed_by(run / "round_3" / "0", "the third\n")
    ended = {"event": "worker_exited", "round": 3, "local_rank": 0, "ran_s": 1.0}
    record(path, 4, **ended, rank=0, pid=10, exit_code=-9, stopped=False)
    record(path, 4, **ended, rank=1, pid=11, exit_code=1, stopped=False)
    assert main(["logs", "0", "--log-dir", str(run)]) == 0
    assert capfdbinary.readouterr() == (b"the third\n", b""), "this is its output"
    worker(path, "worker_started", 4, 0, 12)
    printed_by(run / "round_4" / "0", "the fourth\n")
    record(path, 3, **{**ended, "round": 4}, rank=0, pid=12, exit_code=-15, stopped=True)
    assert main(["logs", "0", "--log-dir", str(run)]) == 0
    said = f"elasticctl: rank 0 of round 3 (pid 10) ended by signal 9; its output is in {run / 'round_3' / '0'}\n"
    assert capfdbinary.readouterr() == (b"the fourth\n", said.encode())


def test_the_log_of_a_worker_that_was_started_ahead(run: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    for number in (1, 2, 10):
        printed_by(run / f"ahead_{number}" / "a" / "0", f"{number}\n")
    worker(run / "events-a.jsonl", "worker_started", 0, -1, 12)
    worker(run / "events-a.jsonl", "worker_placed", 4, 7, 12)
    assert main(["logs", "7", "--log-dir", str(run)]) == 0
    assert capfdbinary.readouterr()[0] == b"10\n"


def test_logs_of_workers_that_were_started_ahead_are_not_confused(
    run: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = run / "events-a.jsonl"
    started = {"event": "worker_started", "rank": None, "local_rank": 0, "cause": "ahead", "start_s": 0.1}
    for number in (1, 2, 3):
        printed_by(run / f"ahead_{number}" / "a" / "0", f"{number}\n")
        record(path, 5, **started, round=0, pid=10 + number, ahead=number)
    worker(path, "worker_placed", 3, 7, 11)
    ended = {"event": "worker_exited", "round": 3, "rank": 7, "local_rank": 0, "ran_s": 1.0}
    record(path, 4, **ended, pid=11, exit_code=-9, stopped=False)
    worker(path, "worker_placed", 4, 7, 12)
    assert main(["logs", "7", "--log-dir", str(run)]) == 0
    said = f"elasticctl: rank 7 of round 3 (pid 11) ended by signal 9; its output is in {run / 'ahead_1' / 'a' / '0'}\n"
    assert capfdbinary.readouterr() == (b"2\n", said.encode())


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        ("5", "have no worker of rank 5"),
        ("3", "The output of rank 3 in round 2 is not in"),
        ("x", "not a whole number"),
    ],
)
def test_a_log_that_is_not_here_is_a_mistake(
    rank: str, message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker(run / "events-a.jsonl", "worker_started", 2, 3, 12)
    assert main(["logs", rank, "--log-dir", str(run)]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


# Status.


def test_a_status_fits_the_terminal_and_is_whole_elsewhere() -> None:
    name = "node-" + "x" * 60
    gpus = (GpuLoad(97, 71 << 30, 80 << 30), GpuLoad(None, 1 << 29, 80 << 30))
    load = HostLoad(51, 12 << 30, 64 << 30, gpus)
    node = a.NodeStatus(name, "10.0.0.1", 4, "starting", 0.5, (0, 3), "start", None, load)
    status = a.Status("run", "next", 1, name, 2, 4, 1, 4, 0, 3, (node,), 7, 0.05, 61.0, 0.25, time=0.0)
    lines = shown(status, "c10d 127.0.0.1:29400")
    assert lines[0] == "run run at c10d 127.0.0.1:29400"
    assert (
        shown(replace(status, run_id=LaunchConfig.run_id), "c10d 127.0.0.1:29400")[0] == "run at c10d 127.0.0.1:29400"
    )
    assert f"leader {name}; next" in lines[1]
    assert lines[2] == "world size 4 on 1 node of 1:4, step 7, restarts 0 of 3"
    assert lines[3] == "20 steps/s, about 61 s left, loss 0.25"
    quiet = replace(status, stepped=5.0), replace(status, stepped=312.0), replace(status, step_s=None, stepped=6.0)
    assert [shown(one, "")[3] for one in quiet] == [lines[3], "no step for 5 min", "no step for 6 s"]
    assert shown(replace(status, step_s=2.0, stepped=9.0), "")[3].startswith("0.5 steps/s")
    row = f"{name}  10.0.0.1        4  starting     0.5 s  CPU 51 %, 12 of 64 GiB; GPU 97 ? %, 71 0.5 of 80 GiB"
    assert row in lines
    for width in (60, 80, 120):
        assert max(map(len, shown(status, "c10d 127.0.0.1:29400", width))) <= width
        assert "0.5 s" in "\n".join(shown(status, "c10d 127.0.0.1:29400", width))

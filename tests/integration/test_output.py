"""Each output option with real workers: what is shown, and which files are written."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Job, job_in, run_script

SAY = 'echo "out $LOCAL_RANK"; echo "err $LOCAL_RANK" >&2'
"""A worker that says one line on each stream."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    yield from job_in(tmp_path)


def lines(job: Job, *flags: str, script: str = SAY, code: int = 0, **environ: str) -> list[str]:
    """What two workers of a run print on the console, sorted, and without the launcher's own lines."""
    command = ["--no-python", "sh", "-c", script]
    agent = job.launch(
        "--node-id",
        "a",
        "--rdzv-id",
        "out",
        "--nproc",
        "2",
        *flags,
        command=command,
        env={"LOGLEVEL": "ERROR", **environ},
    )
    assert agent.wait() == code
    return sorted(agent.output.splitlines())


@pytest.mark.executed
@pytest.mark.parametrize("level", ["info", "LOUD", ""])
def test_a_level_that_torch_does_not_know(job: Job, level: str) -> None:
    """torch's agent fails as it is imported."""
    agent = job.launch("--standalone", command=["--no-python", "true"], env={"LOGLEVEL": level})
    assert agent.wait() == 0
    assert "Traceback" not in agent.output
    assert "done: all workers finished" in agent.output
    assert ("LOGLEVEL=LOUD is not a level: INFO is used" in agent.output) == (level == "LOUD")


def kept(job: Job) -> dict[str, str]:
    """The text of the first round's files, by their names in its directory."""
    round_1 = job.logs / "out" / "round_1"
    return {str(path.relative_to(round_1)): path.read_text() for path in round_1.glob("**/*.log")}


ALL_KEPT = {f"{rank}/std{name}.log": f"{name} {rank}\n" for rank in (0, 1) for name in ("out", "err")}


def test_redirected_streams_are_kept_and_not_shown(job: Job) -> None:
    assert lines(job, "-r", "0:1,1:2") == ["err 0", "out 1"]
    assert kept(job) == ALL_KEPT


def test_the_layout_may_be_torchruns(job: Job) -> None:
    lines(job, "--log-layout", "torchrun", "--duplicate-stderr-filters", "err 1")
    run = job.logs / (job.logs / "latest").readlink()
    assert run.name.startswith("out_")
    assert (run / "run.json").is_file()
    found = {str(path.relative_to(run)): path.read_text() for path in run.glob("attempt_*/**/*.log")}
    ours = {f"attempt_0/{name}": text for name, text in ALL_KEPT.items()}
    assert found == {**ours, "attempt_0/filtered_stderr.log": "[default1]:err 1\n"}


def test_teed_streams_are_shown_with_torchs_header(job: Job) -> None:
    assert lines(job, "--redirects", "3", "-t", "0:3,1:1") == [
        "[default0]:err 0",
        "[default0]:out 0",
        "[default1]:out 1",
    ]
    assert kept(job) == ALL_KEPT


def test_only_the_chosen_local_ranks_are_shown(job: Job) -> None:
    assert lines(job, "--local_ranks_filter", "1") == ["err 1", "out 1"]
    assert kept(job) == ALL_KEPT


def test_lines_of_stdout_with_a_filter_are_duplicated(job: Job) -> None:
    script = 'echo "loss $LOCAL_RANK"; echo "a,b"; echo "loss to stderr" >&2; echo none'
    lines(job, "--duplicate-stdout-filters", "loss,a,,b", script=script)
    found = kept(job)
    assert sorted(found.pop("filtered_stdout-a.log").splitlines()) == [
        "[default0]:a,b",
        "[default0]:loss 0",
        "[default1]:a,b",
        "[default1]:loss 1",
    ]
    assert "filtered_stderr-a.log" not in found


def test_lines_of_stderr_with_a_filter_are_duplicated(job: Job) -> None:
    assert lines(job, "--duplicate-stderr-filters", "err 1") == ["err 0", "err 1", "out 0", "out 1"]
    assert kept(job) == {**ALL_KEPT, "filtered_stderr-a.log": "[default1]:err 1\n"}


def test_the_prefix_names_node_and_rank_and_lines_stay_complete(job: Job) -> None:
    script = 'for i in 1 2 3 4 5; do printf begin; printf " %d " $i; echo end; done'
    expected = [f"[a:{rank}] begin {i} end" for rank in (0, 1) for i in range(1, 6)]
    assert lines(job, "--prefix", script=script) == expected
    assert kept(job)["1/stdout.log"] == "".join(f"begin {i} end\n" for i in range(1, 6))
    assert kept(job)["1/stderr.log"] == "", "a stream has a file, whether or not anything is written to it"


@pytest.mark.slow
def test_no_logs_are_kept_under_dev_null(job: Job) -> None:
    state = job.directory / "state"
    assert lines(job, "--log-dir", "/dev/null", XDG_STATE_HOME=str(state)) == ["err 0", "err 1", "out 0", "out 1"]
    found = [path for path in state.rglob("*") if path.is_file()]
    assert sorted(path.name for path in found) == ["events-a.jsonl", "run.json"]
    assert (state / "elastic-launch" / "latest" / "run.json").is_file()


SPECS = '''
import os
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std

class Specs(LogsSpecs):
    """stdout of rank 0 goes to a file and the console, that of rank 1 to a file; stderr is left alone."""

    root_log_dir = ""

    def reify(self, envs):
        assert self._redirects == {0: Std.ERR} and self._tee == Std.NONE and self._local_ranks_filter == {0, 1}
        assert self._root_log_dir == os.environ["EXPECTED_DIR"]
        base = os.environ["EXPECTED_DIR"]
        files = {rank: f"{base}/mine-{env['RANK']}-{env['ELASTIC_LAUNCH_ROUND']}" for rank, env in envs.items()}
        for rank, env in envs.items():
            env["FROM_SPECS"] = f"specs{rank}"
        return LogsDest(files, dict.fromkeys(envs, ""), {0: files[0]}, {}, {}, f"{base}/matching", "")
'''


def test_named_logs_specs_say_where_logs_go(job: Job) -> None:
    package = job.directory / "package"
    info = package / "some_specs-1.0.dist-info"
    info.mkdir(parents=True)
    (package / "some_specs.py").write_text(SPECS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-specs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nsome = some_specs:Specs\n")
    environ = {
        "PYTHONPATH": f"{package}:{os.environ.get('PYTHONPATH', '')}",
        "EXPECTED_DIR": str(job.logs),
    }
    flags = ["--logs-specs", "some", "-r", "0:2", "--local-ranks-filter", "0,1", "--duplicate-stdout-filters", "specs"]
    script = 'echo "out $FROM_SPECS"; echo "err $LOCAL_RANK" >&2'
    assert lines(job, *flags, script=script, **environ) == ["[default0]:out specs0", "err 0", "err 1"]
    assert (job.logs / "mine-0-1").read_text() == "out specs0\n"
    assert (job.logs / "mine-1-1").read_text() == "out specs1\n"
    assert (job.logs / "matching").read_text() == "[default0]:out specs0\n"
    assert kept(job) == {}


@pytest.mark.slow
def test_the_link_names_the_newest_run_and_rounds_stay(job: Job) -> None:
    script = 'echo "round $ELASTIC_LAUNCH_ROUND"; test $ELASTIC_LAUNCH_ROUND = 2'
    lines(job, "--nproc", "1", script=script)
    assert (job.logs / "latest").readlink() == Path("out")
    for number in (1, 2):
        assert (job.logs / "latest" / f"round_{number}" / "0" / "stdout.log").read_text() == f"round {number}\n"
    lines(job, "--nproc", "1", "--rdzv-id", "next")
    assert (job.logs / "latest").readlink() == Path("next")
    assert (job.logs / "out" / "round_1" / "0" / "stdout.log").is_file()


def test_a_failed_run_leaves_its_last_words_for_kubernetes(job: Job) -> None:
    words = job.directory / "termination-log"
    words.touch()
    script = 'for i in $(seq 500); do echo "line $i of many that come before the end" >&2; done; kill -9 $$'
    lines(
        job, "--nproc", "1", "--max-restarts", "0", script=script, code=137, ELASTIC_LAUNCH_TERMINATION_LOG=str(words)
    )
    text = words.read_text()
    assert len(text.encode()) <= 4096
    first, second, *rest = text.splitlines()
    assert first.startswith("exit code 137: ")
    assert re.match(rf"root cause: rank 0 on node a \(host {os.uname().nodename}, pid \d+, round 1\) failed", second)
    assert "signal 9 (SIGKILL)" in second
    assert "dmesg" in rest[0]
    assert rest[-1] == "line 500 of many that come before the end"


@pytest.mark.slow
def test_colours_are_for_terminals(job: Job) -> None:
    terminal, console = pty.openpty()
    command = [sys.executable, "-m", "elastic_launch", "--log-dir", str(job.logs), "--prefix", "--node-id", "a"]
    agent = subprocess.Popen(
        [*command, "--max-restarts", "0", "--no-python", "sh", "-c", "echo hello; exit 3"],
        stdout=console,
        stderr=console,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": ""},
    )
    os.close(console)
    seen = b""
    try:
        while data := os.read(terminal, 65536):
            seen += data
    except OSError:
        pass  # EIO: the other side is closed
    os.close(terminal)
    assert agent.wait() == 3
    assert b"\x1b[36m[a:0] \x1b[0mhello" in seen
    assert b"\x1b[31m[elastic-launch]\x1b[0m exit code 3" in seen


@pytest.mark.slow
def test_the_console_shows_what_torchrun_shows(job: Job) -> None:
    flags = ["-r", "0:3,1:1", "-t", "1:1,2:2", "--local-ranks-filter", "1,2"]
    script = job.directory / "say.py"
    script.write_text(
        "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', os.environ['RANK'], file=sys.stderr)\n"
    )
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "3", *flags, str(script)]
    expected = run_script(*command, env={"OMP_NUM_THREADS": "1"}).splitlines()
    ours = job.launch("--nproc", "3", *flags, command=[str(script)], env={"LOGLEVEL": "ERROR"})
    assert ours.wait() == 0
    lines = ours.output.splitlines()
    assert all(re.fullmatch(r"(\[default\d\]:)?(out|err) \d", line) for line in lines), lines
    # torchrun's threads write a prefix and its line one after the other: on a busy machine they come between others'.
    assert sorted("".join(lines)) == sorted("".join(expected))
    assert len(lines) == 4

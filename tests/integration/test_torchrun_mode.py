"""The same runs under torchrun and under its replacement: exit codes, restarts, files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked import Process
from harness import SLOWNESS, forks, free_port, wait_for

pytestmark = pytest.mark.timeout(300)

TORCHRUN = ("-m", "torch.distributed.run")

NOTE = """\
echo "$RANK of $WORLD_SIZE, restart $TORCHELASTIC_RESTART_COUNT" >> "$NOTES"
while [ "$(grep -c "restart $TORCHELASTIC_RESTART_COUNT" "$NOTES")" -lt "$WORLD_SIZE" ]; do sleep 0.05; done
"""
"""A worker that fails ends the others: none may before all have begun."""


@dataclass
class Ended:
    """How a launcher's process ended.

    Attributes:
        started: what its workers wrote at their start, sorted.
    """

    code: int
    started: list[str]
    output: str


class Run:
    """The runs of one launcher: torchrun or its replacement."""

    def __init__(self, program: Sequence[str], directory: Path, environ: dict[str, str]) -> None:
        directory.mkdir()
        self.directory = directory
        self._program = program
        self._environ = {**environ, "NOTES": str(directory / "notes"), "OMP_NUM_THREADS": "1"}
        self._processes: list[subprocess.Popen[bytes] | Process] = []

    def start(self, flags: Sequence[str], script: str, *, shell: bool) -> None:
        """Start a launcher whose workers run a script, in Python or a shell; it is executed if that is in Python."""
        path = self.directory / ("script.sh" if shell else "script.py")
        path.write_text(f"#!/bin/sh\n{NOTE}{script}\n" if shell else script)
        path.chmod(0o700)
        line = [*self._program, *flags, *(["--no-python"] if shell else []), str(path)]
        with (self.directory / "output").open("ab") as output:
            if shell:
                self._processes.append(forks().start(line, output.fileno(), self._environ, None, script=True))
                return
            process = subprocess.Popen(
                [sys.executable, *line],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environ,
                start_new_session=True,
            )
        self._processes.append(process)

    def signal(self, number: int) -> None:
        """Send a signal to the launchers, once their workers run."""
        wait_for("the workers' start", self._started, 60)
        for process in self._processes:
            process.send_signal(number)

    def ends(self) -> list[Ended]:
        codes = [process.wait(100 * SLOWNESS) for process in self._processes]
        output = (self.directory / "output").read_text(errors="replace")
        return [Ended(code, self._started(), output) for code in codes]

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        with suppress(FileNotFoundError):  # torchrun leaves its workers to themselves
            for pid in map(int, (self.directory / "notes.pids").read_text().split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _started(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted((self.directory / "notes").read_text().splitlines())
        return []


@pytest.fixture
def runs(tmp_path: Path, forking: None) -> Iterator[tuple[Run, Run]]:
    """torchrun, and its replacement through a link named ``torchrun``."""
    link = tmp_path / "torchrun"
    link.symlink_to(Path(sys.executable).parent / "elastic-launch")
    unset = ("PET_", "ELASTIC_LAUNCH_", "TORCH_ELASTIC_", "TORCHELASTIC_", "LOGLEVEL")
    environ = {name: text for name, text in os.environ.items() if not name.startswith(unset)}
    environ["TMPDIR"] = str(tmp_path)  # both leave their logs there
    with ExitStack() as stack:
        theirs, ours = Run(TORCHRUN, tmp_path / "theirs", environ), Run([str(link)], tmp_path / "ours", environ)
        stack.callback(theirs.close)
        stack.callback(ours.close)
        yield theirs, ours


def both(
    runs: tuple[Run, Run],
    flags: str | Callable[[], str],
    script: str = "",
    *,
    number: int = 0,
    nodes: int = 1,
    shell: bool = True,
) -> Ended:
    """Do the same under both in parallel, check that they end alike, and return how they ended."""
    for run in runs:
        line = flags if isinstance(flags, str) else flags()
        for _ in range(nodes):
            run.start(line.split(), script, shell=shell)
    if number:
        for run in runs:
            run.signal(number)
    theirs, ours = runs[0].ends(), runs[1].ends()
    for one, other in zip(ours, theirs, strict=True):
        assert (one.code, one.started) == (other.code, other.started), f"{one.output}\n--- torchrun:\n{other.output}"
    return ours[0]


def files(run: Run) -> dict[str, str]:
    """The files below a run's log directory given by ``--log-dir``, by torchrun's names."""
    (logs,) = (path for path in (run.directory / "logs").iterdir() if not path.is_symlink())
    return {str(path.relative_to(logs)): path.read_text() for path in logs.glob("attempt_*/**/*") if path.is_file()}


def logged(runs: tuple[Run, Run], flags: str) -> Callable[[], str]:
    """Flags with a separate log directory for each launcher, in their order."""
    directories = iter(run.directory / "logs" for run in runs)
    return lambda: f"--log-dir {next(directories)} {flags}"


def test_a_failed_worker_is_started_again_as_often_as_torchrun_does(runs: tuple[Run, Run]) -> None:
    flags = logged(runs, "--nproc-per-node 2 --max-restarts 1 --redirects 3")
    end = both(runs, flags, 'echo "out $RANK"; echo "err $RANK" >&2; [ "$RANK" = 1 ] || exec sleep 60; exit 93')
    assert end.code == 1
    assert end.started == [f"{rank} of 2, restart {restart}" for rank in (0, 1) for restart in (0, 1)]
    found, expected = files(runs[1]), files(runs[0])
    # The other worker may be stopped before it has printed.
    assert found.keys() == expected.keys()
    assert {name: text for name, text in found.items() if "/1/" in name} == {
        f"attempt_{attempt}/1/std{name}.log": f"{name} 1\n" for attempt in (0, 1) for name in ("out", "err")
    }
    assert "exit code 1: all restarts spent" in end.output
    assert "[elastic-launch] round" not in end.output, "torchrun says nothing of what goes well, either"


def test_a_signal_to_the_launcher_is_1(runs: tuple[Run, Run]) -> None:
    end = both(runs, "--max-restarts 3", "exec sleep 60", number=signal.SIGTERM)
    assert (end.code, end.started) == (1, ["0 of 1, restart 0"])
    assert "exit code 1: stopped by SIGTERM" in end.output


@pytest.mark.soak
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT],
    ids=lambda number: number.name,
)
def test_other_signals_to_the_launcher(runs: tuple[Run, Run], number: signal.Signals) -> None:
    assert both(runs, "", "exec sleep 60", number=number).code == 1


@pytest.mark.slow
def test_a_signal_that_torchrun_does_not_handle(runs: tuple[Run, Run]) -> None:
    end = both(runs, "", 'echo $$ >> "$NOTES.pids"; exec sleep 60', number=signal.SIGUSR1)
    assert end.code == -signal.SIGUSR1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "script", "code", "starts"),
    [
        ("--nproc-per-node 2", "exit 0", 0, 2),
        pytest.param("", "exit 7", 1, 1, marks=pytest.mark.soak),
        pytest.param("", "exit 2", 1, 1, marks=pytest.mark.soak),
        ("--max-restarts 1", "kill -KILL $$", 1, 2),
        pytest.param("--max-restarts 1", "kill -TERM $$", 1, 2, marks=pytest.mark.soak),
        pytest.param("--max-restarts 1", "kill -INT $$", 1, 2, marks=pytest.mark.soak),
        ("--max-restarts 1", '[ "$TORCHELASTIC_RESTART_COUNT" = 1 ]', 0, 2),
        pytest.param("--standalone --rdzv-id x", "exit 0", 0, 1, marks=pytest.mark.soak),
        pytest.param("--rdzv-conf what=1", "exit 0", 0, 1, marks=pytest.mark.soak),
        ("--nproc-per-node 0", "exit 0", 1, 0),
    ],
)
def test_ends_of_one_node(runs: tuple[Run, Run], flags: str, script: str, code: int, starts: int) -> None:
    end = both(runs, flags, script)
    assert (end.code, len(end.started)) == (code, starts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "nonesuch.py",
        *(pytest.param(x, marks=pytest.mark.soak) for x in ("-m nonesuch", "--no-python ./nonesuch")),
        pytest.param("--max-restarts 1 nonesuch.py", marks=pytest.mark.soak),
        pytest.param("--run-path nonesuch.py", marks=pytest.mark.soak),
    ],
)
def test_a_script_module_or_program_that_does_not_exist(runs: tuple[Run, Run], flags: str) -> None:
    assert both(runs, flags).code == 1


@pytest.mark.slow
def test_a_script_that_cannot_run_is_tried_again(runs: tuple[Run, Run]) -> None:
    end = both(runs, "--max-restarts 2", "def (", shell=False)
    assert end.code == 1
    assert "all restarts spent (--max-restarts 2)" in end.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-conf join_timeout=4",
        "--nnodes 2 --master-port {port} --rdzv-conf timeout=4",
        pytest.param("--nnodes 1:2 --master-port {port} --rdzv-conf timeout=4", marks=pytest.mark.soak),
    ],
    ids=["c10d", "static", "static with a range"],
)
def test_nodes_that_never_meet(runs: tuple[Run, Run], where: str) -> None:
    end = both(runs, lambda: where.format(port=free_port()), "exit 0")
    assert (end.code, end.started) == (1, [])


@pytest.mark.slow
@pytest.mark.parametrize(("script", "code"), [pytest.param("exit 0", 0, marks=pytest.mark.soak), ("exit 7", 1)])
def test_two_nodes(runs: tuple[Run, Run], script: str, code: int) -> None:
    ports = {run: free_port() for run in runs}
    for run in runs:
        where = f"--rdzv-backend c10d --rdzv-endpoint localhost:{ports[run]} --rdzv-conf last_call_timeout=20"
        for _ in range(2):
            run.start(["--nnodes", "1:2", *where.split()], script, shell=True)
    theirs, ours = runs[0].ends(), runs[1].ends()
    assert ours[0].started == theirs[0].started == ["0 of 2, restart 0", "1 of 2, restart 0"]
    assert code == max(end.code for end in theirs) == max(end.code for end in ours), ours[0].output


@pytest.mark.slow
def test_exceptions_are_kept_where_torchrun_keeps_them(runs: tuple[Run, Run]) -> None:
    script = """\
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    with open(os.environ["NOTES"], "a") as notes:
        print(os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], file=notes)
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
    raise ValueError(f"no data at restart {os.environ['TORCHELASTIC_RESTART_COUNT']}")

main()
"""
    assert both(runs, logged(runs, "--max-restarts 2 --redirects 1 --tee 2"), script, shell=False).code == 1
    found, expected = files(runs[1]), files(runs[0])
    assert found.keys() == expected.keys()
    assert found.keys() == {
        f"attempt_{attempt}/0/{name}" for attempt in (0, 1, 2) for name in ("error.json", "stdout.log", "stderr.log")
    }
    for attempt in (0, 1, 2):
        assert found[f"attempt_{attempt}/0/stdout.log"] == expected[f"attempt_{attempt}/0/stdout.log"]
        mine, other = (json.loads(tree[f"attempt_{attempt}/0/error.json"])["message"] for tree in (found, expected))
        assert mine["message"] == other["message"] == f"ValueError: no data at restart {attempt}"
        assert mine["extraInfo"].keys() == other["extraInfo"].keys()
        last = [info["extraInfo"]["py_callstack"].splitlines()[-1] for info in (mine, other)]
        assert last[0] == last[1]

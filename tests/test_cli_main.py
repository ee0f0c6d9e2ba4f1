"""Tests of ``main`` and the console script: what is printed, returned and left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

import elastic_agents.console  # noqa: F401 - main imports it, and finds no package once the fixture has replaced it
import elastic_launch
from elastic_launch.cli import main as cli
from elastic_launch.cli.help import help_text
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import EndpointError


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> list[LaunchConfig]:
    """Stand in for the agent and return the list of what it is asked to run; it exits with 17."""
    asked: list[LaunchConfig] = []

    def run(config: LaunchConfig, begun: object) -> int:
        assert begun is None
        asked.append(config)
        return 17

    module = ModuleType("elastic_agents.main")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elastic_agents", ModuleType("elastic_agents"))
    monkeypatch.setitem(sys.modules, "elastic_agents.main", module)
    return asked


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script in it, and an environment without settings."""
    for name in os.environ:
        if name.startswith(("PET_", "TORCH_ELASTIC_")) or name in ("PYTHON_EXEC", "XDG_STATE_HOME"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


@pytest.mark.usefixtures("here")
def test_main_runs_the_agent_and_returns_its_code(agent: list[LaunchConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_ROLE", "trainer")
    assert cli.main(["--nproc", "2", "train.py"]) == 17
    assert [(config.nproc, config.role) for config in agent] == [(2, "trainer")]
    monkeypatch.setattr(sys, "argv", ["elastic-launch", "--nproc", "3", "train.py"])
    assert cli.main() == 17
    assert agent[1].nproc == 3


def test_main_prints_an_error_with_its_hint(
    here: Path, agent: list[LaunchConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--nnodes", "4:1", "train.py"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "elastic-launch: error: --nnodes 4:1 has a maximum below its minimum.\n  Write MIN:MAX, as in --nnodes 1:4.\n"
    )
    assert not agent
    assert [path.name for path in here.iterdir()] == ["train.py"]


@pytest.mark.usefixtures("here", "agent")
def test_main_prints_errors_of_the_agent_and_returns_their_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: LaunchConfig, begun: object) -> int:
        raise EndpointError("node0:29400 does not answer.", "Start node0 first,\nor look at the firewall.")

    monkeypatch.setattr(sys.modules["elastic_agents.main"], "run", run)
    assert cli.main(["train.py"]) == 95
    assert capsys.readouterr().err == (
        "elastic-launch: error: node0:29400 does not answer.\n  Start node0 first,\n  or look at the firewall.\n"
    )


@pytest.mark.parametrize("line", ["--help", "-h", "--he", "--nproc 2 --help", "--nproc nonsense -h train.py"])
def test_main_helps(agent: list[LaunchConfig], capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert cli.main(line.split()) == 0
    assert capsys.readouterr().out == help_text()
    assert not agent


@pytest.mark.parametrize("line", ["--version", "--vers", "--nnodes 1:4 --version train.py"])
def test_main_prints_its_version(capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert cli.main(line.split()) == 0
    assert capsys.readouterr().out == f"elastic-launch {elastic_launch.__version__}\n"


def test_the_console_scripts_name_functions() -> None:
    scripts = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"elastic-launch", "elastic-composer", "elasticctl"}
    for target in scripts.values():
        assert callable(EntryPoint("", target, "").load())


# In a process of its own.


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    root = str(Path(elastic_launch.__file__).parents[1])
    environ = {"PATH": os.environ["PATH"], "HOME": str(cwd), "PYTHONPATH": root}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=60
    )


def test_import_is_free_of_torch(tmp_path: Path) -> None:
    code = (
        "import sys, elastic_launch, elastic_launch.cli.main\n"
        "print(sorted(name for name in sys.modules if name in ('torch', 'numpy', 'elastic_agents')))"
    )
    done = python("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_as_a_module_it_refuses_without_a_traceback(tmp_path: Path) -> None:
    done = python("-m", "elastic_launch", "--nporc", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("elastic-launch: error: unknown flag --nporc.\n  Did you mean --nproc?")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("does", "code"), [("return 0", 0), ("return 17", 17), ("raise KeyboardInterrupt", 130)])
def test_console_main_exits(tmp_path: Path, does: str, code: int) -> None:
    text = f"""
from elastic_launch.cli import main as cli
def main(*, whole):
    assert whole
    {does}
cli.main = main
cli.console_main()
"""
    done = python("-c", text, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize(
    ("threads", "atexit_runs"),
    [("", True), ("threading.Thread(target=time.sleep, args=(60,), name=GIVEN_UP, daemon=True).start()", False)],
)
def test_a_process_that_gave_up_a_call_exits_at_once_with_its_output_flushed(threads: str, atexit_runs: bool) -> None:
    """torch's calls would abort an interpreter that shuts down while they return. In no case is it torn down."""
    text = f"""
import atexit, sys, threading, time
from elastic_launch.system.program import GIVEN_UP, exiting
class Module:
    def __del__(self): print("torn down")
module = Module()
atexit.register(print, "taken to pieces")
{threads}
sys.stdout.reconfigure(line_buffering=False)
print("said")
exiting(lambda: 7)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == ("said\ntaken to pieces\n" if atexit_runs else "said\n")


EXITING = """
import sys
from elastic_launch.system.program import exiting
sys.stdout.reconfigure(line_buffering=False)
print("said")
exiting(lambda: int(sys.argv[1]))
"""


BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize(("code", "found"), [(0, 120), (91, 91)])
def test_output_that_cannot_be_written_is_not_a_success(code: int, found: int) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", EXITING, str(code)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=20, env=BUFFERED)
    assert done.returncode == found
    assert done.stderr == "[elastic-launch] the output could not be written: No space left on device\n"


def test_a_reader_that_is_gone_changes_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", EXITING, "3"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=20, env=BUFFERED)
    os.close(writing)
    assert (done.returncode, done.stderr) == (3, "")


def test_a_profiler_reports_at_the_exit(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(EXITING)
    command = [sys.executable, "-m", "cProfile", "program.py", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "function calls" in done.stdout, done.stderr


def test_a_working_directory_that_is_gone_is_named(here: Path) -> None:
    (here / "gone").mkdir()
    command = [sys.executable, "-m", "elastic_launch", "--log-dir", str(here / "logs"), str(here / "train.py")]
    ended = subprocess.run(
        ["sh", "-c", 'cd gone && rmdir ../gone && exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "error: the working directory does not exist any more.\n" in ended.stderr
    assert [path.name for path in here.iterdir()] == ["train.py"]

"""Run the tests with each pair of Python and torch that pyproject.toml names under ``tool.elastic-launch.matrix``.

    python scripts/matrix.py [--keep] [--directory DIR] [PAIR ...]

A pair is 3.12:2.13, or path/to/python:2.13. Without arguments MATRIX names the pairs; without it they are all pairs.
Each pair gets an environment of its own, which is removed when its tests have run. The tests are those of single parts,
of one node, of exactness, and of torch's launcher and its API. A pair that cannot be installed is reported as such;
one that is installed must pass.

The standard library only. PIP_ARGS, PYTEST_ARGS and JOBS have the same meaning as for make.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = "constraints.txt"
LIMIT = 5400.0
"""Seconds after which an installation or a test run is ended."""

GRACE = 60.0
"""Seconds that a command has to end its own processes when it is ended."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

ENDS = {2: "it was interrupted, and not all tests were run", 3: "an error of pytest itself", 4: "it could not begin"}
"""The exit codes of pytest with which the counts do not cover all tests."""

WHOLE_RUNS = (
    "test_api.py",
    "test_front_ends.py",
    "test_kills_exact.py",
    "test_losses_exact.py",
    "test_one_node.py",
    "test_options.py",
    "test_planned_exact.py",
    "test_torchrun_handler.py",
    "test_torchrun_mode.py",
)
"""Of the tests that start a whole run: those of one node, of exactness, and of torch's launcher and its API."""

MARKS = "not system and not slow and not soak and not gpu"

IDENTIFY = "import ensurepip, sys, venv; print('%d.%d.%d' % sys.version_info[:3])"


@dataclass(frozen=True)
class Pair:
    """A Python, as a version or a path, and a version of torch."""

    python: str
    torch: str

    def __str__(self) -> str:
        return f"{self.python}:{self.torch}"


@dataclass(frozen=True)
class Result:
    """The result of a pair.

    Attributes:
        installed: whether there was an environment to test in.
        passed: whether its tests passed; False without one.
        text: the outcome in words.
    """

    pair: Pair
    installed: bool
    passed: bool
    text: str


class Ended(BaseException):
    """A signal requests the end: everything that was started is ended and removed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)


class NotInstallable(Exception):
    """This pair cannot be installed on this machine; the message says why."""


def supported(file: Path = ROOT / "pyproject.toml") -> list[Pair]:
    """All pairs of the versions that the project declares."""
    declared = tomllib.loads(file.read_text())["tool"]["elastic-launch"]["matrix"]
    return [Pair(python, torch) for torch in declared["torch"] for python in declared["python"]]


def parse(words: Sequence[str]) -> list[Pair]:
    """Read pairs such as 3.12:2.13.

    Raises:
        ValueError: on a word that is not a pair.
    """
    pairs = []
    for word in words:
        python, colon, torch = word.rpartition(":")
        if not (colon and re.fullmatch(r"\d+\.\d+|.*/.*", python) and re.fullmatch(r"\d+(\.\d+){1,2}", torch)):
            raise ValueError(f"{word!r} is not a pair of Python and torch; write 3.12:2.13 or path/to/python:2.13")
        pairs.append(Pair(python, torch))
    return pairs


def interpreters(version: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield possible locations of an interpreter of this version: on PATH, and in the directories of pyenv and uv."""
    name = f"python{version}"
    for directory in environ.get("PATH", os.defpath).split(os.pathsep):
        if found := shutil.which(name, path=directory):
            yield found
    home = Path(environ.get("HOME", "/"))
    pyenv = Path(environ.get("PYENV_ROOT") or home / ".pyenv") / "versions"
    uv = Path(environ.get("UV_PYTHON_INSTALL_DIR") or home / ".local/share/uv/python")
    for found_path in (*pyenv.glob(f"{version}.*/bin/{name}"), *uv.glob(f"cpython-{version}.*/bin/{name}")):
        yield str(found_path)


def find_python(python: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return an interpreter that can create environments, and its full version.

    Raises:
        NotInstallable: if there is none.
    """
    tried = []
    for candidate in [python] if "/" in python else interpreters(python, environ):
        try:
            done = subprocess.run([candidate, "-c", IDENTIFY], capture_output=True, text=True, timeout=60)
        except OSError as error:
            raise NotInstallable(f"{candidate}: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise NotInstallable(f"{candidate}: did not say its version within 60 s") from None
        version = done.stdout.strip()
        if done.returncode == 0 and ("/" in python or version.startswith(f"{python}.")):
            return candidate, version
        tried.append(f"{candidate}: {last_line(done.stderr) or f'is Python {version}'}")
    raise NotInstallable("; ".join(tried) or f"no python{python} on PATH, nor of pyenv or uv")


def last_line(text: str) -> str:
    """The last line that is not empty; of pip's output, the first error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors[-1:] or lines[-1:] or [""])[0]


def run(command: Sequence[str], log: Path, env: Mapping[str, str]) -> int:
    """Run a command with its output in a file, and end it with all its processes after ``LIMIT``."""
    with log.open("a") as out:
        print("$", shlex.join(command), file=out, flush=True)
        process = None
        # One that ended the start would leave the process behind.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=env,
                start_new_session=True,
                preexec_fn=partial(signal.pthread_sigmask, signal.SIG_SETMASK, before),
            )
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            print(f"matrix: ended after {LIMIT:.0f} s", file=out, flush=True)
            return 124
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if process is not None and process.returncode is None:
                end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command as Ctrl-C does, so that tests end processes in their own sessions; after that, by force."""
    try:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def install(
    pair: Pair, interpreter: str, directory: Path, constraints: Path, log: Path, env: Mapping[str, str]
) -> Path:
    """Make the environment of a pair, and return its interpreter.

    Raises:
        NotInstallable: if pip fails, or torch cannot be imported.
    """
    own = directory / "bin" / "python"
    pins = [line for line in (ROOT / CONSTRAINTS).read_text().splitlines() if not line.startswith("torch==")]
    wanted = f"torch=={pair.torch}" if pair.torch.count(".") == 2 else f"torch=={pair.torch}.*"
    constraints.write_text("\n".join([*pins, wanted]) + "\n")
    pip = [str(own), "-m", "pip", "install", *shlex.split(env.get("PIP_ARGS", "")), "-c", str(constraints)]
    steps = (
        [interpreter, "-m", "venv", "--clear", str(directory)],
        [*pip, "-e", ".[test]", wanted],
        [str(own), "-c", "import torch; print('torch', torch.__version__)"],
    )
    for step in steps:
        before = log.stat().st_size if log.exists() else 0
        if run(step, log, env):
            with log.open() as text:
                text.seek(before)
                raise NotInstallable(last_line(text.read()))
    return own


def tests() -> list[str]:
    """The test files that are run for each pair."""
    folder = ROOT / "tests"
    parts = [path for path in folder.rglob("test_*.py") if folder / "integration" not in path.parents]
    return [str(path.relative_to(ROOT)) for path in sorted([*parts, *(folder / "integration" / n for n in WHOLE_RUNS)])]


def judged(code: int, report: Path) -> tuple[bool, str]:
    """Return whether the tests have passed, and the result in words."""
    try:
        suites = list(ElementTree.parse(report).iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return False, f"failed: pytest ended with {code} and left no report"
    count = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    bad = count["failures"] + count["errors"]
    passed = count["tests"] - bad - count["skipped"]
    cases = [case for suite in suites for case in suite.iter("testcase")]
    reasons = Counter(skip.get("message") or "no reason given" for case in cases for skip in case.iter("skipped"))
    text = f"passed {passed}, skipped {count['skipped']}"
    if reasons:
        text += f" ({'; '.join(f'{many}: {reason}' for reason, many in sorted(reasons.items()))})"
    if code == 0 and not bad and passed:
        return True, text
    names = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    if not count["tests"]:
        text = f"no test was run (pytest ended with {code})"
    elif code == 0 and not bad:
        text = f"no test passed: {text}"
    else:
        text = f"failed {bad}, {text} (pytest ended with {code}{short(code, cases)})"
    return False, "\n    ".join([text, *names])


def short(code: int, cases: Sequence[ElementTree.Element]) -> str:
    """Why the counts may not cover all tests; empty if they do."""
    if code in ENDS:
        return f": {ENDS[code]}"
    if code not in (0, 1):
        return ": ended before all tests were run"
    # If a pytest-xdist process dies, the tests that it had yet to run are lost.
    crashed = any("crashed while running" in error.get("message", "") for case in cases for error in case)
    return ": a process of the tests died, and not all tests were run" if crashed else ""


def test(pair: Pair, directory: Path, *, keep: bool) -> Result:
    """Make the environment of a pair, run the tests in it, and remove it."""
    place = directory / f"python{re.sub(r'[^0-9A-Za-z.]+', '-', pair.python)}-torch{pair.torch}"
    log, report, constraints = (place.with_name(f"{place.name}.{kind}") for kind in ("log", "xml", "txt"))
    for old in (log, report):
        old.unlink(missing_ok=True)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    started = time.monotonic()
    try:
        interpreter, version = find_python(pair.python, env)
        print(f"matrix: {pair}: Python {version}: making its environment, see {log}", flush=True)
        own = install(pair, interpreter, place, constraints, log, env)
        found = subprocess.run(
            [own, "-c", "from importlib.metadata import version; print(version('torch'))"],
            capture_output=True,
            text=True,
            env=env,
        )
        name = f"Python {version}, torch {found.stdout.strip()}"
        print(f"matrix: {pair}: installed: {name} ({minutes(started)}); running its tests", flush=True)
        started = time.monotonic()
        pytest = [str(own), "-m", "pytest", "-q", "-rfE", "-n", os.environ.get("JOBS") or "3", "--dist", "loadscope"]
        pytest += ["--no-loadscope-reorder", "--max-worker-restart", "0", "-p", "no:cacheprovider", "-m", MARKS]
        pytest += [f"--junitxml={report}", *tests(), *shlex.split(os.environ.get("PYTEST_ARGS", ""))]
        passed, text = judged(run(pytest, log, env), report)
        if os.environ.get("PYTEST_ARGS"):
            text += f"; with PYTEST_ARGS={shlex.quote(os.environ['PYTEST_ARGS'])}"
        return Result(pair, True, passed, f"{name}: {text} ({minutes(started)})" + ("" if passed else f"; see {log}"))
    except NotInstallable as error:
        return Result(pair, False, False, f"not installable: {error}" + (f" (see {log})" if log.exists() else ""))
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)
            constraints.unlink(missing_ok=True)


def minutes(since: float) -> str:
    seconds = round(time.monotonic() - since)
    return f"{seconds // 60} min {seconds % 60} s"


def exit_code(results: Sequence[Result]) -> int:
    """1 if an installed pair has failed, or if none was installed."""
    return int(
        any(result.installed and not result.passed for result in results) or not any(r.installed for r in results)
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help="3.12:2.13, or path/to/python:2.13")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "matrix", help="for environments and logs")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are")
    args = parser.parse_args(argv)
    try:
        pairs = parse(args.pairs or os.environ.get("MATRIX", "").split()) or supported()
    except ValueError as error:
        parser.error(str(error))
    directory: Path = args.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    ended: Ended | None = None
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup, or in a shell's background
            signal.signal(number, stop)
    try:
        for pair in pairs:
            results.append(test(pair, directory, keep=args.keep))
            print(f"matrix: {pair}: {results[-1].text}", flush=True)
    except Ended as signalled:
        ended = signalled
        rest = pairs[len(results) :]
        results += [Result(pair, False, False, f"not run to its end: {ended.number.name} came") for pair in rest]
    if len(pairs) > 1 or ended:
        print("matrix: all together:")
        for result in results:
            print(f"  {result.pair}  {result.text}")
        installed = [result for result in results if result.installed]
        passed = sum(result.passed for result in installed)
        print(f"matrix: of {len(pairs)} pairs {passed} passed, {len(installed) - passed} failed, ", end="")
        print(f"{len(pairs) - len(installed)} not tested", flush=True)
    if ended:
        return 128 + ended.number
    if not any(result.installed for result in results):
        print("matrix: no pair could be installed, so nothing was tested", file=sys.stderr)
    return exit_code(results)


def stop(number: int, _: object) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # the cleanup is bounded
    raise Ended(number)


if __name__ == "__main__":
    sys.exit(main())

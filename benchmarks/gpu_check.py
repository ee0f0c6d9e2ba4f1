"""Checks and measures what needs a GPU, once and within minutes; scripts/gpu-check runs it.

Each part runs programs that print what they find as lines of JSON, with a limit, and reports tables and notes. The
directory gets gpu-check.json and gpu-check.md, written anew after each part. Without a GPU, parts are skipped, or done
with gloo at small sizes (--on-cpu), to try this program. It installs nothing. The exit code is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_report import markdown
from jobs import CPUS, POLL, Record, become_subreaper, descendants, kill_descendants, program, signal_all

ROOT = Path(__file__).resolve().parents[1]
GRACE = 10.0
"""Seconds that programs have to end what they started once their time is over."""
LEAST = 15.0
"""Seconds that must be left for a part to begin."""
SLOWNESS = 4.0
"""Factor for the limits without a GPU: they are those of a machine with many cores."""


@dataclass
class Part:
    """Runs the programs of a part, and holds what it has found; ``records`` is all that they have printed."""

    name: str
    title: str
    state: str = "passed"
    reason: str = ""
    seconds: float = 0.0
    tables: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def begin(self, gpu: bool, directory: Path, until: float) -> None:
        self.gpu, self.directory, self._until = gpu, directory, until

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.tables.append({"title": title, "head": list(head), "rows": [list(row) for row in rows]})

    def fail(self, reason: str) -> None:
        self.state, self.reason = "failed", f"{self.reason}; {reason}" if self.reason else reason

    def own(self, name: str, *options: object) -> list[str]:
        """The command of a program of this directory."""
        return [sys.executable, str(ROOT / "benchmarks" / name), *map(str, options)]

    def run(self, *commands: list[str]) -> list[list[Record]]:
        """Run programs at the same time, until the part's time is over; other lines than JSON are records, too."""
        share = {"WORKLOAD_GPU": "1"} if self.gpu else {"CUDA_VISIBLE_DEVICES": ""}
        files = [self.directory / f"output-{number}" for number in range(len(commands))]
        processes = []
        for command, path in zip(commands, files, strict=True):
            with path.open("wb") as output:
                how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
                processes.append(subprocess.Popen(command, env=os.environ | share, cwd=ROOT, **how))
        while any(process.poll() is None for process in processes) and time.monotonic() < self._until:
            time.sleep(POLL)
        codes = [process.poll() for process in processes]
        end(process for process in processes if process.returncode is None)
        found = []
        for command, code, path in zip(commands, codes, files, strict=True):
            lines = path.read_text(errors="replace").splitlines()
            found.append([json.loads(line) if line.startswith('{"') else {"line": line} for line in lines])
            if code != 0:
                how_ended = "time over" if code is None else f"exit code {code}"
                self.fail(f"{Path(command[1]).name} {' '.join(command[2:])}: {how_ended}: {lines[-2:]}"[:600])
        self.records += [record for records in found for record in records]
        return found


def end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """End programs whose time is over, with all that they started."""
    ours = [(process, descendants(process.pid)) for process in processes]
    for process, _below in ours:
        process.terminate()
    for process, below in ours:
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        signal_all([process.pid, *below], signal.SIGKILL)
        process.wait()


def facts(part: Part) -> None:
    logs = ["--log-dir", str(part.directory / "logs")]
    commands = [part.own("gpu_probe.py", "--facts"), [program("elasticctl"), "doctor", *logs]]
    commands.append([program("elastic-launch"), "--standalone", "--node-check", *logs, "--no-python", "true"])
    smi = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    commands += [smi] if part.gpu and shutil.which(smi[0]) else []
    torch, doctor, check, *cards = part.run(*commands)
    found = {name: value for record in torch for name, value in record.items() if name != "line"}
    found |= {"cards": [each["line"] for lines in cards for each in lines], "cores": CPUS, "kernel": platform.release()}
    rows = [[name, ", ".join(x) if isinstance(x, list) else x] for name, x in found.items()]
    part.table("", ["what", "found"], rows)
    told = [line for each in check if (line := each["line"].partition("[elastic-launch] ")[2]).startswith("node check")]
    part.notes += [*told, *(f"doctor: {each['line']}" for each in doctor)]


def faults(part: Part) -> None:
    """What must be right, all at the same time: no times are taken from here but those of long standstills."""
    start, few = (10, ()) if part.gpu else (0, ("--steps", 1500))
    plans = [(2, True, "confirmed"), (3, True, "confirmed"), (2, False, "default"), (3, False, "default")]
    plans += [(2, True, "default"), (3, False, "confirmed")]
    plans = plans if part.gpu else plans[2:3]
    options = [["--world", world, *["--exact"][: int(exact)], "--live", live] for world, exact, live in plans]
    commands = [part.own("gpu_walk.py", "--start", start, *few, *each) for each in options]
    commands += [part.own("gpu_limits.py", what) for what in ("memory", "mixed")]
    *walks, memory, mixed = part.run(*commands)
    changes, ends = [], []
    for (world, exact, live), found in zip(plans, walks, strict=True):
        where = [world, "exact" if exact else "default", live]
        keys = ("change", "kept", "standstill", "lost", "whole")
        changes += [[*where, *map(x.get, keys)] for x in found if "change" in x]
        equal = [x["hash"] == x["undisturbed"] for x in found if "hash" in x]
        ends.append([*where, equal == [True]])
        if equal == [False]:
            part.fail(f"{where}: other weights than those of the undisturbed training")
    part.notes.append(f"The script needs {start} s until its first step. All this ran at the same time.")
    part.table("Weights at the end", ["ranks", "mode", "live", "those of the undisturbed training"], ends)
    head = ["ranks", "mode", "live", "change", "others kept, %", "longest standstill, s", "steps repeated"]
    part.table("Changes", [*head, "whole again, s"], changes)
    for x in (x for x in memory + mixed if "what" in x):
        part.notes.append(json.dumps({name: value for name, value in x.items() if name != "output"}))
        if not x["passed"]:
            part.fail(f"{x['what']}: {x['output'][-300:]}")


def tests(part: Part) -> None:
    if not part.gpu or not find_spec("pytest") or not find_spec("pytest_timeout"):
        part.state, part.reason = "skipped", "they need pytest and pytest-timeout" if part.gpu else "they need a GPU"
        return
    marked = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    parallel = ["-n", "6", "--dist", "load"] if find_spec("xdist") else []
    options = ["-v", "-p", "no:cacheprovider", "-m", "gpu", "--tb=short", *parallel]
    (found,) = part.run([sys.executable, "-m", "pytest", *options, *marked])
    lines = [str(record.get("line")) for record in found]
    part.table("", ["test", "state"], results(lines))
    part.notes += [line for line in lines if line.startswith("FAILED")]


def results(lines: Sequence[str]) -> list[tuple[str, str]]:
    """The tests and their states of what ``pytest -v`` prints, alone or with several processes."""
    state, test = "(PASSED|FAILED|ERROR|SKIPPED|XFAIL)", r"(tests/\S+::.+?)"
    pattern = re.compile(rf"^\[gw\d+\] \[ *\d+%\] {state} {test} *$|^{test} {state}\b")
    matches = [match.groups() for line in lines if (match := pattern.search(line))]
    return sorted((test or alone, state or states) for state, test, alone, states in matches)


def steps(part: Part) -> None:
    small = () if part.gpu else ("--millions", 0.1, "--types", "float32", "--extra", "--together", 3)
    names, table = ("--no-live", "default", "confirmed"), dict[tuple[Any, ...], dict[str, Any]]()
    for x in (x for x in part.run(part.own("gpu_steps.py", *small))[0] if "live" in x):
        kind = f"{x['millions']:g} million", x["dtype"], x["extra"]
        table.setdefault(kind, {})[x["live"]] = x.get("ms")
        if "error" in x:
            part.fail(f"{', '.join(kind)}, {x['live']}: {x['error']}")
    rows = [[*kind, *(found.get(name) for name in names)] for kind, found in table.items()]
    part.table("Milliseconds of a step, two ranks", ["parameters", "type", "with", *names], rows)


def standstills(part: Part) -> None:
    whos = ("ours", "ours-confirmed", "no-live", "torchrun") if part.gpu else ("ours",)
    files = {
        kind: part.directory / f"{kind}.json" for kind in (("killed", "joins", "leaves") if part.gpu else ("killed",))
    }
    common = ["--start", 0, "--workers", 2, "--runs", 1, "--cold", *(word for who in whos for word in ("--who", who))]
    part.run(*(part.own("live.py", "--only", kind, "--json", path, *common) for kind, path in files.items()))
    found = [row for path in files.values() if path.exists() for row in json.loads(path.read_text())["rows"]]
    part.records += found
    rows = [[row["title"], row["unit"], *map(row["medians"].get, whos)] for row in found]
    part.table("One run each, as benchmarks/live.py measures; three at a time", ["", "unit", *whos], rows)


def probe(part: Part) -> None:
    found = [x for x in part.run(part.own("gpu_probe.py"))[0] if "phases" in x]
    phases = list(dict.fromkeys(name for x in found for name in x["phases"]))
    rows = []
    for x in found:
        how = " ".join(name for name in ("eager", "nonblocking") if x[name])
        rows.append([x["backend"], x["groups"], x["end"], how, *map(x["phases"].get, phases), x.get("error")])
    part.table("Seconds on rank 0", ["backend", "groups", "ended by", "with", *phases, "error"], rows)


def snapshots(part: Part) -> None:
    gib = 2.0 if part.gpu else 0.0625
    (found,) = part.run(part.own("large_state.py", "--gib", gib, "--directory", part.directory))
    lines = [x.get("line", "") for x in found]
    pairs = [match.groups() for line in lines if (match := re.fullmatch(r"([a-z0-9 ]+): ([0-9.]+) s", line))]
    taken = [float(seconds) for what, seconds in pairs if what.startswith("step ")]
    rows: list[list[Any]] = [[what, float(seconds)] for what, seconds in pairs if not what.startswith("step ")]
    rows += [["a step, median", statistics.median(taken)], ["a step, longest", max(taken)]] if taken else []
    part.table(f"Seconds, with a state of {gib:g} GiB", ["what", "seconds"], rows)
    part.notes += [line for line in lines if line.endswith("GiB")]


PARTS: dict[str, tuple[str, float, Callable[[Part], None]]] = {
    "facts": ("The machine, doctor and node check", 60, facts),
    "faults": ("Faults, changes, and less than is needed", 190, faults),
    "steps": ("What a step costs", 110, steps),
    "standstills": ("Standstills, beside torchrun", 120, standstills),
    "tests": ("Tests marked gpu", 150, tests),
    "probe": ("Where a standstill goes, with torch alone", 90, probe),
    "snapshots": ("Snapshots of a large state", 80, snapshots),
}
"""By name: title, limit in seconds, function; the most valuable come first."""


def done(name: str, gpu: bool, skip: str, over: float) -> Part:
    """Do a part, which must end before a time of the monotonic clock."""
    title, most, function = PARTS[name]
    part, since = Part(name, title), time.monotonic()
    until = min(since + most * (1 if gpu else SLOWNESS), over - GRACE)
    print(f"gpu-check: {title} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as temporary:
        part.begin(gpu, Path(temporary), until)
        if until - since < LEAST or (skip and name != "facts"):
            part.state, part.reason = "skipped", skip or "no time was left"
        else:
            try:
                try:
                    function(part)
                finally:
                    kill_descendants()
            except Exception as error:  # noqa: BLE001  an error in one part must not cost the others
                part.fail(f"{type(error).__name__}: {error}")
    part.seconds = time.monotonic() - since
    print(f"gpu-check: {title}: {part.state} {part.reason}", file=sys.stderr, flush=True)
    return part


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("gpu-check"), help="[./gpu-check]")
    parser.add_argument("--on-cpu", action="store_true", help="try this program: gloo, small sizes")
    parser.add_argument("--minutes", type=float, help="for all parts [8; 30 without a GPU]")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    become_subreaper()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what was started, too
    # In a process of its own: this one must not open the GPU.
    asked = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    gpu = not args.on_cpu and subprocess.run(asked, timeout=120).returncode == 0
    skip = "" if gpu or args.on_cpu else "no GPU that torch can use; --on-cpu tries this program without one"
    limit = 60 * (args.minutes or (8 if gpu else 30))
    where = "on a GPU" if gpu else "on CPUs, with gloo"
    found: dict[str, Any] = {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "where": where, "limit": limit}
    parts = found["parts"] = []
    for name in (name for name in PARTS if name in args.only):
        parts.append(asdict(done(name, gpu, skip, began + limit)))
        found["seconds"] = time.monotonic() - began
        (args.directory / "gpu-check.json").write_text(json.dumps(found, indent=1) + "\n")
        (args.directory / "gpu-check.md").write_text(markdown(found))
    print(markdown(found))
    return int(any(part["state"] == "failed" for part in parts))


if __name__ == "__main__":
    sys.exit(main())

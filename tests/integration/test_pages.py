"""The commands of the tutorial, the how-tos and the questions, run as the pages show them, and what they print.

A block of commands that cannot run here has a comment before it, ``<!-- not run: why -->``, or runs the reader's own
``train.py``.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import wait_for

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIAL = DOCS / "tutorial.md"
HOW_TOS = [*sorted((DOCS / "how-to").glob("*.md")), DOCS / "faq.md"]

SOAK = ("convert-nanogpt", "convert-torchtitan", "torchrun")
"""Pages whose commands only make soak runs: test_convert, test_examples and test_torchrun_mode have their scripts."""

BLOCK = re.compile(r"(<!-- not run: .+? -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OWN_SCRIPT = re.compile(r"(?<![\w/])train\.py")
INSTALLS = re.compile(r"^pip install '(?:\.|elastic-launch)\[(\w+)\]'.*\n", re.MULTILINE)
PROGRAMS = (
    "aws az curl docker elastic-composer elastic-launch elasticctl export for gcloud kubectl make pip podman python "
    "python3 ray rm sbatch scancel scontrol sky srun ssh torchrun torchx"
)
SHELL = re.compile(rf"^\s*(?:\$ )?(?:\w+=(?:\$\([^)]*\)|\S+) )*(?:{'|'.join(PROGRAMS.split())})(?=\s)")
"""What a block of commands begins with, of the programs that the pages use."""

CHANCE = (
    *("incident 7: rank ", "this node was frozen", "this agent did not run", "workers until the leader"),
    *("step ", "..."),
    *("node a joined from 127.0.0.1 with 1 worker; the first", "node b joined from 127.0.0.1 with 1 worker; a round"),
)
"""Lines that need not come: a worker may end before it is killed, a node may be told that it was left out before it
notices that it was frozen, and another one may join before the node that hosts the run does."""


@dataclass(frozen=True)
class Block:
    """A block of a page: commands (sh), or what a program prints (no language)."""

    language: str
    text: str
    runs: bool
    before: str
    """The text between it and the block before it."""


def blocks(page: Path) -> list[Block]:
    text, found, end = page.read_text(), [], 0
    for match in BLOCK.finditer(text):
        found.append(Block(match[2], match[3], match[1] is None, text[end : match.start()]))
        end = match.end()
    return found


def commands(page: Path) -> list[str]:
    """The blocks of commands that are run, without installations."""
    found = [INSTALLS.sub("", block.text) for block in blocks(page) if block.language == "sh" and block.runs]
    return [text for text in found if text and not OWN_SCRIPT.search(text)]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the examples, as in a clone, in an activated environment."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def test_what_pages_install_are_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "".join(page.read_text() for page in [TUTORIAL, *HOW_TOS])
    named = set(INSTALLS.findall(text))
    assert named
    assert named <= extras.keys()
    packages = set(re.findall(r"'([\w-]+>=[\d.]+)'", text))
    assert packages
    assert packages <= {package for extra in extras.values() for package in extra}


@pytest.mark.parametrize("page", [TUTORIAL, *HOW_TOS], ids=lambda page: page.stem)
def test_what_runs_instead_of_a_block_exists(page: Path) -> None:
    instead = re.findall(r"<!-- not run: .*?(tests/\S+)", page.read_text())
    assert [name for name in instead if not (ROOT / name).exists()] == []


def hidden_commands(page: Path) -> list[str]:
    """The blocks with commands that are not labelled sh, so that they would neither be run nor have a reason."""
    others = [block for block in blocks(page) if block.language in ("", "bash", "console", "shell")]
    return [
        block.text
        for block in others
        if not block.text.startswith("#!") and (block.language or SHELL.match(block.text))
    ]


@pytest.mark.parametrize("page", [TUTORIAL, *HOW_TOS], ids=lambda page: page.stem)
def test_blocks_of_commands_are_labelled(page: Path) -> None:
    assert hidden_commands(page) == []


def test_commands_without_a_label_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```\nsrun: error: Node failure on n2\n```\n\n```bash\n#!/bin/bash\nmake\n```\n")
    assert hidden_commands(page) == []
    page.write_text("```\nETCD=a:1 sbatch job\n```\n\n```bash\nstart HOST\n```\n\n```sh\nmake env\n```\n")
    assert hidden_commands(page) == ["ETCD=a:1 sbatch job\n", "start HOST\n"]
    page.write_text("```\nTOKEN=$(openssl rand -hex 32) sky launch\n```\n")
    assert hidden_commands(page) == ["TOKEN=$(openssl rand -hex 32) sky launch\n"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.soak] if page.stem in SOAK else [])
        for page in HOW_TOS
        if commands(page)
    ],
)
def test_the_commands_of_a_how_to_run(page: Path, clone: Path) -> None:
    for command in commands(page):
        done = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_script_of_the_readme_survives_a_kill(clone: Path) -> None:
    """The reader saves the script, types the command below it, and sees what the page shows."""
    found = blocks(ROOT / "README.md")
    at = next(number for number, block in enumerate(found) if block.language == "python")
    Path("train.py").write_text(found[at].text)
    done = subprocess.run(["bash", "-euc", found[at + 1].text], capture_output=True, text=True, timeout=200)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    for line in found[at + 2].text.splitlines():
        if line != "...":
            shown = line.removeprefix("[elastic-launch] ").partition("; logs in")[0]
            assert re.search(as_pattern(shown), printed), f"{shown}\n{printed}"


class Terminals:
    """The tutorial's terminals: node a in the first, node b in the second, kills from the third."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.read = {"a": 0, "b": 0}
        self.helpers = ""

    def type(self, command: str) -> None:
        """Enter a block of commands; a node's goes to the background, in the node's terminal."""
        if node := re.search(r"--node-id (\w)", command):
            command = command.replace("29400", str(self.port))
            if node[1] in self.agents:
                self.agents[node[1]].wait(60)
            with open(f"{node[1]}.out", "ab") as out:
                agent = subprocess.Popen(["bash", "-c", f"exec {command}"], stdout=out, stderr=subprocess.STDOUT)
            self.agents[node[1]] = agent
        elif "() {" in command:
            self.helpers = command
        elif command.strip() == "fg":
            self.agents["b"].send_signal(signal.SIGCONT)
        else:
            if command.startswith("rm "):  # agents write until they have ended
                for agent in self.agents.values():
                    agent.wait(60)
            subprocess.run(["bash", "-euc", f"{self.helpers}\n{command}"], check=True, timeout=60)
            if killed := re.search(r"kill -9 \$\(agent_of (\w)\)", command):
                self.agents[killed[1]].wait(60)

    def sees(self, node: str, patterns: Sequence[str]) -> None:
        """Wait for lines in a node's terminal, in any order, behind those that were seen before."""

        def found() -> list[re.Match[str]] | None:
            text = Path(f"{node}.out").read_text(errors="replace")
            seen = [re.compile(pattern).search(text, self.read[node]) for pattern in patterns]
            missing[:] = [pattern for pattern, match in zip(patterns, seen, strict=True) if match is None]
            return None if missing else [match for match in seen if match is not None]

        missing = list(patterns)
        try:
            seen = wait_for(f"what the page shows in the terminal of {node}", found, 100)
        except AssertionError as error:
            error.add_note(f"missing: {missing}")
            for name in self.agents:
                error.add_note(f"{name}:\n{Path(f'{name}.out').read_text(errors='replace')[-6000:]}")
            raise
        assert seen is not None
        self.read[node] = max(match.end() for match in seen)

    def close(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
            agent.wait(60)


@pytest.fixture
def terminals(clone: Path) -> Iterator[Terminals]:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    made = Terminals(port)
    yield made
    made.close()


def as_pattern(line: str) -> str:
    """A line of the launcher's output, with any numbers, any directory and any order of two nodes."""
    parts = re.split(r"(/home/\S+|\(a, b\)|\d[\d.]*)", line)
    any_of = {"/": r"\S+", "(": r"\((a, b|b, a)\)"}
    return "".join(re.escape(part) if at % 2 == 0 else any_of.get(part[0], r"[\d.]+") for at, part in enumerate(parts))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_tutorial_runs_as_it_is_written(terminals: Terminals) -> None:
    """The lines of each terminal on the page come in the node's output, block by block."""
    node = "a"
    shown = 0
    for block in blocks(TUTORIAL):
        if not block.runs:
            continue
        if mentioned := re.findall(r"\b(first|second)\b", block.before):
            node = {"first": "a", "second": "b"}[mentioned[-1]]
        if re.search(r"[Pp]ress Ctrl-C", block.before):
            terminals.agents[node].send_signal(signal.SIGINT)
        if block.language == "sh":
            terminals.type(block.text)
            continue
        lines = [line.removeprefix("^C").removeprefix("[elastic-launch] ") for line in block.text.splitlines()]
        checked = [as_pattern(line) for line in lines if line and not line.startswith(CHANCE)]
        terminals.sees(node, checked)
        shown += len(checked)
        if lines[-1].startswith("step "):
            terminals.sees(node, [r"step \d+ loss"])
    assert shown > 30
    assert [terminals.agents[name].wait(60) for name in "ab"] == [0, 0]

"""Tests that the documentation says what the code does: tables, links, commands."""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import shlex
from dataclasses import fields
from inspect import Parameter, Signature, signature
from pathlib import Path

import pytest

import elastic_launch
from elastic_launch import dist
from elastic_launch.cli import composer
from elastic_launch.cli import elasticctl as ctl
from elastic_launch.cli.flags import FLAGS, Flag, split
from elastic_launch.config.launch_config import Timing
from elastic_launch.config.notice_sources import SPELLINGS
from elastic_launch.config.settings import CONF_KEYS
from elastic_launch.config.torchrun_mode import DEFAULTS, EMPTY, ENV_TORCHRUN
from elastic_launch.contract import ENV_LOCAL_RANK, ENV_STACKS, FOR_WORKERS
from elastic_launch.errors import ExitCode
from elastic_launch.events.types import KINDS, Event, event_name
from elastic_launch.rendezvous.admin import messages as asking
from elastic_launch.system.host_load import GpuLoad, HostLoad

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.glob("**/*.md")])

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
NAME = re.compile(r"`([^`]+)`")
VARIABLES = re.compile(r"^(?:\w+=(?:'[^']*'|\S+) +)+(?=\w)")
"""Those that are set for one command, before it."""


def rows(text: str) -> list[list[str]]:
    """The cells of all tables in a text."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def names(cell: str) -> list[str]:
    """The parts of a cell in backticks."""
    return [name.replace("\\|", "|") for name in NAME.findall(cell)]


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for language, text in BLOCK.findall(page.read_text()):
            if language == "sh":
                lines = text.replace("\\\n", " ").splitlines()
                found += [(page.name, VARIABLES.sub("", line.removeprefix("$ "))) for line in lines]
    return found


def kinds_of_events() -> list[type[Event]]:
    return [kind for kind in KINDS.values() if kind.__module__ == Event.__module__]


def sections(page: Path, mark: str) -> dict[str, str]:
    """The text under each heading of a level."""
    parts = re.split(rf"^{mark} (.+)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_flag_is_shown_and_no_other() -> None:
    table = rows(sections(REFERENCE / "command-line.md", "##")["Flags"])
    shown = {name.split()[0] for row in table for name in names(row[0])}
    assert shown == {name for flag in FLAGS for name in flag.names}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_a_flag_is_shown_with_its_value_and_default(flag: Flag) -> None:
    table = rows(sections(REFERENCE / "command-line.md", "##")["Flags"])
    mine = [row for row in table if flag.name in [name.split()[0] for name in names(row[0])]]
    assert len(mine) == 1
    cell, default, meaning = mine[0]
    spelled = names(cell)
    assert [name.split()[0] for name in spelled] == list(flag.names)
    assert spelled[-1].partition(" ")[2] == flag.metavar
    assert not flag.default or default.strip("`") == flag.default
    assert meaning
    by_rule = ["PET_" + name[2:].replace("-", "_").upper() for name in flag.names if name.startswith("--")]
    variables = list(flag.variables)
    assert variables[: len(by_rule)] == (by_rule if flag.in_environment else [])
    assert set(variables[len(by_rule) :]) <= set(names(meaning))


def test_the_flags_of_composer_are_shown_with_their_values_and_variables() -> None:
    table = rows(sections(REFERENCE / "composer.md", "##")["Flags"])[2:]
    shown = [(names(row[0]), names(row[2])) for row in table]
    wanted = [
        ([*flag.names[:-1], f"{flag.names[-1]} {flag.metavar}".strip()], flag.fallback) for flag in composer.FLAGS
    ]
    assert shown == [(spelled, [variable] if variable else []) for spelled, variable in wanted]


def test_every_command_and_flag_of_elasticctl_is_shown_and_no_other() -> None:
    page = sections(REFERENCE / "elasticctl.md", "##")
    top = ctl.parser()
    (commands,) = [action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction)]
    assert {title.partition(" ")[2] for title in page if title.startswith("elasticctl ")} == commands.keys()

    def shown(title: str) -> set[str]:
        return {name for row in rows(page[title]) for name in re.findall(r"(?<![\w-])--[a-z][\w-]+", row[0])}

    for name, command in commands.items():
        flags = {option for action in command._actions for option in action.option_strings} - {"-h", "--help"}
        which = shown("Which run") if name not in ("plan", "prune") else set()
        assert which | shown(f"elasticctl {name}") == flags, name
        for action in command._actions:
            if not action.option_strings:
                assert f"`elasticctl {name} {action.metavar}`" in page[f"elasticctl {name}"]


@pytest.mark.parametrize("line", [c[1] for c in commands() if c[1].startswith("elasticctl ")])
def test_command_lines_of_elasticctl_are_understood(line: str) -> None:
    assert callable(ctl.parser().parse_args(shlex.split(line)[1:]).act)


def test_the_fields_of_a_status_are_shown() -> None:
    section = sections(REFERENCE / "elasticctl.md", "##")["elasticctl status"]
    shown = {name for row in rows(section) for name in names(row[0])} - {"field", "--json", "--watch"}
    assert shown == {"backend", *(item.name for item in fields(asking.Status))}
    for kind in (asking.NodeStatus, asking.LastSave, asking.Decision, HostLoad, GpuLoad):
        assert {item.name for item in fields(kind)} <= {name for row in rows(section) for name in names(row[1])}, kind


def test_the_keys_of_rdzv_conf_are_shown_with_their_defaults() -> None:
    table = rows(sections(REFERENCE / "command-line.md", "##")["Keys of --rdzv-conf"])
    shown = {name: row[1] for row in table for name in names(row[0])}
    assert shown.keys() == set(CONF_KEYS)
    flags = {flag.name[2:].replace("-", "_"): f"`{flag.default}`" for flag in FLAGS}
    for item in fields(Timing):
        default = shown[item.name] or flags[item.name]
        assert default == f"`{getattr(Timing(), item.name):g}`"


def test_the_sources_of_notices_are_shown_and_no_other() -> None:
    table = rows(sections(REFERENCE / "command-line.md", "##")["Sources of notices"])
    assert [names(row[0])[0] for row in table[2:]] == [*SPELLINGS, "none"]


def test_the_exit_codes_are_shown() -> None:
    section = sections(REFERENCE / "command-line.md", "##")["Exit codes"]
    assert re.findall(r"^\| `(\d+)` \| (\w+) \|", section, re.MULTILINE) == [(str(c.value), c.name) for c in ExitCode]


def test_the_defaults_of_torchrun_are_shown_beside_ours() -> None:
    table = rows(sections(REFERENCE / "torchrun.md", "##")["What it switches"])
    shown = {names(row[0])[0]: row for row in table if len(names(row[0])) == 1 or "(torch's" in row[0]}
    ours = {flag.name: flag.default for flag in FLAGS}
    for name, text in DEFAULTS.items():
        _, default, other = shown[name]
        assert (default.strip("`"), names(other)[0]) == (ours[name], text), name
    (empty,) = [row for row in table if row[0].startswith("an empty value")]
    assert set(names(empty[0])) == EMPTY
    assert f"| `{ENV_TORCHRUN}` |" in sections(REFERENCE / "environment.md", "##")["What the launcher reads"]


def test_the_workers_variables_are_shown() -> None:
    by_flags = {ENV_LOCAL_RANK, ENV_STACKS}  # shown below the tables
    section = sections(REFERENCE / "environment.md", "##")["What a worker gets"]
    shown = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    assert {name for cell in shown for name in names(cell)} == {
        *(FOR_WORKERS - by_flags),
        "OMP_NUM_THREADS",
        "GLOO_SOCKET_IFNAME",
    }


def test_the_events_are_shown_with_their_fields() -> None:
    shown = sections(REFERENCE / "events.md", "###")
    kinds = {event_name(kind): kind for kind in kinds_of_events()}
    assert shown.keys() == kinds.keys()
    for name, kind in kinds.items():
        (listed,) = re.findall(r"^Fields: (.+?)\.$", shown[name], re.MULTILINE | re.DOTALL)
        outside_brackets = re.sub(r"\([^()]*\)", "", listed)
        assert re.findall(r"`(\w+)`", outside_brackets) == [item.name for item in fields(kind)], name


def test_the_leaders_events_are_under_their_heading() -> None:
    section = sections(REFERENCE / "events.md", "##")["The leader's decisions"]
    leaders = [event_name(kind) for kind in kinds_of_events() if kind.leader]
    assert sorted(re.findall(r"^### (\w+)$", section, re.MULTILINE)) == sorted(leaders)


def test_the_names_of_dist_are_shown_each_in_a_row_and_no_other() -> None:
    header, _, *table = rows((REFERENCE / "dist.md").read_text())
    assert header[:3] == ["name", "inside a job", "outside a job"]
    assert sorted(names(row[0])[0].partition("(")[0] for row in table) == sorted(dist.__all__)
    for row in table:
        assert all(row[:3]), row


@pytest.mark.parametrize("name", dist.__all__)
def test_a_name_of_dist_is_shown_with_its_parameters(name: str) -> None:
    taken = [x.replace(annotation=Parameter.empty) for x in signature(getattr(dist, name)).parameters.values()]
    shown = [names(row[0])[0] for row in rows((REFERENCE / "dist.md").read_text())[2:]]
    assert f"{name}{Signature(taken)}".replace("'", '"') in shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {target}"


def test_the_index_has_every_page() -> None:
    indexes = [DOCS / "README.md", DOCS / "adr" / "README.md"]
    linked = {(index.parent / target).resolve() for index in indexes for target in LINK.findall(index.read_text())}
    assert linked >= {page.resolve() for page in DOCS.glob("**/*.md")} - {indexes[0].resolve()}


@pytest.mark.parametrize(("page", "line"), [c for c in commands() if c[1].startswith("elastic-launch ")])
def test_command_lines_are_understood(page: str, line: str) -> None:
    _, *arguments = shlex.split(line)
    understood = split(arguments)
    assert understood.wants or understood.script
    if understood.script and "/" in understood.script:
        assert (ROOT / understood.script).exists()


def example_commands() -> list[tuple[str, str, list[str]]]:
    """The commands that run an example by a launcher or by Python: page, script, and the flags of the script."""
    found = []
    for page, line in commands():
        script = re.match(r"(?:elastic-launch|torchrun|python3?) (?:.* )?(examples/\S+\.py)(?!\S)", line)
        if script:
            arguments = line[script.end() :].partition(" -- ")[0].split()
            flags = [word.partition("=")[0] for word in arguments if word.startswith("--")]
            found.append((page, script[1], flags))
    return found


@pytest.mark.parametrize(("page", "script", "flags"), example_commands())
def test_examples_have_the_flags_with_which_pages_run_them(page: str, script: str, flags: list[str]) -> None:
    text = (ROOT / script).read_text()
    assert not [flag for flag in flags if f'"{flag}"' not in text], page


def resolved(name: str) -> object:
    """What a page's ``el.…`` names. The modules of frameworks are read, as they import what is not installed here."""
    _, *parts = name.split(".")
    if parts[0] == "integrations" and len(parts) > 2:
        source = ROOT / "elastic_launch" / "integrations" / f"{parts[1]}.py"
        assert parts[2] in {node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)}
        return None
    found: object = elastic_launch
    for part in parts:
        found = getattr(found, part)
    return found


def misused(code: str) -> list[str]:
    """The uses of ``el.…`` in a program that name what is not there, or that do not fit its parameters."""
    wrong = []
    tree = ast.parse(code)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not re.fullmatch(r"el(\.\w+)+", ast.unparse(node)):
            continue
        if ast.unparse(node).startswith("el.integrations") and len(ast.unparse(node).split(".")) < 4:
            continue
        try:
            target = resolved(ast.unparse(node))
            call = calls.get(id(node))
            if call is not None and callable(target):
                omitted = any(isinstance(x, ast.Starred) or ast.unparse(x) == "..." for x in call.args)
                signature(target).bind_partial(
                    *([] if omitted else call.args), **{x.arg: x.value for x in call.keywords if x.arg}
                )
        except (AttributeError, AssertionError, OSError, TypeError) as error:
            wrong.append(f"{ast.unparse(node)}: {error}")
    return wrong


@pytest.mark.parametrize(
    ("page", "code"),
    [
        pytest.param(page, text, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, (language, text) in enumerate(BLOCK.findall(page.read_text()))
        if language == "python"
    ],
)
def test_programs_of_pages_use_names_and_parameters_that_exist(page: Path, code: str) -> None:
    assert misused(code) == [], page.name


@pytest.mark.parametrize(
    "code",
    [
        "el.Trainr(run)",
        "el.Trainer(run, modl=model)",
        "el.GlobalBatch(1, 2, 3, 4, 5, 6, 7)",
        "el.integrations.lightning.Callback()",
        "el.integrations.nonesuch.DrainCallback()",
        "el.integrations.drain.Nonesuch()",
    ],
)
def test_wrong_names_and_parameters_are_found(code: str) -> None:
    assert misused(f"import elastic_launch as el\nx = {code}\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_changes_how_later_ones_run(page: Path) -> None:
    """An exported variable would hold for the commands of the next sections, too."""
    assert "export ELASTIC_LAUNCH_" not in page.read_text()


@pytest.mark.parametrize("name", ["ddp", "nanogpt", "torchtitan", "transformers"])
def test_a_conversion_shows_the_difference_of_its_scripts(name: str) -> None:
    paths = [ROOT / "examples" / "convert" / name / f"{which}.py" for which in ("before", "after")]
    before, after = (path.read_text().splitlines() for path in paths)
    _, _, *lines = difflib.unified_diff(before, after, lineterm="")
    page = (DOCS / "how-to" / f"convert-{name}.md").read_text()
    (shown,) = [text for language, text in BLOCK.findall(page) if language == "diff"]
    assert shown.splitlines() == [line.rstrip() for line in lines]


def test_the_page_shows_the_difference_of_a_script_that_keeps_its_loop_and_counts_its_lines() -> None:
    paths = [ROOT / "examples" / "convert" / "ddp" / f"{which}.py" for which in ("before", "own_loop")]
    _, _, *lines = difflib.unified_diff(*(path.read_text().splitlines() for path in paths), n=1, lineterm="")
    page = (DOCS / "how-to" / "keep-the-batch.md").read_text()
    (shown,) = [text for language, text in BLOCK.findall(page) if language == "diff"]
    assert shown.splitlines() == [line.rstrip() for line in lines]
    changed = [line for line in lines if line.startswith("+") and line != "+"]
    assert len(changed) == 10
    assert "These are ten changed or new lines" in page


def test_targets_of_make_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = [line.split()[1] for _, line in commands() if line.startswith("make ")]
    text = "".join(page.read_text() for page in PAGES)
    asked += re.findall(r"`make ([\w-]+)", text)
    assert {"demo", "test"} <= set(asked) <= set(targets)


def texts_of_the_program() -> set[str]:
    """All texts in the code, with … for what is filled in."""
    found = set()
    for path in [*(ROOT / "elastic_launch").rglob("*.py"), *(ROOT / "agents").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%(?:[.\d]*[dgfsr])", "…", node.value))
    return found


def test_the_messages_of_the_index_are_the_programs() -> None:
    texts = texts_of_the_program()
    page = (REFERENCE / "messages.md").read_text().partition("## Nodes that do not meet")[2]
    shown = [names(row[0])[0] for row in rows(page) if names(row[0])]
    assert len(shown) > 30
    for message in shown:
        parts = message.split("…")
        pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        longest = max(parts, key=len)
        assert any(pattern.search(text) for text in texts if longest in text), message


def test_the_index_has_every_exit_code() -> None:
    told = " ".join(row[0] for row in rows(sections(REFERENCE / "messages.md", "##")["Exit codes"]))
    assert {str(code.value) for code in ExitCode} <= set(re.findall(r"\d+", told))


def test_figures_are_those_of_the_benchmarks() -> None:
    """Those of the README, of its picture, and of the table of what torchrun does better."""
    page = (DOCS / "benchmarks.md").read_text()
    texts = [re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)]
    texts.append((DOCS / "survival.svg").read_text())
    shown = {figure for text in texts for figure in re.findall(r"(?<![\w.])\d+\.\d+(?= s\b)", text)}
    assert len(shown) == 9
    assert [figure for figure in shown if not re.search(rf"(?<![\w.]){re.escape(figure)}(?![\d.])", page)] == []
    ahead = rows(sections(DOCS / "benchmarks.md", "##")["Where torchrun is ahead"])[2:]
    measured = rows("".join(re.findall(r"^<!-- generated.*?^<!-- end", page, flags=re.MULTILINE | re.DOTALL)))
    assert [what for what, *pair in ahead if not any(set(pair) <= set(row) for row in measured)] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


@pytest.mark.parametrize("page", sorted((DOCS / "training").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_about_training_is_short(page: Path) -> None:
    assert len(page.read_text().split()) <= 1500

"""Tests of the job file: the effect of its keys, precedence, and the response to mistakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_lines import Parse, refused

from elastic_launch.cli import main as cli
from elastic_launch.cli.flags import FLAGS, split
from elastic_launch.cli.job import Job, shown
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.launch_config import LaunchConfig, Limits
from elastic_launch.errors import UsageError


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Parse a command line with the job file ``job.yaml``, beside a ``train.py``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def parse_it(text: str, *line: str, **environ: str) -> LaunchConfig:
        Path("job.yaml").write_text(text)
        return cli.parse(
            ["--config", "job.yaml", *line], {"HOME": str(tmp_path), "PATH": os.environ["PATH"], **environ}
        )

    return parse_it


def test_a_file_gives_flags_script_and_arguments(parse: Parse) -> None:
    config = parse("nnodes: 1:4\nnproc_per_node: 2\nrole: no\nscript: train.py\nargs: [--lr, 0.10, ~/x, '']\n")
    assert config.limits == Limits(1, 4, 3)
    assert (config.nproc, config.role) == (2, "no")
    assert config.command.display == ("train.py", "--lr", "0.10", "~/x", "")


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS if flag.metavar and flag.name != "--print-completion"], ids=lambda flag: flag.name
)
def test_every_flag_with_a_value_is_a_key_in_each_spelling(flag, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    names = [name[2:] for name in flag.names if name.startswith("--") and flag.name != "--config"]
    for key in [*names, *(name.replace("-", "_") for name in names)]:
        Path("job.yaml").write_text(f"{key}: 7\n")
        assert Job(split(["--config", "job.yaml"]), {}).values.text(flag.name) == "7"


def test_flags_win_over_the_environment_that_over_the_file_that_over_defaults(parse: Parse) -> None:
    text = "nproc: 2\nmax-restarts: 5\nscript: train.py\n"
    assert (parse(text).nproc, parse(text).limits.max_restarts) == (2, 5)
    assert parse(text, PET_NPROC="3").nproc == 3
    assert parse(text, "--nproc", "4", PET_NPROC="3").nproc == 4
    assert parse("script: train.py\n").limits.max_restarts == 3


def test_a_switch_of_the_file_is_turned_off_by_the_environment(parse: Parse) -> None:
    text = "no-python: yes\nscript: env\n"
    assert parse(text).command.display == ("--no-python", "env")
    with pytest.raises(UsageError, match="there is no script 'env'"):
        parse(text, PET_NO_PYTHON="0")
    assert parse("standalone: off\nnnodes: 2\nscript: train.py\n").limits.max_nodes == 2


def test_times_of_the_file_lose_against_keys_of_rdzv_conf_in_the_environment(parse: Parse) -> None:
    text = "join-settle: 5\nrdzv-conf: {beat: 0.5, join_settle: 4}\nscript: train.py\n"
    assert (parse(text).timing.join_settle, parse(text).timing.beat) == (5, 0.5)
    assert parse(text, PET_RDZV_CONF="join_settle=6").timing.join_settle == 6
    assert parse(text, "--rdzv-conf", "join_settle=7", PET_JOIN_SETTLE="6").timing.join_settle == 7


def test_addresses_may_be_a_list(parse: Parse) -> None:
    text = "rdzv-backend: etcd\nrdzv-id: 0012\nrdzv-endpoint:\n- a:1\n- b\nscript: train.py\n"
    assert parse(text).endpoints == (Endpoint("a", 1), Endpoint("b", 2379))
    assert parse(text).run_id == "0012"


@pytest.mark.parametrize(
    ("text", "line", "display"),
    [
        ("script: train.py\nargs: [a]\n", ["--nproc", "1", "b", "--c"], ("train.py", "a", "b", "--c")),
        ("script: train.py\n", ["--", "--lr", "2"], ("train.py", "--lr", "2")),
        ("args: [a]\n", ["train.py", "b"], ("train.py", "a", "b")),
        ("", ["train.py"], ("train.py",)),
        ("# nothing\n", ["train.py", "--config", "its.yaml"], ("train.py", "--config", "its.yaml")),
    ],
)
def test_arguments_of_the_command_line_follow_those_of_the_file(
    parse: Parse, text: str, line: list[str], display: tuple[str, ...]
) -> None:
    assert parse(text, *line).command.display == display


def test_an_unknown_flag_beside_a_job_file_is_answered_with_a_hint_at_two_dashes(parse: Parse) -> None:
    assert refused(parse, "script: train.py\n", "--lr", "2").hint.endswith(
        "If the job file names it, they go after --."
    )


def test_variables_are_added_where_the_environment_has_none(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("env:\n  A: 010\n  B: on\n  C: ''\n")
    job = Job(split(["--config", str(file)]), {"B": "mine"})
    assert job.added == {"A": "010", "C": ""}
    assert (job.values.environ["A"], job.values.environ["B"]) == ("010", "mine")


@pytest.mark.parametrize(
    ("text", "where", "problem", "remedy"),
    [
        ("nporc: 2\n", "job.yaml:1", "unknown key 'nporc'", "Did you mean nproc?"),
        ("role: a\nmax_restart: 2\n", "job.yaml:2", "unknown key 'max-restart'", "Did you mean max-restarts?"),
        ("--nproc: 2\n", "job.yaml:1", "unknown key", "Did you mean nproc?"),
        ("scripts: a.py\n", "job.yaml:1", "unknown key", "Did you mean script?"),
        ("config: other.yaml\n", "job.yaml:1", "unknown key 'config'", "names of the flags"),
        ("nproc: 2\nnproc: 3\n", "job.yaml:2", "gives nproc again; line 1", "Keep one"),
        ("nproc: 2\nnproc-per-node: 3\n", "job.yaml:2", "line 1 has it under another name", "Keep one"),
        ("nproc: [1, 2]\n", "job.yaml:1", "gives nproc a list", "Write nproc: N."),
        ("log-dir: {a: b}\n", "job.yaml:1", "gives log-dir a mapping", "Write log-dir: DIR."),
        ("nproc:\n", "job.yaml:1", "gives nproc no value", "leave the key out"),
        ("log-dir: ~\n", "job.yaml:1", "gives log-dir no value", "Write log-dir: DIR."),
        ("nproc: ''\n", "job.yaml:1", "gives nproc no value", "leave the key out"),
        ("standalone: 1\n", "job.yaml:1", "gives standalone '1', and it is a switch", "standalone: true or"),
        ("standalone: [yes]\n", "job.yaml:1", "a list, and it is a switch", "standalone: true or"),
        ("args: --lr 0.1\n", "job.yaml:1", "gives args '--lr 0.1' where a list belongs", "args: [--lr, 0.1]"),
        ("args:\n- [a]\n", "job.yaml:2", "gives args a list where one value", "args: ["),
        ("args:\n- a\n-\n", "job.yaml:3", "gives args no value", "args: ["),
        ("script: [a]\n", "job.yaml:1", "gives script a list", "script: train.py"),
        ("env: [A]\n", "job.yaml:1", "gives env a list", "env: {NAME: VALUE}"),
        ("env:\n  A:\n", "job.yaml:2", "gives env.A no value", 'A: ""'),
        ("env:\n  A=1: 2\n", "job.yaml:2", "'A=1' in env, which is not a valid variable name", "letters"),
        ("env:\n  RANK: 2\n", "job.yaml:2", "RANK in env, which the launcher itself sets", "Leave it out"),
        ("env: {PET_NPROC: 2}\n", "job.yaml:1", "PET_NPROC in env", "Write nproc: as a key"),
        ("env: {ELASTIC_LAUNCH_TOKEN: x}\n", "job.yaml:1", "the launcher's and not for workers", "token-file"),
        ("role: !!python/name:os.system\n", "job.yaml:1", "tagged tag:yaml.org,2002:python/name", "role: NAME"),
        ('role: "a\\0b"\n', "job.yaml:1", "NUL", "role: NAME"),
        ("? [a]\n: 1\n", "job.yaml:1", "a key that is not a word", "KEY: VALUE"),
        ("- nproc\n", "job.yaml:1", "holds no keys", "nproc: 8"),
        ("nproc: 2\n  role: a\n", "job.yaml:2", "mapping values are not allowed", "quotes"),
        ("nproc: 2\n---\nnproc: 3\n", "job.yaml:2", "document", "Correct"),
        ("role: *nobody\n", "job.yaml:1", "undefined alias", "Correct"),
        ("role: \x01\n", "job.yaml", "special characters are not allowed", "Correct"),
    ],
)
def test_mistakes_name_line_key_and_remedy(parse: Parse, text: str, where: str, problem: str, remedy: str) -> None:
    error = refused(parse, text, "train.py")
    assert error.message.startswith(where)
    assert problem in error.message
    assert remedy in error.hint


def test_a_value_that_its_flag_refuses_is_reported_with_its_file(parse: Parse) -> None:
    error = refused(parse, "role: a\nmax-restarts: many\n", "train.py")
    assert error.message == "--max-restarts many is not a whole number. --max-restarts comes from job.yaml:2."
    error = refused(parse, "nnodes: 4:1\n", "train.py")
    assert error.message.endswith("--nnodes comes from job.yaml:1.")
    assert "comes from" not in refused(parse, "nnodes: 1\n", "--nnodes", "4:1", "train.py").message
    assert refused(parse, "dead-after: soon\n", "train.py").message.startswith("job.yaml:1: dead-after: soon")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep").write_text("[" * 20000)
    (tmp_path / "endless").write_text("#" * 2**21)
    for name, problem in (
        ("none.yaml", "No such file"),
        (".", "Is a directory"),
        ("binary", "not a text in UTF-8"),
        ("deep", "nested too deeply"),
        ("endless", "holds more than 1048576 bytes"),
    ):
        with pytest.raises(UsageError, match=problem) as caught:
            Job(split(["--config", str(tmp_path / name)]), {})
        assert caught.value.hint


def test_tags_are_not_obeyed(parse: Parse, tmp_path: Path) -> None:
    refused(parse, f"env: {{A: !!python/object/apply:os.mkdir [{tmp_path / 'made'}]}}\n", "train.py")
    assert not (tmp_path / "made").exists()


# What is shown.

TEXT = """nnodes: 1:4
rdzv_conf: {join_settle: 5}
script: train.py
args: [--lr, a b]
env:
  A: 1
  B: 2
"""


def printed(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, tuple[str, str]]:
    """Run ``--print-config`` and return value and source by key; arguments under their values."""
    assert cli.main(["--config", "job.yaml", "--print-config", *line]) == 0
    found = {}
    for text in capsys.readouterr().out.splitlines():
        entry, _, source = text.partition("  # ")
        key, _, value = entry.strip().removeprefix("- ").partition(":")
        found[key] = value.strip(), source
    return found


def test_every_value_is_shown_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("job.yaml").write_text(TEXT)
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    monkeypatch.setenv("B", "mine")
    found = printed(capsys, "--nproc", "2", "--standalone", "--nnodes=1", "--", "--epochs", "3")
    assert found["nproc"] == ("2", "--nproc")
    assert found["nnodes"] == ("1", "--nnodes")
    assert found["standalone"] == ("true", "--standalone")
    assert found["max-restarts"] == ("7", "PET_MAX_RESTARTS")
    assert found["rdzv-conf"] == ("join_settle=5", "job.yaml:2")
    assert found["join-settle"] == ("5", "job.yaml:2: rdzv-conf")
    assert found["# min-wait"] == ("600", "default")
    assert found["# no-python"] == ("false", "default")
    assert found["script"] == ("train.py", "job.yaml:3")
    assert (found['"--lr"'], found['"a b"']) == (("", "job.yaml:4"), ("", "job.yaml:4"))
    assert (found['"--epochs"'], found["3"]) == (("", "command line"), ("", "command line"))
    assert (found["A"], found["B"]) == (("1", "job.yaml:6"), ("mine", "environment"))
    shown_flags = {key.removeprefix("# ") for key in found}
    hidden = {"--help", "--version", "--config", "--print-config", "--print-completion"}
    assert {flag.name[2:] for flag in FLAGS if flag.name not in hidden} <= shown_flags


def test_the_printed_configuration_is_an_equivalent_job_file(parse: Parse) -> None:
    odd = ["a b", "", "#x", "1:4", "null", "é\u2028", "'\"\\", "- x", "trailing:", "!t", "&a", "yes", "\U0001f600"]
    environ = {"PET_NPROC": "2", "HOME": "/"}
    job = Job(split(["--node-id", "a#b", "--role", " x ", "train.py", *odd]), environ)
    again = parse(shown(job, {}))
    assert again.command.display == ("train.py", *odd)
    assert (again.nproc, again.node_id, again.role) == (2, "a#b", " x ")


def test_values_that_cannot_work_are_shown_before_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("nnodes: 4:1\nscript: none.py\n")
    assert cli.main(["--config", "job.yaml", "--print-config"]) == 2
    out, err = capsys.readouterr()
    assert "nnodes: 4:1" in out
    assert "there is no script 'none.py'" in err

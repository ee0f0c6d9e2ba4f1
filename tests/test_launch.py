"""Tests of the replacement of torch.distributed.launch: which argument the script gets, and its spelling."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_launch import launch
from elastic_launch.cli.flags import split
from elastic_launch.cli.job import Job
from elastic_launch.errors import UsageError


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('p.add_argument("--local_rank", type=int)', "--local_rank"),
        ("p.add_argument('--local-rank', type=int)", "--local-rank"),
        ('p.add_argument("--local-rank", "--local_rank")', "--local-rank"),
        ('p.add_argument("--local_rank")  # torch 2 passes --local-rank', "--local_rank"),
        ("DEFINE('--local-rank')  # once it was --local_rank", "--local-rank"),
        ("# --local_rank is parsed elsewhere", "--local_rank"),
        ('p.add_argument("--local_ranks")', "--local-rank"),
        ('p.add_argument("--local_rank_size")', "--local-rank"),
        ("local_rank = os.environ['LOCAL_RANK']", "--local-rank"),
        ("", "--local-rank"),
    ],
)
def test_the_spelling_is_that_of_the_source_else_dashes(source: str, expected: str) -> None:
    assert launch.spelling(source) == expected


def handed(*argv: str) -> tuple[str, ...]:
    """The script's arguments that result from a command line."""
    job = Job(split(argv, launch.FLAGS), {})
    launch.hand_local_rank(job)
    return job.line.arguments


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with scripts that spell it with underscores, at several places."""
    monkeypatch.chdir(tmp_path)
    for path in ("train.py", "pkg/__init__.py", "pkg/mod.py", "pkg/sub/__init__.py", "pkg/sub/__main__.py"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text('raise SystemExit("imported")\n"--local_rank"\n')
    Path("pkg/plain.py").touch()
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py --lr 1", ("--local_rank=${local_rank}", "--lr", "1")),
        ("-m train --lr 1", ("--local_rank=${local_rank}", "--lr", "1")),
        ("-m pkg.mod", ("--local_rank=${local_rank}",)),
        ("-m pkg.sub", ("--local_rank=${local_rank}",)),
        ("pkg/sub", ("--local_rank=${local_rank}",)),
        ("-m pkg.plain", ("--local-rank=${local_rank}",)),
        ("-m pkg.mod.none", ("--local-rank=${local_rank}",)),
        ("-m .mod", ("--local-rank=${local_rank}",)),
        ("none.py", ("--local-rank=${local_rank}",)),
        ("--use-env train.py --lr 1", ("--lr", "1")),
        ("--use_env --nproc_per_node=2 train.py", ()),
        ("--use-env --no-python env A=1", ("A=1",)),
        ("--local-rank-name lr train.py", ("--lr=${local_rank}",)),
        ("--local-rank-name=-r train.py", ("-r=${local_rank}",)),
        ("--local_rank_name=--local-rank train.py", ("--local-rank=${local_rank}",)),
    ],
)
def test_the_script_gets_its_local_rank_first(line: str, expected: tuple[str, ...]) -> None:
    assert handed(*line.split()) == expected


@pytest.mark.usefixtures("here")
def test_it_comes_before_the_arguments_of_a_job_file() -> None:
    Path("job.yaml").write_text("script: train.py\nargs: [--lr, 1]\n")
    assert handed("--config", "job.yaml", "more") == ("--local_rank=${local_rank}", "--lr", "1", "more")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("line", "problem", "hint"),
    [
        ("--no-python train.py", "--no-python without --use-env", "Add --use-env"),
        ("--local-rank-name a=b train.py", "'a=b' is not a valid argument name", "--local-rank-name local_rank"),
        ("--local-rank-name= train.py", "'' is not a valid argument name", "--local-rank-name local_rank"),
    ],
)
def test_a_local_rank_that_cannot_be_passed_is_reported(line: str, problem: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        handed(*line.split())
    assert problem in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.usefixtures("here")
def test_nothing_is_restarted_unless_asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def budget(*line: str) -> str:
        assert launch.main(["--print-config", *line, "train.py"]) == 0
        found = [text for text in capsys.readouterr().out.splitlines() if text.startswith("max-restarts:")]
        return " ".join(found[0].split())

    assert budget() == "max-restarts: 0 # default of torch.distributed.launch"
    assert budget("--max_restarts=2") == "max-restarts: 2 # --max-restarts"
    monkeypatch.setenv("PET_MAX_RESTARTS", "4")
    assert budget() == "max-restarts: 4 # PET_MAX_RESTARTS"


def test_the_help_shows_what_is_different(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for flag in launch.FLAGS for name in flag.names)
    assert "--nnodes" in out

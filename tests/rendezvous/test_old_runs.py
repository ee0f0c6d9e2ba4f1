"""The directories of runs that are over: the newest stay, and all that an agent did not make."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from elastic_launch.cli import elasticctl
from elastic_launch.rendezvous.old_runs import SILENCE, prune, runs_in
from elastic_launch.rendezvous.run_file import RunAddress, RunFile

END = '{"event": "node_ended", "time": "2026-11-28T19:40:49.108+00:00", "clock": 1.0, "code": 0, "cause": "done"}\n'
BEGIN = '{"event": "node_joined", "time": "2026-11-28T19:40:49.108+00:00", "clock": 1.0, "node": "a"}\n'


def launch(base: Path, number: int, events: str = BEGIN + END) -> Path:
    """Make what a launch without --log-dir leaves; return the directory of its run."""
    run = base / f"20261128T1940{number:02}Z-{4000 - number}" / f"run{number}"
    fill(run, events)
    return run


def fill(run: Path, events: str = BEGIN + END) -> None:
    rank = run / "round_1" / "0"
    ahead = run / "ahead_1" / "node-a" / "1"
    for directory in (rank, ahead):
        directory.mkdir(parents=True)
        for name in ("stdout.log", "stderr.log"):
            (directory / name).write_text("x\n")
    os.mkfifo(rank / "collectives.fifo")
    (run / "round_1" / "stacks-node-a.txt").touch()
    (run / "imports-node-a.log").touch()
    (run / "events-node-a.jsonl").write_text(events)
    (run / "run.json").write_text('{"run_id": "x"}')


def removed(base: Path, keep: int, *, named: bool = False, later: float = 0.0) -> list[str]:
    now = base.stat().st_mtime + 60 + later
    return [path.name for path in prune(base, keep, named=named, now=now)]


def test_a_week_of_launches_stays_bounded(tmp_path: Path) -> None:
    for number in range(30):
        launch(tmp_path, number)
        removed(tmp_path, 5)
        assert len(runs_in(tmp_path, named=False)) <= 5
    names = {path.name for path in runs_in(tmp_path, named=False)}
    assert (
        names == {path.name for path in tmp_path.iterdir()} == {f"20261128T1940{n}Z-{4000 - n}" for n in range(25, 30)}
    )


@pytest.mark.parametrize("what", ["a file", "a checkpoint", "a link", "a directory"])
def test_a_directory_with_anything_else_stays_whole(tmp_path: Path, what: str) -> None:
    run = launch(tmp_path, 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    if what == "a file":
        (run / "round_1" / "0" / "result.json").touch()
    elif what == "a checkpoint":
        (run / "step-4.r1.4c412f0611e2c178").mkdir()
    elif what == "a link":
        (run / "round_2").symlink_to(outside)
    else:
        (run.parent / "other").mkdir()
        (run.parent / "other" / "notes.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    assert removed(tmp_path, 0, later=2 * SILENCE) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_no_launch_s_is_not_looked_at(tmp_path: Path) -> None:
    fill(tmp_path / "my-run")
    (tmp_path / "20261128T194000Z-1").symlink_to(tmp_path / "my-run")
    (tmp_path / "latest").symlink_to("my-run")
    assert removed(tmp_path, 0, later=2 * SILENCE) == []
    assert (tmp_path / "my-run" / "run.json").exists()


def test_a_run_that_is_alive_stays(tmp_path: Path) -> None:
    run = launch(tmp_path, 1)
    file = RunFile(run)
    file.write(RunAddress("run1", "c10d", "a:1", "node-a"))
    try:
        assert removed(tmp_path, 0, later=2 * SILENCE) == []
    finally:
        file.close()
    assert removed(tmp_path, 0) == [run.parent.name]


def test_a_run_of_which_a_node_has_not_recorded_its_end_stays_for_a_week(tmp_path: Path) -> None:
    """Where file systems have no locks it may be alive on another host; an agent that is killed records none."""
    run = launch(tmp_path, 1)
    (run / "events-node-b.jsonl").write_text(BEGIN)
    assert removed(tmp_path, 0, later=SILENCE - 600) == []
    assert removed(tmp_path, 0, later=SILENCE + 600) == [run.parent.name]


def test_a_long_root_cause_in_the_last_event_is_no_obstacle(tmp_path: Path) -> None:
    end = END.replace('"done"', json.dumps("x" * 100_000))
    assert removed(launch(tmp_path, 1, BEGIN + end).parents[1], 0)


def test_a_launch_that_has_made_its_directory_only_stays(tmp_path: Path) -> None:
    (tmp_path / "20261128T194000Z-1").mkdir()
    assert removed(tmp_path, 0) == []


def test_an_interrupted_removal_is_completed_by_the_next_one(tmp_path: Path) -> None:
    run = launch(tmp_path, 1)
    shutil.rmtree(run / "round_1")
    (run / "events-node-a.jsonl").unlink()
    assert removed(tmp_path, 0, later=2 * SILENCE) == [run.parent.name]


def test_a_directory_that_cannot_be_removed_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = launch(tmp_path, 1), launch(tmp_path, 2)
    rmdir = Path.rmdir

    def refusing(path: Path) -> None:
        if path == second:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", refusing)
    gone = prune(tmp_path, 0, named=False, now=tmp_path.stat().st_mtime + 60)
    assert next(gone).name == first.parent.name
    with pytest.raises(PermissionError, match="run2"):
        next(gone)


def test_elasticctl_prunes_a_log_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(("old", "new")):
        fill(tmp_path / name)
        os.utime(tmp_path / name / "run.json", (1000 + number, 1000 + number))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-1").touch()
    for directory in (tmp_path / "old", tmp_path / "new"):
        os.utime(directory, (1000, 1000))
    assert elasticctl.main(["prune", "--log-dir", str(tmp_path), "--keep-runs", "1"]) == 0
    told = capsys.readouterr().out
    assert told == f"removed {tmp_path / 'old'}\n1 run removed, 1 left in {tmp_path}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "new"]
    assert elasticctl.main(["prune", "--log-dir", str(tmp_path / "none")]) == 2
    assert "Correct --log-dir" in capsys.readouterr().err

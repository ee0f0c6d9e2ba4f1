"""Where the exceptions of workers are kept, however slow that file system is."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from harness import wait_for

from elastic_agents.workers.logs import PREFIX, LogPlaces, keep_error
from elastic_launch.config.launch_config import Command, LaunchConfig
from elastic_launch.contract import Placement
from elastic_launch.system.writer_thread import Writer

PLACEMENT = Placement(0, 0, 0, 1, 1, 1, "127.0.0.1", 29500, 0, 1, True)


def test_what_killed_agents_have_left_is_removed_and_what_is_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, of_others = tmp_path / f"{PREFIX}left", tmp_path / "elastic-launch-other"
    (left / "round_1").mkdir(parents=True)
    of_others.mkdir()
    config = LaunchConfig(Command(("true",), ("true",)), log_dir=tmp_path / "logs")
    with closing(Writer("files", limit=1 << 20, patience=3.0)) as files:
        places = [LogPlaces(config, files) for _ in range(2)]
        logs = [each.prepare(1, [PLACEMENT], lambda placement, error_file: {}, {})[0][0] for each in places]
        files.flush()
        assert not left.exists()
        assert of_others.exists()
        assert all(each.error_file.parent.exists() for each in logs)
        for each in places:
            each.close()
    assert sorted(tmp_path.iterdir()) == [of_others, tmp_path / "logs"]


def test_an_exception_is_copied_before_its_directory_is_removed(tmp_path: Path) -> None:
    config = LaunchConfig(Command(("true",), ("true",)), log_dir=tmp_path)
    with closing(Writer("files", limit=1 << 20, patience=3.0)) as files:
        places = LogPlaces(config, files)
        logs = places.prepare(1, [PLACEMENT], lambda placement, error_file: {}, {})[0][0]
        logs.error_file.write_text("what it raised")
        files.put(lambda data: time.sleep(0.2))  # a slow disk
        files.put(lambda data: keep_error(logs))
        places.close()
    assert not logs.error_file.parent.exists()
    assert logs.kept_error is not None
    assert logs.kept_error.read_text() == "what it raised"


def test_a_directory_for_temporary_files_that_cannot_be_listed_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    config = LaunchConfig(Command(("true",), ("true",)), log_dir=tmp_path)
    with closing(Writer("files", limit=1 << 20, patience=3.0)) as files, closing(LogPlaces(config, files)) as places:
        places.made = lambda local: shutil.rmtree(local.parent)  # before it is listed: root may list any that is there
        logs = places.prepare(1, [PLACEMENT], lambda placement, error_file: {}, {})[0][0]
        assert files.flush()
        assert logs.kept_error is not None
        assert logs.kept_error.parent.is_dir()


def test_a_file_system_that_answers_late_takes_no_directory_of_a_later_round(tmp_path: Path) -> None:
    config = LaunchConfig(Command(("true",), ("true",)), log_dir=tmp_path)
    with closing(Writer("files", limit=1 << 20, patience=0.1)) as files, closing(LogPlaces(config, files)) as places:
        first = places.prepare(1, [PLACEMENT], lambda placement, error_file: {}, {})[0][0]
        answers = threading.Event()
        files.put(lambda data: answers.wait(60))
        wait_for("the file system to hang", lambda: files.stuck)
        second = places.prepare(2, [PLACEMENT], lambda placement, error_file: {}, {})[0][0]
        third = places.prepare(3, [PLACEMENT], lambda placement, error_file: {}, {})[0][0]
        answers.set()
        assert files.flush()
        assert [logs.error_file.parent.is_dir() for logs in (first, second, third)] == [False, False, True]

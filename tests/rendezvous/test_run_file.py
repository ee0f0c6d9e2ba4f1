"""The file by which elasticctl finds a run."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_launch.rendezvous.run_file import FILE, TOKEN_FILE, FoundRun, RunAddress, RunFile, find
from elastic_launch.secret import Token


def run_address(run_id: str, node_id: str = "a") -> RunAddress:
    return RunAddress(run_id, "c10d", "10.0.0.1:29400", node_id)


def led() -> RunAddress:
    return replace(run_address("one"), leader="10.0.0.1:4000")


def test_a_run_is_alive_as_long_as_its_file_is_held(tmp_path: Path) -> None:
    files = {name: RunFile(tmp_path / name) for name in ("one", "two")}
    for name, file in files.items():
        file.write(run_address(name))
    runs, alive = find(tmp_path, None, depth=1)
    assert ({run.run_id for run, _ in runs}, alive) == ({"one", "two"}, True)
    files["one"].close()
    assert find(tmp_path, None, depth=1) == ([FoundRun(run_address("two"), tmp_path / "two")], True)
    assert find(tmp_path, "one", depth=1) == ([FoundRun(run_address("one"), tmp_path / "one")], False)
    files["two"].close()
    assert find(tmp_path, None, depth=1)[1] is False


def test_the_leader_and_the_end_are_noted(tmp_path: Path) -> None:
    file = RunFile(tmp_path)
    file.write(run_address("one"))
    file.write(led())
    assert find(tmp_path, None, depth=0)[0][0].run.leader == "10.0.0.1:4000"
    file.end(91, "all 3 restarts spent")
    (((run, _),), alive) = find(tmp_path, None, depth=0)
    assert (run.leader, run.code, run.cause, alive) == ("10.0.0.1:4000", 91, "all 3 restarts spent", False)


def test_a_token_that_the_agent_made_is_stored_next_to_it_while_the_run_lasts(tmp_path: Path) -> None:
    token, path = Token.made(), tmp_path / TOKEN_FILE
    path.write_text("left by an agent that was killed")
    path.chmod(0o644)
    file = RunFile(tmp_path, token)
    file.write(run_address("one"))
    file.write(led())
    ((found,), _) = find(tmp_path, None, depth=0)
    assert found.token() == token
    assert path.stat().st_mode & 0o777 == 0o600
    assert token.reveal() not in (tmp_path / FILE).read_text()
    file.end(0, "finished")
    assert found.token() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE]


def test_a_close_that_fails_stops_nothing(tmp_path: Path) -> None:
    """Network file systems may report a full disk only then."""
    file = RunFile(tmp_path)
    file.write(run_address("one"))
    os.close(file._lock)
    file.write(led())
    os.close(file._lock)
    file.end(0, "finished")
    assert find(tmp_path, None, depth=0)[0][0].run.code == 0


def test_in_a_shared_directory_the_last_nodes_file_stays(tmp_path: Path) -> None:
    first, second = RunFile(tmp_path), RunFile(tmp_path)
    first.write(run_address("one", "a"))
    second.write(run_address("one", "b"))
    first.end(143, "stopped by SIGTERM")
    assert find(tmp_path, None, depth=0) == ([FoundRun(run_address("one", "b"), tmp_path)], True)
    second.close()


def test_the_last_of_the_nodes_in_a_directory_records_how_the_run_ended(tmp_path: Path) -> None:
    """A node that left the run by SIGTERM before says nothing about its end."""
    nodes = {node_id: RunFile(tmp_path) for node_id in "abc"}
    for node_id, file in nodes.items():
        file.write(run_address("one", node_id))
    nodes.pop("c").end(143, "stopped by SIGTERM")
    nodes.pop("b").close()
    nodes.pop("a").end(0, "all workers finished")
    (found,), alive = find(tmp_path, None, depth=0)
    assert (found.run.node_id, found.run.code, found.run.cause, alive) == ("a", 0, "all workers finished", False)


def test_a_node_that_leaves_keeps_the_file_of_one_whose_lock_may_be_out_of_sight(tmp_path: Path) -> None:
    """As of an agent on another host, on a file system whose locks end at the host."""
    leaves, stays = RunFile(tmp_path), RunFile(tmp_path)
    leaves.write(run_address("one"))
    stays.write(run_address("one", "b"))
    stays.close()
    leaves.end(143, "stopped by SIGTERM")
    assert find(tmp_path, None, depth=0)[0] == [FoundRun(run_address("one", "b"), tmp_path)]


def test_a_run_is_alive_after_the_node_that_wrote_last_has_left(tmp_path: Path) -> None:
    first, second = RunFile(tmp_path), RunFile(tmp_path)
    first.write(run_address("one", "a"))
    second.write(run_address("one", "b"))
    second.end(143, "stopped by SIGTERM")
    assert find(tmp_path, None, depth=0) == ([FoundRun(run_address("one", "b"), tmp_path)], True)
    first.close()
    (found,), alive = find(tmp_path, None, depth=0)
    assert (found.run.code, alive) == (143, False)


def test_an_agent_waits_for_a_reader_that_looks_whether_the_directory_is_locked(tmp_path: Path) -> None:
    reader = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_EX)
    later = threading.Timer(0.05, os.close, [reader])
    later.start()
    first, second = RunFile(tmp_path), RunFile(tmp_path)
    first.write(run_address("one", "a"))
    second.write(run_address("one", "b"))
    second.close()
    assert find(tmp_path, None, depth=0)[1]
    first.close()
    later.join()


def test_another_run_in_the_same_directory_keeps_its_file(tmp_path: Path) -> None:
    first, second = RunFile(tmp_path), RunFile(tmp_path)
    first.write(run_address("one"))
    second.write(replace(run_address("one", "b"), endpoint="10.0.0.1:29401"))
    second.end(1, "a failure")
    first.end(0, "all workers finished")
    assert find(tmp_path, None, depth=0)[0][0].run.code == 1


def test_a_second_run_of_the_same_id_in_a_directory_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two agents without an endpoint host a run each. The endpoint of one run may be written in several ways."""
    here = replace(led(), endpoint="127.0.0.1:4000")
    addresses = [
        here,
        replace(here, node_id="b", endpoint="localhost:4000", leader="[::1]:4000"),
        replace(here, node_id="c", endpoint="127.0.0.1:5000", leader="127.0.0.1:5000"),
    ]
    files = [RunFile(tmp_path) for _ in addresses]
    for file, address in zip(files, addresses, strict=True):
        assert not caplog.records
        file.write(address)
        file.write(replace(address, cause="written again"))
    (record,) = caplog.records
    assert "another run with the id one, at localhost:4000, is alive and has the same directory" in record.getMessage()
    for file in files:
        file.close()
    later = RunFile(tmp_path)
    later.write(here)
    later.close()
    assert len(caplog.records) == 1, "the other run has ended"


def test_several_agents_of_one_run_are_one_run(tmp_path: Path) -> None:
    files = [RunFile(tmp_path / stamp / "one") for stamp in ("first", "second")]
    for file, node_id in zip(files, "ab", strict=True):
        file.write(run_address("one", node_id))
    runs, alive = find(tmp_path, None, depth=2)
    assert (len(runs), alive) == (1, True)
    for file in files:
        file.close()


def test_invalid_run_files_are_passed_over(tmp_path: Path) -> None:
    for name, text in {"empty": "", "list": "[]", "other": json.dumps({"run_id": 3})}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_text(text)
    assert find(tmp_path, None, depth=1) == ([], False)


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    file = RunFile(tmp_path / "file" / "run")
    file.write(run_address("one"))
    file.write(led())
    file.end(0, "all workers finished")
    assert "cannot be written" in caplog.text
    assert len(caplog.records) == 1


def test_a_disk_that_takes_a_part_of_the_file_leaves_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A write to a disk that fills up takes what there is room for, and only the next one fails."""
    file = RunFile(tmp_path)
    file.write(run_address("one"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        file.write(led())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert find(tmp_path, None, depth=0)[0] == [FoundRun(run_address("one"), tmp_path)]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert "cannot be written" in caplog.text
    file.close()

"""Files that another user prepared in a world-writable directory are not used; new ones are private."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elastic_launch.cli.elasticctl import main as ctl
from elastic_launch.cli.main import parse
from elastic_launch.cli.output_flags import make_run_directory
from elastic_launch.clock import MonotonicClock
from elastic_launch.errors import UsageError
from elastic_launch.events.sinks import JsonLines
from elastic_launch.events.types import LinkChanged
from elastic_launch.system.private_files import make_private, open_private, read_small, untrusted

STRANGER = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files to another user")


def mode(path: Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A world-writable directory for temporary files."""
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    (place.parent / "file").touch()
    monkeypatch.setenv("HOME", str(place.parent / "file"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    return place


def test_new_files_are_private_and_existing_ones_keep_their_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b")
        make_private(tmp_path / "a" / "b")
        os.close(open_private(tmp_path / "a" / "file", os.O_WRONLY))
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("", "a", "a/b", "a/file")] == [0o755, 0o700, 0o700, 0o600]
    with pytest.raises(FileExistsError):
        make_private(tmp_path / "a" / "file" / "below")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "file")
    with pytest.raises(OSError, match="symbolic links"):
        open_private(tmp_path / "link", os.O_WRONLY)


def test_a_pipe_a_large_file_or_a_directory_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 11)
    for name in ("pipe", "large"):
        with pytest.raises(ValueError, match=name):
            read_small(tmp_path / name, 10)
    assert read_small(tmp_path / "large", 11) == b"x" * 11
    before = os.listdir("/proc/self/fd")
    with pytest.raises(IsADirectoryError):
        read_small(tmp_path, 10)
    assert os.listdir("/proc/self/fd") == before


def test_a_users_own_directory_is_trusted_unless_others_may_write_to_it(shared: Path) -> None:
    own = shared / "own"
    assert untrusted(own, exclusive=True) == ""
    own.mkdir(0o755)
    assert untrusted(own, exclusive=True) == untrusted(own / "deep", exclusive=True) == ""
    if os.geteuid() != 0:  # root's own are trusted, as only root can have made them
        own.chmod(0o775)
        assert "can be written by other users (mode 775)" in untrusted(own, exclusive=True)
    (shared / "link").symlink_to(own)
    assert "is not a directory" in untrusted(shared / "link", exclusive=True)


@as_root
@pytest.mark.parametrize("prepared", ["directory", "link", "above", "where a link leads"])
def test_a_strangers_directory_is_not_trusted(shared: Path, prepared: str) -> None:
    theirs, wanted = shared / "theirs", shared / "theirs"
    if prepared == "link":
        theirs.symlink_to("/root")
    else:
        theirs.mkdir(0o777)
    os.lchown(theirs, STRANGER, STRANGER)
    if prepared == "above":
        wanted = theirs / "below"
        wanted.mkdir()
    if prepared == "where a link leads":
        (theirs / "below").mkdir()
        wanted = shared.parent / "link"
        wanted.symlink_to(theirs / "below")
    assert f"{theirs} belongs to another user (uid {STRANGER})" in untrusted(wanted, exclusive=False)
    # If no other user could have made it, an authorized user arranged it.
    shared.chmod(0o755)
    assert untrusted(wanted, exclusive=False) == ""


@as_root
def test_a_launch_without_a_home_takes_a_fresh_directory_if_a_stranger_has_prepared_the_usual_one(
    shared: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = shared / f"elastic-launch-{os.getuid()}"
    config = make_run_directory(parse(["--standalone", __file__], os.environ))
    assert (config.link_dir, mode(usual), mode(config.run_directory)) == (usual, 0o700, 0o700)
    assert not caplog.messages
    os.lchown(usual, STRANGER, STRANGER)
    with caplog.at_level(logging.WARNING):
        config = make_run_directory(parse(["--standalone", __file__], os.environ))
    fresh = config.link_dir
    assert fresh is not None
    assert fresh.parent == shared
    assert fresh != usual
    assert mode(fresh) == mode(config.run_directory) == 0o700
    assert config.log_dir.parent == fresh
    assert f"{usual} belongs to another user (uid {STRANGER}): logs go to {fresh} instead" in caplog.text
    # What another user writes there about runs is not believed either.
    assert ctl(["status"]) == 95
    assert f"Runs in {usual} are ignored: {usual} belongs to another user" in capsys.readouterr().err


@as_root
def test_a_run_directory_of_a_stranger_in_a_given_directory_is_refused(shared: Path) -> None:
    (shared / "job7").mkdir()
    os.lchown(shared / "job7", STRANGER, STRANGER)
    flags = ["--log-dir", str(shared), "--rdzv-id"]
    with pytest.raises(UsageError, match=f"{shared}/job7 belongs to another user"):
        make_run_directory(parse([*flags, "job7", __file__], {}))
    assert mode(make_run_directory(parse([*flags, "job8", __file__], {})).run_directory) == 0o700


@as_root  # others may not write there, which shows earlier
def test_a_directory_in_which_none_can_be_created(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    """/proc can be written, as far as its mode says."""
    with pytest.raises(UsageError, match=r"--log-dir /proc/x: the run's directory cannot be created: .*'/proc/x'"):
        make_run_directory(parse(["--log-dir", "/proc/x", __file__], {}))
    (shared / "job7").touch()
    with pytest.raises(UsageError, match=f"--log-dir {shared}: the run's directory cannot be created: .*/job7'"):
        make_run_directory(parse(["--log-dir", str(shared), "--rdzv-id", "job7", __file__], {}))
    config = make_run_directory(parse([__file__], {"HOME": "/proc"}))
    assert config.run_directory.is_dir()
    assert config.link_dir is not None
    assert config.link_dir.parent == shared
    assert "the run's directory cannot be created: [Errno 2" in caplog.text
    assert f"logs go to {config.link_dir} instead" in caplog.text


def test_events_are_for_the_user_alone_and_go_through_no_link(tmp_path: Path) -> None:
    errors: list[OSError] = []
    path = tmp_path / "new" / "events.jsonl"
    JsonLines(path, MonotonicClock(), errors.append).emit(LinkChanged(True, "hello accepted"))
    assert (mode(path.parent), mode(path)) == (0o700, 0o600)
    other = tmp_path / "other"
    other.write_text("precious")
    (tmp_path / "link").symlink_to(other)
    JsonLines(tmp_path / "link", MonotonicClock(), errors.append).emit(LinkChanged(True, "hello accepted"))
    assert (other.read_text(), len(errors)) == ("precious", 1)


def test_all_that_a_run_leaves_is_for_its_user_alone(tmp_path: Path) -> None:
    """With the real program, for any umask and any output of its workers."""
    tmp_path.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "elastic_launch",
        "--standalone",
        "--log-dir",
        str(tmp_path / "logs"),
        "--no-python",
    ]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, "echo", "x"], umask=0, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    found = [path for path in (tmp_path / "logs").rglob("*") if not path.is_symlink()]
    assert {"run.json", "stdout.log"} <= {path.name for path in found}
    assert {path.name: mode(path) & 0o077 for path in [tmp_path / "logs", *found]} == {
        path.name: 0 for path in [tmp_path / "logs", *found]
    }

"""Notice files, the end of a Slurm job, and which sources are watched where."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

import pytest

from elastic_agents.notices import Trouble
from elastic_agents.notices.file import File
from elastic_agents.notices.notice_watch import sources_of
from elastic_agents.notices.slurm import AGAIN, Slurm, seconds_left
from elastic_launch.config.notice_sources import AUTO, SPELLINGS, NoticeSource, parse_source
from elastic_launch.testing import FakeClock


def test_a_file_is_a_notice_with_the_seconds_in_it(tmp_path: Path) -> None:
    source = File(str(tmp_path / "leave"))
    assert source.poll() == []
    (tmp_path / "leave").write_text("45\n")
    (notice,) = source.poll()
    assert (notice.seconds, notice.leaves, notice.why) == (45.0, True, f"{tmp_path}/leave is there")


def test_an_empty_file_counts_at_the_second_look(tmp_path: Path) -> None:
    source = File(str(tmp_path / "leave"))
    (tmp_path / "leave").touch()
    assert source.poll() == [], "it may be about to be written"
    (notice,) = source.poll()
    assert notice.seconds is None


def test_a_file_of_any_kind_counts_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("pipe", "directory"):
        source = File(str(tmp_path / name))
        assert [len(source.poll()) for _ in range(2)] == [0, 1]
    assert File(str(tmp_path / "directory" / "x" / "y")).poll() == []
    with pytest.raises(Trouble, match="cannot be checked"):
        File("x" * 5000).poll()


def slurm(end: str, clock: FakeClock, *answers: float | None) -> tuple[Slurm, list[str]]:
    """A job's source, and the jobs of which Slurm has been asked."""
    asked: list[str] = []

    def ask(job: str) -> float | None:
        asked.append(job)
        return answers[len(asked) - 1]

    environ = {"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": end}
    return Slurm(environ, lambda: 1_700_000_000.0, clock.now, ask), asked


@pytest.mark.parametrize("answer", [None, 54.0])
def test_a_slurm_job_that_ends_in_a_minute_is_a_notice(answer: float | None) -> None:
    clock = FakeClock()
    source, asked = slurm("1700000100", clock, answer)
    assert source.poll() == []
    assert asked == []
    clock.advance(45)
    (notice,) = source.poll()
    assert (notice.seconds, notice.kind, notice.why) == (answer or 55.0, "time limit", "the end of job 17")
    clock.advance(10)
    (later,) = source.poll()
    assert later.seconds == (answer or 55.0) - 10
    assert asked == ["17"]


def test_a_slurm_job_whose_time_was_extended_stays() -> None:
    clock = FakeClock()
    source, asked = slurm("1700000100", clock, 600.0, 30.0)
    clock.advance(45)
    assert source.poll() == source.poll() == []
    clock.advance(545)
    (notice,) = source.poll()
    assert notice.seconds == 30.0
    assert asked == ["17"] * 2


@pytest.mark.parametrize("end", ["", "Unknown", "1600000000"])
@pytest.mark.parametrize("answer", [math.inf, 100.0])
def test_slurm_is_asked_at_once_when_the_end_is_not_known(end: str, answer: float) -> None:
    clock = FakeClock()
    source, asked = slurm(end, clock, answer, 5.0)
    assert source.poll() == source.poll() == []
    assert asked == ["17"]
    clock.advance(100)
    assert len(source.poll()) == (answer == 100.0)


@pytest.mark.parametrize("end", ["", "1600000000"])
def test_slurm_is_asked_again_until_it_says_when_the_job_ends(end: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    source, asked = slurm(end, clock, None, None, 600.0, 30.0)
    for number in range(1, 4):
        assert source.poll() == source.poll() == []
        assert len(asked) == number
        clock.advance(AGAIN)
    assert [record.message.partition(" is ")[2] for record in caplog.records] == ["not known", "600 s away"]
    clock.advance(540 - AGAIN)
    (notice,) = source.poll()
    assert notice.seconds == 30.0


@pytest.mark.parametrize(
    ("shown", "seconds"),
    [
        ("1-02:03:04", 93784.0),
        ("10:00:00", 36000.0),
        ("4:05", 245.0),
        ("0:09", 9.0),
        ("UNLIMITED", math.inf),
        ("INVALID", None),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_what_squeue_shows(shown: str, seconds: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, f"17 {shown}")
    assert seconds_left("17") == seconds


def stand_in(directory: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Put a squeue in the path that knows of job 17."""
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    shown = " ".join(f"'{line}'" for line in lines)
    asked = '[ "$2" = --jobs=17 ] && [ "$3" = "--format=%A %L" ]'
    (directory / "squeue").write_text(f"#!/bin/sh\n{asked} && printf '%s\\n' {shown}\n")
    (directory / "squeue").chmod(0o755)


@pytest.mark.parametrize("lines", [("18 55:00", "17 0:40"), ("17  0:40", "18  55:00", "19  UNLIMITED")])
def test_a_job_is_told_from_others_of_its_array(
    lines: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """squeue shows all of an array, or of a heterogeneous job, if it is asked for the job whose id is that of all."""
    stand_in(tmp_path, monkeypatch, *lines)
    assert seconds_left("17") == 40.0
    stand_in(tmp_path, monkeypatch, "18 55:00")
    assert seconds_left("17") is None


def test_without_squeue_the_end_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert seconds_left("17") is None


def names(*wanted: NoticeSource, environ: dict[str, str] | None = None, **dmi: str) -> list[str]:
    return [source.name for source in sources_of(wanted, environ or {}, lambda: dmi)]


def test_auto_watches_existing_sources_only() -> None:
    assert names(AUTO) == []
    assert names(AUTO, sys_vendor="Amazon EC2") == ["AWS"]
    assert names(AUTO, environ={"SLURM_JOB_ID": "1"}, product_name="Google Compute Engine") == ["Slurm", "GCP"]


def test_a_source_named_twice_is_watched_once() -> None:
    early, file = NoticeSource("aws", early=True), NoticeSource("file", path="a")
    assert names(
        AUTO, NoticeSource("aws"), early, file, file, NoticeSource("file", path="b"), sys_vendor="Amazon EC2"
    ) == [
        "AWS",
        "file",
        "file",
    ]
    assert names(NoticeSource("slurm"), AUTO, environ={"SLURM_JOB_ID": "1"}) == ["Slurm"]
    assert names(NoticeSource("signal")) == []


def test_the_firmware_is_not_asked_without_auto() -> None:
    def dmi() -> dict[str, str]:
        raise AssertionError("it was")

    assert [x.name for x in sources_of([NoticeSource("gcp"), NoticeSource("azure")], {}, dmi)] == ["GCP", "Azure"]


@pytest.mark.parametrize("spelling", [x for x in SPELLINGS if x.partition(":")[0] not in ("auto", "signal")])
def test_every_kind_of_source_has_a_module(spelling: str) -> None:
    asked = parse_source(spelling)
    assert asked is not None
    assert len(sources_of([asked], {"SLURM_JOB_ID": "17"}, dict)) == 1

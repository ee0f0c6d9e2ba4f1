"""torchrun's output settings: streams, local ranks, filters, and where each stream goes."""

from __future__ import annotations

import socket
import tempfile
import time
from pathlib import Path
from threading import Event
from typing import NoReturn

import pytest

from elastic_launch.cli import output_flags
from elastic_launch.cli.main import parse
from elastic_launch.cli.output_flags import make_run_directory
from elastic_launch.config.output import Output, Route, Std, Streams, parse_ranks, parse_streams
from elastic_launch.contract import Placement
from elastic_launch.errors import UsageError

SCRIPT = __file__


def place(local_rank: int) -> Placement:
    """The third node of two workers each."""
    return Placement(4 + local_rank, local_rank, 2, 8, 2, 4, "127.0.0.1", 29500, 4 + local_rank, 8, local_rank == 0)


def routes(output: Output, local_rank: int = 0) -> tuple[Route, Route]:
    return output.routes(place(local_rank), Path("/logs/run/round_1"), role="default", node_id="c")


def configured(*flags: str, **environ: str) -> Output:
    return parse([*flags, SCRIPT], environ).output


# How the run is shown.


@pytest.mark.parametrize(
    ("flags", "term", "shown", "warning"),
    [
        ("", "xterm", "live", ""),
        ("", "dumb", "plain", ""),
        ("", "", "plain", ""),
        ("--log-format json", "xterm", "plain", ""),
        ("--progress plain", "xterm", "plain", ""),
        ("--progress none", "xterm", "none", ""),
        ("--progress live", "xterm", "live", ""),
        ("--progress live", "dumb", "plain", "TERM names no terminal on which lines can be overwritten"),
        ("--progress live --log-format json", "xterm", "plain", "--log-format json"),
    ],
)
def test_a_view_is_for_terminals_that_can_show_it(
    flags: str, term: str, shown: str, warning: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(output_flags.os, "isatty", lambda descriptor: True)
    assert parse([*flags.split(), SCRIPT], {"TERM": term}).progress == shown
    assert [record.getMessage() for record in caplog.records] == (
        [f"--progress live prints lines here: {warning}."] if warning else []
    )


def test_there_is_no_view_elsewhere_nor_by_default_in_place_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_flags.os, "isatty", lambda descriptor: False)
    assert parse(["--progress", "live", SCRIPT], {"TERM": "xterm"}).progress == "plain"
    monkeypatch.setattr(output_flags.os, "isatty", lambda descriptor: True)
    torchrun = {"TERM": "xterm", "ELASTIC_LAUNCH_TORCHRUN": "1"}
    assert parse([SCRIPT], torchrun).progress == "plain"
    assert parse(["--progress", "live", SCRIPT], torchrun).progress == "live"
    assert parse([SCRIPT], {"TERM": "xterm-color", "JPY_PARENT_PID": "7"}).progress == "plain", "a notebook's cell"


def test_another_way_to_show_a_run_is_refused() -> None:
    with pytest.raises(UsageError, match="--progress fancy is unknown"):
        parse(["--progress", "fancy", SCRIPT], {})


# Values.


@pytest.mark.parametrize("std", list(range(4)))
def test_one_digit_is_for_all_ranks(std: int) -> None:
    assert parse_streams("-r", str(std)) == Streams(Std(std))


def test_streams_are_given_by_local_ranks_of_any_length() -> None:
    streams = parse_streams("-r", "0:1,12:2,3:0")
    assert [streams.of(rank) for rank in (0, 12, 3, 1)] == [Std.OUT, Std.ERR, Std.NONE, Std.NONE]


@pytest.mark.parametrize("text", ["4", "", "3,", "0:4", "0:1;1:2", "a:1", "-1", "0:", "33"])
def test_other_streams_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--redirects"):
        parse_streams("--redirects", text)


def test_local_ranks_are_given_with_commas() -> None:
    assert parse_ranks("0, 2,10") == {0, 2, 10}
    with pytest.raises(UsageError, match="--local-ranks-filter"):
        parse_ranks("0,x")


# Flags and variables.


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("-r", "3"), Output(redirects=Streams(Std.ALL))),
        (("-r3",), Output(redirects=Streams(Std.ALL))),
        (("--redirects=0:1,1:2",), Output(redirects=Streams(ranks=((0, Std.OUT), (1, Std.ERR))))),
        (("-t", "1"), Output(tee=Streams(Std.OUT))),
        (("-t0:3",), Output(tee=Streams(ranks=((0, Std.ALL),)))),
        (("--local_ranks_filter", "0,1"), Output(local_ranks=frozenset({0, 1}))),
        (("--duplicate_stdout_filters", "a,,b,c"), Output(stdout_filters=("a,b", "c"))),
        (("--duplicate-stderr-filters=E",), Output(stderr_filters=("E",))),
        (("--prefix",), Output(prefix=True)),
        (("--logs-specs", "default"), Output()),
    ],
)
def test_flags_are_understood(flags: tuple[str, ...], expected: Output, tmp_path: Path) -> None:
    assert configured("--log-dir", str(tmp_path), *flags) == expected


def test_variables_give_what_flags_do_not(tmp_path: Path) -> None:
    environ = {
        "PET_LOG_DIR": str(tmp_path),
        "PET_REDIRECTS": "3",
        "PET_TEE": "0:1",
        "PET_LOCAL_RANKS_FILTER": "0",
        "PET_DUPLICATE_STDOUT_FILTERS": "loss",
        "PET_DUPLICATE_STDERR_FILTERS": "Error",
        "PET_PREFIX": "1",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]:",
    }
    assert configured("-r", "2", **environ) == Output(
        redirects=Streams(Std.ERR),
        tee=Streams(ranks=((0, Std.OUT),)),
        local_ranks=frozenset({0}),
        stdout_filters=("loss",),
        stderr_filters=("Error",),
        prefix=True,
        header="[${rank}]:",
    )


def test_the_prefix_of_teed_lines_may_name_the_host(tmp_path: Path) -> None:
    variable = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]:"}
    template = "${hostname} ${role_name}${local_rank}/${rank}: ${other}"
    output = configured("--log-dir", str(tmp_path), "--log-line-prefix-template", template, **variable)
    name = socket.gethostname()
    assert output.header_of(place(1), role="r", node_id="a") == f"{name} r1/5: ${{other}}"


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(UsageError, match="--log-layout trees is not a layout"):
        configured("--log-layout", "trees")


def test_an_empty_filter_is_refused() -> None:
    with pytest.raises(UsageError, match="empty filter"):
        configured("--duplicate-stdout-filters", "a,")


def test_unknown_logs_specs_are_refused() -> None:
    with pytest.raises(UsageError, match="no installed package") as raised:
        configured("--logs-specs", "nobodys")
    assert "default" in raised.value.hint


def test_a_run_cannot_have_the_links_name() -> None:
    with pytest.raises(UsageError, match="--rdzv-id 'latest'"):
        parse(["--rdzv-id", "latest", SCRIPT], {})


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("-r", "3"), True),
        (("-t", "2"), True),
        (("-r", "3", "-t", "1"), False),
        (("-r", "0:3"), False),
        (("-r", "3", "-t", "7:1"), False),
        ((), False),
    ],
)
def test_filters_that_no_line_reaches_are_mentioned(
    flags: tuple[str, ...], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    configured("--duplicate-stdout-filters", "x", *flags)
    assert [record.message.startswith("--duplicate-stdout-filters has no effect") for record in caplog.records] == (
        [True] if told else []
    )


def test_no_files_are_kept_under_dev_null(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    config = parse(
        ["--log-dir", "/dev/null", "--duplicate-stderr-filters", "x", SCRIPT], {"XDG_STATE_HOME": str(tmp_path)}
    )
    out, err = routes(config.output)
    assert (out, err) == (Route(rank=4, header="[default0]:"),) * 2
    assert config.log_dir.parent == config.link_dir == tmp_path / "elastic-launch"
    assert "keeps no files" in caplog.text


# Where streams go.


def test_by_default_a_stream_is_shown_as_it_is_and_kept() -> None:
    out, err = routes(Output(), 1)
    assert out == Route(path=Path("/logs/run/round_1/5/stdout.log"), rank=5, header="[default1]:")
    assert err == Route(path=Path("/logs/run/round_1/5/stderr.log"), rank=5, header="[default1]:")


def test_a_redirected_stream_is_kept_only() -> None:
    output = Output(redirects=parse_streams("-r", "0:1"))
    assert [route.console for route in (*routes(output, 0), *routes(output, 1))] == [False, True, True, True]


def test_a_teed_stream_is_shown_with_torchs_header_redirected_or_not() -> None:
    out, err = routes(Output(redirects=Streams(Std.ALL), tee=Streams(Std.OUT)), 1)
    assert (out.console, out.prefix, err.console, err.prefix) == (True, "[default1]:", False, "")


def test_torchs_variable_changes_the_header() -> None:
    out, _ = routes(Output(tee=Streams(Std.ALL), header="${role_name}/${rank}/${local_rank}/${x} "), 1)
    assert out.prefix == "default/5/1/${x} "


def test_a_filter_of_local_ranks_hides_teed_streams_too() -> None:
    output = Output(tee=Streams(Std.ALL), local_ranks=frozenset({0}), stdout_filters=("x",))
    assert [route.console for route in (*routes(output, 0), *routes(output, 1))] == [True, True, False, False]
    assert routes(output, 1)[0].matching is None


def test_the_prefix_names_node_and_rank() -> None:
    out, err = routes(Output(prefix=True, tee=Streams(Std.OUT)), 1)
    assert (out.prefix, err.prefix) == ("[c:5] ", "[c:5] ")


def test_lines_are_duplicated_by_node_and_round() -> None:
    out, err = routes(Output(stdout_filters=("x",)))
    assert (out.filters, out.matching) == (("x",), Path("/logs/run/round_1/filtered_stdout-c.log"))
    assert (err.filters, err.matching) == ((), None)


def test_lines_are_duplicated_of_teed_streams_only_if_there_are_any() -> None:
    output = Output(tee=parse_streams("-t", "1:1"), stdout_filters=("x",))
    assert [routes(output, rank)[0].filters for rank in (0, 1)] == [(), ("x",)]


def test_without_a_home_or_temporary_directory_a_place_for_files_is_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "file")])
    monkeypatch.setattr(output_flags, "writable", lambda path: False)
    with pytest.raises(UsageError, match="there is no place for this run's files") as caught:
        parse([SCRIPT], {"HOME": str(tmp_path / "file")})
    assert caught.value.hint == "Name a directory with --log-dir DIR, or with XDG_STATE_HOME."


@pytest.mark.parametrize("function", ["writable", "untrusted"])
def test_a_log_directory_whose_file_system_does_not_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: str
) -> None:
    answers = Event()

    def hang(path: Path, **options: bool) -> NoReturn:
        answers.wait(60)
        raise OSError("it never answers")

    monkeypatch.setattr(output_flags, function, hang)
    monkeypatch.setattr(output_flags, "PATIENCE", 0.2)
    began = time.monotonic()
    with pytest.raises(UsageError, match=f"--log-dir {tmp_path}: the file system does not answer") as caught:
        make_run_directory(parse(["--log-dir", str(tmp_path), SCRIPT], {}))
    answers.set()
    assert time.monotonic() - began < 30
    assert caught.value.hint == "Name a directory on another one with --log-dir."

"""The last rows of a terminal, as pyte shows them."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_agents.console import Consoles
from elastic_agents.inbox import Inbox
from elastic_agents.live_view import _OPEN, ROWS, LiveView, Panel, _cells, laid_out
from elastic_launch.clock import MonotonicClock
from elastic_launch.events.types import CheckpointSaved
from elastic_launch.observe.live import LiveLedger
from elastic_launch.observe.node_watch import NodeWatch
from elastic_launch.observe.present import Present
from elastic_launch.system.threads import ThreadDied, deaths_reported_to

LINES = [f"view {number}" for number in range(ROWS)]


class Screen:
    """A terminal, and a panel in its last rows."""

    def __init__(self, rows: int = 16, columns: int = 40) -> None:
        self.panel = Panel()
        self.pyte = pyte.HistoryScreen(columns, rows, history=1000, ratio=0.5)
        self._stream = pyte.ByteStream(self.pyte)

    def print(self, data: bytes) -> None:
        self._stream.feed(data.replace(b"\n", b"\r\n"))  # as the terminal's driver does

    def draw(self) -> None:
        self._stream.feed(self.panel.drawn(LINES, (self.pyte.lines, self.pyte.columns)))

    def erase(self) -> None:
        self._stream.feed(self.panel.erased((self.pyte.lines, self.pyte.columns)).encode())

    @property
    def rows(self) -> list[str]:
        return [row.rstrip() for row in self.pyte.display]

    @property
    def printed(self) -> list[str]:
        """All lines that the view has not drawn."""
        columns = range(self.pyte.columns)
        gone = ["".join(row[x].data for x in columns).rstrip() for row in self.pyte.history.top]
        rows = [row for row in [*gone, *self.rows] if not row.startswith("view ")]
        return [*"\n".join(rows).rstrip().split("\n")]


def test_what_is_printed_scrolls_above_it() -> None:
    screen = Screen()
    for number in range(40):
        screen.print(b"line %d\n" % number)
        screen.draw()
    assert screen.rows[-ROWS:] == LINES
    assert screen.printed == [f"line {number}" for number in range(40)]


def test_unfinished_lines_and_progress_bars_go_on_where_they_were() -> None:
    screen = Screen()
    screen.print(b"before\n" * 20)
    for data in (b"half a ", b"line\n", b" 10%|#    ", b"\r 50%|###  ", b"\r\x1b[31m100%|#####", b"\x1b[0m\nend"):
        screen.draw()
        screen.print(data)
    screen.draw()
    assert screen.printed[-3:] == ["half a line", "100%|#####", "end"]
    assert screen.rows[-ROWS:] == LINES
    screen.erase()
    screen.print(b" and more\n" + b"after\n" * 3)
    assert screen.printed[-4:] == ["end and more", "after", "after", "after"]
    assert not [row for row in screen.rows if row.startswith("view ")]


@given(
    st.lists(st.sampled_from([b"a", b"bc\n", b"\rd", b"\n", b"\x1b[32me\x1b[0m", "ü".encode(), b"x" * 45]), max_size=60)
)
def test_lines_are_those_of_a_terminal_without_it(pieces: list[bytes]) -> None:
    plain, screen = Screen(rows=16 - ROWS), Screen()
    for piece in pieces:
        plain.print(piece)
        screen.draw()
        screen.print(piece)
    screen.draw()
    assert screen.printed == plain.printed
    assert screen.rows[-ROWS:] == LINES


@pytest.mark.parametrize("size", [(12, 40), (30, 40), (16, 80), (11, 31)])
def test_another_size_of_the_terminal_moves_it_to_the_last_rows(size: tuple[int, int]) -> None:
    screen = Screen()
    screen.print(b"line\n" * 5)
    screen.draw()
    screen.pyte.resize(*size)
    screen.draw()
    assert screen.rows[-ROWS:] == LINES
    assert [row for row in screen.rows if row.startswith("view ")] == LINES
    screen.print(b"more\n" * 40)
    assert screen.rows[-ROWS:] == LINES


def test_there_is_none_on_a_terminal_that_is_too_small() -> None:
    screen = Screen()
    screen.draw()
    screen.pyte.resize(6, 40)
    screen.draw()
    assert screen.panel.size is None
    assert not [row for row in screen.rows if row.startswith("view ")]


def test_a_program_that_resets_the_terminal_loses_it_until_the_next_picture() -> None:
    screen = Screen()
    screen.draw()
    screen.print(b"\x1bc")
    screen.draw()
    screen.print(b"line\n" * 40)
    assert screen.rows[-ROWS:] == LINES


@pytest.mark.parametrize("tail", [b"\x1b", b"x\x1b[", b"\x1b[38;5;", b"\x1b]0;title", b"\xc3", b"\xe2\x82"])
def test_no_picture_goes_into_a_sequence_or_a_character(tail: bytes) -> None:
    assert _OPEN.search(tail)


@pytest.mark.parametrize("tail", [b"", b"text", b"\x1b[0m", b"\x1b[2K 5%", b"\x1b]0;title\x07", "ü€😀".encode(), b"\n"])
def test_a_picture_follows_whole_ones(tail: bytes) -> None:
    assert not _OPEN.search(tail)


@given(
    st.lists(st.tuples(st.text("ab 漢é", max_size=8), st.text("cd 字", max_size=60)), max_size=12), st.integers(29, 90)
)
def test_figures_fit(figures: list[tuple[str, str]], width: int) -> None:
    lines, _ = laid_out(figures, width, 3)
    assert len(lines) == 3
    assert all(_cells(line) <= width for line in lines)


def test_figures_are_laid_out_in_order() -> None:
    figures = [("world size", "4"), ("step", "12 of 90"), ("loss", "0.5"), ("restarts left", "3 of 3")]
    lines = [" world size 4   step 12 of 90   loss 0.5", " restarts left 3 of 3", ""]
    assert laid_out(figures, 40, 3) == (lines, True)
    assert laid_out(figures, 30, 1) == ([" world size 4   step 12 of 90"], False)


@pytest.mark.parametrize(("columns", "named"), [(110, 3), (80, 0)])
def test_fewer_nodes_are_named_rather_than_a_figure_left_out(columns: int, named: int) -> None:
    clock = MonotonicClock()
    watch = NodeWatch(clock, LiveLedger(clock))
    watch.add(CheckpointSaved(1, 180_000, "/c"))
    watch._stepless = None
    nodes = [(f"rack-{number}-train-job-worker.train.cluster.example.com", 8) for number in range(8)]
    present = Present("running", 1, 8, 64, 8, 182_345, 1_000_000, 45_000.0, 182_345, 9117.0, 182_345, 1, 3)
    present = replace(present, members=tuple(nodes), loss=2.345, batch=4096, passes=4)
    view = LiveView("run r, node rack-0", watch, Inbox(clock), consoles := Consoles())
    view._present = present
    lines = view._lines(columns)
    view.close()
    consoles.close()
    assert lines[0].endswith("- running for 0 s --")
    assert all(_cells(line) < columns for line in lines), lines
    shown = " ".join(lines)
    for text in (
        "64 on 8 nodes",
        "time left 12 h 30 min",
        "snapshot step 182345, 0 s ago",
        "checkpoint step 180000, 0 s",
    ):
        assert text in shown
    assert shown.count("-train-job-worker 8") == named
    assert "example.com" not in shown


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_view_that_fails_is_removed_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(view: LiveView, columns: int) -> list[str]:
        raise KeyError("loss")

    pictures: list[bytes] = []
    monkeypatch.setattr(LiveView, "_lines", fail)
    monkeypatch.setattr("elastic_agents.live_view._size", lambda: (24, 80))
    monkeypatch.setattr(Consoles, "draw", lambda self, number, picture: pictures.append(picture(b"")) or True)
    clock, died = MonotonicClock(), list[ThreadDied]()
    with deaths_reported_to(died.append), closing(Consoles()) as consoles:
        view = LiveView("run r, node n", NodeWatch(clock, LiveLedger(clock)), Inbox(clock), consoles)
        view._thread.join(30)
        assert "the last lines of the terminal no longer show the run: KeyError: 'loss'" in caplog.text
        assert pictures == [b""], "the last picture has been taken back"
        view.close()
    assert not died, "the run goes on"


def test_a_plain_start_imports_nothing_of_it() -> None:
    found = "[x for x in sys.modules if 'live_view' in x or 'node_watch' in x]"
    program = f"import sys, elastic_agents.main; print({found})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"

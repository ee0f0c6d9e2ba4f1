"""The report as a PNG file, for slides and messages. matplotlib draws it, and is imported only for that."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from elastic_launch.errors import UsageError
from elastic_launch.events import types as ev
from elastic_launch.events.types import counted
from elastic_launch.observe.advice import advice
from elastic_launch.observe.ledger import PARTS, Incident, Ledger, spoken
from elastic_launch.observe.page import TICKS, time_of_day, when
from elastic_launch.observe.reading import Host
from elastic_launch.observe.timeline import bars, still
from elastic_launch.system.plain_text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DPI", "WIDTH", "as_png"]

DPI = 100
WIDTH, MARGIN = 12.0, 0.4
"""Width of the picture and its margin, in inches."""

LINE, ROUNDS, ROW = 0.22, 2.4, 0.3
"""Heights of a line of text, of the rounds and of an incident, in inches."""

BAR_LEFT, BAR_WIDTH = 3.6, 3.6
"""Position and width of the incidents' bars, in inches."""

CHARACTERS = 150
"""Characters in a line of text."""

CAUSE = 50
"""Characters of a cause that fit beside the bars."""

MOST = 20
"""Incidents that are shown: those that cost most."""

FILL, STILL, SAVED, DIM = "#2f6fde", "#c23b3b", "#1a7f37", "#59636e"
COLORS = ("#b35900", "#c23b3b", "#8250df", "#1a7f37", "#0a7ea4", "#6e7781")
"""Colors of an incident's parts, as on the page."""


def as_png(name: str, host: Host, ledger: Ledger, standing: Sequence[str] = ()) -> bytes:
    """Return the picture.

    Args:
        name: name of the run.
        host: the host whose clock is used.
        ledger: what :func:`elastic_launch.observe.report.joined` returns.
        standing: how the run ended, or that it did not.

    Raises:
        UsageError: if matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            f"--png needs the package matplotlib: {error}.",
            "Install it with: pip install 'elastic-launch[monitoring]'.",
        ) from None
    head = [f"From {when(host, host.chronicle.since or 0.0)} to {when(host, host.chronicle.until)}."]
    head = _wrapped([*head, *standing, ledger.line()])
    hints = _wrapped(f"- {line}" for line in advice(ledger))
    shown = sorted(sorted(ledger.incidents, key=lambda x: -x.still_s)[:MOST], key=lambda x: x.number)
    height = 2 * MARGIN + LINE * (6 + len(head)) + ROUNDS + (LINE * 5 + ROW * len(shown) if shown else 0.0)
    height += LINE * (1 + len(hints)) if hints else 0.0
    buffer = io.BytesIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # the user's own style may not fit
        matplotlib.rcParams.update({"font.size": 9.0, "text.parse_math": False})  # a cause may have a dollar sign
        # A character that the font does not have is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        sheet = _Sheet(Figure(figsize=(WIDTH, height), dpi=DPI), height)
        sheet.text(f"Run {one_line(name)}", size=14.0, weight="bold")
        sheet.down(LINE)
        for line in head:
            sheet.text(line)
        sheet.down(2 * LINE)
        _rounds(sheet.axes(MARGIN + 0.2, WIDTH - 2 * MARGIN - 0.2, ROUNDS), host, ledger.incidents)
        sheet.down(2 * LINE)
        if shown:
            left_out = f": the {MOST} of {len(ledger.incidents)} that cost most" if len(ledger.incidents) > MOST else ""
            sheet.text(f"Incidents{left_out}", weight="bold")
            sheet.down(LINE)
            _incidents(sheet.axes(BAR_LEFT, BAR_WIDTH, ROW * len(shown)), host, shown)
            sheet.down(3 * LINE)
        if hints:
            sheet.text("What to change", weight="bold")
        for line in hints:
            sheet.text(line)
        sheet.figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _wrapped(lines: Iterable[str]) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(one_line(line), CHARACTERS)]


class _Sheet:
    """A figure that is filled from the top; lengths in inches."""

    def __init__(self, figure: Figure, height: float) -> None:
        self.figure = figure
        self._height = height
        self._at = MARGIN

    def down(self, length: float) -> None:
        self._at += length

    def text(self, text: str, size: float = 9.0, weight: str = "normal") -> None:
        y = 1 - self._at / self._height
        self.figure.text(MARGIN / WIDTH, y, text, fontsize=size, fontweight=weight, verticalalignment="top")
        self._at += LINE

    def axes(self, left: float, width: float, height: float) -> Axes:
        self._at += height
        place = (left / WIDTH, 1 - self._at / self._height, width / WIDTH, height / self._height)
        found = self.figure.add_axes(place)
        found.spines[["top", "right"]].set_visible(False)
        return found


def _rounds(axes: Axes, host: Host, incidents: Sequence[Incident]) -> None:
    """Draw each round, as high as its world size, with checkpoints and the times in which training stood still."""
    from matplotlib.ticker import MaxNLocator

    chronicle = host.chronicle
    since = chronicle.since or 0.0
    whole = max(chronicle.until - since, 1e-6)
    drawn = bars(chronicle, host.told)
    largest = max([1, *(bar.world for bar in drawn)])
    below = -0.1 * largest
    axes.bar(
        [bar.since - since for bar in drawn],
        [bar.world for bar in drawn],
        [max(whole / 1000, bar.until - bar.since) for bar in drawn],
        align="edge",
        color=FILL,
        edgecolor="white",
        linewidth=0.5,
        label="round, as high as its world size",
    )
    for bar in drawn:
        if bar.until - bar.since > 0.02 * whole:
            middle = (bar.since + bar.until) / 2 - since
            axes.text(middle, bar.world / 2, str(bar.world), color="white", ha="center", va="center", weight="bold")
    for index, (_, start, end) in enumerate(still(chronicle, incidents)):
        label = "_" if index else "training stood still"
        axes.axvspan(start - since, max(end, start + whole / 500) - since, color=STILL, alpha=0.25, lw=0, label=label)
    broken = [moment - since for moment, event in host.told if isinstance(event, ev.RoundBroken)]
    saved = [moment - since for moment, event in host.told if isinstance(event, ev.CheckpointSaved)]
    for moments, color, label in ((broken, STILL, "a round broke"), (saved, SAVED, "durable checkpoint")):
        if moments:
            axes.vlines(moments, below, 0.0, colors=color, linewidth=1.5, label=label)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xlim(0.0, whole)
    axes.set_ylim(below, 1.05 * largest)
    ticks = [whole * part / TICKS for part in range(TICKS + 1)]
    axes.set_xticks(ticks, [time_of_day(host, tick) for tick in ticks])
    sizes = MaxNLocator(nbins=6, integer=True).tick_values(0, largest)
    axes.set_yticks([size for size in sizes if 0 <= size <= largest])
    axes.set_ylabel("world size")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, frameon=False)


def _incidents(axes: Axes, host: Host, incidents: Sequence[Incident]) -> None:
    """Draw a bar of its parts for each incident."""
    ends = [0.0] * len(incidents)
    places = range(len(incidents))
    for part, color in zip(PARTS, COLORS, strict=True):
        widths = [getattr(incident, part) or 0.0 for incident in incidents]
        axes.barh(places, widths, left=ends, color=color, height=0.6, label=spoken(part))
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, incident in enumerate(incidents):
        kind = one_line(incident.kind) + (", drained" if incident.drained else "")
        rounds = f"{incident.round} → {incident.next_round or 'end'}"
        name = f"{incident.number}   {time_of_day(host, incident.at_s)}   round {rounds}   {kind}"
        axes.text((MARGIN - BAR_LEFT) / BAR_WIDTH, place, name, transform=axes.get_yaxis_transform(), va="center")
        lost = "" if incident.lost_steps is None else f", {counted(incident.lost_steps, 'step')} lost"
        cause = textwrap.shorten(one_line(incident.cause), CAUSE, placeholder=" ...")
        said = f"{incident.still_s:.2f} s{lost}" + (f": {cause}" if cause else "")
        axes.text(1.02, place, said, transform=axes.get_yaxis_transform(), va="center")
    axes.set_yticks([])
    axes.set_xlim(0.0, max([1e-6, *ends]))
    axes.set_ylim(len(incidents) - 0.5, -0.5)
    axes.set_xlabel("seconds for which training stood still")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(PARTS), frameon=False)

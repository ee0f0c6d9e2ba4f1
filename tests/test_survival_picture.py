"""The README's picture, drawn from given steps."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def survival() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("survival")
    finally:
        del sys.path[0]


def noted(clock: float, step: int, world: int, rank: int = 0) -> dict[str, Any]:
    return {"clock": clock, "step": step, "world": world, "rank": rank, "loss": 1.0 / step}


STEPS = [
    *(noted(100.0 + n / 10, n + 1, 1) for n in range(50)),  # to 104.9, step 50
    *(noted(107.0 + n / 10, n + 41, 2, rank) for n in range(100) for rank in (0, 1)),  # from step 41 again
]


def test_a_story_has_the_pauses_and_the_repeated_steps_of_each_event(survival: Any) -> None:
    story = survival.told("torchrun", STEPS, [102.0, 105.0])
    assert [(bar.workers, round(bar.since, 1), round(bar.until, 1)) for bar in story.bars] == [
        (1, 0.0, 4.9),
        (2, 7.0, 16.9),
    ]
    assert story.pauses == pytest.approx([0.0, 2.0])
    assert story.again == [0, 10]
    assert story.losses[0] == (0.25, pytest.approx(sum(1 / n for n in range(1, 6)) / 5))


def test_the_picture_has_the_bars_of_both_and_a_line_for_each_event(survival: Any) -> None:
    stories = [survival.told(title, STEPS, [102.0, 105.0]) for title in ("ours", "theirs")]
    made = ElementTree.fromstring(
        survival.picture(stories, [(2.0, "it < joins"), (5.0, "it leaves")], "A title", "End")
    )
    for name in ("ours", "theirs"):
        heights = [float(rect.attrib["height"]) for rect in made.iter(f"{SVG}rect") if rect.get("class") == name]
        assert heights == [heights[1] / 2, heights[1]]
        assert len([path for path in made.iter(f"{SVG}path") if path.get("class") == name]) == 1
    texts = [text.text for text in made.iter(f"{SVG}text")]
    assert {"A title", "it < joins", "2.00 s", "2 workers", "End"} <= set(texts)
    assert max(float(text.attrib["x"]) for text in made.iter(f"{SVG}text")) <= survival.WIDTH
    assert "| it leaves | 2.00 s | 10 | 2.00 s | 10 |" in survival.table(
        stories, [(2.0, "it joins"), (5.0, "it leaves")]
    )


def test_the_readmes_picture_was_drawn_by_the_program(survival: Any) -> None:
    """The layout is the program's of today; what it shows is a run's."""
    text = (ROOT / "docs" / "survival.svg").read_text()
    assert survival.STYLE in text
    assert f'viewBox="0 0 {survival.WIDTH} ' in text
    assert "to the bit" in text

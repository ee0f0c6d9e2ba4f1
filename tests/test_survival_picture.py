"""The README's picture, drawn from given rounds."""

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
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield importlib.import_module("survival_picture")
    finally:
        del sys.path[0]


def test_the_picture_has_a_bar_for_each_round_and_a_line_for_each_incident(survival: Any) -> None:
    bars = [survival.Bar(0.0, 10.0, 2), survival.Bar(10.0, 12.0, 4), survival.Bar(12.0, 40.0, 2)]
    marks = [survival.Mark(10.0, "a node joins"), survival.Mark(12.0, "a < b & c")]
    made = ElementTree.fromstring(survival.picture(bars, marks, "A title", "The end"))
    rounds = [rect for rect in made.iter(f"{SVG}rect") if rect.get("class") == "round"]
    heights = [float(rect.attrib["height"]) for rect in rounds]
    assert heights == [heights[1] / 2, heights[1], heights[1] / 2]
    texts = [text.text for text in made.iter(f"{SVG}text")]
    assert {"A title", "a < b & c", "The end", "2 workers", "4"} <= set(texts)
    assert max(float(text.attrib["x"]) for text in made.iter(f"{SVG}text")) <= survival.WIDTH


def test_the_readmes_picture_was_drawn_by_the_script(survival: Any) -> None:
    """The layout is the script's of today; what it shows is a run's."""
    text = (ROOT / "docs" / "survival.svg").read_text()
    assert survival.STYLE in text
    assert f'viewBox="0 0 {survival.WIDTH} ' in text
    assert "to the bit" in text

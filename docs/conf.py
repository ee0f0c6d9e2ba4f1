"""Configuration of the documentation's site, for ``make docs``.

The source directory is the repository's root, so that the links between pages, and from pages to files, are the same
in the repository and on the site. The lists of docs/README.md are the navigation.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import elastic_launch

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]

project = "elastic-launch"
author = "The elastic-launch authors"
release = version = elastic_launch.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["*.md", "docs/**.md", "benchmarks/**README.md", "examples/**/README.md"]
exclude_patterns = ["build", "tests", "agents", "elastic_launch", ".*", "**/.*"]
root_doc = "docs/README"
html_theme = "furo"
html_title = f"elastic-launch {release}"
html_copy_source = False
html_additional_pages = {"index": "redirect.html"}
templates_path = ["site"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
add_module_names = False
python_maximum_signature_line_length = 88
nitpicky = True
nitpick_ignore_regex = [
    # Types in signatures: those of other projects, and those that have no entry of their own.
    ("py:class", r"(collections|contextlib|datetime|os|pathlib|subprocess|torch)\..+"),
    ("py:class", r"elastic_launch\.(snapshot|training)\..+"),
]
suppress_warnings = ["misc.highlighting_failure"]

LINK = re.compile(r"\[([^\]]+)\]\(([^()\s#]+)(#[^()\s]+)?\)")


def toctrees(index: str) -> str:
    """The pages that each part of an index names, as hidden tables of contents."""
    parts = re.split(r"^## (.+)$", index, flags=re.MULTILINE)
    made = []
    for caption, text in zip(parts[1::2], parts[2::2], strict=True):
        links = [(" ".join(title.split()), path) for title, path, _ in LINK.findall(text)]  # a title may be wrapped
        pages = [f"{title} <{path}>" for title, path in links if path.endswith(".md")]
        made.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""]))
    return "\n".join(made)


def prepare(app: Sphinx, page: str, text: list[str]) -> None:
    """Add the navigation to the index; show links to directories, which have no page, as text."""
    if page == root_doc:
        text[0] += "\n" + toctrees(text[0])
    here = (ROOT / page).parent
    text[0] = LINK.sub(lambda link: link[1] if (here / link[2]).is_dir() else link[0], text[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", prepare)

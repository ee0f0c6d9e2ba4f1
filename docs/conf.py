"""Configuration of the documentation's site, for ``make docs``.

The source directory is the repository's root, so that the links between pages, and from pages to files, are the same
in the repository and on the site. The lists of docs/README.md are the navigation.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx import addnodes

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
html_static_path = ["site/static"]
html_css_files = ["site.css"]
highlight_language = "text"
pygments_style = "default"
pygments_dark_style = "github-dark"
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

DECISIONS = "docs/adr/README"
"""The index of what readers of the code look for; the sidebar shows its pages below it only."""

COMPARING = {"torchrun", "launch", "composer"}
"""Pages on the flags of other launchers: a search shows them after the page on the flag itself."""

LINK = re.compile(r"\[([^\]]+)\]\(([^()\s#]+)(#[^()\s]+)?\)")


def toctrees(index: str) -> str:
    """The pages that each part of an index names, as hidden tables of contents."""
    whole, *parts = re.split(r"^## (.+)$", index, flags=re.MULTILINE)
    made = []
    for caption, text in zip(parts[::2] or [""], parts[1::2] or [whole], strict=True):
        links = [(" ".join(title.split()), path) for title, path, _ in LINK.findall(text)]  # a title may be wrapped
        pages = [f"{title} <{path}>" for title, path in links if path.endswith(".md")]
        options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
        made.append("\n".join(["```{toctree}", *options, "", *pages, "```", ""]))
    return "\n".join(made)


def prepare(app: Sphinx, page: str, text: list[str]) -> None:
    """Add the navigation to the indexes; show links to directories, which have no page, as text."""
    if page in (root_doc, DECISIONS):
        text[0] += "\n" + toctrees(text[0])
    here = (ROOT / page).parent
    text[0] = LINK.sub(lambda link: link[1] if (here / link[2]).is_dir() else link[0], text[0])


def index_rows(app: Sphinx, page: nodes.document) -> None:
    """Make what a row of a reference table begins with, such as a flag, an entry of the index.

    The search then finds it by its whole name, ahead of pages that have its words, and leads to its row.
    """
    name = app.env.current_document.docname
    if not name.startswith("docs/reference/"):
        return
    main = "" if name.removeprefix("docs/reference/") in COMPARING else "main"
    for row in page.findall(nodes.row):
        for literal in list(row[0].findall(nodes.literal)):  # a list, since it would find what is inserted
            text = literal.astext()
            text = text.split()[0] if text.startswith("--") else text  # without a placeholder of its value
            anchor = nodes.make_id(f"row {text}")
            if anchor not in page.ids:
                target = nodes.target(ids=[anchor])
                page.note_explicit_target(target)
                entry = addnodes.index(entries=[("single", text, anchor, main, None)])
                literal.parent.insert(0, [entry, target])


def setup(app: Sphinx) -> None:
    app.connect("source-read", prepare)
    app.connect("doctree-read", index_rows)

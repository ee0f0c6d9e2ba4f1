"""Fails if two public classes of the launcher and the agent have the same name: one name means one thing.

``check_names.py [ROOT]`` reads all classes, nested ones too, in ``elastic_launch`` and ``agents/elastic_agents`` below
a root, this repository unless given. The exceptions in ``REPEATED`` are public names that stand for the same thing.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PACKAGES = "elastic_launch", "agents/elastic_agents"

REPEATED = frozenset({"DrainCallback"})
"""Names that may be there more than once: each framework's module has its callback of this name."""


def public_classes(root: Path) -> dict[str, list[str]]:
    """Return where each public class is defined, by its name."""
    places: dict[str, list[str]] = {}
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path.relative_to(root)}:{node.lineno}")
    return places


def main(root: Path) -> int:
    """Print each name that is defined more than once, with its places; return the exit code."""
    shared = {name: where for name, where in public_classes(root).items() if len(where) > 1 and name not in REPEATED}
    for name, where in shared.items():
        print(f"{' and '.join(where)}: both define a class {name}; rename one.", file=sys.stderr)
    return int(bool(shared))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]))

"""One name means one thing: scripts/check_names.py, which ``make check`` runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_names.py"


def check(*args: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def planted(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_no_public_class_of_this_project_shares_its_name() -> None:
    assert check() == (0, "")


def test_two_classes_of_the_same_name_are_named_with_their_places(tmp_path: Path) -> None:
    planted(tmp_path, "elastic_launch/contract.py", "class Ready:\n    pass\n")
    planted(tmp_path, "agents/elastic_agents/policy_types.py", "\n\nclass Ready:\n    pass\n")
    assert check(tmp_path) == (
        1,
        "agents/elastic_agents/policy_types.py:3 and elastic_launch/contract.py:1: both define a class Ready; "
        "rename one.\n",
    )


def test_a_nested_class_counts_but_not_a_private_one_nor_the_frameworks_callbacks(tmp_path: Path) -> None:
    for name in ("lightning", "transformers"):
        text = "class DrainCallback:\n    pass\n\n\nclass _Own:\n    pass\n"
        planted(tmp_path, f"elastic_launch/integrations/{name}.py", text)
    assert check(tmp_path) == (0, "")
    planted(tmp_path, "elastic_launch/a.py", "class Outer:\n    class Kept:\n        pass\n")
    planted(tmp_path, "elastic_launch/b.py", "class Kept:\n    pass\n")
    code, said = check(tmp_path)
    assert code == 1
    assert "elastic_launch/a.py:2 and elastic_launch/b.py:1" in said

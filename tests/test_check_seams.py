"""No module uses what another one keeps for itself: scripts/check_seams.py, which ``make check`` runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_seams.py"

OWNER = """
class Owner:
    _size = 1

    def __init__(self):
        self._name = ""

    def _method(self): ...
"""


def check(*args: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def planted(root: Path, text: str) -> Path:
    file = root / "agents" / "elastic_agents" / "planted.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return root


def test_no_module_of_this_project_uses_what_another_one_keeps_for_itself() -> None:
    assert check() == (0, "")


@pytest.mark.parametrize(
    "access",
    ["owner._name", "owner._method()", "owner._size = 2", "owner.part._name", 'getattr(owner, "_name")'],
)
def test_an_access_is_refused_unless_a_class_of_the_module_has_the_name(tmp_path: Path, access: str) -> None:
    code, said = check(planted(tmp_path, f"def use(owner):\n    {access}\n"))
    name = next(name for name in ("_name", "_method", "_size") if name in access)
    assert code == 1
    assert said.startswith(f"agents/elastic_agents/planted.py:2: {name} belongs to another module")
    assert check(planted(tmp_path, f"{OWNER}\n\ndef use(owner):\n    {access}\n")) == (0, "")


def test_what_is_an_objects_own_or_foreign_or_has_two_underscores_is_allowed(tmp_path: Path) -> None:
    text = "class One(Two):\n    def use(self, tensor):\n        self._inherited = super()._method(tensor._version)\n"
    assert check(planted(tmp_path, text + "        return type(self).__name__, tensor.__class__\n")) == (0, "")


def test_a_function_or_a_local_variable_is_no_attribute(tmp_path: Path) -> None:
    code, said = check(planted(tmp_path, "def _name(owner):\n    _size = owner._size\n    return owner._name, _size\n"))
    assert code == 1
    assert said.count("_name belongs") == said.count("_size belongs") == 1

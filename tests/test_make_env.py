"""What make installs into an environment that uses another interpreter's torch. Nothing is installed here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def make_env() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield importlib.import_module("make_env")
    finally:
        del sys.path[0]


@pytest.mark.parametrize("extra", ["examples", "dev"])
def test_what_compares_the_version_of_torch_is_installed(
    make_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    """No dependency of the demo brings it."""
    installed: list[str] = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(make_env, "pip_install", lambda *arguments, **_: installed.extend(arguments))
    torch = make_env.OtherTorch("python", "2.13.0", sys.version_info[:2], [])
    make_env.link_torch(torch, tmp_path, extra)
    assert "packaging" in installed


def test_what_is_installed_is_compiled_without_the_packages_tests(make_env: ModuleType, tmp_path: Path) -> None:
    for name, text in (("package/module", "x = 1"), ("package/newer", "def f[T](): ..; ?"), ("package/tests/test", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    make_env.compile_packages(tmp_path)
    compiled = [path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")]
    assert compiled == ["module"]

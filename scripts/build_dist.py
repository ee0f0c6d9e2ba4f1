"""Build the source distribution and the wheel of a release. `make dist REPOSITORY=URL` runs this script.

    python scripts/build_dist.py REPOSITORY DIRECTORY

Only a release knows the address of its repository, so the checkout does not contain it. The source distribution gets
the project's URLs, the man pages, and a README whose links and images are absolute, since a package index shows it
alone. The wheel is built from the source distribution.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

import man_pages

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?\[[^\]]*\]\()([^()\s]+)(?=\))|((?:href|src)=\")([^\"]+)(?=\")")

URLS = """
[project.urls]
Homepage = "{repository}"
Documentation = "{repository}/blob/{tag}/docs/README.md"
Source = "{repository}"
Issues = "{repository}/issues"
Changelog = "{repository}/blob/{tag}/CHANGELOG.md"

[tool.hatch.build.targets.wheel.shared-data]
"build/man" = "share/man/man1"

[tool.hatch.build.targets.sdist]
artifacts = ["/build/man"]
"""


def absolute(text: str, repository: str, tag: str) -> str:
    """A page of the repository's root in which links and images do not depend on where it is shown."""

    def link(found: re.Match[str]) -> str:
        before, target = (found[1], found[2]) if found[1] else (found[3], found[4])
        if "://" in target or target.startswith(("#", "mailto:")):
            return found[0]
        is_image = before.startswith(("!", "src"))
        path = ROOT / target.partition("#")[0]
        if not path.exists():
            raise SystemExit(f"build_dist: README.md links to {target}, which does not exist")
        kind = "raw" if is_image else "tree" if path.is_dir() else "blob"
        return f"{before}{repository}/{kind}/{tag}/{target}"

    return LINK.sub(link, text)


def build(source: Path, target: str, directory: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(directory)]
    subprocess.run(command, cwd=source, check=True)


def extract(archive: Path, directory: Path) -> Path:
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="data")
    (source,) = directory.iterdir()
    return source


def main(repository: str, out: str) -> None:
    repository, directory = repository.rstrip("/"), Path(out).resolve()
    if not re.fullmatch(r"https://[^/\s]+/\S+", repository):
        raise SystemExit(
            f"build_dist: {repository!r} is not the address of a repository, as in https://HOST/OWNER/NAME"
        )
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    tag, name = f"v{version}", f"elastic_launch-{version}"
    with tempfile.TemporaryDirectory(prefix="elastic-launch-dist-") as temporary:
        build(ROOT, "sdist", Path(temporary))
        copy = extract(Path(temporary, f"{name}.tar.gz"), Path(temporary, "first"))
        (copy / "README.md").write_text(absolute((ROOT / "README.md").read_text(), repository, tag))
        pyproject = (ROOT / "pyproject.toml").read_text()
        (copy / "pyproject.toml").write_text(pyproject + URLS.format(repository=repository, tag=tag))
        man_pages.main(str(copy / "build" / "man"))
        build(copy, "sdist", directory)
        build(extract(directory / f"{name}.tar.gz", Path(temporary, "second")), "wheel", directory)


if __name__ == "__main__":
    main(*sys.argv[1:])

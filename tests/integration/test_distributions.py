"""What a release publishes: built, installed into an environment of its own, and run there."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from elastic_launch import __version__
from elastic_launch.cli import composer
from elastic_launch.cli.flags import FLAGS

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://git.example.org/elastic/elastic-launch"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Built:
    directory: Path

    @property
    def sdist(self) -> Path:
        return self.directory / f"elastic_launch-{__version__}.tar.gz"

    @property
    def wheel(self) -> Path:
        return self.directory / f"elastic_launch-{__version__}-py3-none-any.whl"

    def read(self, name: str) -> str:
        """The text of the one file of the wheel whose path ends so."""
        with zipfile.ZipFile(self.wheel) as wheel:
            (path,) = (path for path in wheel.namelist() if path.endswith(name))
            return wheel.read(path).decode()


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PET_", "ELASTIC_"))}
    done = subprocess.run(command, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    directory = tmp_path_factory.mktemp("dist")
    run(sys.executable, ROOT / "scripts" / "build_dist.py", REPOSITORY, directory, cwd=ROOT)
    return Built(directory)


def test_the_metadata_are_valid_and_their_links_absolute(built: Built) -> None:
    text = built.read(".dist-info/METADATA")
    metadata = Metadata.from_email(text, validate=True)
    assert {"homepage", "documentation", "source", "issues", "changelog"} == {
        name.lower() for name in metadata.project_urls or ()
    }
    assert metadata.description_content_type == "text/markdown"
    assert {"examples", "storage", "frameworks", "monitoring"} <= set(metadata.provides_extra or ())
    description = email.message_from_string(text).get_payload()
    targets = re.findall(r"\]\(([^()\s]+)\)", str(description))
    assert len(targets) > 20
    assert not [target for target in targets if not target.startswith("https://")]


def test_the_wheel_has_the_files_of_the_page(built: Built) -> None:
    directory = ROOT / "elastic_launch" / "observe" / "page"
    assert {path.name for path in directory.iterdir()} == {"index.html", "style.css", "page.js"}
    for path in directory.iterdir():
        assert built.read(f"elastic_launch/observe/page/{path.name}") == path.read_text()


def test_the_man_pages_have_every_flag(built: Built) -> None:
    page = built.read("/elastic-launch.1").replace("\\-", "-")
    assert not [flag.name for flag in FLAGS if flag.name not in page]
    page = built.read("/elastic-composer.1").replace("\\-", "-")
    assert not [flag.name for flag in composer.FLAGS if flag.name not in page]
    assert "Variables: LOCAL_WORLD_SIZE." in page
    assert ".SH" in built.read("/elasticctl.1")


def test_a_run_of_the_installed_wheel_survives_a_kill(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"elastic_launch-{__version__}"
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    run(*pip, "install", "--no-index", "--no-deps", built.wheel, cwd=tmp_path)
    # The dependencies are this environment's. The .pth files there, such as that of an editable install, are not read.
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    Path(purelib, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(python, "-c", "import elastic_launch; print(elastic_launch.__file__)", cwd=tmp_path).strip()
    assert where.startswith(purelib)
    assert __version__ in run(python.parent / "elastic-launch", "--version", cwd=tmp_path)
    assert "status" in run(python.parent / "elasticctl", "--help", cwd=tmp_path)
    train = [source / "examples" / "digits" / "train.py", "--exact", "--epochs", "2", "--result", "result.json"]
    launch = [python.parent / "elastic-launch", "--standalone", "--nproc", "2", "--log-dir", "logs", *train]
    said = run(*launch, cwd=tmp_path, ELASTIC_LAUNCH_FAULTS='[{"rank": 1, "step": 20}]')
    assert "signal 9 (SIGKILL)" in said
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["restarts"], result["steps"]) == (1, 46)

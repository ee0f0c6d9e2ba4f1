"""Real containers for tests: podman, an image built from docker/Dockerfile, and compose. Nothing outlives the session.

If no image can be pulled, the base is made from Debian's packages. It mounts the packages of this environment, torch
above all, so that the build takes seconds: the Dockerfile skips what its base already has.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import yaml
from etcd_servers import binary
from harness import SCRIPTS

REPOSITORY = Path(__file__).parents[1]
COMPOSE = REPOSITORY / "docker" / "compose.yaml"

PULLED = "docker.io/library/python:3.11-slim-bookworm"
"""The Dockerfile's own base."""

MADE = "localhost/elastic-launch-test-base"

# runc, where crun fails (old cgroups), and limits that a container without all capabilities can have.
SIMPLE = '[containers]\ndefault_ulimits = ["nofile=1024:4096", "nproc=4096:4096"]\n[engine]\nruntime = "runc"\n'

ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""The prefix of a command whose processes and mounts end with it."""

HURRY = "/checkpoints/hurry"

LENT = ("torch", "yaml", "etcd_client", "safetensors", "numpy", "sklearn")


class Impossible(Exception):
    """Something that containers need is missing on this machine."""


class Podman:
    """The podman command, with settings that work here, and the objects it has created."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.env: dict[str, str] = {}
        self._made: list[str] = []
        self.mounts: list[str] = []
        """Mounts that a container of the image needs."""

    def __call__(self, *arguments: str, timeout: float = 180.0, env: Mapping[str, str] | None = None) -> str:
        """Return stdout.

        Raises:
            AssertionError: with stderr, if it fails.
        """
        done = self.run(*arguments, timeout=timeout, env=env)
        assert done.returncode == 0, f"podman {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def run(
        self,
        *arguments: str,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        program: tuple[str, ...] = (),
    ) -> subprocess.CompletedProcess[str]:
        command = [*(program or ("podman",)), *arguments]
        everything = {**os.environ, **self.env, **(env or {})}
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=everything, cwd=REPOSITORY)

    def prepare(self) -> None:
        """Find settings with which a container runs.

        Raises:
            Impossible: if there are none.
        """
        if os.geteuid() != 0:
            raise Impossible("needs root")
        if shutil.which("podman") is None:
            raise Impossible("needs podman")
        self._import_etcd()
        simple = self._directory / "containers.conf"
        simple.write_text(SIMPLE)
        reasons = []
        for env in ({}, {"CONTAINERS_CONF": str(simple)}):
            self.env = env
            done = self.run("run", "--rm", self.etcd, "/usr/local/bin/etcd", "--version")
            if done.returncode == 0:
                return
            reasons.append(done.stderr.strip())
        raise Impossible(f"podman: {'; '.join(reasons)}")

    def build(self) -> None:
        """Build the image.

        Raises:
            Impossible: if there is no base image for it.
        """
        wheels = self._directory / "wheels"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "-d",
            str(wheels),
            *os.environ.get("PIP_ARGS", "").split(),
        ]
        # The build tool of the project's wheel, and a package that new environments have in too old a version.
        done = subprocess.run([*pip, "hatchling", "setuptools"], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        base = self._lending(self._base())
        self.image = self._named("image")
        arguments = {"BASE": base, "PIP_ARGS": "--no-index --find-links /wheels", "PACKAGES": "scikit-learn"}
        flags = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        flags += [*self.mounts, f"--volume={wheels}:/wheels:ro", "--layers=false", "--pull-never", "-q"]
        self("build", *flags, "-f", "docker/Dockerfile", "-t", self.image, ".", timeout=300)

    def close(self) -> None:
        for image in reversed(self._made):
            self.run("rmi", "--force", image)

    def _named(self, what: str) -> str:
        name = f"localhost/elastic-launch-test-{what}-{os.getpid()}"
        self._made.append(name)
        return name

    def _import_etcd(self) -> None:
        """Import an image with only the server, like etcd's own image."""
        archive = self._directory / "etcd.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(binary("etcd"), "usr/local/bin/etcd")
        self.etcd = self._named("etcd")
        self("import", "-q", str(archive), self.etcd)

    def _base(self) -> str:
        if sys.version_info[:2] != (3, 11):
            raise Impossible("needs Python 3.11, whose packages the base of the image can use")
        if self.run("image", "exists", MADE).returncode == 0:
            return MADE
        try:
            pulled = self.run("pull", "-q", PULLED)
            if pulled.returncode == 0:
                return PULLED
            reason = pulled.stderr.strip()
        except subprocess.TimeoutExpired:
            reason = "no answer for a minute"
        if shutil.which("mmdebstrap") is None:
            raise Impossible(f"needs mmdebstrap, since no image can be pulled ({reason})")
        archive = self._directory / "base.tar"
        packages = "--include=python3,python3-venv,ca-certificates,libstdc++6"
        # In namespaces of its own: when it is killed, its processes and its mounts of /proc and /sys go, too.
        command = [*ALONE, "mmdebstrap", "--variant=essential", packages, "bookworm", str(archive)]
        environment = {**os.environ, "TMPDIR": str(self._directory)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
        if done.returncode:
            raise Impossible(f"mmdebstrap: {done.stderr.strip()[-1000:]}")
        self._made.append(MADE)
        self("import", "-q", str(archive), MADE)
        archive.unlink()
        return MADE

    def _lending(self, base: str) -> str:
        """Return a base image with the packages of this environment, which are mounted."""
        found = [spec.origin for name in LENT if (spec := find_spec(name)) is not None and spec.origin]
        places = sorted({str(Path(origin).parents[1]) for origin in found})
        # The warm server recognizes installed packages by the directory's name.
        there = {place: f"/lent/{number}/site-packages" for number, place in enumerate(places)}
        self.mounts = [f"--volume={place}:{mounted}:ro" for place, mounted in there.items()]
        lines = "".join(f"{mounted}\\n" for mounted in there.values())
        code = (
            "import pathlib, site; place = pathlib.Path(site.getsitepackages()[0]); "
            f"place.mkdir(parents=True, exist_ok=True); (place / 'lent.pth').write_text('{lines}')"
        )
        file = self._directory / "Dockerfile"
        file.write_text(f'FROM {base}\nRUN python3 -c "{code}"\n')
        name = self._named("lending")
        self("build", "-q", "--layers=false", "-f", str(file), "-t", name, str(self._directory))
        return name


class Compose:
    """The topology of docker/compose.yaml, run by podman-compose; only the length of the steps is changed."""

    def __init__(self, podman: Podman, directory: Path, **variables: str) -> None:
        self._podman = podman
        self._env = {"IMAGE": podman.image, "ETCD_IMAGE": podman.etcd, **variables}
        self.project = f"elastictest{os.getpid()}"
        services = yaml.safe_load(COMPOSE.read_text())["services"]
        self.nodes = [name for name in services if name != "etcd"]
        volumes = [mount.removeprefix("--volume=") for mount in podman.mounts]
        volumes.append(f"{SCRIPTS}:/tests:ro")
        command = _paced(services[self.nodes[0]]["command"])
        changed = {"volumes": volumes, "command": command}
        lent = directory / "changed.yaml"
        lent.write_text(yaml.safe_dump({"services": dict.fromkeys(self.nodes, changed)}))
        files = ["-f", str(COMPOSE), "-f", str(lent)]
        self._command = (sys.executable, "-m", "podman_compose", "-p", self.project, *files)

    def __call__(self, *arguments: str) -> None:
        done = self._podman.run(*arguments, program=self._command, env=self._env, timeout=300)
        assert done.returncode == 0, f"podman-compose {' '.join(arguments)}: {done.stdout}{done.stderr}"

    def hurry(self, node: str) -> None:
        """Make steps as short as possible, on all nodes."""
        self._podman("exec", self.container(node), "touch", HURRY)

    def container(self, node: str) -> str:
        return f"{self.project}_{node}_1"

    def said(self, node: str) -> str:
        done = self._podman.run("logs", self.container(node))
        return done.stdout + done.stderr

    def exit_code(self, node: str) -> int:
        """Wait for a container to end; return its exit code."""
        return int(self._podman("wait", self.container(node), timeout=400))

    def logs(self) -> Path:
        """The directory of the nodes' log volume."""
        return Path(self._podman("volume", "inspect", "--format", "{{.Mountpoint}}", f"{self.project}_logs").strip())


def _paced(command: list[str]) -> list[str]:
    """Return the command with slow steps until :meth:`Compose.hurry`."""
    at = next(number for number, word in enumerate(command) if word.endswith(".py"))
    return [*command[:at], "/tests/paced.py", HURRY, *command[at:]]


@contextlib.contextmanager
def up(podman: Podman, directory: Path, **variables: str) -> Iterator[Compose]:
    """Start all services; remove them, their network and volumes at the end."""
    compose = Compose(podman, directory, **variables)
    try:
        compose("up", "-d", "--no-build")
        yield compose
    finally:
        compose("down", "--volumes", "--timeout", "1")

"""The commands of docs/how-to/ssh.md, as they stand there, on hosts with a real sshd (network namespaces)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import netns
import pytest
from changes import SCRIPT, undisturbed_hash
from harness import SLOWNESS, trains, wait_for
from netns import Host, kill_all, net

ROOT = Path(__file__).parents[2]

MISSING = next((f"needs {program}" for program in ("ssh", "sshd") if shutil.which(program) is None), netns.missing())

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "nothing is missing"),
]

SERVER = """
Port 22
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/key.pub
StrictModes no
PermitRootLogin yes
PidFile none
"""

CLIENT = """#!/bin/sh
exec {ssh} -F none -i {directory}/key -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no -o LogLevel=ERROR "$@"
"""


class Hosts:
    """Hosts that know each other by name, and share the file system; commands are run on one of their own."""

    def __init__(self, directory: Path, hosts: list[Host]) -> None:
        self.directory = directory
        self._client, *others = hosts
        self.nodes = {f"n{number}": host for number, host in enumerate(others, 1)}
        self._daemons: list[subprocess.Popen[bytes]] = []
        lines = "".join(f"{host.address} {name}\n" for name, host in self.nodes.items())
        (directory / "etc-hosts").write_text(f"127.0.0.1 localhost\n{lines}")
        for key in ("host_key", "key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / key)]
            subprocess.run(command, check=True, timeout=20)
        (directory / "sshd_config").write_text(SERVER.format(directory=directory))
        (directory / "bin").mkdir()
        client = directory / "bin" / "ssh"
        client.write_text(CLIENT.format(ssh=shutil.which("ssh"), directory=directory))
        client.chmod(0o755)

    def start(self, name: str) -> None:
        """Start a node's sshd."""
        # It wants a directory that only a started system has.
        server = "mount -t tmpfs tmpfs /run && mkdir /run/sshd && exec /usr/sbin/sshd -De -f"
        log = self.directory / f"sshd.{len(self._daemons)}"
        self._run([*self._on(name, self.nodes[name]), "sh", "-c", f"{server} {self.directory / 'sshd_config'}"], log)
        wait_for(f"sshd on {name}", lambda: "Server listening on 0.0.0.0" in log.read_text())

    def shell(self, work: Path) -> subprocess.Popen[bytes]:
        """Start a shell, in a directory, that reads its commands from a pipe."""
        path = {"PATH": f"{self.directory / 'bin'}:{os.environ['PATH']}"}
        command = [*self._on("desk", self._client), "bash", "-e"]
        with (work / "shell.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=work, env=os.environ | path
                )
            )
        return self._daemons[-1]

    def close(self) -> None:
        for host in (self._client, *self.nodes.values()):
            kill_all(host.name)
        for daemon in self._daemons:
            if daemon.stdin:
                daemon.stdin.close()
            daemon.wait(20)

    def _on(self, name: str, host: Host) -> list[str]:
        """A prefix that runs a command on a host that has its own name, and knows those of the others."""
        inside = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        network = ["nsenter", f"--net=/run/netns/{host.name}", "unshare", "--uts", "--mount"]
        return [*network, "sh", "-c", inside, name, str(self.directory / "etc-hosts")]

    def _run(self, command: list[str], output: Path) -> None:
        with output.open("wb") as log:
            self._daemons.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with net(3) as made:
        found = Hosts(tmp_path, made)
        try:
            yield found
        finally:
            found.close()


def commands() -> tuple[str, str]:
    """The page's commands for a run, and the one that starts a host again."""
    section = (ROOT / "docs" / "how-to" / "ssh.md").read_text().partition("## ssh")[2].partition("\n## ")[0]
    whole, again = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return whole, again


@pytest.mark.usefixtures("forking")
def test_a_host_is_lost_and_comes_back(tmp_path: Path, hosts: Hosts) -> None:
    """All that is changed is the script's arguments, and that the hosts have no GPU."""
    work, notes = tmp_path / "work", tmp_path / "notes"
    for directory in (work, notes):
        directory.mkdir()
    (work / ".venv").symlink_to(Path(sys.executable).parents[1])
    (work / "train.py").symlink_to(SCRIPT)
    (work / "hosts").write_text("".join(f"{name}\n" for name in hosts.nodes))
    for name in hosts.nodes:
        hosts.start(name)
    whole, again = commands()
    for shown, own in (("--nproc gpu", "--nproc 1"), ("train.py", f"train.py {notes} --steps 400 --step-time 1")):
        assert whole.count(shown) == 1
        whole = whole.replace(shown, own)
    shell = hosts.shell(work)

    def type_in(text: str) -> None:
        assert shell.stdin
        shell.stdin.write(text.encode())
        shell.stdin.flush()

    def logs() -> str:
        paths = [*work.glob("*.log"), *tmp_path.glob("sshd.*")]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in paths)

    def steps(world: int, after: int = 0) -> int:
        return trains(notes, world, after, logs)

    type_in(whole)
    number = steps(2)
    kill_all(hosts.nodes["n2"].name)
    number = steps(1, number)
    hosts.start("n2")
    type_in(again.replace("HOST", "n2"))
    steps(2, number)
    (notes / "hurry").touch()
    type_in("wait\nexit 7\n")
    assert shell.wait(60 * SLOWNESS) == 7, (work / "shell.log").read_text()
    outputs = {name: (work / f"{name}.log").read_text(errors="replace") for name in hosts.nodes}
    result = json.loads((notes / "result.json").read_text())
    alone = tmp_path / "alone"
    alone.mkdir()
    assert result["hash"] == undisturbed_hash(alone, 400), outputs
    assert result["restarts"] == 0, outputs
    assert "done: all workers finished" in outputs["n1"]
    assert "node n2 lost: its connection closed" in outputs["n1"]
    assert (work / "token").stat().st_mode & 0o777 == 0o600

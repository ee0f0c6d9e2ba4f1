"""The examples for engines above us, by what these engines themselves start: TorchX, Ray, SkyPilot."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from changes import SCRIPT, undisturbed_hash
from harness import LOOP, SLOWNESS, Agent, Job, free_port, name_of, read_lines, trains
from netns import Host, ip, kill_all, missing, net

EXAMPLES = Path(__file__).parents[2] / "examples"

BIN = Path(sys.executable).parent

TORCHX = shutil.which("torchx") or shutil.which("torchx", path=BIN.parent / "torchx" / "bin")
"""TorchX needs an older urllib3 than other tests, so `make test-all` gives it an environment of its own."""

PROGRAM = ("-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])")
"""For :class:`Agent`, which starts Python programs: to start another."""

MISSING = missing()


def own_path() -> dict[str, str]:
    """The variable by which shells find elastic-launch."""
    return {"PATH": f"{BIN}:{os.environ['PATH']}"}


@pytest.mark.slow
@pytest.mark.skipif(TORCHX is None, reason="torchx is not installed")
def test_a_worker_of_a_torchx_app_is_killed(job: Job) -> None:
    """Two replicas on this host are two nodes of a run, whose name is the app's."""
    component = f"{EXAMPLES / 'torchx' / 'component.py'}:elastic"
    own = ["--name", "digits", "--port", str(free_port()), "-j", "1:2x1", "--script", LOOP]
    engine = [str(TORCHX), "run", "-s", "local_cwd", "-cfg", f"log_dir={job.directory / 'torchx'}", "--wait", "--log"]
    app = Agent([*engine, component, *own, "--", str(job.work)], job.directory, "torchx", own_path(), program=PROGRAM)
    job.agents.append(app)
    killed = job.world(2)[1]
    assert re.fullmatch(r"digits-\w+", killed["env"]["TORCHELASTIC_RUN_ID"])
    os.kill(killed["pid"], signal.SIGKILL)
    job.world(2, after=int(killed["env"]["ELASTIC_LAUNCH_ROUND"]))
    (job.work / "finish").touch()
    assert app.wait() == 0, app.output
    assert "restart 1 of 3" in app.output
    assert "Job finished: SUCCEEDED" in app.output


SKY: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        **{key: {"type": "string"} for key in ("name", "workdir", "setup", "run")},
        "num_nodes": {"type": "integer"},
        "envs": {"type": "object", "additionalProperties": {"type": "string"}},
        "secrets": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        "resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "accelerators": {"type": "string"},
                "use_spot": {"type": "boolean"},
                "job_recovery": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"recover_on_exit_codes": {"type": "array", "items": {"type": "integer"}}},
                },
            },
        },
    },
}
"""The fields of the example, written down from SkyPilot 0.14 (Apache License 2.0), whose own parser takes it, too."""


@pytest.mark.slow
def test_the_command_of_the_skypilot_task_on_two_nodes(job: Job) -> None:
    """Both nodes are this host, and have no GPU; all else is as SkyPilot would have it."""
    task = yaml.safe_load((EXAMPLES / "skypilot" / "train.yaml").read_text())
    jsonschema.validate(task, SKY)
    command = task["run"].replace(":29400", f":{free_port()}").replace("--nproc gpu", "--nproc 1")
    of_sky = {
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_TASK_ID": "sky-1_train_1",
    }
    env = own_path() | of_sky | {"ELASTIC_LAUNCH_TOKEN": secrets.token_hex(32), "STEPS": "3"}
    env |= {"CHECKPOINT": str(job.directory / "checkpoints")}
    nodes = [
        Agent(["bash", "-c", command], job.directory, f"node{rank}", env, EXAMPLES.parent, program=PROGRAM)
        for rank in range(2)
    ]
    job.agents += nodes
    for node in nodes:
        assert node.wait(60) == 0, node.output
    assert "trained 3 steps on 2 workers" in "".join(node.output for node in nodes)


class RayCluster:
    """A Ray cluster whose nodes are hosts; the first one is its head."""

    def __init__(self, hosts: list[Host], directory: Path) -> None:
        self._hosts, self._directory = hosts, directory
        self.env = {
            **os.environ,
            **own_path(),
            **hosts[0].env,
            "RAY_ADDRESS": f"{hosts[0].address}:6379",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # A node whose connections are closed is noticed within seconds, and a slow one is not taken for lost.
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_timeout_ms": "60000",
            # By default tasks run at niceness 15: beside other tests, agents would get next to no processor time.
            "RAY_worker_niceness": "0",
        }

    def start(self, host: Host) -> None:
        """Start Ray on a host, with room for one agent, and return when the cluster has this node."""
        head = ("--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self._directory}")
        role = head if host is self._hosts[0] else (f"--address={self.env['RAY_ADDRESS']}",)
        own = (f"--node-ip-address={host.address}", "--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000")
        command = [*host.prefix, str(BIN / "ray"), "start", *role, *own, "--disable-usage-stats"]
        # Its daemons stay, and must not hold a pipe.
        output = self._directory / f"start-{host.name}.log"
        with output.open("w") as log:
            done = subprocess.run(command, env=self.env, stdout=log, stderr=log, timeout=40 * SLOWNESS)
        assert done.returncode == 0, output.read_text()

    def pids(self, host: Host, name: str) -> list[int]:
        """The processes of a host that run a program of this name."""
        return [pid for pid in map(int, ip("netns", "pids", host.name).split()) if name_of(pid) == name]


@pytest.fixture
def ray_hosts() -> Iterator[tuple[RayCluster, list[Host]]]:
    # The paths of its sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray") as directory, net(3) as hosts:
        yield RayCluster(hosts, Path(directory)), hosts
        for host in hosts:
            kill_all(host.name)


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=MISSING or "nothing is missing")
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install '.[ray]'")
@pytest.mark.usefixtures("forking")
def test_on_ray_a_worker_an_agent_and_a_node_are_lost(tmp_path: Path, ray_hosts: tuple[RayCluster, list[Host]]) -> None:
    """Training comes to the weights of the undisturbed run: Ray starts agents again, and they join."""
    cluster, hosts = ray_hosts
    notes = tmp_path / "notes"
    notes.mkdir()
    cluster.start(hosts[0])
    flags = ("--nnodes", "1:2", "--nproc", "1", "--dead-after", "3", "--log-dir", str(tmp_path / "logs"))
    script = (SCRIPT, str(notes), "--steps", "400", "--step-time", "1")
    own = [str(EXAMPLES / "ray" / "run.py"), "--agents", "2", "--", *flags, *script]
    driver = Agent(own, tmp_path, "driver", cluster.env, tmp_path, hosts[0].prefix, program=())

    def steps(world: int, after: int = 0) -> int:
        return trains(notes, world, after, lambda: driver.output)

    with contextlib.ExitStack() as ends:
        ends.callback(driver.kill)
        number = steps(1)  # so that the first agent is on the head, which is not lost here
        cluster.start(hosts[1])
        number = steps(2, number)
        os.kill(read_lines(notes / "started.jsonl")[-1]["pid"], signal.SIGKILL)
        number = steps(2, number)
        (task,) = cluster.pids(hosts[1], "ray::agent")
        os.kill(task, signal.SIGKILL)
        number = steps(2, steps(1, number))
        kill_all(hosts[1].name)
        number = steps(1, number)
        cluster.start(hosts[2])
        steps(2, number)
        (notes / "hurry").touch()
        assert driver.wait(60) == 0, driver.output
    result = json.loads((notes / "result.json").read_text())
    alone = tmp_path / "alone"
    alone.mkdir()
    assert result["hash"] == undisturbed_hash(alone, 400), driver.output
    assert result["restarts"] == 1, driver.output

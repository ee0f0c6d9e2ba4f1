"""A node of each cloud leaves on its notice: real agents and training, and a metadata service at its real address.

Each host is a network namespace, in which a stand-in for the service listens at 169.254.169.254:80.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import metadata_servers
import netns
import pytest
from harness import SCRIPTS, Agent, Job, wait_for
from metadata_servers import ADDRESS, AZURE, GCP, NAME, Service
from netns import Host, ip

MISSING = netns.missing()
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "nothing is missing"),
]

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits" / "train.py")
META = "/latest/meta-data/"


@contextlib.contextmanager
def metadata(cloud: str, host: Host, directory: Path) -> Iterator[Service]:
    """The metadata service of a cloud, as this host sees it."""
    directory.mkdir()
    service = Service(directory)
    ip("-n", host.name, "addr", "add", f"{ADDRESS}/32", "dev", "lo")
    command = [*host.prefix, sys.executable, metadata_servers.__file__, cloud, str(directory)]
    server = subprocess.Popen(command)
    try:
        yield service
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with netns.net(2) as hosts:
        yield hosts


def digits(job: Job) -> list[str]:
    """A command that by default saves only at the end, and is slow until it is hurried."""
    paced = [str(SCRIPTS / "paced.py"), str(job.directory / "hurry"), DIGITS]
    saving = ["--checkpoint", str(job.directory / "checkpoints"), "--every", "100000"]
    return [*paced, "--step-time", "0.5", *saving, "--result", str(job.directory / "result.json")]


def start(job: Job, host: Host, name: str, where: str, *flags: str, prefix: tuple[str, ...] = ()) -> Agent:
    several = ["--nnodes", "1:2", "--node-id", name, "--rdzv-id", "run", "--rdzv-endpoint", f"{where}:29400"]
    env = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    prefix = (*host.prefix, *prefix)
    return job.launch(*several, *flags, name=name, command=digits(job), env=env, prefix=prefix)


def steps(job: Job, size: int) -> int:
    """Wait until a round of this many nodes has done a step; return its number."""

    def probe() -> int:
        formed = [x["round"] for x in job.events("round_formed") if x["world_size"] == size]
        begun = [x["round"] for x in job.events("first_step")]
        return formed[-1] if formed and formed[-1] in begun else 0

    return wait_for(f"a step in a world of {size}", probe, 90)


def quiet(cloud: str, service: Service) -> None:
    if cloud == "gcp":
        service.tell(GCP + "preempted", "FALSE")
        service.tell(GCP + "maintenance-event", "NONE")
    if cloud == "azure":
        service.tell(NAME, "train_1")
        service.tell(AZURE, {"DocumentIncarnation": 1, "Events": []})


def preempt(cloud: str, service: Service, seconds: float) -> None:
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    if cloud == "aws":
        time = at.strftime("%Y-%m-%dT%H:%M:%SZ")
        service.tell(META + "spot/instance-action", {"action": "terminate", "time": time})
    if cloud == "gcp":
        service.tell(GCP + "preempted", "TRUE")
    if cloud == "azure":
        mine = {
            "EventId": "E-1",
            "EventStatus": "Scheduled",
            "EventType": "Preempt",
            "ResourceType": "VirtualMachine",
            "Resources": ["train_1"],
            "NotBefore": format_datetime(at, usegmt=True),
        }
        service.tell(AZURE, {"DocumentIncarnation": 2, "Events": [mine | {"Resources": ["train_7"]}, mine]})


@pytest.mark.parametrize(
    ("cloud", "seconds"),
    [
        ("aws", 120.0),
        pytest.param("gcp", 30.0, marks=pytest.mark.soak),
        pytest.param("azure", 30.0, marks=pytest.mark.soak),
    ],
)
def test_a_machine_that_is_preempted_leaves_drained_and_the_other_continues(
    job: Job, hosts: list[Host], tmp_path: Path, cloud: str, seconds: float
) -> None:
    a, b = hosts
    host = start(job, a, "a", a.address)
    host.says("hosts")
    with metadata(cloud, b, tmp_path / "metadata") as service:
        quiet(cloud, service)
        guest = start(job, b, "b", a.address, "--notice", cloud)
        number = steps(job, 2)
        # As the machine's own shutdown does about then: it must not cut the drain short.
        preempt(cloud, service, seconds)
        guest.says("this node leaves the run", 60)
        guest.signal(signal.SIGTERM)
        assert guest.wait(60) == 143, guest.output
    (job.directory / "hurry").touch()
    assert host.wait(100) == 0, host.output

    (notice,) = job.events("notice_received")
    assert (notice["kind"], notice["leaves"]) == ("preemption", True)
    assert seconds - 20 < notice["seconds"] <= seconds
    (drained,) = [x for x in job.events("round_drained") if x["round"] == number]
    assert drained["kind"] == "preemption"
    assert job.events("restart_charged") == []
    result = json.loads((job.directory / "result.json").read_text())
    assert result["resumed_step"] == drained["step"], "no step is lost"
    assert [json.loads(x["body"]) for x in service.asked("POST")] == (
        [{"StartRequests": [{"EventId": "E-1"}]}] if cloud == "azure" else []
    )


FIRMWARE = """
cp -a /sys/class "$0/class"; rm -rf "$0/class/dmi"; mkdir -p "$0/class/dmi/id"
echo "Amazon EC2" > "$0/class/dmi/id/sys_vendor"
mount --bind "$0/class" /sys/class && exec "$@"
"""
"""Makes a command detect an EC2 machine; ``ip netns exec`` gives it a mount namespace, so no other process does."""


def test_auto_finds_the_cloud_and_a_node_alone_saves_before_it_goes(
    job: Job, hosts: list[Host], tmp_path: Path
) -> None:
    host = hosts[0]
    with metadata("aws", host, tmp_path / "metadata") as service:
        agent = start(job, host, "a", host.address, prefix=("sh", "-c", FIRMWARE, str(tmp_path)))
        agent.says("notices from AWS: spot interruptions", 30)
        assert "found by --notice auto" in agent.output
        steps(job, 1)
        preempt("aws", service, 120.0)
        assert agent.wait(60) == 143, agent.output
    (drained,) = job.events("round_drained")
    (saved,) = (job.directory / "checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-").partition(".")[0]) == drained["step"]


def test_services_that_misbehave_do_not_touch_the_run(job: Job, hosts: list[Host], tmp_path: Path) -> None:
    host = hosts[0]
    with metadata("aws", host, tmp_path / "metadata") as service:
        service.break_by("silent")
        agent = job.launch("--standalone", "--notice", "aws,gcp,azure", prefix=host.prefix)
        agent.says("no notices from AWS for now: the metadata service gives no token", 60)
        job.world(1)
        for fault in ("garbage", "page", "huge", "trickle", "status:404", "status:401", "status:500"):
            service.break_by(fault)
            asked = len(service.asked())
            wait_for(f"requests under {fault}", lambda asked=asked: len(service.asked()) > asked + 3)
        job.finish()
        assert agent.wait(60) == 0, agent.output
    lines = [line for line in agent.output.splitlines() if "no notices from" in line]
    assert len(lines) == len(set(lines)), "each is said once"
    assert job.events("notice_received") == []

"""The examples for Slurm, unmodified, on a real Slurm whose nodes are hosts of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from changes import undisturbed_hash
from etcd_servers import cluster as etcd_cluster
from etcd_servers import endpoints
from harness import LOOP, SCRIPTS, read_lines, wait_for
from slurm_cluster import Cluster, cluster, missing

MISSING = missing()

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "nothing is missing"),
]

EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"
CHANGES = str(SCRIPTS / "changes.py")
STEPS = 60


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm"), 3) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash with which a training of so many steps ends."""
    return undisturbed_hash(tmp_path_factory.mktemp("undisturbed"), STEPS)


class Training:
    """A job that runs ``scripts/changes.py`` by an example.

    Args:
        flags: of sbatch.
        launch: of elastic-launch.
    """

    def __init__(
        self,
        slurm: Cluster,
        directory: Path,
        example: str,
        *flags: str,
        launch: tuple[str, ...] = (),
        steps: int = STEPS,
        **env: str,
    ) -> None:
        self.slurm = slurm
        self.directory = directory
        self.example = example
        output = ("--output", str(slurm.directory / f"{example}-%j.out"))
        saving = ("--checkpoint", str(directory / "checkpoints"), "--step-time", "0.6", "--steps", str(steps))
        logs = ("--log-dir", str(directory / "logs"))
        script = str(EXAMPLES / f"{example}.sbatch")
        self.job = slurm.submit(
            *output, *flags, script, *logs, *launch, CHANGES, str(directory), *saving, env={"NODE": "a", **env}
        )

    @property
    def output(self) -> str:
        path = self.slurm.directory / f"{self.example}-{self.job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def says(self, text: str, timeout: float = 60.0) -> str:
        """Wait until a pattern has been printed, and return the match."""

        def probe() -> str:
            found = re.search(text, self.output)
            return found[0] if found else ""

        return self.wait(text, probe, timeout)

    def steps(self) -> list[dict[str, Any]]:
        return read_lines(self.directory / "steps.jsonl")

    def trains(self, world: int, after: int = 0) -> int:
        """Wait for a step in a world of that size, beyond a step; return its number."""

        def probe() -> int:
            return next((x["step"] for x in self.steps()[::-1] if x["world"] == world and x["step"] > after), 0)

        return self.wait(f"a step in a world of {world}", probe)

    def wait(self, what: str, probe: Any, timeout: float = 60.0) -> Any:
        try:
            return wait_for(what, probe, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.slurm.show(self.job)}\n{self.slurm.logs()}") from None

    def finish(self, state: str = "COMPLETED") -> dict[str, Any]:
        """Let the training end; return its result."""
        (self.directory / "hurry").touch()
        assert self.slurm.ends(self.job, 100) == state, self.slurm.logs()
        return dict(json.loads((self.directory / "result.json").read_text()))

    def assert_no_step_was_done_twice(self) -> None:
        assert [x["step"] for x in self.steps()] == list(range(1, STEPS + 1)), self.output

    def start_again(self) -> None:
        """Have a requeued job start in some seconds, instead of in two minutes; not at once, which Slurm refuses."""
        self.slurm.reaches(self.job, "PENDING")
        self.slurm.command("scontrol", "update", f"jobid={self.job}", "starttime=now+3seconds")


@pytest.fixture(scope="module")
def limited(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A job whose time limit comes while the other tests run."""
    directory = tmp_path_factory.mktemp("limited")
    return Training(slurm, directory, "train", "--nodes=1", "--time=3", "--nodelist=n3", steps=10_000)


def test_mistakes_are_errors_and_the_agents_of_a_job_are_placed_by_slurm(slurm: Cluster, limited: Training) -> None:
    script = slurm.directory / "mistakes.sbatch"
    lines = [
        "elastic-launch",
        "elastic-launch --standalone --print-config",
        "srun --ntasks=4 --overcommit elastic-launch",
        "srun --ntasks=2 elastic-launch --nnodes 3",
        "srun --ntasks=2 elastic-launch --nnodes 2 --rdzv-endpoint ctl:29400",
        "srun --ntasks=2 --label elastic-launch --print-config",
        "srun --nodes=1 --ntasks=1 --nodelist=n2 elastic-launch --nnodes 1:2 --print-config",
    ]
    runs = [f"{line} {LOOP} >{slurm.directory}/mistake-{number} 2>&1\n" for number, line in enumerate(lines)]
    script.write_text("#!/bin/bash\n#SBATCH --nodes=2 --output=mistakes.out --nodelist=n[1-2]\n" + "".join(runs))
    job = slurm.submit(str(script))
    assert slurm.ends(job) == "COMPLETED", slurm.logs()
    outside, standalone, tasks, many, endpoint, both, one = [
        (slurm.directory / f"mistake-{number}").read_text() for number in range(len(lines))
    ]
    assert f"on this host, not on each of the 2 nodes of Slurm job {job} (n[1-2])" in outside
    assert "rdzv-endpoint: " not in standalone.replace("# rdzv-endpoint: ", "")
    assert "srun has started 2 agents on node n1, one for each task" in tasks
    assert f"--nnodes 3 asks for more nodes than Slurm job {job} has: 2 (n[1-2])" in many
    assert f"--rdzv-endpoint ctl:29400 is not one of the nodes of Slurm job {job} (n[1-2])" in endpoint
    port = 20_000 + int(job) % 10_000
    for rank, name in enumerate(("n1", "n2")):
        told = {"nnodes": "2", "rdzv-endpoint": f"n1:{port}", "node-id": name, "node-rank": str(rank)}
        for key, value in told.items():
            assert re.search(rf"^{rank}: {key}: {value} +# Slurm job {job}$", both, re.MULTILINE), both
    assert re.search(rf"rdzv-endpoint: n1:{port} ", one)
    assert re.search(rf"rdzv-id: {job} ", one)
    assert re.search("node-rank: 1 ", one)


def test_preempted_by_another_job_it_is_requeued_and_no_step_is_lost(
    slurm: Cluster, tmp_path: Path, undisturbed: str
) -> None:
    training = Training(slurm, tmp_path, "requeue", "--nodes=2", "--nodelist=n[1-2]")
    training.trains(2)
    urgent = slurm.submit("--partition=high", "--nodes=2", "--nodelist=n[1-2]", "--exclusive", "--wrap=true")
    assert slurm.ends(urgent) == "COMPLETED", slurm.logs()
    training.start_again()
    training.says("; n1 hosts; SLURM_RESTART_COUNT=1")
    training.trains(2, after=training.steps()[-1]["step"])
    result = training.finish()
    training.assert_no_step_was_done_twice()
    assert (result["restarts"], result["hash"]) == (0, undisturbed)
    assert training.output.count("exit code 143: stopped by SIGTERM") == 2


def test_warned_of_its_end_a_job_saves_and_requeues_itself(slurm: Cluster, tmp_path: Path, undisturbed: str) -> None:
    training = Training(slurm, tmp_path, "requeue", "--nodes=2", "--nodelist=n[1-2]")
    training.trains(2)
    slurm.command("scancel", "--batch", "--signal=USR1", training.job)
    training.start_again()
    training.says("; n1 hosts; SLURM_RESTART_COUNT=1")
    training.trains(2, after=training.steps()[-1]["step"])
    result = training.finish()
    training.assert_no_step_was_done_twice()
    assert result["hash"] == undisturbed
    assert training.output.count("exit code 143: stopped by SIGUSR1") == 2


def test_a_cancelled_job_saves_and_does_not_come_back(slurm: Cluster, tmp_path: Path) -> None:
    training = Training(slurm, tmp_path, "requeue", "--nodes=1", "--nodelist=n1", launch=("--nproc", "2"))
    training.trains(2)
    slurm.command("scancel", training.job)
    assert slurm.ends(training.job) == "CANCELLED"
    training.says("exit code 143: stopped by SIGTERM")
    last = training.steps()[-1]["step"]
    assert sorted((tmp_path / "checkpoints").glob(f"step-{last}.*/manifest.json"))


@pytest.mark.soak
def test_training_goes_on_without_a_node_that_is_set_down(slurm: Cluster, tmp_path: Path) -> None:
    training = Training(slurm, tmp_path, "no-kill", "--nodes=2", "--nodelist=n[1-2]")
    training.trains(2)
    slurm.command("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    training.trains(1)
    result = training.finish("FAILED")
    assert slurm.show(training.job)["ExitCode"] == "137:0"  # of the agent that Slurm has killed
    assert (result["worlds"][-2:], result["restarts"]) == ([2, 1], 0)
    assert "done: all workers finished" in training.output
    wait_for("n2", lambda: slurm.states()["n2"] == "idle")


@pytest.mark.soak
def test_with_etcd_the_first_node_may_lose_its_agent(slurm: Cluster, tmp_path: Path) -> None:
    token = str(tmp_path / "token")
    (tmp_path / "etcd").mkdir()
    with etcd_cluster(tmp_path / "etcd", host=slurm.controller) as members:
        where = {"ETCD": endpoints(members), "TOKEN_FILE": token}
        training = Training(slurm, tmp_path, "etcd", "--nodes=2", "--nodelist=n[1-2]", **where)
        training.trains(2)
        training.says(rf"Slurm job {training.job} gives --rdzv-id {training.job}\.0, --node-id n1, --node-rank 0")
        slurm.kill_agent("n1")
        training.trains(1)
        training.says("leads the run")
        (tmp_path / "hurry").touch()
        # srun exits with the highest code of its tasks; the training itself comes to its end.
        slurm.ends(training.job, 100)
    assert json.loads((tmp_path / "result.json").read_text())["worlds"][-2:] == [2, 1]


@pytest.mark.soak
def test_each_task_of_an_array_is_a_run_of_its_own(slurm: Cluster, tmp_path: Path) -> None:
    outputs = str(slurm.directory / "array-%a.out")
    flags = ("--array=0-1", "--output", outputs, "--nodelist=n1")
    launch = ("--nnodes", "1:2", "--log-dir", str(tmp_path / "logs"))
    job = slurm.submit(*flags, str(EXAMPLES / "array.sbatch"), *launch, LOOP, str(tmp_path))

    def started() -> list[dict[str, str]]:
        return [worker["env"] for worker in read_lines(tmp_path / "started.jsonl")]

    wait_for("a worker of each task", lambda: len(started()) == 2)
    (tmp_path / "finish").touch()
    for task in ("0", "1"):
        assert slurm.ends(f"{job}_{task}") == "COMPLETED", slurm.logs()
    assert {env["SLURM_ARRAY_TASK_ID"] for env in started()} == {"0", "1"}
    assert len({env["TORCHELASTIC_RUN_ID"] for env in started()}) == 2
    assert {env["WORLD_SIZE"] for env in started()} == {"1"}


def test_before_its_time_limit_a_job_saves(slurm: Cluster, limited: Training) -> None:
    """Of three minutes, two have passed when the notice comes: a busy machine may need one for the first step."""
    limited.says("stopped by Slurm notice: the end of job", 210)
    assert slurm.ends(limited.job) == "FAILED"  # as the exit code, 143
    last = limited.steps()[-1]["step"]
    assert sorted((limited.directory / "checkpoints").glob(f"step-{last}.*/manifest.json"))


@pytest.mark.soak
def test_a_job_whose_time_was_extended_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    script = slurm.directory / "extended.sbatch"
    extend = "scontrol update jobid=$SLURM_JOB_ID timelimit=60"
    launch = f"srun elastic-launch --log-dir {tmp_path}/logs {LOOP} {tmp_path}"
    script.write_text(f"#!/bin/bash\n#SBATCH --time=1 --output=extended.out\n{extend}\n{launch}\n")
    job = slurm.submit(str(script))
    output = slurm.directory / "extended.out"
    extended = r"the end of job \d+ is 3\d+ s away"
    wait_for("squeue's answer", lambda: output.exists() and re.search(extended, output.read_text()))
    (tmp_path / "finish").touch()
    assert slurm.ends(job) == "COMPLETED"


def test_training_goes_on_without_a_node_that_loses_power(slurm: Cluster, tmp_path: Path) -> None:
    """Comes last: the node stays down."""
    training = Training(slurm, tmp_path, "no-kill", "--nodes=2", "--nodelist=n[1-2]")
    training.trains(2)
    slurm.kill_node("n2")
    training.trains(1)
    result = training.finish("COMPLETED")
    assert (result["worlds"][-2:], result["restarts"]) == ([2, 1], 0)

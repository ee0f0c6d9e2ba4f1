"""A pod's commands, run for real: the manifests' own commands under a simulated kubelet (``tests/kubelet``)."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from changes import SCRIPT
from harness import LOOP, Job, run_script
from kubelet.cluster import UID, Cluster, cluster
from kubelet.manifests import EXAMPLES, Manifest, documents, find, rendered
from kubelet.operators import as_jobset, as_trainer, as_training_operator
from kubelet.pods import Pod
from netns import missing

MISSING = missing()

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "nothing is missing"),
]

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl to render")

STEPS = 400

NOTES = "/checkpoints/notes"


def container(manifests: list[Manifest]) -> Manifest:
    (found,) = find(manifests, "Job")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def own_script(manifests: list[Manifest], script: str, *arguments: str, **env: str) -> None:
    """Do what a user does: set a script, its arguments and variables, and change nothing else."""
    find(manifests, "ConfigMap", "train")["data"]["train.py"] = Path(script).read_text()
    of_pod = container(manifests)
    of_pod["args"] += arguments
    of_pod["env"] += [{"name": name, "value": value} for name, value in env.items()]


class Training:
    """A run of ``scripts/changes.py`` whose notes are on the pods' shared volume."""

    def __init__(self, made: Cluster) -> None:
        self.cluster = made
        self.notes = made.claims / "train" / "notes"
        self.notes.mkdir(parents=True)

    def round(self) -> int:
        """The round of the last step, 0 before the first."""
        path = self.notes / "steps.jsonl"
        lines = path.read_bytes()[-1000:].splitlines() if path.exists() else []  # each is far shorter
        return int(json.loads(lines[-1])["round"]) if lines else 0

    def trains(self, index: int, after: int) -> int:
        """Wait until a round beyond one has done steps, and the pod of an index exists; return the round."""
        pods = self.cluster.job.pods

        def probe() -> int:
            there = index in pods and pods[index].running and pods[index].catches(signal.SIGTERM)
            return self.round() if there and self.round() > after else 0

        return self.cluster.until(f"steps in a round after {after}, and pod {index}", probe, 120)


@needs_kubectl
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forking")
def test_four_pods_through_ten_evictions_and_losses_come_to_the_weights_of_the_undisturbed_run(tmp_path: Path) -> None:
    """Pods are evicted with their grace, lost with their nodes, and killed; so is pod 0, which hosts the run."""
    chance = random.Random(20)
    kinds = ["evict"] * 4 + ["lose"] * 2 + ["crash"] * 2
    fates = [("evict", 0), ("lose", 0), *((kind, chance.randrange(1, 4)) for kind in kinds)]
    chance.shuffle(fates)
    manifests = rendered("overlays/aks")
    own_script(
        manifests,
        SCRIPT,
        *(NOTES, "--steps", str(STEPS), "--step-time", "0.3", "--checkpoint", "/checkpoints/train", "--every", "50"),
        PET_DEAD_AFTER="3",
    )
    with cluster(manifests, tmp_path / "cluster") as made:
        training = Training(made)
        number = 0
        ended = []
        for kind, index in fates:
            number = training.trains(index, number)
            pod = made.job.pods[index]
            {"evict": lambda pod=pod: pod.terminate(disrupted=True), "lose": pod.lose, "crash": pod.crash}[kind]()
            ended.append((kind, index, pod))
        training.trains(0, number)
        made.until("a pod in the place of each", lambda: len(made.pods) == 4 + len(fates))
        (training.notes / "hurry").touch()
        made.until("the job's end", lambda: made.job.over, 120)
        made.until("the end of all pods", lambda: not made.job.pods)
        outputs = made.outputs()
    assert made.job.over == "Complete", outputs
    assert len({pod.host.address for pod in made.pods}) == len(made.pods) == 14, outputs
    codes = {"evict": (143, "Ignore"), "lose": (137, "Ignore"), "crash": (137, "Count")}
    assert sorted(made.job.decisions) == sorted((index, *codes[kind]) for kind, index, _ in ended), outputs
    for kind, _, pod in ended:
        assert pod.message.startswith("exit code 143: stopped by SIGTERM") if kind == "evict" else not pod.message
    result = json.loads((training.notes / "result.json").read_text())
    assert result["restarts"] == 0, outputs
    assert result["hash"] == undisturbed(tmp_path / "alone"), outputs


@needs_kubectl
@pytest.mark.usefixtures("forking")
def test_a_job_that_is_resized_loses_no_step(tmp_path: Path) -> None:
    """As kubectl does it, and Kueue's elastic jobs: by both numbers of the indexed job."""
    manifests = rendered("overlays/kueue-elastic")
    find(manifests, "Job")["spec"] |= {"completions": 2, "parallelism": 2}
    volume = {"name": "notes", "persistentVolumeClaim": {"claimName": "train"}}
    find(manifests, "Job")["spec"]["template"]["spec"]["volumes"].append(volume)
    container(manifests)["volumeMounts"].append({"name": "notes", "mountPath": "/checkpoints"})
    own_script(manifests, SCRIPT, NOTES, "--steps", str(STEPS), "--step-time", "0.6")
    with cluster(manifests, tmp_path / "cluster") as made:
        training = Training(made)
        number = training.trains(1, 0)
        made.job.resize(3)
        number = training.trains(2, number)
        made.job.resize(2)
        made.until("the end of pod 2", lambda: 2 not in made.job.pods)
        number = training.trains(1, number)
        (training.notes / "hurry").touch()
        made.until("the job's end", lambda: made.job.over, 120)
        made.until("the end of all pods", lambda: not made.job.pods)
        outputs = made.outputs()
    assert (made.job.over, made.job.decisions, len(made.pods)) == ("Complete", [], 3), outputs
    assert made.pods[2].exit_code == 143, outputs
    result = json.loads((training.notes / "result.json").read_text())
    assert (result["restarts"], result["hash"]) == (0, undisturbed(tmp_path / "alone")), outputs
    done = [json.loads(line)["step"] for line in (training.notes / "steps.jsonl").read_text().splitlines()]
    assert len(done) == len({*done}) == STEPS, outputs


def undisturbed(directory: Path) -> str:
    """The hash of the weights that a single process ends with."""
    directory.mkdir()
    (directory / "hurry").touch()
    run_script(SCRIPT, str(directory), "--steps", str(STEPS))
    return str(json.loads((directory / "result.json").read_text())["hash"])


@needs_kubectl
@pytest.mark.parametrize(
    "operator",
    [
        "trainer",
        *(
            pytest.param(x, marks=pytest.mark.soak)
            for x in ("trainer, as it would have it", "training operator", "jobset")
        ),
    ],
)
def test_pods_of_operators_meet_by_the_names_and_variables_that_these_set(operator: str, tmp_path: Path) -> None:
    """Of Trainer's pods once by the example's flags, which make it elastic, and once as its own torch runtime does."""
    kinds = {"training operator": ("pytorchjob", as_training_operator), "jobset": ("jobset", as_jobset)}
    directory, as_made = kinds.get(operator, ("trainjob", as_trainer))
    made_of = as_made(rendered(directory), nodes=2)
    of_pod = container(made_of)
    if "as it would" in operator:
        of_pod["args"][:] = of_pod["args"][-1:]
    find(made_of, "Job")["spec"]["template"]["spec"]["volumes"].append({"name": "notes", "emptyDir": {}})
    of_pod["volumeMounts"].append({"name": "notes", "mountPath": "/notes"})
    own_script(made_of, LOOP, "/notes")
    with cluster(made_of, tmp_path) as made:

        def notes(file: str) -> list[Path]:
            return [path for pod in made.pods for path in [tmp_path / pod.metadata["name"] / "volume-notes" / file]]

        def workers() -> list[dict[str, str]]:
            texts = [path.read_text() for path in notes("started.jsonl") if path.exists()]
            return [json.loads(text.splitlines()[-1])["env"] for text in texts if text.endswith("\n")]

        def train() -> bool:
            ready = [pod.ready for pod in made.job.pods.values()]
            return ready == [True, True] and [env["WORLD_SIZE"] for env in workers()] == ["2", "2"]

        made.until("two pods that train", train)
        ranks = sorted(env["RANK"] for env in workers())
        assert {env["TORCHELASTIC_RUN_ID"] for env in workers()} == {"train" if directory == "pytorchjob" else UID}
        for path in notes("finish"):
            path.touch()
        made.until("the job's end", lambda: made.job.over)
        made.until("the end of all pods", lambda: not made.job.pods)
        assert made.job.over == "Complete"
        assert ranks == ["0", "1"]
        assert ("PET_MASTER_ADDR has no effect" in made.outputs()) is (operator == "trainer")


class Rounds:
    """Worlds of ``scripts/loop.py``, whose notes are on the pods' shared volume."""

    def __init__(self, directory: Path) -> None:
        self.notes = directory / "claims" / "train" / "notes"
        self.notes.mkdir(parents=True)

    def of(self, world: int) -> list[int]:
        """The round of each worker that was started in a world of this size."""
        path = self.notes / "started.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line)["env"] for line in lines if line.endswith("\n")]
        return [int(env["ELASTIC_LAUNCH_ROUND"]) for env in found if env["WORLD_SIZE"] == str(world)]

    def complete(self, world: int, after: int) -> bool:
        """Whether all workers of a later round of this size have started."""
        found = self.of(world)
        return max(found, default=0) > after and found.count(max(found)) == world


@needs_kubectl
@pytest.mark.soak
def test_with_the_record_in_etcd_the_pod_that_leads_is_lost_as_any_other_is(tmp_path: Path) -> None:
    """The overlay's three members form a cluster; each index succeeds, since latecomers learn how the run ended."""
    manifests = rendered("overlays/etcd")
    find(manifests, "Job")["spec"] |= {"completions": 3, "parallelism": 3}
    own_script(manifests, LOOP, "/checkpoints/notes")
    rounds = Rounds(tmp_path)
    with cluster(manifests, tmp_path) as made:
        made.until("members that are a cluster", lambda: [pod.ready for pod in made.kept] == [True] * 3)
        made.until("three pods that train", lambda: rounds.complete(3, 0))
        leads = next(pod for pod in made.pods if re.search(r"round \d+ formed in ", pod.output))
        number = max(rounds.of(3))
        leads.lose()
        made.until("another that leads", lambda: any("leads the run (term 2)" in pod.output for pod in made.pods))
        made.until("three again", lambda: rounds.complete(3, number))
        (rounds.notes / "finish").touch()
        made.until("the job's end", lambda: made.job.over)
        assert (made.job.over, made.job.succeeded) == ("Complete", {0, 1, 2})
        assert [pod.restarts for pod in made.kept] == [0] * 3


@needs_kubectl
@pytest.mark.slow
def test_with_the_record_on_three_pods_each_that_leads_is_lost_as_any_other_is(tmp_path: Path) -> None:
    """A replacement has another address and no file: the second loss leaves a majority only if it votes again."""
    manifests = rendered("overlays/voters")
    own_script(manifests, LOOP, "/checkpoints/notes")
    rounds = Rounds(tmp_path)

    def leader(after: int = 0) -> tuple[int, Pod] | None:
        """The last leader and its term: one that could not be sure of a majority in time has a term, too."""
        terms = [(int(x), pod) for pod in made.pods for x in re.findall(r"leads the run \(term (\d+)\)", pod.output)]
        return max((x for x in terms if x[0] > after), key=lambda x: x[0], default=None)

    with cluster(manifests, tmp_path) as made:
        made.until("four pods that train", lambda: rounds.complete(4, 0))
        for _ in range(2):
            number = max(rounds.of(4))
            term, leads = made.until("a leader", leader)
            leads.lose()
            made.until("another that leads", lambda term=term: leader(term))
            made.until("four again", lambda number=number: rounds.complete(4, number))
        (rounds.notes / "finish").touch()
        made.until("the job's end", lambda: made.job.over)
        assert made.job.over == "Complete"
        fourth = next(pod for pod in made.pods if pod.hostname == "train-3")
        assert "not one of the 3 hosts that keep the run's record together" in fourth.output


@needs_kubectl
def test_a_plain_script_is_asked_to_save_before_its_pod_ends(tmp_path: Path) -> None:
    """The hook of the overlay comes before SIGTERM, and the message of the end is where kubectl looks for it."""
    manifests = rendered("overlays/plain-script")
    of_pod = container(manifests)
    hook = of_pod["lifecycle"]["preStop"]["exec"]["command"]
    hook[-1] = hook[-1].replace("sleep 20", "sleep 1")
    of_pod["args"][of_pod["args"].index("2:4")] = "1:4"
    find(manifests, "Job")["spec"] |= {"completions": 1, "parallelism": 1}
    own_script(manifests, str(Path(LOOP).with_name("saving.py")), "/checkpoints/notes")
    notes = tmp_path / "claims" / "train" / "notes"
    with cluster(manifests, tmp_path) as made:
        made.until("a pod that trains", lambda: notes.exists() and 0 in made.job.pods and made.job.pods[0].ready)
        made.job.pods[0].terminate()
        made.until("its end", lambda: made.pods[0].exit_code is not None)
        assert made.pods[0].exit_code == 143, made.outputs()
        assert made.job.decisions == [(0, 143, "Ignore")]
        assert notes.read_text() == "started\nUSR1\nTERM\n"
        assert made.pods[0].message.startswith("exit code 143: stopped by SIGTERM")
        assert made.pods[0].events == []


def test_the_script_of_the_example_trains_and_saves(job: Job) -> None:
    script, checkpoints = str(EXAMPLES / "script" / "train.py"), job.directory / "checkpoints"
    env = {"STEPS": "3", "CHECKPOINT": str(checkpoints)}
    agent = job.launch("--standalone", "--nproc", "2", command=[script], env=env)
    assert agent.wait(90) == 0, agent.output
    assert re.search(r"^trained 3 steps on 2 workers: weights [0-9a-f]{16}$", agent.output, re.MULTILINE)
    assert len(list(checkpoints.glob("step-3.*/manifest.json"))) == 1


def one_pod(command: list[str], **fields: Any) -> list[Manifest]:
    """A job of one pod that runs another command instead of elastic-launch."""
    (job,) = documents(EXAMPLES / "base" / "job.yaml")
    job["spec"] |= {"completions": 1, "parallelism": 1}
    template = job["spec"]["template"]["spec"]
    template |= {"volumes": [], **fields}
    bare = {"name": "train", "command": command, "volumeMounts": [], "env": []}
    template["containers"] = [bare | fields.pop("container", {})]
    return [job]


def test_the_stand_in_makes_the_root_read_only_on_request(tmp_path: Path) -> None:
    tries = "for f in /x /usr/x /etc/x /tmp/x /dev/termination-log; do touch $f 2>/dev/null && echo $f; done"
    command = ["sh", "-c", tries]
    strict = {"securityContext": {"readOnlyRootFilesystem": True}, "volumeMounts": [{"name": "t", "mountPath": "/tmp"}]}
    manifests = one_pod(command, volumes=[{"name": "t", "emptyDir": {}}], container=strict)
    with cluster(manifests, tmp_path) as made:
        made.until("its end", lambda: made.pods and made.pods[0].exit_code is not None)
        assert made.pods[0].output.split() == ["/tmp/x", "/dev/termination-log"]


def test_the_stand_in_kills_processes_that_do_not_end_in_their_grace(tmp_path: Path) -> None:
    """If a hook takes all of the grace period, SIGTERM still gets two seconds."""
    deaf = ["sh", "-c", "trap 'echo told' TERM; echo up; while :; do sleep 0.1; done"]
    hook = {"lifecycle": {"preStop": {"exec": {"command": ["sleep", "100"]}}}}
    with cluster(one_pod(deaf, terminationGracePeriodSeconds=1, container=hook), tmp_path) as made:
        made.until("its start", lambda: made.pods and "up" in made.pods[0].output)
        made.job.pods[0].terminate()
        made.until("its end", lambda: made.pods[0].exit_code is not None)
        assert (made.pods[0].exit_code, made.pods[0].output) == (137, "up\ntold\n")
        assert made.pods[0].events == ["FailedPreStopHook"]


def test_the_stand_in_restarts_a_container_with_back_off_at_the_same_address(tmp_path: Path) -> None:
    counts = ["sh", "-c", "echo run; test -e /tmp/x && echo kept; touch /tmp/x; exit 3"]
    with cluster(one_pod(counts, restartPolicy="OnFailure"), tmp_path) as made:
        made.until("three starts", lambda: made.pods and made.pods[0].output == "run\n" * 3)
        (pod,) = made.pods
        assert pod.restarts >= 2
        assert pod.events[:2] == ["Back-off restarting failed container, exit code 3"] * 2


def test_the_stand_in_ends_the_job_whose_pods_fail_too_often(tmp_path: Path) -> None:
    manifests = one_pod(["sh", "-c", "getent hosts train-0; exit 95"])
    find(manifests, "Job")["spec"] |= {"backoffLimitPerIndex": 1, "maxFailedIndexes": 0}
    with cluster(manifests, tmp_path) as made:
        made.until("the job's end", lambda: made.job.over)
        assert made.job.over == "Failed"
        assert made.job.decisions == [(0, 95, "Count")] * 2
        assert [re.split(r"\s+", pod.output.strip()) for pod in made.pods] == [
            [pod.host.address, "train-0.train.default.svc.cluster.local", "train-0"] for pod in made.pods
        ]

"""The image of docker/Dockerfile and the topology of docker/compose.yaml, as real containers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from containers import Compose, Impossible, Podman, up
from harness import read_lines, wait_for

PATIENCE = 200.0
"""Seconds for operations that take about ten on an idle machine."""

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """With the image built."""
    podman = Podman(tmp_path_factory.mktemp("podman"))
    try:
        podman.prepare()
        podman.build()
        yield podman
    except Impossible as error:
        pytest.skip(f"containers cannot be run here: {error}")
    finally:
        podman.close()


@pytest.fixture(scope="module")
def alone(podman: Podman) -> dict[str, Any]:
    """The result of the compose file's training by two workers in one container: any user, nothing but volumes."""
    image = ["--user", "54321", "--read-only", "--volume", "/logs", "--volume", "/checkpoints", podman.image]
    training = ["--nnodes", "1", "--nproc", "2", "/examples/digits/train.py", "--exact", "--checkpoint", "/checkpoints"]
    return _result(podman("run", "--rm", "--network", "none", *podman.mounts, *image, *training, timeout=200))


def _result(output: str) -> dict[str, Any]:
    (line,) = [line for line in output.splitlines() if line.startswith("{")]
    return dict(json.loads(line))


def test_the_image_trains_and_its_exit_codes_are_the_launchers(podman: Podman, alone: dict[str, Any]) -> None:
    assert alone["worlds"] == [2]
    image = ["run", "--rm", "--network", "none", *podman.mounts, podman.image]
    failed = podman.run(*image, "--max-restarts", "0", "--no-python", "sh", "-c", "echo $PPID; id -u; exit 7")
    assert failed.returncode == 7
    assert failed.stdout.split() == ["1", "10001"]  # the agent is process 1
    assert "usage" in podman(*image, "elasticctl", "--help").lower()


@pytest.mark.soak
def test_a_run_continues_when_containers_are_killed_started_and_stopped(
    podman: Podman, alone: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with up(podman, tmp_path_factory.mktemp("compose"), STEP_TIME="1") as compose:
        run = _Run(compose)
        names = run.trains(4)
        leader = run.leader()

        podman("kill", compose.container(leader))
        names = run.trains(3)
        assert leader not in names
        assert compose.exit_code(leader) == 137

        compose("start", leader)
        assert leader in run.trains(4)

        stopped, other = sorted({*names} - {run.leader()})
        podman("stop", compose.container(stopped))
        assert compose.exit_code(stopped) == 143
        assert "leaves (SIGTERM); the workers stop after the same step" in compose.said(stopped)
        assert stopped not in run.trains(3)

        compose.hurry(other)
        left = [node for node in compose.nodes if node != stopped]
        assert [compose.exit_code(node) for node in left] == [0, 0, 0], run.outputs()
        result = _result("".join(compose.said(node) for node in left))
        assert result["worlds"][-3:] == [3, 4, 3]
        assert result["restarts"] == 0
        assert result["weights_sha256"] == alone["weights_sha256"]


class _Run:
    """The nodes' events; a node's name begins with that of its container."""

    def __init__(self, compose: Compose) -> None:
        self._compose = compose
        self._logs = compose.logs()
        self._seen = 0

    def _rounds(self) -> list[tuple[int, list[str], str]]:
        """Number, nodes and leader of each round."""
        found = []
        for path in self._logs.glob("first/events-*.jsonl"):
            events = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            leader = path.stem.split("-")[1]
            found += [(e["round"], e["nodes"], leader) for e in events if e["event"] == "round_formed"]
        return sorted(found)

    def trains(self, size: int) -> list[str]:
        """Wait until another round of that size has done a step; return its nodes."""

        def probe() -> list[str]:
            rounds = self._rounds()
            number, nodes, _ = rounds[-1] if rounds else (0, [], "")
            if number <= self._seen or len(nodes) != size or not self._trained(number):
                return []
            self._seen = number
            return [name.split("-")[0] for name in nodes]

        try:
            return wait_for(f"a round of {size} after round {self._seen}", probe, PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.outputs()}") from None

    def _trained(self, number: int) -> bool:
        lines = [line for path in (self._logs / "first").glob("events-*.jsonl") for line in read_lines(path)]
        return number in {line["round"] for line in lines if line["event"] == "first_step"}

    def leader(self) -> str:
        return self._rounds()[-1][2]

    def outputs(self) -> str:
        return "\n".join(f"--- {node}\n{self._compose.said(node)}" for node in self._compose.nodes)

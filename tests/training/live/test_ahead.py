"""Workers that are started ahead of a place in a round: they join it at their first use of the world."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SCRIPTS, Agent, read_lines, run_script, wait_for
from played_agent import PlayedAgent
from torch import nn

import elastic_launch as el
from elastic_launch import contract as c
from elastic_launch import dist
from elastic_launch.errors import ElasticLaunchError, UsageError
from elastic_launch.training.stopping import DrainedExit

SCRIPT = SCRIPTS / "ahead.py"


# In this process, as the only worker.


def train(run: el.Run, steps: int = 2) -> None:
    model = nn.Linear(4, 4)
    loader = el.ElasticLoader(torch.randn(8, 4), el.GlobalBatch(8, 4))
    for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), 0.1), until=f"{steps}ba"):
        for x in step:
            step.backward(step.model(x).square().mean())
        step.update()


def fit(run: el.Run) -> None:
    model = nn.Linear(4, 4)
    loader = el.ElasticLoader([(torch.randn(4), torch.randn(4))] * 8, el.GlobalBatch(8, 4))
    loss_fn = nn.functional.mse_loss
    el.Trainer(run, model, torch.optim.SGD(model.parameters(), 0.1), loader, loss_fn=loss_fn).fit("1ba")


USES: dict[str, Callable[[el.Run], object]] = {
    "rank": lambda run: run.rank,
    "world size": lambda run: run.world_size,
    "worlds": lambda run: run.worlds,
    "restarts": lambda run: run.restarts,
    "grad_accum": lambda run: run.grad_accum(el.GlobalBatch(8, 4)),
    "steps": train,
    "fit": fit,
    "boundary": lambda run: run.boundary(),
    "dist rank": lambda run: dist.get_global_rank(),
    "dist world size": lambda run: dist.get_world_size(),
    "dist node rank": lambda run: dist.get_node_rank(),
    "dist barrier": lambda run: dist.barrier(),
    "dist initialize": lambda run: dist.initialize_dist(),
}


@pytest.mark.parametrize("use", USES)
def test_a_first_use_of_the_world_waits_for_a_place_and_joins_its_round(agent: PlayedAgent, use: str) -> None:
    with el.session() as run:
        assert run.device.type in ("cpu", "cuda")
        assert (dist.get_local_rank(), dist.get_local_world_size()) == (0, 1)
        assert (run.start_reason, run.resumed_step, run.stopped) == ("first", 0, False)
        assert not agent.connected(0)
        USES[use](run)
        worker = agent.worker(0)
        assert worker.said(c.WorkerHello) == [c.WorkerHello(0, 0, 0)]
        assert (run.rank, run.world_size, run.world.round, run.worlds) == (0, 1, 7, [1])
        assert dist.is_initialized()
        assert (os.environ["RANK"], os.environ[c.ENV_ROUND], c.ENV_AHEAD in os.environ) == ("0", "7", False)
        assert run.start_reason == "membership"
    wait_for("the end of the connection", lambda: worker.gone)
    assert len(worker.said(c.Ahead)) == 1
    assert not torch.distributed.is_initialized()


def test_a_script_with_its_own_loop_resumes_in_its_round(agent: PlayedAgent, tmp_path: Path) -> None:
    with el.session() as run:
        run.register("model", nn.Linear(1, 1))
        assert not agent.connected(0)
        assert run.resume(el.Checkpoint(tmp_path, every=100)) == 0
        assert not run.boundary(1)
    assert agent.worker(0).wait(c.Ready).live is False


def test_a_script_without_a_session_waits_too(agent: PlayedAgent) -> None:
    assert dist.get_local_rank() == 0
    assert not agent.connected(0)
    assert dist.get_world_size() == 1
    wait_for("the end of the connection", lambda: agent.worker(0).gone)
    with el.session() as run:
        train(run)
    assert agent.worker(0).said(c.WorkerHello) == [c.WorkerHello(7, 0, 0)]


def test_the_first_step_of_each_round_is_reported_at_once(agent: PlayedAgent) -> None:
    with el.session() as run:
        train(run, steps=5)
    wait_for("the end of the connection", lambda: agent.worker(0).gone)
    assert agent.worker(0).said(c.StepDone)[0] == c.StepDone(1)
    assert agent.worker(0).said(c.Ready)[0].live


def test_a_process_that_uses_no_world_ends_without_one(agent: PlayedAgent) -> None:
    with el.session() as run:
        run.register("model", nn.Linear(1, 1))
        run.request_stop()
    assert not agent.connected(0)


def exchanges_before(run: el.Run) -> None:
    dist.all_reduce(torch.ones(1))
    train(run)


def exchanges_between(run: el.Run) -> None:
    model = nn.Linear(4, 4)
    loader = el.ElasticLoader(torch.randn(8, 4), el.GlobalBatch(8, 4))
    for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), 0.1), until="3ba"):
        for x in step:
            step.backward(step.model(x).square().mean())
        step.update()
        if step.number == 2:
            dist.all_reduce(torch.ones(1))


def exchanges_in_the_head(run: el.Run) -> None:
    model = nn.Linear(4, 4)
    loader = el.ElasticLoader(torch.randn(8, 4), el.GlobalBatch(8, 4))
    for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), 0.1), until="3ba"):
        dist.all_reduce(torch.ones(1))
        for x in step:
            step.backward(step.model(x).square().mean())
        step.update()


def makes_a_group(run: el.Run) -> None:
    assert run.rank == 0
    torch.distributed.new_group([0])
    train(run)


def calls_a_function(run: el.Run) -> None:
    run.on_save(lambda: None)
    train(run)


def trains_twice(run: el.Run) -> None:
    train(run)
    train(run)


@pytest.mark.parametrize(
    ("script", "live"),
    [
        (train, [True]),
        (exchanges_before, [False]),
        (exchanges_between, [True, False]),
        (exchanges_in_the_head, [True, False]),
        (makes_a_group, [False]),
        (calls_a_function, [False]),
        (trains_twice, [True, False]),
    ],
)
def test_a_script_that_another_process_could_not_meet_at_the_same_place_ends_with_its_round(
    agent: PlayedAgent, script: Callable[[el.Run], object], live: list[bool]
) -> None:
    with el.session() as run:
        script(run)
    worker = agent.worker(0)
    wait_for("the end of the connection", lambda: worker.gone)
    said = [ready.live for ready in worker.said(c.Ready)]
    assert said[: len(live)] == live
    assert not any(said[len(live) :])


def test_a_session_that_is_not_to_be_live_ends_with_its_round(agent: PlayedAgent) -> None:
    with el.session(live=False) as run:
        train(run)
    worker = agent.worker(0)
    wait_for("the end of the connection", lambda: worker.gone)
    assert not any(ready.live for ready in worker.said(c.Ready))


def test_a_session_refuses_an_unknown_value_of_live() -> None:
    with pytest.raises(UsageError, match="session\\(live='gpu'\\) is not known"), el.session(live="gpu"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("how", ["exit", "the agent is gone"])
def test_a_process_that_gets_no_place_exits_as_after_a_drain(agent: PlayedAgent, how: str) -> None:
    agent.on_ahead = lambda worker: worker.tell(c.Exit()) if how == "exit" else agent.hang_up(worker)
    stopped = False

    def script() -> None:
        nonlocal stopped
        with el.session() as run:
            try:
                train(run)
            finally:
                stopped = run.stopped and run.draining

    with pytest.raises(DrainedExit) as caught:
        script()
    assert (caught.value.code, stopped) == (0, True)
    assert not agent.worker(0).said(c.Drained)


def test_an_agent_that_is_not_there_is_an_error(agent: PlayedAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(c.ENV_SOCKET, "@there-is-no-such-agent")
    with pytest.raises(ElasticLaunchError, match=r"started ahead .* its agent cannot be reached"), el.session() as run:
        train(run)


# Processes of their own.


class Training:
    """Workers that run ``scripts/ahead.py``."""

    def __init__(self, directory: Path, agent: PlayedAgent, *flags: str) -> None:
        self.directory, self.agent, self._flags = directory, agent, flags
        self.limit(0)

    def limit(self, step: int) -> None:
        """Let the training go on until a step."""
        (self.directory / "limit.new").write_text(str(step))
        (self.directory / "limit.new").replace(self.directory / "limit")

    def start(self, environment: dict[str, str], *flags: str) -> Agent:
        return self.agent.start(environment, self.directory, SCRIPT, str(self.directory), *self._flags, *flags)

    def steps(self, number: int) -> list[dict[str, Any]]:
        return [x for x in read_lines(self.directory / "steps.jsonl") if x["round"] == number]

    def trains(self, number: int, step: int) -> None:
        wait_for(f"step {step} in round {number}", lambda: step in [x["step"] for x in self.steps(number)], 60)

    def drain(self, local_rank: int) -> None:
        """Have the training stop after a step, and its worker wait for another place."""
        worker = self.agent.worker(local_rank)
        drained, suspended = len(worker.said(c.Drained)), len(worker.said(c.Suspended))
        worker.tell(c.Stop("membership"))
        self.limit(100)
        worker.wait(c.Drained, drained + 1)
        self.limit(0)
        worker.wait(c.Suspended, suspended + 1)

    def end(self, *processes: Agent) -> list[dict[str, Any]]:
        """Let the training end, and return each rank's result."""
        self.limit(100)
        for process in processes:
            assert process.wait(60) == 0, process.output
        return [json.loads((self.directory / f"result-{rank}.json").read_text()) for rank in range(len(processes))]


@pytest.fixture
def node(forking: None) -> Iterator[PlayedAgent]:
    """An agent with up to three workers."""
    node = PlayedAgent(3)
    yield node
    node.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "limit").write_text("100")
    run_script(str(SCRIPT), str(directory))
    return str(json.loads((directory / "result-0.json").read_text())["hash"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        [],
        *(
            pytest.param(x, marks=pytest.mark.soak)
            for x in (["--trainer", "--default-mode"], ["--trainer"], ["--early"], ["--default-mode"])
        ),
    ],
    ids=" ".join,
)
def test_a_worker_ahead_joins_a_running_training_with_its_state(
    node: PlayedAgent, tmp_path: Path, undisturbed: str, flags: list[str]
) -> None:
    training = Training(tmp_path, node, *flags)
    survivor = training.start(node.environment(1, 0, 0, 1))
    new = training.start(node.ahead(1), "--seed", "9")
    node.worker(1).wait(c.Ahead)
    training.limit(4)
    training.trains(1, 4)  # the others do not wait for it
    training.drain(0)
    node.place(2, 2, [0, 1])
    assert {node.worker(rank).wait(c.Ready, 2 - rank).step for rank in (0, 1)} == {training.steps(1)[-1]["step"]}
    first, second = training.end(survivor, new)
    steps = [x["step"] for x in training.steps(1)]
    assert steps == [*range(1, len(steps) + 1)]
    for rank, process in enumerate((survivor, new)):
        noted = [x for x in training.steps(2) if x["rank"] == rank]
        assert [x["step"] for x in noted] == [*range(len(steps) + 1, 21)]
        assert {(x["pid"], x["world"], x["RANK"]) for x in noted} == {(process.process.pid, 2, str(rank))}
        told = [x.step for x in node.worker(rank).said(c.StepDone)]
        assert (len(steps) + 1 in told) == (rank == 0), "the first step in each round is reported at once"
    assert first == second
    assert (first["worlds"], first["resumed"]) == ([1, 2], len(steps))
    assert (first["hash"] == undisturbed) == ("--default-mode" not in flags)


@pytest.mark.slow
def test_a_worker_ahead_whose_round_breaks_as_it_joins_waits_for_another_place(
    node: PlayedAgent, tmp_path: Path, undisturbed: str
) -> None:
    """First while it waits for the others; then, with them, for one that has joined and is killed before its loop."""
    training = Training(tmp_path, node)
    survivor = training.start(node.environment(1, 0, 0, 1))
    new = training.start(node.ahead(1), "--seed", "9")
    late = training.start(node.ahead(2), "--early", "--pause")
    for local_rank in (1, 2):
        node.worker(local_rank).wait(c.Ahead)
    training.limit(4)
    training.trains(1, 4)
    training.drain(0)

    node.place(2, 2, [1])  # alone in a world of two
    wait_for("the new worker at the store", lambda: node.stores[2].num_keys() > 1)
    node.worker(1).tell(c.Suspend(2, "membership"))
    node.worker(1).wait(c.Suspended)

    node.place(3, 3, [0, 1, 2])
    wait_for("the late one's pause", (tmp_path / "pauses").exists)
    late.signal(signal.SIGKILL)
    for local_rank in (0, 1):
        node.worker(local_rank).wait(c.Disconnected)
        node.worker(local_rank).tell(c.Suspend(3, "crash"))
    for local_rank, times in ((0, 2), (1, 2)):
        node.worker(local_rank).wait(c.Suspended, times)
    node.place(4, 2, [1, 0])
    results = training.end(new, survivor)
    assert results[0] == results[1]
    assert results[0]["hash"] == undisturbed
    assert results[0]["resumed"] == training.steps(1)[-1]["step"]
    assert {x["rank"] for x in training.steps(4) if x["pid"] == new.process.pid} == {0}


@pytest.mark.slow
def test_a_worker_ahead_that_has_got_the_state_is_a_source_of_it(
    node: PlayedAgent, tmp_path: Path, undisturbed: str
) -> None:
    """The only process that had the state is killed once the new worker has it."""
    training = Training(tmp_path, node)
    survivor = training.start(node.environment(1, 0, 0, 1))
    new = training.start(node.ahead(1), "--seed", "9")
    node.worker(1).wait(c.Ahead)
    training.limit(4)
    training.trains(1, 4)
    training.drain(0)
    node.place(2, 2, [0, 1])
    node.worker(1).wait(c.Ready)
    survivor.signal(signal.SIGKILL)
    training.limit(100)
    node.worker(1).wait(c.Disconnected)
    node.worker(1).tell(c.Suspend(2, "crash"))
    node.worker(1).wait(c.Suspended)
    node.place(3, 1, [1])
    (result,) = training.end(new)
    assert result["hash"] == undisturbed
    assert node.worker(1).said(c.StepDone), "the first worker of a node reports steps, whatever its local rank"


@pytest.mark.slow
def test_a_script_that_reads_the_rank_itself_fails_by_its_name(node: PlayedAgent, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(int(os.environ['LOCAL_RANK']))\nrank = int(os.environ['RANK'])\n")
    process = node.start(node.ahead(1), tmp_path, script)
    assert process.wait(60) == 1
    assert process.output.startswith("1\n")
    assert "int(os.environ['RANK'])" in process.output
    assert "'unplaced'" in process.output

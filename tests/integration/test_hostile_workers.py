"""Workers run the user's code: whatever they send or leave behind, their agent survives, or reports why not."""

from __future__ import annotations

from harness import SCRIPTS, Job, alive

FLAGS = ["--standalone", "--no-warm", "--max-restarts", "0"]


def test_nothing_that_a_worker_sends_or_leaves_ends_its_agent(job: Job) -> None:
    agent = job.launch(*FLAGS, command=[str(SCRIPTS / "hostile.py"), str(job.work)])
    assert agent.wait(60) == 3, agent.output
    heard = (job.work / "heard").read_text().splitlines()
    assert len(heard) == 11
    assert all(line.endswith(": True") for line in heard), heard
    assert agent.output.count("a worker's connection is closed") == len(heard), "one warning for each"
    assert "Exception in thread" not in agent.output


def test_an_agent_whose_thread_dies_ends_its_workers_and_reports_it(job: Job) -> None:
    command = [str(SCRIPTS / "greeting.py"), str(job.work)]
    agent = job.program([str(SCRIPTS / "thread_dies.py"), "--log-dir", str(job.logs), *FLAGS, *command])
    assert agent.wait(60) == 1, agent.output
    said = "exit code 1: internal error: the agent's thread 'control' failed: ZeroDivisionError: a fault of the agent's"
    assert said in agent.output
    (worker,) = job.started()
    assert not alive(worker["pid"])

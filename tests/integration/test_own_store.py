"""A control store of another package: its entry point is all that the launcher needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness import Job
from shelf_store import Shelf, installed

CONTROL = "import sys; from elastic_launch.cli.elasticctl import main; sys.exit(main())"


def test_a_run_keeps_its_record_in_a_store_of_another_package(job: Job, tmp_path: Path) -> None:
    env = {"PYTHONPATH": installed(tmp_path)}
    with Shelf() as shelf:
        where = ("--rdzv-backend", "shelf", "--rdzv-endpoint", shelf.address, "--rdzv-id", "run")

        def controls(*words: str) -> str:
            command = [sys.executable, "-c", CONTROL, *words, *where]
            done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=100)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        flags = ("--nnodes", "2", "--nproc", "1", *where)
        agents = [job.launch(*flags, "--node-id", name, name=name, env=env) for name in "ab"]
        job.world(2)
        assert f"the shelf at {shelf.address} has the records of runs: 1" in controls("doctor")
        assert "a" in controls("status")
        job.finish()
        assert [agent.wait() for agent in agents] == [0, 0]
        assert '"end":{"code":0' in shelf.values["run"]


def test_a_store_that_is_not_installed_is_not_supported(job: Job) -> None:
    agent = job.launch("--rdzv-backend", "shelf", "--rdzv-endpoint", "127.0.0.1:1", "--rdzv-id", "run")
    assert agent.wait() == 2
    assert "--rdzv-backend shelf is not supported" in agent.output

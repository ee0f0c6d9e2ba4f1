"""Arguments of a training that differ between ranks: an error on all ranks that names them, before the first step."""

from __future__ import annotations

import json

from harness import SCRIPTS, Job

UNLIKE = str(SCRIPTS / "guards" / "unlike.py")

SAID = {
    "length": "rank 1 has dataset length 63, rank 0 has 64",
    "batch": "rank 1 has global batch 32, rank 0 has 16",
    "micro": "rank 1 has micro-batch 8, rank 0 has 4",
    "seed": "rank 1 has seed 1, rank 0 has 0",
    "shuffle": "rank 1 has order of samples (as a hash) ",
    "evaluation": "rank 1 has micro-batch 8, rank 0 has 4",
    "until": "rank 1 has until, in steps 3, rank 0 has 2",
    "exact": "rank 1 has exact True, rank 0 has False",
    "checkpoint": "rank 1 has checkpoint None, rank 0 has a directory, every=10min, keep=3, ",
    "scheduler": "has saved objects model, optimizer (SGD), rank 0 has model, optimizer (SGD), scheduler (StepLR)",
    "metrics": "rank 1 has metrics ['accuracy'], rank 0 has []",
    "buffers": "rank 1 has buffers {'*': 'last'}, rank 0 has {}",
    "nothing": "",
    "own loop": "rank 1 has width 1, rank 0 has 0",
}


def test_what_one_rank_was_given_otherwise_is_named_on_all(job: Job) -> None:
    agent = job.launch("--standalone", "--nproc", "2", command=[UNLIKE, str(job.directory)])
    assert agent.wait(60) == 0, agent.output
    for rank in range(2):
        said = json.loads((job.directory / f"rank-{rank}.json").read_text())
        assert said.keys() == SAID.keys()
        for kind, expected in SAID.items():
            assert expected in said[kind], kind
            assert bool(said[kind]) == bool(expected), kind

"""Arguments of a training that differ between ranks: an error on all ranks that names them, before the first step."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from harness import SCRIPTS, Job

from elastic_launch.errors import UsageError
from elastic_launch.training.ranks import same_arguments
from elastic_launch.training.ranks.same_arguments import NOT_COMPARED, check_same
from elastic_launch.training.ranks.world import World

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
    "sample": "rank 1 has sample 63 (as a hash; see compare_samples) ",
    "sample, not compared": "",
    "random": "",
    "time": "",
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
            assert ("give ElasticLoader(compare_samples=False)" in said[kind]) is (kind == "sample")
            assert bool(said[kind]) == bool(expected), kind


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("baaa", "rank 0 has sample 5 b, ranks 1, 2, 3 have a."),
        ("aabb", "ranks 2, 3 have sample 5 b, ranks 0, 1 have a."),
        ("acab", "rank 1 has sample 5 c, rank 3 has b, ranks 0, 2 have a."),
        ("aaaa", ""),
        ("ab?a", ""),
        (["1/2/3", "1/5/3", "4/5/3", "1/2/3"], ""),
        (["1/2/3", "1/6/4", "1/6/4", "7/8/9"], "rank 3 has sample 5 7, ranks 0, 1, 2 have 1."),
    ],
)
def test_the_ranks_that_differ_from_most_are_named(
    values: Sequence[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one rank does not know is not compared on any."""
    given = [{"seed": 1, "sample 5": NOT_COMPARED if value == "?" else value} for value in values]
    texts = [json.dumps({name: str(value) for name, value in one.items()}).encode() for one in given]
    monkeypatch.setattr(same_arguments, "are_same", lambda numbers: [False])
    monkeypatch.setattr(same_arguments, "bytes_of_all", lambda world, mine: texts)
    world = World(rank=0, world_size=4)
    if not said:
        check_same(world, given[0])
        return
    with pytest.raises(UsageError) as found:
        check_same(world, given[0])
    assert found.value.message == f"The ranks have different samples: {said}"
    assert "compare_samples=False" in str(found.value)

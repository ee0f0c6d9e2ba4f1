"""What training scripts do with torch, in a forked worker and in an executed one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import SCRIPTS
from warm_processes import WAYS, Starter, both_ways, config_for

SCRIPT = str(SCRIPTS / "torch_things.py")


@pytest.fixture(scope="module")
def starters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Starter]]:
    """With as many threads for OpenMP as there are cores, which is the harder case."""
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        # Neither a trial of the processor's vector instructions nor headers for later compilations are compiled.
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }
    with both_ways(config_for(tmp_path_factory.mktemp("logs"), SCRIPT, preload=()), env) as starters:
        for starter in starters.values():
            starter.patience = 300.0  # processes that are spawned import torch, and a compiler takes long beside others
        starters["warm"].learn(SCRIPT, "draw", "compiled", "step")
        yield starters


@pytest.mark.slow
@pytest.mark.parametrize(
    "things",
    [
        ("draw", "threads", "compiled", "step", "recorded"),
        *(pytest.param((x,), marks=pytest.mark.soak) for x in ("loader", "spawned")),
    ],
    ids=" ".join,
)
def test_torch_does_in_a_forked_worker_what_it_does_in_an_executed_one(
    things: tuple[str, ...], starters: dict[str, Starter], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Several in one process, which has to import torch, and for two of them its compiler."""
    env = {"TORCHELASTIC_ERROR_FILE": str(tmp_path_factory.mktemp("errors") / "error.json")}
    ends = {way: starters[way].run(SCRIPT, *things, env=env) for way in WAYS}
    assert ends["warm"].code == 0, ends["warm"].stderr
    told = {way: (end.code, sorted(end.stdout.splitlines()), _warnings(end.stderr)) for way, end in ends.items()}
    assert told["warm"] == told["exec"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_what_torch_compiles_by_default_is_what_an_executed_worker_compiles(starters: dict[str, Starter]) -> None:
    """The forked worker runs first, without a cache."""
    cache = Path(starters["warm"].env["TORCHINDUCTOR_CACHE_DIR"])
    assert not list(cache.rglob("*.so"))
    ends = {way: starters[way].run(SCRIPT, "inducted") for way in WAYS}
    assert ends["warm"].code == 0, ends["warm"].stderr
    assert list(cache.rglob("*.so"))
    assert (ends["warm"].code, ends["warm"].stdout) == (ends["exec"].code, ends["exec"].stdout)


@pytest.mark.slow
def test_forked_workers_draw_different_numbers(starters: dict[str, Starter]) -> None:
    first, second = (starters["warm"].run(SCRIPT, "draw").stderr.split() for _ in range(2))
    assert len(first) == len(second) == 3
    assert not set(first) & set(second)


def _warnings(text: str) -> list[str]:
    return sorted(set(re.findall(r"\w+Warning", text)))

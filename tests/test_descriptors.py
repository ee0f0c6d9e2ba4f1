"""Descriptors: the agent's own limit, that of its children, and its behaviour when none is left."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elastic_launch.errors import ElasticLaunchError
from elastic_launch.system import descriptors


@pytest.fixture(autouse=True)
def limit() -> Iterator[tuple[int, int]]:
    """Restore what a test changes; meanwhile the process has a soft limit below the hard one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = (min(1024, before[1] - 1), before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, low)
    yield low
    descriptors.release()
    descriptors._given, descriptors._told = None, False
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def child() -> str:
    return subprocess.run(["sh", "-c", "ulimit -Sn"], capture_output=True, text=True, timeout=60).stdout.strip()


def test_the_limit_is_raised_for_this_process_and_not_for_those_it_starts(limit: tuple[int, int]) -> None:
    soft, hard = limit
    with descriptors.given_limit():
        assert child() == str(soft)
    descriptors.raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    with descriptors.given_limit():
        assert child() == str(soft)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


def test_no_limit_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    without = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: without)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    monkeypatch.setattr(descriptors, "_given", None)
    descriptors.raise_limit()
    assert asked == [without]
    try:
        descriptors.reserve()
        assert len(descriptors._held) == descriptors.RESERVE
    finally:
        descriptors.release()


def test_an_agent_that_cannot_have_a_link_to_each_node_is_refused(limit: tuple[int, int]) -> None:
    _, hard = limit
    descriptors.raise_limit(nodes=hard - descriptors.FEWEST)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    with pytest.raises(ElasticLaunchError, match=f"up to {hard} nodes it needs {hard + descriptors.FEWEST}") as caught:
        descriptors.raise_limit(nodes=hard)
    assert "smaller maximum to --nnodes" in caught.value.hint


def test_the_limit_is_not_lowered_below_descriptors_in_use(limit: tuple[int, int]) -> None:
    descriptors.raise_limit()
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(limit[0])]
    try:
        with descriptors.given_limit():
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit[1]
    finally:
        for descriptor in many:
            os.close(descriptor)


def test_the_reserve_is_available_when_no_other_descriptor_is(
    limit: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    descriptors.reserve()
    highest = os.open(os.devnull, os.O_RDONLY)
    os.close(highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, limit[1]))
    with pytest.raises(OSError, match="Too many open files") as caught:
        os.open(os.devnull, os.O_RDONLY)
    assert descriptors.scarce(caught.value)
    assert descriptors.scarce(caught.value)
    freed = [os.open(os.devnull, os.O_RDONLY) for _ in range(descriptors.RESERVE)]
    for descriptor in freed:
        os.close(descriptor)
    assert len([text for text in caplog.messages if "tries again" in text]) == 1
    assert not descriptors.scarce(OSError(errno.ENOENT, "no"))


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -Hn"),
    ],
)
def test_a_limit_that_is_reached_ends_with_its_remedy(error: Exception, remedy: str) -> None:
    with pytest.raises(ElasticLaunchError, match=remedy), descriptors.shortage_told():
        raise error


def _limits_memory(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


@pytest.fixture
def memory_limited() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)[0]
    _limits_memory(2**46)
    yield
    _limits_memory(before)


@pytest.mark.usefixtures("memory_limited")
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_a_limit_on_memory_is_named_if_there_is_one(error: Exception) -> None:
    with pytest.raises(ElasticLaunchError, match=r"ulimit -v, which is 68719476736"), descriptors.shortage_told():
        raise error


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOENT, "no"), RuntimeError("bug"), ImportError("a.so: failed to map segment from shared object")],
)
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error.args[-1])), descriptors.shortage_told():
        raise error


def test_no_descriptor_is_taken_for_a_closed_standard_stream() -> None:
    code = (
        "import os; from elastic_launch.system.descriptors import standard_numbers_taken as taken\n"
        "os.close(0); os.close(2)\n"
        "with taken(): print(os.dup(1))\n"
        "print(os.dup(1))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["3", "0"]

"""Errors as objects: they pass between processes."""

from __future__ import annotations

import pickle

import pytest

from elastic_launch.errors import FINAL_NOTE, ElasticLaunchError, InternalError, LeasedError, StoreError, UsageError


class Refused(UsageError):
    def __init__(self, *, name: str) -> None:
        super().__init__(f"{name} is refused.", "Give another one.")
        self.name = name


@pytest.mark.parametrize(
    "error",
    [LeasedError("heard", 1.5), InternalError("a part failed"), StoreError("down", "wait"), Refused(name="a")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_another_process_gets_is_the_same(error: ElasticLaunchError) -> None:
    got = pickle.loads(pickle.dumps(error))
    assert type(got) is type(error)
    assert (str(got), got.args, vars(got)) == (str(error), error.args, vars(error))
    assert getattr(got, "__notes__", []) == ([FINAL_NOTE] if error.final else [])

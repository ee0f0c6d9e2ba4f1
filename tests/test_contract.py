"""What a worker finds in its environment: all that torchrun sets, and ours."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent as TorchAgent

from elastic_launch import contract as c
from elastic_launch.contract import Placement, worker_environment

PLACEMENT = Placement(
    rank=5,
    local_rank=1,
    group_rank=2,
    world_size=12,
    local_world_size=2,
    group_world_size=4,
    master_addr="fd00::1",
    master_port=29500,
)


def environment() -> dict[str, str]:
    return worker_environment(
        PLACEMENT,
        run_id="run",
        role="default",
        restarts=2,
        max_restarts=3,
        round_number=7,
        reason="node b lost: its connection closed",
        error_file="/logs/error.json",
        socket="@elastic-launch-1",
    )


def torchruns_names() -> set[str]:
    """The variables that the installed torch's agent and its process contexts set for a worker."""
    source = textwrap.dedent(inspect.getsource(TorchAgent._start_workers))
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            names |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return {str(name) for name in names if str(name).isupper()} | {"LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"}


def test_all_that_torchrun_sets_is_there() -> None:
    assert "TORCHELASTIC_RESTART_COUNT" in torchruns_names()
    assert torchruns_names() - set(environment()) == set()


def test_all_values() -> None:
    assert environment() == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "2",
        "NODE_RANK": "2",
        "ROLE_RANK": "5",
        "ROLE_NAME": "default",
        "WORLD_SIZE": "12",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "4",
        "ROLE_WORLD_SIZE": "12",
        "MASTER_ADDR": "fd00::1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/logs/error.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "ELASTIC_LAUNCH_ROUND": "7",
        "ELASTIC_LAUNCH_START_REASON": "node b lost: its connection closed",
        "ELASTIC_LAUNCH_SOCKET": "@elastic-launch-1",
    }


def test_a_users_choice_of_error_handling_is_kept() -> None:
    env = worker_environment(
        PLACEMENT,
        run_id="run",
        role="default",
        restarts=0,
        max_restarts=3,
        round_number=1,
        reason="first",
        error_file="x",
        nccl_async_error_handling="3",
    )
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_our_names_have_our_prefix() -> None:
    names = {name for name in environment() if name.startswith("ELASTIC_LAUNCH_")}
    assert names == {c.ENV_ROUND, c.ENV_START_REASON, c.ENV_SOCKET}


MESSAGES = [
    c.Hello(7, 5, 1),
    c.Ready(100, 900, 0.25),
    c.StepDone(101),
    c.Stored(2, 9, 101, 7, True, "/checkpoints", 3),
    c.Drained(102, 0.5),
    c.Slots(3, 0, 9, fetching=True),
    c.Fetched(1, 9),
    c.Use(1),
    c.Copied(101, 7, 1.5, "/checkpoints/step-101", "abc", 1000, "", ""),
    c.Stop("node b leaves"),
    c.Save(),
    c.Saved(7, "the disk is full"),
    c.Noted(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_its_line(message: c.Message) -> None:
    line = c.pack(message)
    assert line.count(b"\n") == 1
    assert c.unpack(line) == message


def test_every_message_has_an_example() -> None:
    assert {type(message) for message in MESSAGES} == set(c.Message.TYPES.values())


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"", "Expecting value"),
        (b"[]", "no message that is known"),
        (b"{}", "no message that is known"),
        (b'{"type": "explode"}', "no message that is known"),
        (b'{"type": ["stop"]}', "no message that is known"),
        (b'{"type": "stepdone"}', "StepDone.step is 'None', not of type int"),
        (b'{"type": "stepdone", "step": "9"}', "StepDone.step is '9', not of type int"),
        (b'{"type": "stepdone", "step": true}', "StepDone.step is 'True', not of type int"),
        (b'{"type": "drained", "step": 1, "seconds": "x"}', "Drained.seconds is 'x', not of type float"),
    ],
)
def test_a_line_that_is_no_message_is_refused(line: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        c.unpack(line)

"""A worker's environment: all of torchrun's variables, and this project's."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import sys
import textwrap
from dataclasses import asdict, fields

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent as TorchAgent

from elastic_launch import contract as c
from elastic_launch.contract import Placement, worker_environment
from elastic_launch.errors import ProtocolError

PLACEMENT = Placement(
    rank=5,
    local_rank=1,
    group_rank=2,
    world_size=12,
    local_world_size=2,
    group_world_size=4,
    master_addr="fd00::1",
    master_port=29500,
    role_rank=3,
    role_world_size=10,
    first_on_node=False,
    replica_size=2,
)


def environment() -> dict[str, str]:
    return worker_environment(
        PLACEMENT,
        run_id="run",
        run_number="5eed",
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


def test_all_variables_of_torchrun_are_set() -> None:
    assert "TORCHELASTIC_RESTART_COUNT" in torchruns_names()
    assert torchruns_names() - set(environment()) == set()


def test_all_values() -> None:
    assert environment() == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "2",
        "NODE_RANK": "2",
        "ROLE_RANK": "3",
        "ROLE_NAME": "default",
        "WORLD_SIZE": "12",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "4",
        "ROLE_WORLD_SIZE": "10",
        "MASTER_ADDR": "fd00::1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/logs/error.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "ELASTIC_LAUNCH_FIRST_ON_NODE": "0",
        "ELASTIC_LAUNCH_REPLICA_SIZE": "2",
        "ELASTIC_LAUNCH_REPLICA": "2",
        "ELASTIC_LAUNCH_REPLICA_RANK": "1",
        "ELASTIC_LAUNCH_REPLICAS": "6",
        "ELASTIC_LAUNCH_RUN_NUMBER": "5eed",
        "ELASTIC_LAUNCH_ROUND": "7",
        "ELASTIC_LAUNCH_START_REASON": "node b lost: its connection closed",
        "ELASTIC_LAUNCH_SOCKET": "@elastic-launch-1",
    }


def test_a_worker_that_starts_ahead_has_its_local_rank_but_no_place() -> None:
    placed, ahead = environment(), c.ahead_environment(environment(), workers=3)
    same = {"LOCAL_RANK", "ROLE_NAME", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", c.ENV_SOCKET}
    assert {name: ahead[name] for name in same} == {name: placed[name] for name in same}
    assert (ahead["LOCAL_WORLD_SIZE"], ahead[c.ENV_AHEAD]) == ("3", "1")
    place = c.round_environment(PLACEMENT, 7, run_number="5eed", restarts=2, max_restarts=3, reason="")
    numbers = {name for name, value in ahead.items() if name in place and value.isdigit()}
    assert numbers == {
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        c.ENV_REPLICA_SIZE,
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
    }


def test_a_users_choice_of_error_handling_is_kept() -> None:
    env = worker_environment(
        PLACEMENT,
        run_id="run",
        run_number="5eed",
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
    of_replicas = {c.ENV_REPLICA_SIZE, c.ENV_REPLICA, c.ENV_REPLICA_RANK, c.ENV_REPLICAS}
    assert names == {c.ENV_FIRST_ON_NODE, c.ENV_ROUND, c.ENV_RUN_NUMBER, c.ENV_START_REASON, c.ENV_SOCKET} | of_replicas


STORED = c.Stored(2, c.CopyJob(9, 101, 7, "/checkpoints", 3, True, keep_best=c.Best("loss", "max", 2)))


def stored(**odd: object) -> bytes:
    """A line about a snapshot whose job has some odd fields."""
    value = json.loads(c.pack(STORED))
    return json.dumps({**value, "job": {**value["job"], **odd}}).encode()


MESSAGES = [
    c.WorkerHello(7, 5, 1),
    c.Ready(100, 900, 0.25),
    c.StepDone(101),
    STORED,
    c.Drained(102, 0.5),
    c.Stopping(102),
    c.WorkerEnding(-2),
    c.Disconnected(102, "Connection closed by peer"),
    c.Suspended(102),
    c.Suspend(7, "rank 1 on node b: SIGKILL"),
    c.Ahead('{"seed": "7"}'),
    c.Differs((0, 0, 2)),
    c.RestoreFailed(),
    c.Place(
        8,
        "5eed",
        c.Placement(5, 1, 1, 6, 4, 2, "host", 29400, 5, 6, False),
        1,
        3,
        "rank 1 on node b: SIGKILL",
        None,
        9,
        True,
    ),
    c.Exit(),
    c.Exit(2, 9),
    c.SnapshotSlots(3, 0, 9, fetching=True),
    c.Fetched(1, 9),
    c.Use(1),
    c.Copied(101, 7, 1.5, "/checkpoints/step-101", "abc", 1000, "", ""),
    c.Copying(),
    c.MayCommit(3),
    c.CommitAnswer(3, True),
    c.Stop("node b leaves"),
    c.Save(),
    c.WorkerSaved(7, "the disk is full"),
    c.PlaceTaken(4242),
    c.Noted(),
    c.FaultDue(3, 20, 1),
    c.SlowRank(3, "data", 2.5, 0.9),
    c.SlowRank(3, "data", 2.5, 0.9, 0.25),
    c.Restored(1),
    c.Agreed(20),
    c.Differing(21, (1,), 5),
    c.Corrupt(),
    c.NoSnapshots("3 of 0.20 GiB each need 0.60 GiB more"),
    c.FaultOrder(strikes=True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_its_line(message: c.Message) -> None:
    line = c.pack(message)
    assert line.count(b"\n") == 1
    assert c.unpack(line) == message


def test_every_message_has_an_example() -> None:
    assert {type(message) for message in MESSAGES} == c.FROM_WORKERS | c._FROM_AGENTS


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"", "Expecting value"),
        (b"[]", "A JSON object was expected"),
        (b"{}", "unexpected type"),
        (b'{"type": "explode"}', "unexpected type"),
        (b'{"type": ["stop"]}', "unexpected type"),
        (b'{"type": "stepdone"}', "StepDone.step is missing"),
        (b'{"type": "stepdone", "step": "9"}', "StepDone.step: int was expected, found str"),
        (b'{"type": "stepdone", "step": true}', "StepDone.step: int was expected, found bool"),
        (b'{"type": "stepdone", "step": 1.0}', "StepDone.step: int was expected, found float"),
        (b'{"type": "stepdone", "step": -1}', "StepDone.step is '-1', not a number from 0"),
        (b'{"type": "stepdone", "step": [1]}', "StepDone.step: int was expected, found list"),
        (b'{"type": "ready", "step": 1, "total": 1%s, "restore_s": 0.0}' % (b"0" * 400), "Ready.total is '1000"),
        (b'{"type": "stepdone", "step": 1%s}' % (b"0" * 5000), "digits"),
        (b'{"type": "drained", "step": 1, "seconds": "x"}', "Drained.seconds: float was expected, found str"),
        (b'{"type": "drained", "step": 1, "seconds": -0.5}', "Drained.seconds is '-0.5', not a number of seconds"),
        (b'{"type": "drained", "step": 1, "seconds": true}', "Drained.seconds: float was expected, found bool"),
        (b'{"type": "drained", "step": 1, "seconds": NaN}', "Drained.seconds is 'nan', not a number of seconds"),
        (b'{"type": "drained", "step": 1, "seconds": 1e400}', "Drained.seconds is 'inf', not a number of seconds"),
        (b'{"type": "drained", "step": 1, "seconds": 1%s}' % (b"0" * 400), "Drained.seconds: the number is too large"),
        (b'{"type": "workersaved", "step": 1, "error": "\xff"}', "can't decode byte"),
        (b'{"type": "use", "slot": %d}' % c.SLOTS, "Use.slot is '3', not the number of a slot"),
        (b'{"type": "use", "slot": -1}', "Use.slot is '-1', not the number of a slot"),
        (b'{"type": "stored", "slot": 1, "job": 3}', "CopyJob: an object was expected, found int"),
        (stored(keep=0), "CopyJob.keep is '0', not a number from 1"),
        (stored(keep_best={"metric": "loss", "mode": "up"}), "Best.mode is 'up', not min or max"),
        (stored(keep_best={"metric": "loss", "count": 0}), "Best.count is '0', not a number from 1"),
        (stored(shares=2, share=2), "CopyJob.share is 2 of 2"),
        (stored(now=1), "CopyJob.now: bool was expected, found int"),
        (stored(directory="/a\0b"), "not a path"),
        (stored(directory="/\ud800"), "not a path"),
        (stored(nonce="../../x"), "CopyJob.nonce is '../../x', not hexadecimal"),
        (b"[" * 50_000, "recursion" if sys.version_info < (3, 14) else "Expecting value"),
        (b" " * (c.MAX_LINE + 1), "A value of 65537 bytes exceeds the limit"),
    ],
    ids=lambda value: value[:40] if isinstance(value, bytes) else "",
)
def test_an_invalid_line_is_refused(line: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(complaint)):
        c.unpack(line)


def test_what_only_agents_say_is_refused_from_a_worker() -> None:
    with pytest.raises(ProtocolError, match="unexpected type"):
        c.unpack(c.pack(c.Use(1)), c.FROM_WORKERS)
    assert c.unpack(c.pack(c.StepDone(1)), c.FROM_WORKERS) == c.StepDone(1)


def test_an_error_with_an_undecodable_file_name_can_be_sent() -> None:
    told = c.unpack(c.pack(c.WorkerSaved(1, "no room in /a\udcff\0")))
    assert told == c.WorkerSaved(1, r"no room in /a\udcff\x00")


def test_a_path_of_other_bytes_than_utf_8_survives() -> None:
    message = c.Stored(0, c.CopyJob(1, 1, 1, "/a\udcff"))
    assert c.unpack(c.pack(message)) == message


# Lines that are nearly right: a message with some fields replaced.
_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=0, max_value=9),
    st.sampled_from([2**53, 2**63, 2**64, 10**400, -1]),
    st.floats(),
    st.text(st.characters(exclude_categories=())),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)
_LINES = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda message, odd: json.dumps({**json.loads(c.pack(message)), **odd}).encode(),
        st.sampled_from(MESSAGES),
        st.dictionaries(
            st.sampled_from(sorted({field.name for kind in c.FROM_WORKERS | c._FROM_AGENTS for field in fields(kind)})),
            _ODD,
            max_size=4,
        ),
    ),
)


def _read(line: bytes) -> None:
    """A line is refused with a ProtocolError, or is a message whose every field can be used and encoded."""
    try:
        message = c.unpack(line)
    except ProtocolError:
        return
    values = asdict(message)
    job = values.pop("job", {})
    best = job.pop("keep_best", None) or {}
    listed = [*values.pop("alike", ()), *values.pop("ranks", ())]
    nested = [*job.values(), *best.values(), *values.pop("placement", {}).values(), *listed]
    for value in [*nested, *values.values()]:
        if isinstance(value, str):
            assert "\0" not in value
            os.fsencode(value)
        elif value is not None:
            assert -64 <= float(value) < 2**53
    assert c.unpack(c.pack(message)) == message


@settings(max_examples=300, deadline=None)
@given(_LINES)
def test_anything_that_a_worker_sends_is_a_message_or_refused(line: bytes) -> None:
    _read(line)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=300_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(_LINES)
def test_anything_that_a_worker_sends_is_a_message_or_refused_at_length(line: bytes) -> None:
    _read(line)


@pytest.mark.parametrize("text", ["lost\n[elastic-launch] the run is done", "lost\r[elastic-launch] done", "a\x1b[2Jb"])
def test_what_a_worker_reports_stays_one_line_of_the_launcher_s(text: str) -> None:
    found = c.unpack(c.pack(c.WorkerSaved(3, text)), c.FROM_WORKERS)
    assert isinstance(found, c.WorkerSaved)
    assert found.error.isprintable()
    assert found.error[:1] == text[:1]

"""What a stack says about where a worker stands."""

from __future__ import annotations

import json

import pytest
import torch

from elastic_agents.hangs import stacks
from elastic_agents.hangs.stacks import (
    debugged,
    in_exchange,
    in_loader,
    parse_dump,
    parse_py_spy,
    prepares,
    text_of,
)
from elastic_agents.workers.frames import Frame, user_frame
from elastic_launch.errors import ProtocolError
from elastic_launch.training.gradients import means

TORCH = torch.__path__[0]
SCRIPT = Frame("/home/me/job/train.py", 41, "main")
PACKAGE = Frame("/venv/lib/python3.11/site-packages/mine/model.py", 7, "forward")
WAIT = Frame("/usr/lib/python3.11/threading.py", 320, "wait")

DUMP = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f02 [python] (most recent call first):
  File "/home/me/job/model.py", line 5 in <lambda>
  File "/home/me/job/train.py", line 41 in main
  ...
"""


def test_a_dump_has_a_stack_for_each_thread_and_the_main_one_is_the_last() -> None:
    other, main = parse_dump(DUMP)
    assert main == (Frame("/home/me/job/model.py", 5, "<lambda>"), SCRIPT)
    assert other[0] == WAIT
    assert parse_dump("nonsense\n") == []
    assert text_of([other, main]).splitlines()[1] == '  File "/home/me/job/model.py", line 5, in <lambda>'


def test_py_spy_says_the_same() -> None:
    threads = [
        {"thread_name": "MainThread", "frames": [{"name": "main", "filename": "/home/me/job/train.py", "line": 41}]},
        {"thread_name": None, "frames": []},
        {"thread_name": "b", "frames": [{"name": "wait", "filename": "/x/threading.py", "line": 3}]},
    ]
    assert parse_py_spy(json.dumps(threads).encode()) == [(Frame("/x/threading.py", 3, "wait"),), (SCRIPT,)]
    infinite = b'[{"thread_name": "b", "frames": [{"name": "wait", "filename": "/a.py", "line": 1e999}]}]'
    for spoiled in (b"", b"{}", b"[1]", b'[{"thread_name": "MainThread"}]', infinite, b"[" * 100000):
        with pytest.raises(ProtocolError):
            parse_py_spy(spoiled)


@pytest.mark.parametrize(
    "file",
    [
        f"{TORCH}/distributed/distributed_c10d.py",
        f"{TORCH}/autograd/graph.py",
        f"{TORCH}/nn/parallel/distributed.py",
        means.__file__,
    ],
)
def test_what_waits_for_other_ranks_is_in_an_exchange(file: str) -> None:
    stack = (Frame(file, 1, "wait"), SCRIPT)
    assert in_exchange(stack)
    assert not in_loader(stack)
    assert user_frame(stack) == SCRIPT


def test_what_waits_for_loaders_processes_is_in_the_loader() -> None:
    stack = (WAIT, Frame(f"{TORCH}/utils/data/dataloader.py", 1, "_try_get_data"), SCRIPT)
    assert in_loader(stack)
    assert not in_exchange(stack)
    assert user_frame(stack) == SCRIPT


def test_a_hook_of_the_users_in_a_backward_pass_is_the_users_code() -> None:
    assert not in_exchange((SCRIPT, Frame(f"{TORCH}/autograd/graph.py", 1, "_engine_run_backward")))


def test_the_users_frame_is_in_a_package_of_theirs_if_all_their_code_is() -> None:
    assert user_frame((WAIT, PACKAGE, SCRIPT)) == SCRIPT
    assert user_frame((WAIT, PACKAGE)) == PACKAGE
    assert user_frame((WAIT,)) == WAIT
    assert user_frame(()) is None


def test_the_command_of_the_warm_server_is_not_the_users_code() -> None:
    command, ours = Frame("<string>", 1, "<module>"), Frame(str(stacks.__file__), 46, "run_script")
    assert user_frame((WAIT, ours, command)) == WAIT
    assert user_frame((WAIT, SCRIPT, ours, command)) == SCRIPT
    assert user_frame((WAIT, Frame("<string>", 3, "f"), SCRIPT)) == Frame("<string>", 3, "f")


@pytest.mark.parametrize(
    "file",
    [
        "<frozen importlib._bootstrap>",
        f"{TORCH}/_dynamo/symbolic_convert.py",
        f"{TORCH}/_inductor/async_compile.py",
        f"{TORCH}/utils/file_baton.py",
        f"{TORCH}/utils/data/_utils/fetch.py",
        f"{TORCH}/serialization.py",
        f"{TORCH}/distributed/checkpoint/state_dict_loader.py",
        "/usr/lib/python3.11/site-packages/safetensors/torch.py",
        "/usr/lib/python3.11/site-packages/urllib3/response.py",
        "/usr/lib/python3.11/subprocess.py",
        "/usr/lib/python3.11/http/client.py",
    ],
)
def test_what_imports_compiles_or_loads_prepares(file: str) -> None:
    assert prepares((Frame("/usr/lib/python3.11/threading.py", 1, "wait"), Frame(file, 1, "x"), SCRIPT))


@pytest.mark.parametrize(
    "file",
    [
        f"{TORCH}/_dynamo/eval_frame.py",
        f"{TORCH}/_functorch/_aot_autograd/runtime_wrappers.py",
        f"{TORCH}/distributed/distributed_c10d.py",
        f"{TORCH}/autograd/graph.py",
        "/home/me/datasets/train.py",
        "/v/lib/python3.11/site-packages/transformers/trainer.py",
    ],
)
def test_what_runs_or_exchanges_does_not_prepare(file: str) -> None:
    assert not prepares((Frame(file, 1, "x"), SCRIPT))


def test_a_debugger_is_noticed_in_any_thread() -> None:
    assert debugged([(WAIT,), (Frame("/usr/lib/python3.11/bdb.py", 1, "dispatch_line"), SCRIPT)])
    assert debugged([(Frame("/v/lib/python3.11/site-packages/debugpy/_vendored/pydevd/pydevd.py", 1, "x"),)])
    assert not debugged([(WAIT, SCRIPT)])

"""What the stack of a worker says about where it stands: pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from elastic_agents.workers.frames import Frame, Stack, frame_in
from elastic_launch.errors import ProtocolError

_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_WAITS_IN_PYTHON = re.compile(
    r"/(threading|queue|selectors|subprocess|multiprocessing/\w+|concurrent/futures/\w+)\.py$"
)
_EXCHANGE = re.compile(r"/torch/(distributed|autograd|nn/parallel)/|/elastic_launch/training/(gradients|ranks|live)/")
_LOADER = re.compile(r"/torch/utils/data/")
_SERVES = re.compile(r"/torch/utils/data/_utils/worker\.py$")
_DATA = re.compile(r"/elastic_launch/training/data/")
_EVALUATES = re.compile(r"/elastic_launch/training/evaluations\.py$")
_PREPARES = re.compile(
    r"^<frozen importlib|/importlib/"
    # What runs compiled code, once it is compiled, is in the same packages.
    r"|/torch/_dynamo/(?!eval_frame\.|external_utils\.)|/torch/_inductor/(?!output_code\.)"
    r"|/torch/_functorch/(?!_aot_autograd/runtime)"
    r"|/torch/(export|fx/(passes|experimental)|jit|hub|serialization|storage|package)\b"
    r"|/torch/utils/(data|cpp_extension|file_baton|_triton)\b"
    r"|/torch/distributed/(checkpoint|rpc)/"
    r"|/elastic_launch/(snapshot|training/(checkpoints|data))/"
    r"|/(site|dist)-packages/(triton|safetensors|huggingface_hub|datasets|transformers/modeling_utils|fsspec|s3fs|gcsfs"
    r"|boto3|botocore|filelock|requests|urllib3|httpx|httpcore|aiohttp|grpc)\b"
    r"|/(urllib|http)/\w+\.py$|/(subprocess|ssl|socket|socketserver|ftplib|zipfile|tarfile|pickle)\.py$"
)
_DEBUGGER = re.compile(r"/(pdb|bdb)\.py$|/(pydevd|debugpy)[/_.]")


def parse_dump(text: str) -> list[Stack]:
    """Read the stacks that faulthandler has written, one per thread; that of the main thread is the last."""
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            stacks.append([])
        elif stacks and (frame := frame_in(line)):
            stacks[-1].append(frame)
    return [tuple(stack) for stack in stacks if stack]


def parse_py_spy(data: bytes) -> list[Stack]:
    """Read the output of ``py-spy dump --json``, likewise.

    Raises:
        ProtocolError: if it is not that.
    """
    try:
        threads = json.loads(data)
        threads.sort(key=lambda thread: thread["thread_name"] == "MainThread")
        stacks = [
            tuple(Frame(x["filename"], int(x["line"]), x["name"]) for x in thread["frames"]) for thread in threads
        ]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"py-spy's output is not as expected: {error}") from error
    return [stack for stack in stacks if stack]


def text_of(stacks: Sequence[Stack]) -> str:
    """Return stacks as text, the main thread's first."""
    threads = ["\n".join(f'  File "{x.file}", line {x.line}, in {x.function}' for x in stack) for stack in stacks]
    return "\n\n".join(f"Thread {number} (innermost frame first):\n{x}" for number, x in enumerate(reversed(threads)))


def in_exchange(stack: Stack) -> bool:
    """Whether the thread waits in an exchange with other ranks. A backward pass that stands still waits for one."""
    return bool(_EXCHANGE.search(_innermost(stack)))


def in_loader(stack: Stack) -> bool:
    """Whether the thread waits for its data loader's processes."""
    return bool(_LOADER.search(_innermost(stack)))


def reads_data(stack: Stack) -> bool:
    """Whether the thread reads data for a training, or waits for them; not those of an evaluation."""
    return any(_DATA.search(x.file) for x in stack) and not any(_EVALUATES.search(x.file) for x in stack)


def serves_loader(stack: Stack) -> bool:
    """Whether the thread is that of a data loader's process."""
    return any(_SERVES.search(frame.file) for frame in stack)


def prepares(stack: Stack) -> bool:
    """Whether the thread imports, compiles or loads something, or waits for a program or a server that may do so."""
    return any(_PREPARES.search(frame.file) for frame in stack)


def debugged(stacks: Sequence[Stack]) -> bool:
    """Whether a debugger runs in the process."""
    return any(_DEBUGGER.search(frame.file) for stack in stacks for frame in stack)


def _innermost(stack: Stack) -> str:
    """Return the file of the innermost frame that is not just Python's way to wait."""
    return next((x.file for x in stack if not _WAITS_IN_PYTHON.search(x.file)), "")
